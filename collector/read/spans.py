"""Spans of a run, and of selected ranks and times of a step, which may exceed the memory."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from rankscope.tracer.span import COMM_KINDS, NONE, SPAN_COLUMNS, SpanKind

from ..arrow_columns import to_numpy
from ..store.deduplicated_reads import read_deduplicated
from .steps import step_range

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pyarrow as pa
    from numpy.typing import NDArray

    from ..identity import Row
    from ..store.store import Store

NOT_COMM_KINDS = sorted(kind.value for kind in {*SpanKind} - {*COMM_KINDS, SpanKind.OTHER})
"""Span kinds that are never communication. ``other`` may be: a kind that only a newer version knows
is read as ``other``."""

SELECT_COLUMNS = "SELECT epoch, rank, " + ", ".join(
    column.name for column in SPAN_COLUMNS if column.in_analysis
)

SELECT_SPANS = (
    SELECT_COLUMNS
    + """
FROM spans
WHERE run_id = {run_id:String} AND step >= {first:Int32} AND step <= {last:Int32}
    AND epoch >= {first_epoch:Int32} AND epoch <= {last_epoch:Int32}
    AND rank >= {first_rank:Int32} AND rank <= {last_rank:Int32}
ORDER BY epoch, step, rank, start_ns, segment, row
"""
)

SELECT_SPANS_FINAL = SELECT_SPANS.replace("FROM spans", "FROM spans FINAL")

SELECT_CHOSEN = SELECT_SPANS_FINAL.replace(
    "\nORDER BY",
    """
    AND (empty({ranks:Array(Int32)}) OR rank IN {ranks:Array(Int32)})
    AND (empty({kinds:Array(String)}) OR kind IN {kinds:Array(String)})
ORDER BY""",
)

SELECT_RECORDED_COLUMNS = {
    "bytedance": "SELECT epoch, rank, step, start_ns, kind, name, seq, microbatch, chunk,"
    " duration_ns"
}
"""The columns that a format records, if not all: to read the others takes twice as long again."""

SELECT_FORMAT = (
    "SELECT argMax(source_format, epoch) AS source_format FROM runs WHERE run_id = {run_id:String}"
)

EVERYWHERE = {
    "first_epoch": -(1 << 31),
    "last_epoch": (1 << 31) - 1,
    "first_rank": -(1 << 31),
    "last_rank": (1 << 31) - 1,
}
"""Bounds of `SELECT_SPANS` for all epochs and ranks."""

MAX_STATEMENT_SPANS = 1_000_000
"""Spans of one statement's result, 0.1 GB: a server holds the result whole until its client has
read it, and the engine once more while it sorts."""

COUNT_BY_STEP = """
SELECT epoch, step, count() AS num_spans FROM spans
WHERE run_id = {run_id:String} AND step >= {first:Int32} AND step <= {last:Int32}
GROUP BY epoch, step ORDER BY epoch, step
"""

COUNT_BY_RANK = """
SELECT rank, count() AS num_spans FROM spans
WHERE run_id = {run_id:String} AND step >= {first:Int32} AND step <= {last:Int32}
    AND epoch >= {first_epoch:Int32} AND epoch <= {last_epoch:Int32}
GROUP BY rank ORDER BY rank
"""

SELECT_OUTLINE = """
SELECT
    rank, count() AS num_spans, min(start_ns) AS begin_ns, max(start_ns + duration_ns) AS end_ns
FROM spans FINAL
WHERE run_id = {run_id:String} AND epoch = {epoch:Int32} AND step = {step:Int32}
GROUP BY rank ORDER BY rank
"""

SELECT_BOUNDS = """
SELECT min(start_ns) AS begin_ns, max(start_ns + duration_ns) AS end_ns FROM spans
WHERE run_id = {run_id:String} AND epoch = {epoch:Int32} AND step = {step:Int32}
"""

SELECTION = """
WHERE run_id = {run_id:String} AND epoch = {epoch:Int32} AND step = {step:Int32}
    AND rank IN {ranks:Array(Int32)}
    AND start_ns < {before_ns:Int64} AND start_ns + duration_ns > {after_ns:Int64}
"""

SELECT_SELECTED_SPANS = (
    SELECT_COLUMNS + " FROM spans" + SELECTION + "ORDER BY rank, start_ns, segment, row"
)

COUNT_SELECTED_SPANS = "SELECT count() AS num_spans FROM spans" + SELECTION  # noqa: S608  # constants

JOINED = """
    kind NOT IN {kinds:Array(String)} AND group_id != 0 AND seq != -1
    AND seq >= {first_seq:Int64} AND seq <= {last_seq:Int64}
"""

SELECT_ARRIVALS = f"""
WITH
    if(src_rank != -1 AND dst_rank != -1, src_rank, toInt32(-1)) AS source_rank,
    if(src_rank != -1 AND dst_rank != -1, dst_rank, toInt32(-1)) AS target_rank
SELECT
    group_id, source_rank, target_rank, seq,
    toInt64(count()) AS num_spans,
    toInt64(groupBitmap(toUInt32(rank))) AS num_ranks,
    max(start_ns) AS latest_ns,
    argMin(rank, (-start_ns, rank)) AS last_rank
FROM spans
WHERE run_id = {{run_id:String}} AND epoch = {{epoch:Int32}} AND step = {{step:Int32}}
    AND {JOINED} AND (group_id, source_rank, target_rank, seq) IN (
        SELECT group_id, source_rank, target_rank, seq FROM spans {SELECTION} AND {JOINED}
    )
GROUP BY group_id, source_rank, target_rank, seq
"""  # noqa: S608  # constants
"""Only those of the selection's instances: of a part of a step there are some ten times as many
with its groups and numbers."""

FIRST_NS, LAST_NS = -(1 << 62), 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutline:
    """Ranks of a step in ascending order, with their numbers of spans; empty if there are none."""

    ranks: NDArray[np.int32]
    num_spans: NDArray[np.int64]
    begin_ns: int
    """Start of the first span; 0 if there is none."""

    end_ns: int
    """End of the last span; 0 if there is none."""

    @property
    def num_all(self) -> int:
        """Number of spans of all ranks."""
        return int(self.num_spans.sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanSelection:
    """Some ranks of a step, and a range of time."""

    run_id: str
    epoch: int
    step: int
    ranks: Sequence[int]
    after_ns: int = FIRST_NS
    """Unix time after which a span must end."""

    before_ns: int = LAST_NS
    """Unix time before which a span must start."""

    def bound(self) -> dict[str, Any]:
        """Return the bound parameters of a statement."""
        return {
            "run_id": self.run_id,
            "epoch": self.epoch,
            "step": self.step,
            "ranks": [int(rank) for rank in self.ranks],
            "after_ns": self.after_ns,
            "before_ns": self.before_ns,
        }


def read_spans(
    store: Store, run_id: str, *, first: int | None = None, last: int | None = None
) -> pa.Table:
    """Return the spans of the steps from ``first`` to ``last``, each once.

    Spans outside any step are left out, and so are columns that the run's format does not record.
    Order: epoch, step, rank, start_ns.
    """
    bound = step_range(run_id, first, last)
    (run,) = store.rows(SELECT_FORMAT, {"run_id": run_id})
    select = SELECT_RECORDED_COLUMNS.get(run["source_format"], SELECT_COLUMNS)
    return read_deduplicated(
        store,
        partial(_read_spans, store),
        SELECT_SPANS.replace(SELECT_COLUMNS, select),
        bound,
        final=SELECT_SPANS_FINAL.replace(SELECT_COLUMNS, select),
    )


def read_spans_final(store: Store, run_id: str, *, first: int, last: int) -> pa.Table:
    """Return the same as `read_spans`, without duplicates that the ledger does not have yet.

    While a cut is stored again, the store has its rows twice until the ledger says so.
    """
    bound = step_range(run_id, first, last) | EVERYWHERE
    return read_deduplicated(store, store.arrow, SELECT_SPANS_FINAL, bound)


def read_filtered_spans(
    store: Store,
    run_id: str,
    *,
    first: int | None,
    last: int | None,
    ranks: Sequence[int] = (),
    kinds: Sequence[str] = (),
) -> pa.Table:
    """Return the spans of some ranks and kinds (empty: all), each once, as `read_spans` does.

    With ``first`` below 0, spans outside any step are included: their step is -1.
    """
    bound = step_range(run_id, first, last) | EVERYWHERE
    bound |= {"ranks": [*ranks], "kinds": [*kinds]}
    if first is not None and first < 0:
        bound["first"] = NONE
    return read_deduplicated(store, store.arrow, SELECT_CHOSEN, bound)


def read_outline(store: Store, run_id: str, *, epoch: int, step: int) -> StepOutline:
    """Return the ranks of a step with their numbers of spans, each span counted once."""
    bound = {"run_id": run_id, "epoch": epoch, "step": step}
    outline = read_deduplicated(store, store.arrow, SELECT_OUTLINE, bound)
    begin, end = to_numpy(outline["begin_ns"]), to_numpy(outline["end_ns"])
    return StepOutline(
        ranks=to_numpy(outline["rank"]),
        num_spans=to_numpy(outline["num_spans"]).astype(np.int64),
        begin_ns=int(begin.min(initial=LAST_NS)) if len(begin) else 0,
        end_ns=int(end.max(initial=FIRST_NS)) if len(end) else 0,
    )


def read_bounds(store: Store, run_id: str, *, epoch: int, step: int) -> tuple[int, int]:
    """Return begin and end of a step, Unix ns; 0 without spans. Duplicates do not change them."""
    bound = {"run_id": run_id, "epoch": epoch, "step": step}
    (row,) = read_deduplicated(store, store.rows, SELECT_BOUNDS, bound)
    return int(row["begin_ns"]), int(row["end_ns"])


def read_selected_spans(store: Store, selection: SpanSelection) -> pa.Table:
    """Return the selected spans, each once, by (rank, start_ns)."""
    return _read_distinct(store, SELECT_SELECTED_SPANS, selection.bound())


def count_selected_spans(store: Store, selection: SpanSelection) -> int:
    """Return the number of selected spans; duplicates count twice."""
    (row,) = read_deduplicated(store, store.rows, COUNT_SELECTED_SPANS, selection.bound())
    return int(row["num_spans"])


def read_arrivals(store: Store, selection: SpanSelection, spans: pa.Table) -> pa.Table:
    """Return the arrivals of the communication instances in ``spans``, from all their members.

    Members count whatever their rank and time.

    Args:
        selection: A selection of the step.
        spans: Result of `read_selected_spans`.

    Returns:
        Columns ``group_id, source_rank, target_rank`` (-1 for a collective)``, seq, num_spans,
        num_ranks, latest_ns, last_rank``.
    """
    group, seq = to_numpy(spans["group_id"]), to_numpy(spans["seq"])
    joined = (group != 0) & (seq != NONE)
    return _read_distinct(
        store,
        SELECT_ARRIVALS,
        {
            **selection.bound(),
            "kinds": NOT_COMM_KINDS,
            "first_seq": int(seq[joined].min(initial=LAST_NS)),
            "last_seq": int(seq[joined].max(initial=FIRST_NS)),
        },
    )


def _read_distinct(store: Store, select: str, bound: Row) -> pa.Table:
    # FINAL reads all columns of a step: some five times the time.
    final = select.replace("FROM spans", "FROM spans FINAL")
    return read_deduplicated(store, store.arrow, select, bound, final=final)


def group_blocks(
    blocks: Sequence[Sequence[int]], num_spans: dict[int, int], *, max_spans: int
) -> list[tuple[int, int]]:
    """Group neighbouring blocks of ranks by their numbers of spans.

    Args:
        blocks: Ranks that must stay together.
        num_spans: Number of spans by rank.
        max_spans: Largest number of spans of a group, exceeded only by a single block.

    Returns:
        First and end block of each group.
    """
    groups: list[tuple[int, int]] = []
    begin = total = 0
    for index, block in enumerate(blocks):
        size = sum(num_spans[rank] for rank in block)
        if index > begin and total + size > max_spans:
            groups.append((begin, index))
            begin, total = index, 0
        total += size
    if len(blocks) > begin:
        groups.append((begin, len(blocks)))
    return groups


def _read_spans(store: Store, sql: str, bound: Row) -> pa.Table:
    """Read spans by as few statements as `MAX_STATEMENT_SPANS` allows."""
    rows = read_deduplicated(store, store.rows, COUNT_BY_STEP, bound)
    num_rows = sum(row["num_spans"] for row in rows)
    parts = [bound | EVERYWHERE]
    if num_rows > MAX_STATEMENT_SPANS:
        parts = [
            part
            for epoch, of_epoch in groupby(rows, key=itemgetter("epoch"))
            for part in _split(
                "step",
                list(of_epoch),
                bound | EVERYWHERE | {"first_epoch": epoch, "last_epoch": epoch},
            )
            for part in _split_large_step(store, part)
        ]
    return store.stream_arrow(sql, *parts, num_rows=num_rows)


def _split(column: str, rows: list[Row], bound: Row) -> list[Row]:
    """Split a statement by the ascending values of a column, of which ``rows`` has the counts."""
    first, last = ("first", "last") if column == "step" else (f"first_{column}", f"last_{column}")
    values = [row[column] for row in rows]
    num_spans = {row[column]: row["num_spans"] for row in rows}
    groups = group_blocks([(value,) for value in values], num_spans, max_spans=MAX_STATEMENT_SPANS)
    return [bound | {first: values[begin], last: values[end - 1]} for begin, end in groups]


def _split_large_step(store: Store, bound: Row) -> list[Row]:
    """Split a statement of a single step by ranks, if that has too many spans."""
    if bound["first"] != bound["last"]:
        return [bound]
    rows = read_deduplicated(store, store.rows, COUNT_BY_RANK, bound)
    return _split("rank", rows, bound)
