"""The dependency graph of a traced run: pieces, communications and host gaps, and their ideals.

A piece follows the one before it on its rank; a communication begins when the
piece that launched it has ended (and the one before it on its stream), and its
members leave together; the piece after a `wait` record follows the communication
waited for.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from rankscope.tracer.span import KIND_CODES, KINDS, SpanFlag, SpanKind

from ...arrays.group_stats import group_medians
from ...arrays.grouping import NO_GROUP, factorize, is_one_of, sorted_unique
from ...arrays.intervals import NOT_FOUND
from ...arrays.sorting import argsort_rows, find_positions, is_in_sorted
from ...replay.model import ReplayModel
from ...replay.operations import Operations
from ..waits import is_p2p
from .pieces import GAP, MAX_PARTS, Pieces, RankSteps, is_own_compute

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ...trace.tables import RunInfo
    from .matched_waits import MatchedWaits

HOST = KIND_CODES[SpanKind.HOST]

PAUSE_KINDS = (KIND_CODES[SpanKind.GC], KIND_CODES[SpanKind.CHECKPOINT])
"""Host kinds that an ideal step has none of; all other host time has its median."""


def build_model(
    run: RunInfo,
    joined: MatchedWaits,
    pieces: Pieces,
    *,
    numbers: tuple[int, ...],
    portion: NDArray[np.int64],
) -> tuple[ReplayModel, NDArray[np.int64]]:
    """Build the operations of a traced run, with their dependencies and ideals.

    Args:
        run: Positions of the ranks.
        joined: Communications and waits.
        pieces: What the ranks did between their waits.
        numbers: Steps that take part, ascending.
        portion: Shape (spans,): which portion of its micro-batch a compute span is.

    Returns:
        The model, and the operation that each piece, and after them each
        communication of ``joined``, became.
    """
    spans, windows, comm = joined.spans, joined.windows, joined.comm
    num_pieces = len(pieces.start)

    window = np.concatenate((pieces.window, joined.comm_window))
    rank = windows.rank[window]
    coords = {info.rank: info.coords for epoch in run.epochs for info in epoch.ranks}
    position = np.array(
        [[getattr(coords[r], axis) for r in joined.line.ranks.tolist()] for axis in ("dp", "pp")],
        dtype=np.int32,
    )[:, find_positions(rank, joined.line.ranks)]
    dp, stage = position
    duration = np.concatenate((pieces.end - pieces.start, _transfer_durations(joined))).astype(
        np.float64
    )
    gap = np.zeros(len(window))
    gap[:num_pieces] = _late_start_gaps(pieces, windows)
    kind = _operation_kinds(joined, pieces)

    def labels_and_ideals() -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
        labels, work = _label_operations(joined, pieces, stage, portion)
        ideal = ideal_durations(
            joined, pieces, kind=kind, label=labels, portion=portion, duration_ns=duration
        )
        return labels, work, ideal

    # numpy lets other threads go on while it works on long arrays.
    with ThreadPoolExecutor(1) as aside:
        valued = aside.submit(labels_and_ideals)
        src, dst = _all_edges(joined, pieces)
        is_comm = np.arange(len(window)) >= num_pieces
        step = windows.step_index[window]
        order = argsort_rows(step, dp, rank, is_comm, np.concatenate((pieces.start, joined.launch)))
        number = np.empty_like(order)
        number[order] = np.arange(len(order))
        labels, work, ideal = valued.result()
    replica = dp[order]
    group = np.concatenate(
        (np.full(num_pieces, NO_GROUP, dtype=np.int64), _group_instances(joined))
    )
    operations = Operations(
        steps=numbers,
        step=step[order],
        replica=replica,
        label=labels[order],
        group=group[order],
        duration_ns=duration[order],
        gap_ns=gap[order],
        start_ns=np.concatenate((joined.line.time_at(pieces.start), spans.start_ns[comm]))[order],
        end_ns=np.concatenate(
            (joined.line.time_at(pieces.end), (spans.start_ns + spans.duration_ns)[comm])
        )[order],
        closes_step=np.ones(len(order), dtype=np.bool_),
        src=number[src],
        dst=number[dst],
    )
    model = ReplayModel(
        operations=operations,
        ideal_ns=ideal[order],
        ideal_gap_ns=ideal_gaps(pieces, gap)[order],
        kind=kind[order],
        kinds=tuple(kind.value for kind in KINDS),
        rank=rank[order],
        dp=replica,
        stage=stage[order],
        on_device=(is_comm | is_own_compute(pieces, len(window)))[order],
        span=np.append(pieces.compute, np.full(len(comm), GAP))[order],
        work=work[order],
    )
    return model, number


def _transfer_durations(joined: MatchedWaits) -> NDArray[np.int64]:
    """Return what each communication took once all members were there.

    Where a member's end is only a bound it ended before, the instance's
    shortest transfer stands for its own: nobody waited for it there. Where all
    are, nobody waited at all; it is taken to have been as long as alike ones
    whose end is known, or as the tightest bound, if that is shorter.
    """
    spans, comm = joined.spans, joined.comm
    wait = np.where(joined.waits_for_nobody, 0, joined.split.wait_ns[comm])
    transfer: NDArray[np.int64] = spans.duration_ns[comm] - wait
    bound = (spans.flags[comm] & SpanFlag.END_BOUND) != 0
    if not bound.any():
        return transfer
    instance, num = factorize(joined.split.instance[comm])
    shortest = np.full(num, np.iinfo(np.int64).max)
    np.minimum.at(shortest, instance, transfer)
    known = np.zeros(num, dtype=np.bool_)
    known[instance[~bound]] = True
    transfer = np.where(bound, shortest[instance], transfer)
    alike, num_alike = factorize(spans.kind[comm], spans.name[comm], spans.num_bytes[comm])
    usual, num_known = group_medians(transfer[~bound], alike[~bound], num_alike)
    tightest = np.full(num_alike, np.inf)
    np.minimum.at(tightest, alike, transfer)
    usual = np.rint(np.where(num_known > 0, usual, tightest)).astype(np.int64)
    return np.where(known[instance], transfer, np.minimum(transfer, usual[alike]))


def _all_edges(joined: MatchedWaits, pieces: Pieces) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return (src, dst) with pieces numbered first and communications after them."""
    num_pieces = len(pieces.start)
    parts = (
        _rank_edges(joined, pieces),
        _buffered_edges(joined, num_pieces),
        _stream_edges(joined, num_pieces),
    )
    src, dst = (np.concatenate(side) for side in zip(*parts, strict=True))
    return src, dst


def _rank_edges(
    joined: MatchedWaits, pieces: Pieces
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return what pieces wait for, and what communications do on the rank that launched them."""
    num = len(pieces.start)
    follows = pieces.window[1:] == pieces.window[:-1]
    index = np.arange(num)
    src, dst = [index[:-1][follows]], [index[1:][follows]]

    before = _launching_pieces(joined, pieces)
    known = (before >= 0) & (pieces.window[before] == joined.comm_window) if num else before >= 0
    src.append(before[known])
    dst.append(num + np.flatnonzero(known))

    wait_end = joined.blocked()[1]
    after = np.searchsorted(pieces.start, wait_end, side="left")
    comm = joined.wait_comm
    known = (comm != NOT_FOUND) & (after < num)
    known[known] = pieces.window[after[known]] == joined.comm_window[comm[known]]
    src.append(num + comm[known])
    dst.append(after[known])
    return np.concatenate(src), np.concatenate(dst)


def _launching_pieces(joined: MatchedWaits, pieces: Pieces) -> NDArray[np.int64]:
    """Return the piece that had ended when each communication was launched, -1 where none had.

    Where a wait of no length stands at the same instant, the launch came first.
    """
    launch = joined.launch
    before: NDArray[np.int64] = np.searchsorted(pieces.end, launch, side="right") - 1
    begin, end = joined.blocked()
    passing = pieces.start == pieces.end
    passing[passing] = ~is_in_sorted(pieces.start[passing], sorted_unique(end[end > begin]))
    at_once = (before >= 0) & passing[before] & (pieces.start[before] == launch)
    earlier: NDArray[np.int64] = before - at_once
    return earlier


def _operation_kinds(joined: MatchedWaits, pieces: Pieces) -> NDArray[np.int16]:
    spans = joined.spans
    of_piece = np.where(
        pieces.host_kind != GAP,
        pieces.host_kind,
        np.where(pieces.compute != GAP, spans.kind[np.maximum(pieces.compute, 0)], HOST),
    )
    return np.concatenate((of_piece, spans.kind[joined.comm])).astype(np.int16)


def _late_start_gaps(pieces: Pieces, windows: RankSteps) -> NDArray[np.float64]:
    """Return how long after its step's first rank each rank began, at its first piece."""
    num_steps = int(windows.step_index.max(initial=-1)) + 1
    earliest = np.full(num_steps, np.iinfo(np.int64).max)
    np.minimum.at(earliest, windows.step_index, windows.start_ns)
    late = windows.start_ns - earliest[windows.step_index]
    first = np.diff(pieces.window, prepend=NOT_FOUND) != 0
    return np.where(first, late[pieces.window], 0).astype(np.float64)


def _group_instances(joined: MatchedWaits) -> NDArray[np.int64]:
    """Return each communication's group instance, `NO_GROUP` where it waits for nobody."""
    group = joined.split.instance[joined.comm].copy()
    group[joined.waits_for_nobody] = NO_GROUP
    return group


def _buffered_edges(
    joined: MatchedWaits, num_pieces: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Let the receive of a buffered send wait for it."""
    buffered = joined.buffered
    instance = joined.split.instance[joined.comm]
    sends = np.flatnonzero(buffered)
    receives = np.flatnonzero(np.isin(instance, instance[sends]) & ~buffered)
    sends = sends[np.argsort(instance[sends])]
    receives = receives[np.argsort(instance[receives])]
    return num_pieces + sends, num_pieces + receives


def _stream_edges(
    joined: MatchedWaits, num_pieces: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Let an asynchronous collective follow the one before it on its device stream.

    Only what was measured on a device has a stream that keeps an order; where the
    record shows two at once, the track is no such stream.
    """
    spans = joined.spans
    flags = spans.flags[joined.comm]
    on_stream = (flags & SpanFlag.DEVICE_BEGIN_KNOWN != 0) & ~is_p2p(spans)[joined.comm]
    rows = np.flatnonzero(on_stream)
    if not (flags[rows] & SpanFlag.ASYNC).any():
        return rows[:0], rows[:0]
    row = joined.comm[rows]
    stream, _ = factorize(joined.comm_window[rows], spans.track[row])
    order = argsort_rows(stream, spans.start_ns[row])
    before, after = order[:-1], order[1:]
    follows = (stream[before] == stream[after]) & (flags[rows[after]] & SpanFlag.ASYNC != 0)
    end_ns = (spans.start_ns + spans.duration_ns)[row]
    follows &= end_ns[before] <= spans.start_ns[row[after]]
    return num_pieces + rows[before[follows]], num_pieces + rows[after[follows]]


def _label_operations(
    joined: MatchedWaits, pieces: Pieces, stage: NDArray[np.int32], portion: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Number what each operation is: operations of equal label have one ideal.

    Compute pieces by (kind, portion, chunk, stage, number of pieces, ordinal), gaps
    by what stands before and after them, communications by (kind, name, bytes).

    Returns:
        The labels, and those of whole compute spans: the same, however often they are cut.
    """
    spans, comm = joined.spans, joined.comm
    span = np.maximum(pieces.compute, 0)
    is_gap = (pieces.compute == GAP) | (pieces.host_kind != GAP)
    kind = np.where(pieces.compute == GAP, GAP, spans.kind[span]).astype(np.int64)
    before = np.append(GAP, kind[:-1])
    after = np.append(kind[1:], GAP)
    of_pieces = (
        np.where(is_gap, 1, 0),
        np.where(is_gap, pieces.host_kind, kind * MAX_PARTS**2 + portion[span]),
        np.where(is_gap, before, np.where(pieces.compute == GAP, 0, spans.chunk[span])),
        np.where(is_gap, after, pieces.num_ordinals),
        np.where(is_gap, 0, pieces.ordinal),
        stage[: len(span)],
    )
    piece_label, num_labels = factorize(*of_pieces)
    comm_label, _ = factorize(spans.kind[comm], spans.name[comm], spans.num_bytes[comm])
    labels = np.concatenate((piece_label, num_labels + comm_label))
    work, _ = factorize(*of_pieces[:3], stage[: len(span)])
    return labels, np.append(work, np.full(len(comm), GAP))


def ideal_durations(
    joined: MatchedWaits,
    pieces: Pieces,
    *,
    kind: NDArray[np.int16],
    label: NDArray[np.int64],
    portion: NDArray[np.int64],
    duration_ns: NDArray[np.float64],
) -> NDArray[np.float64]:
    """Return what each operation would take in a straggler-free step.

    Communications and host gaps take the median of their label, pauses take
    nothing. A compute span takes the mean self time of its (kind, chunk, portion)
    over all ranks and stages, shared among its pieces as spans of its stage share
    theirs on average.

    Args:
        joined: The run.
        pieces: Its pieces, the first rows of the arrays that follow.
        kind: Shape (ops,): codes into `tracer.span.KINDS`.
        label: Shape (ops,): operations of equal label have one ideal.
        portion: Shape (spans,): which portion of its micro-batch a compute span is.
        duration_ns: Shape (ops,): as recorded.

    Source:
        design.md section 5; the means and medians are arXiv 2505.05713's.
    """
    ideal = _median_by(label, duration_ns)
    ideal[is_one_of(kind, PAUSE_KINDS)] = 0.0
    own = np.flatnonzero(is_own_compute(pieces, len(pieces.start)))
    if not len(own):
        return ideal
    span = pieces.compute[own]
    chunk = joined.spans.chunk[span].astype(np.int64)
    of_kind = kind[own].astype(np.int64) * MAX_PARTS**2 + portion[span]
    of_kind = of_kind * (int(chunk.max()) + 2) + chunk + 1
    typical = _mean_by(label[own], duration_ns[own])
    span_typical = np.bincount(span, weights=typical)
    share = np.divide(typical, span_typical[span], out=np.zeros(len(own)), where=typical > 0)
    ideal[own] = share * _mean_span(of_kind, span, duration_ns[own])
    return ideal


def ideal_gaps(pieces: Pieces, gap_ns: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return how late a rank would begin a step: the median over all ranks and steps.

    Args:
        pieces: The first rows of ``gap_ns``.
        gap_ns: Shape (ops,): 0 but at each rank's first piece of a step.
    """
    ideal = np.zeros_like(gap_ns)
    first = np.flatnonzero(np.diff(pieces.window, prepend=NOT_FOUND))
    if len(first):
        ideal[first] = np.median(gap_ns[first])
    return ideal


def _mean_span(
    of_kind: NDArray[np.int64], span: NDArray[np.int64], duration: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return, for each piece, the mean self time of the spans of its kind."""
    index, num = factorize(of_kind)
    a_piece = np.full(int(span.max()) + 1, NOT_FOUND)
    a_piece[span] = np.arange(len(span))
    spans_of_kind = np.bincount(index[a_piece[a_piece != NOT_FOUND]], minlength=num)
    mean = np.bincount(index, weights=duration) / spans_of_kind
    of_piece: NDArray[np.float64] = mean[index]
    return of_piece


def _mean_by(label: NDArray[np.int64], value: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the mean of each row's label."""
    index, _ = factorize(label)
    mean: NDArray[np.float64] = (np.bincount(index, weights=value) / np.bincount(index))[index]
    return mean


def _median_by(label: NDArray[np.int64], value: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the median of each row's label."""
    index, num = factorize(label)
    return group_medians(value, index, num)[0][index]
