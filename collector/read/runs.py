"""Runs: their list, and the small rows that describe one run."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rankscope.tracer.span import NONE

from ..bounds import COORD_AXES, MAX_WORLD_SIZE, keep_valid
from ..spool.descriptions import ENDED, FAILED, IMPORT_NOTE, INVALID, LOST, RUNNING
from ..store.deduplicated_reads import read_stored_spans
from .heartbeats import mark_lost_runs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from ..identity import Row
    from ..store.store import Store


DIED = frozenset({FAILED, LOST})

SELECT_RUNS = """
SELECT
    run_id, source_format, state, world_size, layout, started_ns, num_spans, num_steps,
    num_records + num_lines AS num_rows, newest_epoch, before,
    greatest(created_ns, wrote_ns) AS reported_ns
FROM (
    SELECT
        run_id,
        argMax(source_format, epoch) AS source_format,
        argMax(state, epoch) AS state,
        max(epoch) AS newest_epoch,
        arrayReverseSort(groupArray((epoch, runs.state, runs.world_size)))[2] AS before,
        argMax(world_size, epoch) AS world_size,
        argMax(layout, epoch) AS layout,
        min(started_ns) AS started_ns,
        max(created_ns) AS created_ns
    FROM runs FINAL WHERE run_id NOT IN (SELECT run_id FROM deletions) GROUP BY run_id
) AS known
LEFT JOIN (
    SELECT run_id, sum(num_spans) AS num_spans, sum(num_records) AS num_records,
        sum(num_lines) AS num_lines, max(wrote_ns) AS wrote_ns, sum(num_steps) AS num_steps
    FROM (
        SELECT run_id, epoch, sum(run_totals.num_spans) AS num_spans,
            sum(run_totals.num_records) AS num_records, sum(run_totals.num_lines) AS num_lines,
            max(run_totals.wrote_ns) AS wrote_ns, groupBitmapMerge(steps) AS num_steps
        FROM run_totals GROUP BY run_id, epoch
    ) GROUP BY run_id
) AS counted USING run_id
ORDER BY created_ns DESC, run_id
"""
"""Cuts that are only ``sent`` are not counted: their spans may appear later without any other
change, and a reader that has processed all counted spans looks again only if the count grows. Lines
of logs count as rows: they may come after the end of the process that they explain. If two
collectors stored the same cut at the same moment, it counts twice here, unlike in the account of
its run, and so does a line that was sent again."""

SELECT_RUN_NAMES = """
SELECT run_id FROM runs WHERE run_id NOT IN (SELECT run_id FROM deletions)
GROUP BY run_id ORDER BY max(created_ns) DESC, run_id
"""

SELECT_LAST_RANKS = """
SELECT run_id, max(rank) AS last_rank FROM ranks
WHERE run_id IN {run_ids:Array(String)} AND rank >= 0 AND rank < {below:Int32} GROUP BY run_id
"""
"""Of runs without a valid world size: the ranks that are known are counted then."""

SELECT_WORLD_SIZES = """
SELECT run_id, epoch, world_size FROM runs FINAL
WHERE run_id IN {run_ids:Array(String)} AND world_size > 0
"""

SELECT_RECENT_RUNS = """
SELECT run_id FROM runs FINAL
WHERE source_format = 'rankscope' AND run_id NOT IN (SELECT run_id FROM deletions)
GROUP BY run_id
HAVING argMax(state, epoch) = 'running' OR max(ended_ns) >= {since_ns:Int64}
"""

SELECT_EPOCHS = """
SELECT * FROM runs FINAL
WHERE run_id = {run_id:String} AND run_id NOT IN (SELECT run_id FROM deletions)
ORDER BY epoch
"""

SELECT_RANKS = """
SELECT * FROM ranks FINAL WHERE run_id = {run_id:String}
ORDER BY epoch, rank, started_ns, process
"""

SELECT_VERSION = """
SELECT
    (SELECT count() FROM runs FINAL WHERE run_id = {run_id:String}) AS num_epochs,
    (SELECT max(epoch) FROM runs WHERE run_id = {run_id:String}) AS epoch,
    (SELECT count() FROM groups WHERE run_id = {run_id:String}) AS num_groups,
    (SELECT count() FROM events WHERE run_id = {run_id:String}) AS num_events,
    (SELECT sum(cityHash64(tuple(* EXCEPT (dropped, produced, revision)))) FROM ranks FINAL
     WHERE run_id = {run_id:String}) AS ranks
"""

SELECT_GROUPS = """
SELECT * FROM groups FINAL WHERE run_id = {run_id:String} ORDER BY epoch, group_id
"""

SELECT_ACCOUNT = """
SELECT epoch, rank, sum(num_spans) AS num_spans, sum(num_steps) AS num_steps,
    sum(num_microbatches) AS num_microbatches, sum(num_torn) AS num_torn, sum(num_bad) AS num_bad
FROM segment_totals WHERE run_id = {run_id:String}
GROUP BY epoch, rank ORDER BY epoch, rank
"""

SELECT_EXACT_ACCOUNT = """
SELECT
    epoch, rank,
    sum(num_spans) AS num_spans,
    sum(num_steps) AS num_steps,
    sum(num_microbatches) AS num_microbatches,
    sum(num_torn) AS num_torn,
    sum(num_bad) AS num_bad
FROM ledger FINAL WHERE run_id = {run_id:String} AND state != 'sent'
GROUP BY epoch, rank ORDER BY epoch, rank
"""

SELECT_BAD = """
SELECT reason, count() AS num_rows FROM bad_rows FINAL
WHERE run_id = {run_id:String} GROUP BY reason ORDER BY reason
"""

SELECT_PACE = """
SELECT epoch, rank, argMax(data, at_ns) AS data FROM events
WHERE run_id = {run_id:String} AND kind = 'pace' GROUP BY epoch, rank ORDER BY epoch, rank
"""

SELECT_CLOCKS = """
SELECT host, boot_id, argMax(clock_error_ns, at_ns) AS clock_error_ns FROM clock FINAL
WHERE (host, boot_id) IN (SELECT host, boot_id FROM ranks WHERE run_id = {run_id:String})
GROUP BY host, boot_id ORDER BY host, boot_id
"""

SELECT_EXPIRED = """
SELECT epoch, last_step, kept_first, kept_last FROM expired FINAL
WHERE run_id = {run_id:String} AND last_step != 2147483647 ORDER BY epoch
"""
"""Without imported traces: all of their spans are kept."""

SELECT_WARNINGS = """
SELECT DISTINCT kind, text FROM events
WHERE run_id = {run_id:String} AND kind IN {kinds:Array(String)}
ORDER BY text LIMIT {most:UInt8} BY kind
"""

SELECT_EVENTS = """
SELECT epoch, rank, at_ns, kind, text, data FROM events FINAL
WHERE run_id = {run_id:String} ORDER BY at_ns, epoch, rank, line
"""


SELECT_STARTERS = """
WITH lone AS (
    SELECT run_id, epoch FROM runs FINAL WHERE run_id IN {run_ids:Array(String)} AND world_size <= 1
)
SELECT DISTINCT run_id, epoch FROM (
    SELECT run_id, epoch, any((host, boot_id, pid)) AS process,
        any(if(exit_state IN ('', 'running'), 9223372036854775807, ifNull(exit_ns, 0))) AS until_ns
    FROM ranks FINAL WHERE run_id IN {run_ids:Array(String)} AND (run_id, epoch) IN lone
    GROUP BY run_id, epoch HAVING count() = 1
) AS alone
INNER JOIN (
    SELECT run_id, ranks.epoch - 1 AS epoch, (host, boot_id, pid) AS process, pid, started_ns
    FROM ranks FINAL WHERE run_id IN {run_ids:Array(String)} AND (run_id, ranks.epoch - 1) IN lone
) AS next_one USING (run_id, epoch)
WHERE (started_ns < until_ns OR (next_one.process = alone.process AND pid > 0))
AND (run_id, epoch) NOT IN (
    SELECT run_id, epoch FROM run_totals WHERE run_id IN {run_ids:Array(String)}
    GROUP BY run_id, epoch HAVING groupBitmapMerge(steps) > 0
)
"""
"""The processes of an attempt end before the next attempt begins. One without steps that is alone
and lives while the ranks of the next epoch start has started them (`torch.multiprocessing.spawn`,
Ray), or became one of them."""

SELECT_EXITS = """
SELECT epoch, rank, exit_state, exit_ns, last_event.data AS data FROM (
    SELECT epoch, rank, process, exit_state, exit_ns FROM ranks FINAL
    WHERE run_id = {run_id:String} AND exit_state != ''
) AS ended
LEFT JOIN (
    SELECT epoch, rank, process, argMax(data, at_ns) AS data FROM events
    WHERE run_id = {run_id:String} AND kind IN ('exit', 'lost') GROUP BY epoch, rank, process
) AS last_event USING (epoch, rank, process)
ORDER BY epoch, rank, process
"""


GAP_TIMEOUT_NS = 60_000_000_000
"""Time that rows of a running run may come after later ones: agents send in parallel."""

END_OF_TIME = (1 << 63) - 1
MAX_INVALID = 8
"""Texts about descriptions out of bounds that a reader gets."""

SELECT_GAPS = """
SELECT
    epoch, rank, segment, held_end AS gap_first, begin - 1 AS gap_last, count() OVER () AS num_gaps
FROM (
    SELECT
        epoch, rank, segment, at_ns, first_row AS begin,
        max(end_row) OVER (
            PARTITION BY epoch, rank, segment ORDER BY first_row
            ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
        ) AS held_end
    FROM ledger FINAL
    WHERE run_id = {run_id:String} AND end_row > first_row AND (epoch, rank, segment) IN (
        SELECT epoch, rank, segment FROM (
            SELECT epoch, rank, segment, sum(segment_totals.num_rows) AS num_rows,
                max(segment_totals.end_row) AS end_row
            FROM segment_totals WHERE run_id = {run_id:String} GROUP BY epoch, rank, segment
        ) WHERE num_rows != end_row
    )
) AS held
WHERE begin > held_end AND at_ns < {before_ns:Int64}
ORDER BY epoch, rank, segment, begin LIMIT 8
"""
"""The inner query leaves out segments without a gap, which are nearly all."""

SELECT_MANIFESTS = """
SELECT manifest_hash, settings FROM manifests FINAL WHERE run_id = {run_id:String}
"""

SELECT_RANK_MANIFESTS = """
SELECT epoch, rank, argMax(manifest_hash, (started_ns, process)) AS newest_hash
FROM ranks FINAL WHERE run_id = {run_id:String} AND manifest_hash != ''
GROUP BY epoch, rank ORDER BY epoch, rank
"""

SELECT_CONFIGURATIONS = """
SELECT
    run_id,
    argMax(JSONExtractString(model, 'name'), epoch) AS model,
    argMax(JSONExtractString(manifest, 'git', 'commit'), epoch) AS commit,
    argMax(
        arrayFirst(
            num -> num > 0,
            arrayMap(name -> JSONExtractInt(manifest, 'config', name), {names:Array(String)})
        ),
        epoch
    ) AS num_microbatches
FROM runs FINAL GROUP BY run_id
"""

MICROBATCH_NAMES = ("num_microbatches", "gradient_accumulation_steps", "accumulate_grad_batches")
"""Names of the micro-batches of a step in a job's configuration: ours, and those of Transformers
and DeepSpeed, and of Lightning."""

SELECT_PREVIOUS = """
WITH now AS (
    SELECT
        argMax(JSONExtractString(model, 'name'), epoch) AS model_name,
        argMax(world_size, epoch) AS world_size,
        min(created_ns) AS created_ns
    FROM runs FINAL WHERE run_id = {run_id:String}
)
SELECT
    run_id,
    argMax(JSONExtractString(model, 'name'), epoch) AS model_name,
    argMax(world_size, epoch) AS size,
    min(created_ns) AS began_ns
FROM runs FINAL
WHERE run_id != {run_id:String} AND source_format = 'rankscope'
GROUP BY run_id
HAVING model_name != ''
    AND model_name = (SELECT model_name FROM now)
    AND size = (SELECT world_size FROM now)
    AND began_ns < (SELECT created_ns FROM now)
ORDER BY began_ns DESC, run_id LIMIT 1
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRows:
    """All small rows that describe a run; `epochs` is empty if the run is unknown."""

    epochs: list[Row]
    ranks: list[Row]
    """One per process: a rank that was restarted within an epoch has several."""

    groups: list[Row]
    account: list[Row]
    """Per (epoch, rank): numbers of rows stored, torn and bad."""

    bad: list[Row]
    """Numbers of bad rows by reason."""

    pace: list[Row]
    """Latest ``pace`` event of each (epoch, rank)."""

    clocks: list[Row]
    """Latest error bound of each host's clock; -1 if it was not measured."""

    expired: list[Row] = field(default_factory=list)
    """Per epoch with expired spans: the last expired step, and the steps kept before it."""

    gaps: list[Row] = field(default_factory=list)
    """The first ranges of missing rows: see `read_gaps`."""

    invalid: list[str] = field(default_factory=list)
    """What of the descriptions was left out because it is out of bounds, and why."""

    notes: list[str] = field(default_factory=list)
    """What the import of the run assumed or could not find."""


def list_runs(store: Store, *, unix_ns: Callable[[], int] = time.time_ns) -> list[Row]:
    """Return one row per run, newest first.

    The state of a running run that is silent is ``lost``.

    Args:
        unix_ns: Clock that measures the silence.
    """
    valid = [keep_valid("runs", row)[0] for row in store.rows(SELECT_RUNS)]
    rows = [row for row in valid if row is not None]
    unsized = [row["run_id"] for row in rows if not row["world_size"]]
    if unsized:
        last_ranks = store.rows(SELECT_LAST_RANKS, {"run_ids": unsized, "below": MAX_WORLD_SIZE})
        sizes = {row["run_id"]: row["last_rank"] + 1 for row in last_ranks}
        rows = [
            {**row, "world_size": row["world_size"] or sizes.get(row["run_id"], 1)} for row in rows
        ]
    return mark_lost_runs(store, _with_state_of_starter(store, rows), unix_ns=unix_ns)


def _with_state_of_starter(store: Store, rows: list[Row]) -> list[Row]:
    """Return rows of runs, each as long running, or failed, as the process that started its ranks.

    Ray's driver raises a second after its workers were stopped, and may have more to do.
    """
    before = {}
    for row in rows:
        epoch, (_, state, size) = row.pop("newest_epoch") - 1, row.pop("before")
        if row["state"] == ENDED and state in {RUNNING, FAILED} and size <= 1:
            before[row["run_id"], epoch] = state
    if not before:
        return rows
    run_ids = sorted({run_id for run_id, _ in before})
    found = store.rows(SELECT_STARTERS, {"run_ids": run_ids})
    starters = {(row["run_id"], row["epoch"]) for row in found}
    states = {run_id: state for (run_id, e), state in before.items() if (run_id, e) in starters}
    return [{**row, "state": states.get(row["run_id"], row["state"])} for row in rows]


def read_world_sizes(store: Store, run_ids: Iterable[str]) -> dict[tuple[str, int], int]:
    """Return the declared world size of each (run, epoch) that has one."""
    rows = store.rows(SELECT_WORLD_SIZES, {"run_ids": sorted(run_ids)})
    return {(row["run_id"], row["epoch"]): row["world_size"] for row in rows}


def read_recent_runs(store: Store, *, since_ns: int) -> set[str]:
    """Return the collected runs, no imported traces, that have not ended before a Unix time."""
    return {row["run_id"] for row in store.rows(SELECT_RECENT_RUNS, {"since_ns": since_ns})}


def read_run_names(store: Store) -> tuple[str, ...]:
    """Return the names of all runs, newest first."""
    return tuple(row["run_id"] for row in store.rows(SELECT_RUN_NAMES))


def read_starters(store: Store, run_id: str) -> frozenset[int]:
    """Return the epochs that are no attempts: each of one process, which started the next one's."""
    return frozenset(row["epoch"] for row in store.rows(SELECT_STARTERS, {"run_ids": [run_id]}))


def read_run(store: Store, run_id: str, *, unix_ns: Callable[[], int] = time.time_ns) -> RunRows:
    """Return the rows that describe a run, without those of a process that only started its ranks.

    Args:
        unix_ns: Clock that measures the age of gaps.
    """
    bound = {"run_id": run_id}
    of_kinds = {**bound, "kinds": [INVALID, IMPORT_NOTE], "most": MAX_INVALID}
    texts: dict[str, list[str]] = {INVALID: [], IMPORT_NOTE: []}
    for row in store.rows(SELECT_WARNINGS, of_kinds):
        texts[row["kind"]].append(row["text"])
    invalid = texts[INVALID]
    epochs = _read_valid(store, "runs", SELECT_EPOCHS, bound, invalid)
    if not epochs:
        return RunRows(epochs=[], ranks=[], groups=[], account=[], bad=[], pace=[], clocks=[])
    starters = read_starters(store, run_id) if len(epochs) > 1 else frozenset()
    epochs = [row for row in epochs if row["epoch"] not in starters]
    account = [row for row in _read_account(store, run_id) if row["epoch"] not in starters]
    has_bad = any(row["num_bad"] for row in account)
    has_pace = any(row["paced"] for row in epochs)
    ranks = _read_valid(store, "ranks", SELECT_RANKS, bound, invalid)
    ranks = [row for row in ranks if row["epoch"] not in starters]
    groups = _read_valid(store, "groups", SELECT_GROUPS, bound, invalid)
    return RunRows(
        epochs=[_sized_epoch(row, ranks) for row in epochs],
        ranks=_ranks_of_world(epochs, ranks, invalid),
        groups=_groups_of_world(epochs, groups, invalid),
        account=account,
        bad=store.rows(SELECT_BAD, bound) if has_bad else [],
        pace=store.rows(SELECT_PACE, bound) if has_pace else [],
        clocks=store.rows(SELECT_CLOCKS, bound),
        expired=store.rows(SELECT_EXPIRED, bound),
        gaps=read_gaps(store, run_id, is_running=epochs[-1]["state"] == RUNNING, now_ns=unix_ns()),
        invalid=invalid[:MAX_INVALID],
        notes=texts[IMPORT_NOTE],
    )


def read_version(store: Store, run_id: str) -> Row:
    """Return a row that differs if a run has other epochs, ranks, exits, groups or events.

    It is the same if only counts of records have changed.
    """
    return store.rows(SELECT_VERSION, {"run_id": run_id})[0]


def _read_account(store: Store, run_id: str) -> list[Row]:
    """Return the stored rows of each (epoch, rank).

    Two collectors may have stored one cut at the same moment. Then it is ``repeated``, and its
    lines in the ledger say how many rows are there.
    """
    has_repeated = read_stored_spans(store, run_id).has_repeated
    return store.rows(SELECT_EXACT_ACCOUNT if has_repeated else SELECT_ACCOUNT, {"run_id": run_id})


def _read_valid(
    store: Store, table: str, statement: str, bound: Row, invalid: list[str]
) -> list[Row]:
    """Return the rows of a table within their bounds; add to ``invalid`` what is left out."""
    kept = []
    for row in store.rows(statement, bound):
        valid, problems = keep_valid(table, row)
        invalid += [f"{table}, {name}: {problem}" for name, problem in problems.items()]
        if valid is not None:
            kept.append(valid)
    return kept


def _sized_epoch(epoch: Row, ranks: Sequence[Row]) -> Row:
    """Return the row of an epoch; if it has no valid world size, the ranks that are known."""
    if epoch["world_size"]:
        return epoch
    of_epoch = [row["rank"] for row in ranks if row["epoch"] == epoch["epoch"]]
    return {**epoch, "world_size": max(of_epoch, default=0) + 1}


def _ranks_of_world(epochs: Sequence[Row], ranks: Sequence[Row], invalid: list[str]) -> list[Row]:
    """Return the ranks below their world size, without positions beyond their axis."""
    world = {row["epoch"]: (row["world_size"] or MAX_WORLD_SIZE, row["layout"]) for row in epochs}
    kept = []
    for row in ranks:
        size, layout = world.get(row["epoch"], (MAX_WORLD_SIZE, {}))
        beyond = [axis for axis in COORD_AXES if layout and row[axis] >= layout.get(axis, 1)]
        if row["rank"] >= size:
            invalid.append(f"rank {row['rank']:,} is beyond the world size of {size:,}")
        elif beyond:
            invalid.append(f"rank {row['rank']:,}: its position is beyond the axis {beyond[0]}")
            kept.append({**row, **dict.fromkeys(beyond, NONE)})
        else:
            kept.append(row)
    return kept


def _groups_of_world(epochs: Sequence[Row], groups: Sequence[Row], invalid: list[str]) -> list[Row]:
    """Return the groups whose members are all below the world size."""
    size = {row["epoch"]: row["world_size"] or MAX_WORLD_SIZE for row in epochs}
    kept = []
    for row in groups:
        if max(row["members"]) < size.get(row["epoch"], MAX_WORLD_SIZE):
            kept.append(row)
        else:
            invalid.append(
                f"group {row['group_id']:x} has rank {max(row['members']):,}, beyond the world size"
            )
    return kept


def read_events(store: Store, run_id: str) -> list[Row]:
    """Return a run's events in order of time."""
    return store.rows(SELECT_EVENTS, {"run_id": run_id})


def read_exits(store: Store, run_id: str) -> list[Row]:
    """Return the end of each rank's process: ``epoch, rank, exit_state, exit_ns, data``.

    Of a process that started the ranks: the failures of ranks that it reports, or its own, as that
    of rank -1 of their epoch, if no rank recorded one. ``data`` is the document of its exit or lost
    event; "" if there is none.
    """
    rows = store.rows(SELECT_EXITS, {"run_id": run_id})
    starters = read_starters(store, run_id) if any(row["epoch"] for row in rows) else frozenset()
    of_ranks = [row for row in rows if row["epoch"] not in starters]
    for starter in (row for row in rows if row["epoch"] in starters):
        of_ranks = _with_end_of_starter(starter, of_ranks)
    return of_ranks


def _with_end_of_starter(starter: Row, ends: list[Row]) -> list[Row]:
    """Return the ends of ranks with what the process that started those of one epoch says of them.

    It ends the other ranks once one has failed, so that one failed before any of them was lost.
    """
    epoch = starter["epoch"] + 1
    own = {row["rank"]: row for row in ends if row["epoch"] == epoch}
    died = [row for row in own.values() if row["exit_state"] in DIED]
    if starter["exit_state"] != FAILED or FAILED in {row["exit_state"] for row in own.values()}:
        return ends
    reported = {
        failure["rank"]: {
            "epoch": epoch,
            "rank": failure["rank"],
            "exit_state": FAILED,
            "exit_ns": _first_exit([*died, own.get(failure["rank"], starter)]),
            "data": json.dumps({"exception": failure}),
        }
        for failure in _failures_of_ranks(starter["data"])
    }
    if not reported and not died:
        reported = {NONE: {**starter, "epoch": epoch, "rank": NONE}}
    named = {(epoch, rank) for rank in reported}
    return [row for row in ends if (row["epoch"], row["rank"]) not in named] + [*reported.values()]


def _first_exit(ends: list[Row]) -> int | None:
    return min((row["exit_ns"] for row in ends if row["exit_ns"] is not None), default=None)


def _failures_of_ranks(data: str) -> list[Row]:
    """Return the entries ``rank, type, message`` of a starter's exit; none if it is malformed."""
    try:
        failures = json.loads(data)["exception"]["of_ranks"]
        return [
            failure
            for failure in failures
            if type(failure["rank"]) is int and 0 <= failure["rank"] < MAX_WORLD_SIZE
        ]
    except (ValueError, TypeError, KeyError):
        return []


def read_gaps(store: Store, run_id: str, *, is_running: bool, now_ns: int) -> list[Row]:
    """Return the first ranges of rows that are missing although later rows of the segment came.

    Rows that were sent and never confirmed count as stored. Rows missing at the end of a segment,
    or a whole segment, look like rows that were never written.

    Args:
        is_running: Whether the run is running: a gap then counts after `GAP_TIMEOUT_NS`.
        now_ns: Unix time.

    Returns:
        Rows of ``epoch, rank, segment, gap_first, gap_last, num_gaps``.
    """
    before_ns = now_ns - GAP_TIMEOUT_NS if is_running else END_OF_TIME
    return store.rows(SELECT_GAPS, {"run_id": run_id, "before_ns": before_ns})


def read_configurations(store: Store) -> dict[str, Row]:
    """Return model, commit and number of micro-batches of each run, "" and 0 if unknown."""
    rows = store.rows(SELECT_CONFIGURATIONS, {"names": list(MICROBATCH_NAMES)})
    return {row.pop("run_id"): row for row in rows}


def read_manifests(store: Store, run_id: str) -> list[tuple[int, int, Mapping[str, str]]]:
    """Return (epoch, rank, settings) of each rank with a manifest; equal ones share a mapping."""
    bound = {"run_id": run_id}
    settings = {
        row["manifest_hash"]: row["settings"] for row in store.rows(SELECT_MANIFESTS, bound)
    }
    return [
        (row["epoch"], row["rank"], settings[row["newest_hash"]])
        for row in (store.rows(SELECT_RANK_MANIFESTS, bound) if settings else [])
        if row["newest_hash"] in settings
    ]


def read_previous_run(store: Store, run_id: str) -> str | None:
    """Return the last run of the same model and world size that began before this one.

    None if there is none, or if the job declared no name of its model.
    """
    previous = store.rows(SELECT_PREVIOUS, {"run_id": run_id})
    return previous[0]["run_id"] if previous else None
