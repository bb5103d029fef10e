"""Cut each rank's step into pieces: what it did itself, between the places where it waited.

A TP partner that waits inside ``forward`` is not slow. So compute is cut at
each communication that it waits for, and only what is left is the rank's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from rankscope.tracer.span import KIND_CODES, NONE, SpanFlag, SpanKind

from ...arrays.grouping import cumcount, factorize, is_one_of, sorted_unique
from ...arrays.intervals import NOT_FOUND, Line, find_covering, keep_outermost, merge_intervals
from ...arrays.sorting import argsort_rows, is_in_sorted, stable_argsort

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ...trace.tables import SpanTable, StepTable

COMPUTE_KINDS = (SpanKind.FORWARD, SpanKind.BACKWARD, SpanKind.OPTIMIZER)
HOST_KINDS = (SpanKind.GC, SpanKind.DATA, SpanKind.CHECKPOINT)
"""Spans that take their time away from the compute span around them, where a host computes."""

GAP = NOT_FOUND

FORWARD, BACKWARD = KIND_CODES[SpanKind.FORWARD], KIND_CODES[SpanKind.BACKWARD]

WHOLE = 0
"""The one span of its micro-batch, or nobody knows its micro-batch."""

MAX_PARTS = 4
"""More spans of one kind in what is said to be one micro-batch are several micro-batches under
one number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSteps:
    """Each (step, rank)'s step, sorted along the line."""

    start: NDArray[np.int64]
    """Positions on the line."""

    end: NDArray[np.int64]
    step_index: NDArray[np.int32]
    rank: NDArray[np.int32]
    start_ns: NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """Busy pieces, sorted along the line: by rank, then by time.

    None is empty but those that stand where a wait ended and nothing began.
    """

    start: NDArray[np.int64]
    """Positions on the line."""

    end: NDArray[np.int64]
    window: NDArray[np.int64]
    """Index of the (step, rank) window."""

    compute: NDArray[np.int64]
    """Row of the compute span that it is part of, or `GAP`."""

    host_kind: NDArray[np.int8]
    """Code of the host kind that took the time, or `GAP`."""

    ordinal: NDArray[np.int64]
    """Position among its compute span's pieces."""

    num_ordinals: NDArray[np.int64]
    """How many pieces that span has."""


def place_rank_steps(steps: StepTable, line: Line, step_index: NDArray[np.int32]) -> RankSteps:
    """Place the steps of each rank on the line.

    Args:
        steps: Rows of the steps that take part.
        line: The line.
        step_index: Shape (rows,): index of the row's step.
    """
    start = line.place(steps.rank, steps.start_ns)
    order = stable_argsort(start)
    return RankSteps(
        start=start[order],
        end=line.place(steps.rank, steps.end_ns)[order],
        step_index=step_index[order],
        rank=steps.rank[order],
        start_ns=steps.start_ns[order],
    )


def cut_pieces(
    spans: SpanTable,
    line: Line,
    windows: RankSteps,
    blocked: tuple[NDArray[np.int64], NDArray[np.int64]],
    launches: NDArray[np.int64],
) -> Pieces:
    """Cut the windows into pieces.

    Args:
        spans: The spans of these steps.
        line: The line.
        windows: The steps of each rank.
        blocked: (start, end) on the line where a rank stood waiting.
        launches: Positions on the line where it launched a communication.

    Returns:
        What is left of the windows once the waits are taken out, cut at every
        border of a compute or host span and at every launch.
    """
    start = line.place(spans.rank, spans.start_ns)
    end = start + spans.duration_ns
    compute = _rows_of(spans, COMPUTE_KINDS)
    compute = compute[keep_outermost(start[compute], end[compute])]
    host = _rows_of(spans, HOST_KINDS)
    host = host[keep_outermost(start[host], end[host])]
    idle_start, idle_end = merge_intervals(*blocked)
    borders = sorted_unique(
        np.concatenate(
            (
                windows.start, windows.end, idle_start, idle_end, launches,
                start[compute], end[compute], start[host], end[host],
            )
        )
    )  # fmt: skip
    first, last = borders[:-1], borders[1:]
    window = find_covering(windows.start, windows.end, first)
    busy = (window != NOT_FOUND) & (find_covering(idle_start, idle_end, first) == NOT_FOUND)
    first, last, window = _add_anchors(
        first[busy], last[busy], wait_end=blocked[1], launches=launches, windows=windows
    )
    empty = first == last
    in_compute = np.where(empty, NOT_FOUND, find_covering(start[compute], end[compute], first))
    in_host = np.where(empty, NOT_FOUND, find_covering(start[host], end[host], first))
    # A device goes on computing while its host does something else.
    on_device = (spans.flags[compute] & SpanFlag.DEVICE_END_KNOWN) != 0
    in_host[(in_compute != NOT_FOUND) & np.append(on_device, False)[in_compute]] = NOT_FOUND
    span = np.where(in_compute == NOT_FOUND, GAP, np.append(compute, GAP)[in_compute])
    host_kind = np.where(in_host == NOT_FOUND, GAP, spans.kind[np.append(host, 0)[in_host]])
    ordinal, num_ordinals = _number_pieces(span, host_kind)
    return Pieces(
        start=first,
        end=last,
        window=window,
        compute=span,
        host_kind=host_kind.astype(np.int8),
        ordinal=ordinal,
        num_ordinals=num_ordinals,
    )


def _add_anchors(
    first: NDArray[np.int64],
    last: NDArray[np.int64],
    *,
    wait_end: NDArray[np.int64],
    launches: NDArray[np.int64],
    windows: RankSteps,
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Add an empty piece where a wait ends, for what follows to hang on.

    Where a piece begins, that is what follows, unless a communication was launched
    at the same instant: it must not hang on what preceded the wait.
    """
    ends = sorted_unique(wait_end)
    hangs = ~is_in_sorted(ends, first) | is_in_sorted(ends, sorted_unique(launches))
    anchors = ends[hangs]
    # A wait may end with the step itself, which is half-open.
    anchors = anchors[find_covering(windows.start, windows.end, anchors - 1) != NOT_FOUND]
    first, last = np.concatenate((first, anchors)), np.concatenate((last, anchors))
    order = argsort_rows(first, last)
    first, last = first[order], last[order]
    empty = first == last
    return first, last, find_covering(windows.start, windows.end, first - empty)


def _rows_of(spans: SpanTable, kinds: tuple[SpanKind, ...]) -> NDArray[np.int64]:
    return np.flatnonzero(is_one_of(spans.kind, [KIND_CODES[kind] for kind in kinds]))


def is_own_compute(pieces: Pieces, num_operations: int) -> NDArray[np.bool_]:
    """Tell which operations are a rank's own compute, pieces coming first among them.

    Returns:
        Shape (num_operations,).
    """
    own = np.zeros(num_operations, dtype=np.bool_)
    own[: len(pieces.start)] = (pieces.compute != GAP) & (pieces.host_kind == GAP)
    return own


def _number_pieces(
    span: NDArray[np.int64], host_kind: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Number the pieces of each compute span; pieces that a host span took count as one apart."""
    ordinal = np.full(len(span), GAP, dtype=np.int64)
    num = np.zeros(len(span), dtype=np.int64)
    own = np.flatnonzero((span != GAP) & (host_kind == GAP))
    order = own[stable_argsort(span[own])]
    if len(order):
        first = np.flatnonzero(np.diff(span[order], prepend=GAP))
        sizes = np.diff(np.append(first, len(order)))
        ordinal[order] = np.arange(len(order)) - np.repeat(first, sizes)
        num[order] = np.repeat(sizes, sizes)
    return ordinal, num


def number_parts(spans: SpanTable, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Tell the backwards of one micro-batch apart by their order.

    Where forwards share numbers too, a number says nothing of the micro-batch.

    Args:
        spans: The table.
        rows: Shape (rows,): compute spans, none inside another.

    Returns:
        Shape (rows,): `WHOLE`, or one number for each (how many there are, place among them):
        1 and 2 for the halves of a split in two.
    """
    found = np.full(len(rows), WHOLE, dtype=np.int64)
    known = spans.microbatch[rows] != NONE
    backward = np.flatnonzero(known & (spans.kind[rows] == BACKWARD))
    work, num = _microbatches(spans, rows[backward])
    if num == len(backward):
        return found
    forward = rows[known & (spans.kind[rows] == FORWARD)]
    if _microbatches(spans, forward)[1] != len(forward):
        return found
    size = np.bincount(work, minlength=num)[work]
    order = argsort_rows(work, spans.start_ns[rows[backward]])
    place = np.empty(len(backward), dtype=np.int64)
    place[order] = cumcount(work[order])
    number = size * (size - 1) // 2 + place
    found[backward] = np.where(size > MAX_PARTS, WHOLE, number)
    return found


def _microbatches(spans: SpanTable, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], int]:
    """Number what is said to be one micro-batch's work on one chunk of a rank."""
    if not len(rows):
        return rows, 0
    columns = (spans.epoch, spans.step, spans.rank, spans.chunk, spans.microbatch)
    return factorize(*(column[rows] for column in columns))


def is_deferred_part(portion: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Tell the portions that are not the first of their micro-batch. Shape as given."""
    first = [size * (size - 1) // 2 for size in range(1, MAX_PARTS + 1)]
    return ~np.isin(portion, first)


def number_parts_by_span(spans: SpanTable, compute: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return `number_parts` the spans that ``compute`` names, `WHOLE` elsewhere. Shape (spans,)."""
    portion = np.full(len(spans), WHOLE, dtype=np.int64)
    named = np.zeros(len(spans), dtype=np.bool_)
    named[compute[compute != NOT_FOUND]] = True
    rows = np.flatnonzero(named)
    portion[rows] = number_parts(spans, rows)
    return portion
