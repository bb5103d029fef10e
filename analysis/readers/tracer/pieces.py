"""Cut each rank's step into pieces: what it did itself, between the places where it waited.

A TP partner that waits inside ``forward`` is not slow. So compute is cut at
each communication that it waits for, and only what is left is the rank's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from rankscope.tracer.span import KIND_CODES, NONE, SpanFlag, SpanKind

from ...arrays.grouping import distinct, is_one_of, number_rows, positions_in_runs
from ...arrays.intervals import NOWHERE, Line, covering, outermost, union
from ...arrays.sorting import is_among, sort_rows, stable_order

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ...trace.tables import SpanTable, StepTable

COMPUTE_KINDS = (SpanKind.FORWARD, SpanKind.BACKWARD, SpanKind.OPTIMIZER)
HOST_KINDS = (SpanKind.GC, SpanKind.DATA, SpanKind.CHECKPOINT)
"""Spans that take their time away from the compute span around them, where a host computes."""

GAP = NOWHERE

FORWARD, BACKWARD = KIND_CODES[SpanKind.FORWARD], KIND_CODES[SpanKind.BACKWARD]

WHOLE = 0
"""The one span of its micro-batch, or nobody knows its micro-batch."""

MOST_PORTIONS = 4
"""More spans of one kind in what is said to be one micro-batch are several micro-batches under
one number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
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


def windows_of(steps: StepTable, line: Line, step_index: NDArray[np.int32]) -> Windows:
    """Place the steps of each rank on the line.

    Args:
        steps: Rows of the steps that take part.
        line: The line.
        step_index: Shape (rows,): index of the row's step.
    """
    start = line.place(steps.rank, steps.start_ns)
    order = stable_order(start)
    return Windows(
        start=start[order],
        end=line.place(steps.rank, steps.end_ns)[order],
        step_index=step_index[order],
        rank=steps.rank[order],
        start_ns=steps.start_ns[order],
    )


def cut(
    spans: SpanTable,
    line: Line,
    windows: Windows,
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
    compute = compute[outermost(start[compute], end[compute])]
    host = _rows_of(spans, HOST_KINDS)
    host = host[outermost(start[host], end[host])]
    idle_start, idle_end = union(*blocked)
    borders = distinct(
        np.concatenate(
            (
                windows.start, windows.end, idle_start, idle_end, launches,
                start[compute], end[compute], start[host], end[host],
            )
        )
    )  # fmt: skip
    first, last = borders[:-1], borders[1:]
    window = covering(windows.start, windows.end, first)
    busy = (window != NOWHERE) & (covering(idle_start, idle_end, first) == NOWHERE)
    first, last, window = _with_anchors(
        first[busy], last[busy], wait_end=blocked[1], launches=launches, windows=windows
    )
    empty = first == last
    in_compute = np.where(empty, NOWHERE, covering(start[compute], end[compute], first))
    in_host = np.where(empty, NOWHERE, covering(start[host], end[host], first))
    # A device goes on computing while its host does something else.
    on_device = (spans.flags[compute] & SpanFlag.DEVICE_END_KNOWN) != 0
    in_host[(in_compute != NOWHERE) & np.append(on_device, False)[in_compute]] = NOWHERE
    span = np.where(in_compute == NOWHERE, GAP, np.append(compute, GAP)[in_compute])
    host_kind = np.where(in_host == NOWHERE, GAP, spans.kind[np.append(host, 0)[in_host]])
    ordinal, num_ordinals = _ordinals(span, host_kind)
    return Pieces(
        start=first,
        end=last,
        window=window,
        compute=span,
        host_kind=host_kind.astype(np.int8),
        ordinal=ordinal,
        num_ordinals=num_ordinals,
    )


def _with_anchors(
    first: NDArray[np.int64],
    last: NDArray[np.int64],
    *,
    wait_end: NDArray[np.int64],
    launches: NDArray[np.int64],
    windows: Windows,
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Add an empty piece where a wait ends, for what follows to hang on.

    Where a piece begins, that is what follows, unless a communication was launched
    at the same instant: it must not hang on what preceded the wait.
    """
    ends = distinct(wait_end)
    hangs = ~is_among(ends, first) | is_among(ends, distinct(launches))
    anchors = ends[hangs]
    # A wait may end with the step itself, which is half-open.
    anchors = anchors[covering(windows.start, windows.end, anchors - 1) != NOWHERE]
    first, last = np.concatenate((first, anchors)), np.concatenate((last, anchors))
    order = sort_rows(first, last)
    first, last = first[order], last[order]
    empty = first == last
    return first, last, covering(windows.start, windows.end, first - empty)


def _rows_of(spans: SpanTable, kinds: tuple[SpanKind, ...]) -> NDArray[np.int64]:
    return np.flatnonzero(is_one_of(spans.kind, [KIND_CODES[kind] for kind in kinds]))


def own_compute(pieces: Pieces, num_operations: int) -> NDArray[np.bool_]:
    """Tell which operations are a rank's own compute, pieces coming first among them.

    Returns:
        Shape (num_operations,).
    """
    own = np.zeros(num_operations, dtype=np.bool_)
    own[: len(pieces.start)] = (pieces.compute != GAP) & (pieces.host_kind == GAP)
    return own


def _ordinals(
    span: NDArray[np.int64], host_kind: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Number the pieces of each compute span; pieces that a host span took count as one apart."""
    ordinal = np.full(len(span), GAP, dtype=np.int64)
    num = np.zeros(len(span), dtype=np.int64)
    own = np.flatnonzero((span != GAP) & (host_kind == GAP))
    order = own[stable_order(span[own])]
    if len(order):
        first = np.flatnonzero(np.diff(span[order], prepend=GAP))
        sizes = np.diff(np.append(first, len(order)))
        ordinal[order] = np.arange(len(order)) - np.repeat(first, sizes)
        num[order] = np.repeat(sizes, sizes)
    return ordinal, num


def portions_of(spans: SpanTable, rows: NDArray[np.int64]) -> NDArray[np.int64]:
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
    order = sort_rows(work, spans.start_ns[rows[backward]])
    place = np.empty(len(backward), dtype=np.int64)
    place[order] = positions_in_runs(work[order])
    number = size * (size - 1) // 2 + place
    found[backward] = np.where(size > MOST_PORTIONS, WHOLE, number)
    return found


def _microbatches(spans: SpanTable, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], int]:
    """Number what is said to be one micro-batch's work on one chunk of a rank."""
    if not len(rows):
        return rows, 0
    columns = (spans.epoch, spans.step, spans.rank, spans.chunk, spans.microbatch)
    return number_rows(*(column[rows] for column in columns))


def is_deferred(portion: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Tell the portions that are not the first of their micro-batch. Shape as given."""
    first = [size * (size - 1) // 2 for size in range(1, MOST_PORTIONS + 1)]
    return ~np.isin(portion, first)


def portions_by_span(spans: SpanTable, compute: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return `portions_of` the spans that ``compute`` names, `WHOLE` elsewhere. Shape (spans,)."""
    portion = np.full(len(spans), WHOLE, dtype=np.int64)
    named = np.zeros(len(spans), dtype=np.bool_)
    named[compute[compute != NOWHERE]] = True
    rows = np.flatnonzero(named)
    portion[rows] = portions_of(spans, rows)
    return portion
