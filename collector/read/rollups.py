"""Rollups: sums of closed steps by rank and kind, and the inputs from which they were computed.

A step is rolled up whole, from rows without duplicates. `ClosedStep.revision` counts the rows that
a computation used. Rows are only added, so the computation with the most rows stays, in whatever
order the computations of one or several servers end.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from ..spool.descriptions import RUNNING
from ..store.deduplicated_reads import read_deduplicated

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import pyarrow as pa

    from ..identity import Row
    from ..store.store import Store

LAG_STEPS = 2
"""Newest steps that stay open while a run is running, because their spans are still on the way."""

RUN_WHOLE = -1
"""Step and epoch of the row that records that all of a run was rolled up."""

EpochStep = tuple[int, int]

FIRST_STEP: EpochStep = (RUN_WHOLE, 0)

SELECT_OPEN = """
SELECT epoch, step, present.num_spans AS num_spans, described.num_described AS num_described
FROM (
    SELECT epoch, step, count() AS num_spans FROM spans
    WHERE run_id = {run_id:String} AND step >= 0
        AND (epoch > {epoch:Int32} OR (epoch = {epoch:Int32} AND step >= {first:Int32}))
    GROUP BY epoch, step
) AS present
LEFT JOIN (
    SELECT epoch, count() AS num_described FROM (
        SELECT epoch FROM groups FINAL WHERE run_id = {run_id:String}
        UNION ALL SELECT epoch FROM ranks FINAL WHERE run_id = {run_id:String}
    ) GROUP BY epoch
) AS described USING (epoch)
LEFT JOIN (
    SELECT epoch, step, num_spans, num_described FROM closed_steps FINAL
    WHERE run_id = {run_id:String}
        AND (epoch > {epoch:Int32} OR (epoch = {epoch:Int32} AND step >= {first:Int32}))
) AS rolled USING (epoch, step)
WHERE rolled.num_spans != present.num_spans OR rolled.num_described != described.num_described
ORDER BY epoch, step
"""
"""Compared in the engine: a run of days has tens of thousands of steps, of which few are open."""

SELECT_OPEN_FINAL = SELECT_OPEN.replace("FROM spans", "FROM spans FINAL")

SELECT_NEWEST = """
SELECT epoch, step FROM spans WHERE run_id = {run_id:String} AND step >= 0
ORDER BY run_id DESC, epoch DESC, step DESC LIMIT 1
"""

SELECT_WHOLE = """
SELECT run_id, num_spans FROM closed_steps FINAL WHERE step = {whole:Int32}
"""

SELECT_NEWEST_ROLLED_UP = """
SELECT epoch, step, num_ranks, revision FROM closed_steps FINAL
WHERE run_id = {run_id:String} AND step >= 0
ORDER BY epoch DESC, step DESC LIMIT {most:UInt32}
"""

SELECT_MEANS = """
SELECT epoch, step, kind, closed.num_ranks AS num_ranks,
    sum(busy_ns) / num_ranks AS busy_ns, sum(exposed_ns) / num_ranks AS exposed_ns,
    sum(wait_ns) / num_ranks AS wait_ns, sum(num_unsplit) AS num_unsplit
FROM rollups FINAL INNER JOIN (
    SELECT epoch, step, num_ranks FROM closed_steps FINAL WHERE run_id = {run_id:String}
) AS closed USING (epoch, step)
WHERE run_id = {run_id:String} AND step >= 0
    AND (epoch > {epoch:Int32} OR (epoch = {epoch:Int32} AND step >= {first:Int32}))
GROUP BY epoch, step, kind, num_ranks ORDER BY epoch, step, kind
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenStep:
    """A step to roll up, for the first time or again."""

    epoch: int
    step: int
    num_spans: int
    """Number of spans in the store when it was read."""

    num_described: int
    """Number of groups and ranks of the epoch then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedStep:
    """Inputs of a step's rollup."""

    run_id: str
    epoch: int
    step: int
    begin_ns: int
    end_ns: int
    num_spans: int
    num_ranks: int
    num_described: int
    at_ns: int
    orderings: dict[str, str] = field(default_factory=dict)
    """For each ordering, the one whose picture is kept; equal ones are kept once."""

    line_ranks: int = 0
    """Ranks of a line of the whole step's picture; 0 if none is kept."""

    @property
    def revision(self) -> int:
        """Number of rows that the computation used."""
        return self.num_spans + self.num_described


def read_open_steps(
    store: Store, run_id: str, *, state: str, since: EpochStep = FIRST_STEP
) -> tuple[OpenStep, ...]:
    """Return the steps whose rollups are missing or outdated, by (epoch, step).

    Steps with expired spans keep their rollups.

    Args:
        state: Its state; if it is running, the newest steps are left out.
        since: First step to check; by default the run's first.
    """
    bound = {"run_id": run_id, "epoch": since[0], "first": since[1]}
    open_steps = read_deduplicated(store, store.rows, SELECT_OPEN, bound, final=SELECT_OPEN_FINAL)
    if not open_steps:
        return ()
    last = read_newest_closed(store, run_id) if state == RUNNING else None
    return tuple(
        OpenStep(**row) for row in open_steps if last is None or (row["epoch"], row["step"]) <= last
    )


def read_newest_closed(store: Store, run_id: str) -> EpochStep:
    """Return the newest step of a running run that counts as closed."""
    rows = store.rows(SELECT_NEWEST, {"run_id": run_id})
    return (rows[0]["epoch"], rows[0]["step"] - LAG_STEPS) if rows else FIRST_STEP


def batch_steps(steps: Sequence[OpenStep], *, max_spans: int) -> Iterator[tuple[OpenStep, ...]]:
    """Yield groups of neighbouring steps of one epoch, with at most ``max_spans`` spans each."""
    batch: list[OpenStep] = []
    num_spans = 0
    for step in steps:
        is_gap = batch and (step.epoch != batch[-1].epoch or step.step != batch[-1].step + 1)
        if is_gap or (batch and num_spans + step.num_spans > max_spans):
            yield tuple(batch)
            batch, num_spans = [], 0
        batch.append(step)
        num_spans += step.num_spans
    if batch:
        yield tuple(batch)


def write_rollups(store: Store, rows: pa.Table, closed: Iterable[ClosedStep]) -> None:
    """Store rollups, and then their inputs."""
    if rows.num_rows:
        store.insert_arrow("rollups", rows)
    store.insert_rows("closed_steps", [_closed_row(step) for step in closed])


def read_rolled_up_runs(store: Store) -> dict[str, int]:
    """Return the runs that were rolled up whole, with their numbers of spans in the ledger then."""
    rows = store.rows(SELECT_WHOLE, {"whole": RUN_WHOLE})
    return {row["run_id"]: row["num_spans"] for row in rows}


def read_newest_rolled_up(store: Store, run_id: str, *, most: int) -> list[Row]:
    """Return epoch, step, number of ranks and revision of the newest rolled up steps.

    Returns:
        The rows by (epoch, step), ascending.
    """
    return store.rows(SELECT_NEWEST_ROLLED_UP, {"run_id": run_id, "most": most})[::-1]


def read_mean_times(store: Store, run_id: str, *, since: EpochStep) -> list[Row]:
    """Return the mean times per rank of each rolled up step and kind, by (epoch, step, kind)."""
    bound = {"run_id": run_id, "epoch": since[0], "first": since[1]}
    return store.rows(SELECT_MEANS, bound)


def mark_run_rolled_up(store: Store, run_id: str, *, num_spans: int, at_ns: int) -> None:
    """Record that all steps of an ended run are rolled up.

    Args:
        num_spans: Number of its spans in the ledger, read before the last check.
        at_ns: Unix time.
    """
    whole = ClosedStep(
        run_id=run_id, epoch=RUN_WHOLE, step=RUN_WHOLE, begin_ns=0, end_ns=0,
        num_spans=num_spans, num_ranks=0, num_described=0, at_ns=at_ns,
    )  # fmt: skip
    store.insert_rows("closed_steps", [_closed_row(whole)])


def _closed_row(step: ClosedStep) -> Row:
    return {**asdict(step), "revision": step.revision}
