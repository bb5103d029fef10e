"""Read one step a portion of its ranks at a time: it may have more spans than memory holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from rankscope.tracer.span import COMM_KINDS, NONE, SpanKind

from ..arrow_columns import to_numpy
from ..store.ledger import read_deduplicated
from .steps import step_range

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pyarrow as pa
    from numpy.typing import NDArray

    from ..store.store import Store

APART_KINDS = sorted(kind.value for kind in {*SpanKind} - {*COMM_KINDS, SpanKind.OTHER})
"""Kinds of spans that are members of no communication instance; one that only a newer
collector knows is read as ``other``, which may be."""

SELECT_OUTLINE = """
SELECT
    rank, count() AS num_spans, min(start_ns) AS begin_ns, max(start_ns + duration_ns) AS end_ns
FROM spans FINAL
WHERE run_id = {run_id:String} AND epoch = {epoch:Int32} AND step = {step:Int32}
GROUP BY rank ORDER BY rank
"""

SELECT_SELECTED_SPANS = """
SELECT
    epoch, step, rank, kind, name, track, start_ns, duration_ns, launch_ns, group_id, seq,
    src_rank, dst_rank, microbatch, chunk, num_bytes, interval_id, flags, depth
FROM spans FINAL
WHERE run_id = {run_id:String} AND epoch = {epoch:Int32} AND step = {step:Int32}
    AND rank IN {ranks:Array(Int32)}
    AND start_ns < {before_ns:Int64} AND start_ns + duration_ns > {after_ns:Int64}
ORDER BY rank, start_ns, segment, row
"""

COUNT_SELECTED_SPANS = """
SELECT count() AS num_spans FROM spans
WHERE run_id = {run_id:String} AND epoch = {epoch:Int32} AND step = {step:Int32}
    AND rank IN {ranks:Array(Int32)}
    AND start_ns < {before_ns:Int64} AND start_ns + duration_ns > {after_ns:Int64}
"""

SELECT_ARRIVALS = """
SELECT
    group_id,
    if(src_rank != -1 AND dst_rank != -1, src_rank, toInt32(-1)) AS source_rank,
    if(src_rank != -1 AND dst_rank != -1, dst_rank, toInt32(-1)) AS target_rank,
    seq,
    toInt64(count()) AS num_spans,
    toInt64(groupBitmap(toUInt32(rank))) AS num_ranks,
    max(start_ns) AS latest_ns,
    argMin(rank, (-start_ns, rank)) AS last_rank
FROM spans FINAL
WHERE run_id = {run_id:String} AND epoch = {epoch:Int32} AND step = {step:Int32}
    AND kind NOT IN {kinds:Array(String)} AND group_id IN {groups:Array(UInt64)}
    AND seq >= {first_seq:Int64} AND seq <= {last_seq:Int64}
GROUP BY group_id, source_rank, target_rank, seq
"""

FIRST_NS, LAST_NS = -(1 << 62), 1 << 62


SELECT_SPANS = """
SELECT
    epoch, step, rank, kind, name, track, start_ns, duration_ns, launch_ns, group_id, seq,
    src_rank, dst_rank, microbatch, chunk, num_bytes, interval_id, flags, depth
FROM spans
WHERE run_id = {run_id:String} AND step >= {first:Int32} AND step <= {last:Int32}
ORDER BY epoch, step, rank, start_ns, segment, row
"""

SELECT_SPANS_ONCE = """
SELECT
    epoch, step, rank, kind, name, track, start_ns, duration_ns, launch_ns, group_id, seq,
    src_rank, dst_rank, microbatch, chunk, num_bytes, interval_id, flags, depth
FROM spans FINAL
WHERE run_id = {run_id:String} AND step >= {first:Int32} AND step <= {last:Int32}
ORDER BY epoch, step, rank, start_ns, segment, row
"""

COUNT_SPANS = """
SELECT count() AS num_spans FROM spans
WHERE run_id = {run_id:String} AND step >= {first:Int32} AND step <= {last:Int32}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutline:
    """What a step holds, rank by rank, ascending; empty columns where there is nothing."""

    ranks: NDArray[np.int32]
    num_spans: NDArray[np.int64]
    begin_ns: int
    """Start of the first span, end of the last one; 0 where there is none."""

    end_ns: int

    @property
    def num_all(self) -> int:
        """Spans of all ranks."""
        return int(self.num_spans.sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanSelection:
    """Which of a step's spans are asked for."""

    run_id: str
    epoch: int
    step: int
    ranks: Sequence[int]
    after_ns: int = FIRST_NS
    """Spans that end at or before this Unix time are left out."""

    before_ns: int = LAST_NS
    """Spans that start at or after it are."""

    def bound(self) -> dict[str, Any]:
        """Return the statement's parameters."""
        return {
            "run_id": self.run_id,
            "epoch": self.epoch,
            "step": self.step,
            "ranks": [int(rank) for rank in self.ranks],
            "after_ns": self.after_ns,
            "before_ns": self.before_ns,
        }


def read_outline(store: Store, run_id: str, *, epoch: int, step: int) -> StepOutline:
    """Return how many spans each rank has in a step, each counted once, and its bounds."""
    found = store.arrow(SELECT_OUTLINE, {"run_id": run_id, "epoch": epoch, "step": step})
    begin, end = to_numpy(found["begin_ns"]), to_numpy(found["end_ns"])
    return StepOutline(
        ranks=to_numpy(found["rank"]),
        num_spans=to_numpy(found["num_spans"]).astype(np.int64),
        begin_ns=int(begin.min(initial=LAST_NS)) if len(begin) else 0,
        end_ns=int(end.max(initial=FIRST_NS)) if len(end) else 0,
    )


def read_selected_spans(store: Store, portion: SpanSelection) -> pa.Table:
    """Return the portion's spans, each once, by (rank, start_ns)."""
    return store.arrow(SELECT_SELECTED_SPANS, portion.bound())


def count_selected_spans(store: Store, portion: SpanSelection) -> int:
    """Return how many spans the portion has; those that are there twice count so."""
    return int(store.rows(COUNT_SELECTED_SPANS, portion.bound())[0]["num_spans"])


def read_arrivals(store: Store, portion: SpanSelection, spans: pa.Table) -> pa.Table:
    """Return what is known of all members of the communication instances in ``spans``.

    Columns: ``group_id, source_rank, target_rank`` (-1 for a collective)``, seq, num_spans,
    num_ranks, latest_ns, last_rank``. Members count whichever rank and time they are of.

    Args:
        store: The store.
        portion: Names the step.
        spans: What `read_selected_spans` returned.
    """
    group, seq = to_numpy(spans["group_id"]), to_numpy(spans["seq"])
    joined = (group != 0) & (seq != NONE)
    bound = {name: portion.bound()[name] for name in ("run_id", "epoch", "step")}
    return store.arrow(
        SELECT_ARRIVALS,
        {
            **bound,
            "kinds": APART_KINDS,
            "groups": np.unique(group[joined]).tolist(),
            "first_seq": int(seq[joined].min(initial=LAST_NS)),
            "last_seq": int(seq[joined].max(initial=FIRST_NS)),
        },
    )


def group_blocks(
    blocks: Sequence[Sequence[int]], num_spans: dict[int, int], *, max_spans: int
) -> list[tuple[int, int]]:
    """Cut neighbouring blocks of ranks into portions; return first and end block of each.

    Args:
        blocks: Ranks that are not to be parted.
        num_spans: By rank.
        max_spans: Of a portion; a block that has more is one of its own.
    """
    cuts: list[tuple[int, int]] = []
    begin = held = 0
    for place, block in enumerate(blocks):
        size = sum(num_spans[rank] for rank in block)
        if place > begin and held + size > max_spans:
            cuts.append((begin, place))
            begin, held = place, 0
        held += size
    if len(blocks) > begin:
        cuts.append((begin, len(blocks)))
    return cuts


def read_spans(
    store: Store, run_id: str, *, first: int | None = None, last: int | None = None
) -> pa.Table:
    """Return the spans of these steps, by (epoch, step, rank, start_ns).

    Spans outside any step are left out.
    """
    bound = step_range(run_id, first, last)
    return read_deduplicated(
        store,
        run_id,
        lambda sql: _read_spans(store, sql, bound),
        plain=SELECT_SPANS,
        final=SELECT_SPANS_ONCE,
    )


def read_spans_once(store: Store, run_id: str, *, first: int, last: int) -> pa.Table:
    """Return what `read_spans` does, free of duplicates that the ledger does not tell of yet.

    Between the second storing of a cut and the note about it, rows stand there twice.
    """
    return store.arrow(SELECT_SPANS_ONCE, step_range(run_id, first, last))


def _read_spans(store: Store, sql: str, bound: dict[str, Any]) -> pa.Table:
    (counted,) = store.rows(COUNT_SPANS, bound)
    return store.stream_arrow(sql, bound, num_rows=counted["num_spans"])
