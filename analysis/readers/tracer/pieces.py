"""Pieces of each rank's step: what it did itself, between the communications that it waited for.

A TP partner that waits inside ``forward`` is not slow. So compute is cut at each communication
that it waits for, and only the rest counts as the rank's own.

Some schedules also split the backward of a micro-batch into several spans, its *parts*: a
zero-bubble schedule first computes the gradients of the micro-batch's input, and those of the
weights later, in another span. Parts are different work, so their ideals are separate. They are
distinguished by their order in the micro-batch, not by their names, which each tracer chooses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from rankscope.tracer.span import KIND_CODES, NONE, IdleName, SpanFlag, SpanKind

from ...arrays.grouping import cumcount, factorize, is_one_of, sorted_unique
from ...arrays.intervals import NOT_FOUND, Line, find_covering, keep_outermost, merge_intervals
from ...arrays.sorting import argsort_rows, is_in_sorted, stable_argsort
from ...replay.model import COMPILATION_NAMES, INTERRUPTING_CODES

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ...trace.tables import SpanTable, StepTable

GAP = NOT_FOUND

HOST, OTHER = KIND_CODES[SpanKind.HOST], KIND_CODES[SpanKind.OTHER]
IDLE_NAMES = frozenset(IdleName)
FORWARD, BACKWARD = KIND_CODES[SpanKind.FORWARD], KIND_CODES[SpanKind.BACKWARD]

WHOLE = 0
"""Part number of a span that is all of its micro-batch, or whose micro-batch is unknown."""

OVERLAP_SLACK_NS = 20_000
"""Overlap of two spans that follow each other: clocks of device and host explain it, as
`matched_waits.QUEUE_SLACK_NS`; so does the drift of a host whose clock is aligned, which moves
begins and keeps durations."""

MAX_PARTS = 4
"""If one micro-batch has more spans of one kind, several micro-batches share its number."""

EVALUATION = MAX_PARTS**2 - 1
"""Part number of a forward of an evaluation: it has an ideal of its own."""

GENERATION = EVALUATION - 1
"""Part number of another forward without gradients, which most steps have: sampling in
reinforcement learning, a frozen model."""

NO_GRADIENTS = (GENERATION, EVALUATION)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSteps:
    """The steps of each rank, one row per (step, rank), sorted along the number line."""

    start: NDArray[np.int64]
    """Positions on the line."""

    end: NDArray[np.int64]
    step_index: NDArray[np.int32]
    rank: NDArray[np.int32]
    start_ns: NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """The pieces of all ranks' steps, sorted along the number line: by rank, then by time.

    A piece is empty only as an anchor: where a wait ended and nothing began.
    """

    start: NDArray[np.int64]
    """Positions on the line."""

    end: NDArray[np.int64]
    rank_step: NDArray[np.int64]
    """Index into `RankSteps`."""

    compute: NDArray[np.int64]
    """Row of the compute span that contains the piece, or `GAP`."""

    host_kind: NDArray[np.int8]
    """Code of the kind of the host span that took the time, or `GAP`."""

    is_idle: NDArray[np.bool_]
    """Whether a compute span contains it in which nothing was computed then (`IdleName`)."""

    is_hidden: NDArray[np.bool_]
    """Whether it is compute that ended before its host launched more: had it been shorter, the
    device would have been idle for longer."""

    named_row: NDArray[np.int64]
    """Row of that span, if it has a name of the job's or of the compiler, or `GAP`."""

    ordinal: NDArray[np.int64]
    """Number among the pieces of the compute span."""

    num_ordinals: NDArray[np.int64]
    """Number of pieces of the compute span."""

    part: NDArray[np.int64]
    """Shape (spans,): the part of its micro-batch that a compute span is; `WHOLE` for others."""

    @property
    def is_own(self) -> NDArray[np.bool_]:
        """Pieces that are the rank's own compute, as a mask."""
        own: NDArray[np.bool_] = (self.compute != GAP) & (self.host_kind == GAP)
        return own

    @property
    def is_first(self) -> NDArray[np.bool_]:
        """Pieces that are the first of their (step, rank), as a mask."""
        first: NDArray[np.bool_] = np.diff(self.rank_step, prepend=NOT_FOUND) != 0
        return first

    @property
    def is_call(self) -> NDArray[np.bool_]:
        """Pieces of forwards without gradients, as a mask."""
        return self.is_own & np.isin(self.part[self.compute], NO_GRADIENTS)


def place_rank_steps(steps: StepTable, line: Line, step_index: NDArray[np.int32]) -> RankSteps:
    """Place the steps of each rank on the line.

    Args:
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


@dataclass(frozen=True, slots=True)
class PlacedSpans:
    """Some spans on the number line, sorted, none inside another."""

    row: NDArray[np.int64]
    """Rows of the span table."""

    start: NDArray[np.int64]
    """Positions on the line."""

    end: NDArray[np.int64]

    @classmethod
    def outermost(cls, spans: SpanTable, line: Line, rows: NDArray[np.int64]) -> PlacedSpans:
        """Place those of these rows that are inside no other of them."""
        start = line.place(spans.rank[rows], spans.start_ns[rows])
        end = start + spans.duration_ns[rows]
        kept = keep_outermost(start, end, slack=OVERLAP_SLACK_NS)
        start, end = start[kept], end[kept]
        end[:-1] = np.minimum(end[:-1], start[1:])
        return cls(rows[kept], start, end)

    def inside(self, others: PlacedSpans) -> PlacedSpans:
        """Return those that are inside another placed span."""
        around = find_covering(others.start, others.end, self.start)
        inside = (around != NOT_FOUND) & (self.end <= np.append(others.end, 0)[around])
        return PlacedSpans(self.row[inside], self.start[inside], self.end[inside])


def cut_pieces(
    spans: SpanTable,
    line: Line,
    rank_steps: RankSteps,
    *,
    compute: PlacedSpans,
    waits: tuple[NDArray[np.int64], NDArray[np.int64]],
    launches: NDArray[np.int64],
) -> Pieces:
    """Cut the steps of each rank into pieces.

    Args:
        waits: Starts and ends on the line of the time that ranks waited.
        launches: Positions on the line of the launches of communications.

    Returns:
        The steps without the waits, cut at every border of a compute or host span and at every
        launch.
    """
    idle = is_idle_span(spans)
    interrupting = np.flatnonzero(is_one_of(spans.kind, INTERRUPTING_CODES) | idle)
    host = PlacedSpans.outermost(spans, line, interrupting)
    named = _named_layers(spans, line)
    wait_start, wait_end = merge_intervals(*waits)
    borders = sorted_unique(
        np.concatenate(
            (
                rank_steps.start, rank_steps.end, wait_start, wait_end, launches,
                compute.start, compute.end, host.start, host.end,
                *(border for layer in named for border in (layer.start, layer.end)),
            )
        )
    )  # fmt: skip
    first, last = borders[:-1], borders[1:]
    rank_step = find_covering(rank_steps.start, rank_steps.end, first)
    busy = (rank_step != NOT_FOUND) & (find_covering(wait_start, wait_end, first) == NOT_FOUND)
    first, last, rank_step = _add_anchors(
        first[busy], last[busy], wait_end=waits[1], launches=launches, rank_steps=rank_steps
    )
    empty = first == last
    in_compute = np.where(empty, NOT_FOUND, find_covering(compute.start, compute.end, first))
    in_host = np.where(empty, NOT_FOUND, find_covering(host.start, host.end, first))
    # A device continues to compute while its host does something else.
    on_device = (spans.flags[compute.row] & SpanFlag.DEVICE_END_KNOWN) != 0
    on_device = (in_compute != NOT_FOUND) & np.append(on_device, False)[in_compute]
    idles = np.append(idle[host.row], False)[in_host]
    in_host[on_device & ~idles] = NOT_FOUND
    span = np.where(in_compute == NOT_FOUND, GAP, np.append(compute.row, GAP)[in_compute])
    host_kind = np.where(in_host == NOT_FOUND, GAP, spans.kind[np.append(host.row, 0)[in_host]])
    named_row = _named_rows(spans, named, compute, first, in_compute, on_device=on_device)
    # A compiler also collects garbage.
    is_named = (in_host == NOT_FOUND) | compiles_at(spans, named_row)
    is_named &= (named_row != GAP) & ~empty
    host_kind[is_named] = HOST
    ordinal, num_ordinals = _number_pieces(span, host_kind)
    is_idle = idles & (host_kind == HOST) & ~is_named
    late = np.array([name == IdleName.LATE for name in spans.names], dtype=np.bool_)
    is_late = is_idle & late[spans.name[np.append(host.row, 0)[in_host]]]
    is_hidden = np.append(is_late[1:] & (span[1:] == span[:-1]), False) & (host_kind == GAP)
    return Pieces(
        start=first,
        end=last,
        rank_step=rank_step,
        compute=span,
        host_kind=host_kind.astype(np.int8),
        is_idle=is_idle,
        is_hidden=is_hidden & (span != GAP),
        named_row=np.where(is_named, named_row, GAP),
        ordinal=ordinal,
        num_ordinals=num_ordinals,
        part=_number_parts_by_span(spans, span),
    )


def is_idle_span(spans: SpanTable) -> NDArray[np.bool_]:
    """Return which spans are time inside compute in which nothing was computed. Shape (spans,)."""
    names = np.array([name in IDLE_NAMES for name in spans.names], dtype=np.bool_)
    is_idle: NDArray[np.bool_] = (spans.kind == HOST) & names[spans.name]
    return is_idle


def _named_layers(spans: SpanTable, line: Line) -> list[PlacedSpans]:
    """Return the host spans with a name of the job's or of the compiler, the outermost first."""
    layers = []
    is_own = ((spans.kind == HOST) & ~is_idle_span(spans)) | (
        (spans.kind == OTHER) & (spans.group_id == 0)
    )
    rows = np.flatnonzero(is_own & (spans.duration_ns > 0))
    while len(rows):
        layers.append(PlacedSpans.outermost(spans, line, rows))
        rows = np.setdiff1d(rows, layers[-1].row)
    return layers


def _named_rows(
    spans: SpanTable,
    layers: list[PlacedSpans],
    compute: PlacedSpans,
    first: NDArray[np.int64],
    in_compute: NDArray[np.int64],
    *,
    on_device: NDArray[np.bool_],
) -> NDArray[np.int64]:
    """Return the innermost named host span that took each piece, or `GAP`.

    Compute that such a span encloses is compute; what a span inside it takes is not, unless a
    device computes. A device has nothing to do while its host compiles the rest of what it does.
    """
    innermost = np.full(len(first), GAP, dtype=np.int64)
    begin, end = np.append(compute.start, 0)[in_compute], np.append(compute.end, 0)[in_compute]
    for layer in layers:
        at = find_covering(layer.start, layer.end, first)
        is_inside = (begin <= layer.start[at]) & (layer.end[at] <= end)
        is_inside &= ~on_device | compiles_at(spans, layer.row[at])
        taken = (at != NOT_FOUND) & ((in_compute == NOT_FOUND) | is_inside)
        innermost[taken] = layer.row[at[taken]]
    return innermost


def compiles_at(spans: SpanTable, row: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return which rows are host spans of the compiler. Shape as ``row``, False for `GAP`."""
    compiles = np.array([name in COMPILATION_NAMES for name in spans.names], dtype=np.bool_)
    is_named = compiles[spans.name[row]]
    is_compilation: NDArray[np.bool_] = is_named & (spans.kind[row] == HOST) & (row != GAP)
    return is_compilation


def _add_anchors(
    first: NDArray[np.int64],
    last: NDArray[np.int64],
    *,
    wait_end: NDArray[np.int64],
    launches: NDArray[np.int64],
    rank_steps: RankSteps,
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Add an empty piece at the end of a wait, as the operation that depends on it.

    If a piece begins there, that piece depends on the wait and needs no anchor, unless a
    communication was launched at the same moment: the launch must not depend on what preceded the
    wait.
    """
    ends = sorted_unique(wait_end)
    needs_anchor = ~is_in_sorted(ends, first) | is_in_sorted(ends, sorted_unique(launches))
    anchors = ends[needs_anchor]
    # A wait may end with the step itself, which is half-open.
    covering = find_covering(rank_steps.start, rank_steps.end, anchors - 1)
    anchors = anchors[covering != NOT_FOUND]
    first, last = np.concatenate((first, anchors)), np.concatenate((last, anchors))
    order = argsort_rows(first, last)
    first, last = first[order], last[order]
    empty = first == last
    return first, last, find_covering(rank_steps.start, rank_steps.end, first - empty)


def _number_pieces(
    span: NDArray[np.int64], host_kind: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Number the own pieces of each compute span; pieces that a host span took are not counted."""
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
    """Number the parts of each micro-batch's backward by their order.

    If forwards share micro-batch numbers too, the numbers do not identify micro-batches.

    Args:
        rows: Shape (rows,): compute spans, none inside another.

    Returns:
        Shape (rows,): `WHOLE`, or a number for each (count of parts, position): 1 and 2 for the
        parts of a backward split in two.
    """
    numbers = np.full(len(rows), WHOLE, dtype=np.int64)
    known = spans.microbatch[rows] != NONE
    backward = np.flatnonzero(known & (spans.kind[rows] == BACKWARD))
    work, num = _number_microbatches(spans, rows[backward])
    if num == len(backward):
        return numbers
    forward = rows[known & (spans.kind[rows] == FORWARD)]
    if _number_microbatches(spans, forward)[1] != len(forward):
        return numbers
    size = np.bincount(work, minlength=num)[work]
    order = argsort_rows(work, spans.start_ns[rows[backward]])
    position = np.empty(len(backward), dtype=np.int64)
    position[order] = cumcount(work[order])
    number = size * (size - 1) // 2 + position
    numbers[backward] = np.where(size > MAX_PARTS, WHOLE, number)
    return numbers


def _number_microbatches(
    spans: SpanTable, rows: NDArray[np.int64]
) -> tuple[NDArray[np.int64], int]:
    """Number the (epoch, step, rank, chunk, micro-batch) of each row; return also their count."""
    if not len(rows):
        return rows, 0
    columns = (spans.epoch, spans.step, spans.rank, spans.chunk, spans.microbatch)
    return factorize(*(column[rows] for column in columns))


def is_deferred_part(part: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return which parts are not the first of their micro-batch. Shape as given."""
    first = [size * (size - 1) // 2 for size in range(1, MAX_PARTS + 1)]
    return ~np.isin(part, (*first, *NO_GRADIENTS))


def _number_parts_by_span(spans: SpanTable, compute: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return `number_parts` of the spans in ``compute``, `WHOLE` for all others. Shape (spans,)."""
    part = np.full(len(spans), WHOLE, dtype=np.int64)
    is_compute = np.zeros(len(spans), dtype=np.bool_)
    is_compute[compute[compute != NOT_FOUND]] = True
    rows = np.flatnonzero(is_compute)
    part[rows] = number_parts(spans, rows)
    # A forward without gradients has no micro-batch. So has every forward of a job that numbers
    # none. An evaluation is in at most half of the steps.
    forward = rows[spans.kind[rows] == FORWARD]
    free = forward[spans.microbatch[forward] == NONE]
    if len(free) < len(forward):
        num_steps = len(sorted_unique(spans.step[forward]))
        is_rare = 2 * len(sorted_unique(spans.step[free])) <= num_steps
        part[free] = EVALUATION if is_rare else GENERATION
    return part
