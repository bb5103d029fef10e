"""Times of a run's epochs: processes, steps, saves, and the last signs of life."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rankscope.tracer.span import STEPS_COUNTED

from ..store.deduplicated_reads import read_deduplicated
from .runs import read_starters

if TYPE_CHECKING:
    from collections.abc import Collection

    from ..identity import Row
    from ..store.store import Store

TOTAL_STEPS = ("total_steps", "num_steps", "max_steps", "train_iters", "steps")
TOTAL_TOKENS = ("total_tokens",)
"""Names of a job's length in its configuration: any job's, ours, and those of Transformers and
Lightning, Megatron-LM, and torchtitan."""

SELECT_EPOCHS = """
SELECT epoch, world_size, state, ranks.first_ns AS first_ns, failed_ns, last_exit_ns, num_running,
    num_known, JSONExtractInt(manifest, 'process_started_ns') AS process_ns,
    arrayFirst(
        num -> num > 0,
        arrayMap(name -> JSONExtractInt(manifest, 'config', name), {steps:Array(String)})
    ) AS total_steps,
    arrayFirst(
        num -> num > 0,
        arrayMap(name -> JSONExtractInt(manifest, 'config', name), {tokens:Array(String)})
    ) AS total_tokens
FROM (SELECT * FROM runs FINAL WHERE run_id = {run_id:String}) AS runs
LEFT JOIN (
    SELECT epoch, toNullable(min(started_ns)) AS first_ns,
        toNullable(minIf(exit_ns, exit_state IN ('failed', 'lost'))) AS failed_ns,
        toNullable(max(exit_ns)) AS last_exit_ns,
        toNullable(countIf(exit_state IN ('', 'running'))) AS num_running,
        toNullable(uniqExact(rank)) AS num_known
    FROM ranks FINAL WHERE run_id = {run_id:String} GROUP BY epoch
) AS ranks USING epoch
ORDER BY epoch
"""

SELECT_STEPS = """
SELECT epoch, step, min(start_ns) AS begin_ns, max(end_ns) AS last_end_ns,
    min(end_ns) AS first_end_ns, uniqExact(rank) AS num_ranks
FROM steps WHERE run_id = {run_id:String} AND step >= 0
GROUP BY epoch, step ORDER BY epoch, step
"""

SELECT_TOKENS = """
SELECT epoch, step, sum(tokens) AS num_tokens, min(tokens) AS fewest FROM (
    SELECT steps.epoch AS epoch, steps.step AS step, dp, cp, max(num_tokens) AS tokens
    FROM steps INNER JOIN (
        SELECT DISTINCT epoch, rank, dp, cp FROM ranks FINAL WHERE run_id = {run_id:String}
    ) AS place ON steps.epoch = place.epoch AND steps.rank = place.rank
    WHERE steps.run_id = {run_id:String} AND steps.step >= 0
    GROUP BY epoch, step, dp, cp
)
GROUP BY epoch, step
"""
"""The ranks of one data-parallel and context-parallel position have the same tokens."""

SELECT_SAVES = """
SELECT epoch, step, if(step < 0, sum(saving_ns), max(saving_ns)) AS saving_ns,
    min(begin_ns) AS begin_ns
FROM (
    SELECT epoch, step, toInt64(intervalLengthSum(start_ns, start_ns + duration_ns)) AS saving_ns,
        min(start_ns) AS begin_ns
    FROM spans
    WHERE run_id = {run_id:String} AND kind = 'checkpoint' AND track = 'main'
    GROUP BY epoch, step
    UNION ALL
    SELECT epoch, step, saving_ns, saving_begin_ns AS begin_ns FROM step_spans FINAL
    WHERE run_id = {run_id:String} AND saving_begin_ns != 0
)
GROUP BY epoch, step ORDER BY epoch, step
"""
"""The union over the ranks. Saves in other threads are uploads beside the training. A step whose
spans are kept when they expire is in both; spans outside any step are in one of them."""

SELECT_ENDS = """
SELECT epoch, step, min(begin_ns) AS begin_ns, max(last_begin_ns) AS last_begin_ns,
    max(last_end_ns) AS last_end_ns
FROM (
    SELECT epoch, step, min(start_ns) AS begin_ns, max(start_ns) AS last_begin_ns,
        maxIf(start_ns + duration_ns, kind != 'gc') AS last_end_ns
    FROM spans
    WHERE run_id = {run_id:String} AND step >= 0 AND (
        (epoch, step) IN {newest:Array(Tuple(Int32, Int32))} OR epoch IN {unended:Array(Int32)}
    )
    GROUP BY epoch, step
    UNION ALL
    SELECT epoch, step, begin_ns, last_begin_ns, last_end_ns FROM step_spans FINAL
    WHERE run_id = {run_id:String} AND step >= 0 AND (
        (epoch, step) IN {newest:Array(Tuple(Int32, Int32))} OR epoch IN {unended:Array(Int32)}
    )
)
GROUP BY epoch, step ORDER BY epoch, step
"""

SELECT_COUNTED = """
SELECT DISTINCT epoch FROM events WHERE run_id = {run_id:String} AND kind = {kind:String}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTimes:
    """Rows about the time of a run, each list by epoch and step."""

    epochs: list[Row]
    """Attempts. Each begins with the process that started its ranks, if there was one."""

    steps: list[Row]
    saves: list[Row]
    ends: list[Row]
    """Spans of the last recorded step of each epoch, and of the one after it."""

    counted: frozenset[int]
    """Epochs whose steps the tracer counted."""

    tokens: list[Row]
    """Of each step; empty if the job declared no total."""


def read_run_times(store: Store, run_id: str) -> RunTimes:
    """Return the times of a run; without epochs if it is unknown. Repeated rows change nothing."""
    bound = {"run_id": run_id}
    names = {"steps": list(TOTAL_STEPS), "tokens": list(TOTAL_TOKENS)}
    epochs = _attempts(store.rows(SELECT_EPOCHS, bound | names), read_starters(store, run_id))
    has_total = any(row["total_tokens"] > 0 for row in epochs)
    steps = store.rows(SELECT_STEPS, bound)
    newest = {row["epoch"]: row["step"] for row in steps}
    pairs = [(epoch, step + more) for epoch, step in newest.items() for more in (0, 1)]
    unended = [row["epoch"] for row in epochs if row["epoch"] not in newest]
    of_ends = {**bound, "newest": pairs, "unended": unended}
    return RunTimes(
        epochs=epochs,
        steps=steps,
        saves=read_deduplicated(store, store.rows, SELECT_SAVES, bound),
        ends=read_deduplicated(store, store.rows, SELECT_ENDS, of_ends),
        counted=frozenset(
            row["epoch"] for row in store.rows(SELECT_COUNTED, {**bound, "kind": STEPS_COUNTED})
        ),
        tokens=store.rows(SELECT_TOKENS, bound) if has_total else [],
    )


def _attempts(epochs: list[Row], starters: Collection[int]) -> list[Row]:
    """Return the epochs without those of starters, whose times begin the next one."""
    attempts: list[Row] = []
    begun: list[int] = []
    for row in epochs:
        begun += [ns for ns in (row["first_ns"], row["process_ns"]) if ns and ns > 0]
        if row["epoch"] not in starters:
            attempts.append({**row, "first_ns": min(begun, default=None)})
            begun = []
    return attempts
