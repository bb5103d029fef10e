"""Dependency graph of a traced run: pieces, communications and host gaps, with their ideals.

A piece follows the one before it on its rank, and the communication that it waited for. A
communication begins when the piece that launched it and the one before it on its stream have
ended, and its members leave together.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from rankscope.tracer.span import KIND_CODES, KINDS, SpanFlag, SpanKind

from ...arrays.group_stats import group_medians, means_by_key, medians_by_key, row_medians
from ...arrays.grouping import NO_GROUP, factorize, is_one_of, sorted_unique
from ...arrays.intervals import NOT_FOUND
from ...arrays.sorting import argsort_rows, find_positions, is_in_sorted, stable_argsort
from ...replay.model import EVALUATION_KIND, ReplayModel
from ...replay.operations import Operations
from ...statistics.baseline import (
    equal_share_ratio,
    equal_work_ratio,
    faster_steps_baseline,
)
from ...statistics.noise import median_change_deviation, required_deviations
from ...statistics.thresholds import THRESHOLDS
from ..waits import is_p2p
from .pieces import (
    BACKWARD,
    EVALUATION,
    FORWARD,
    GAP,
    HOST,
    MAX_PARTS,
    Pieces,
    RankSteps,
    compiles_at,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ...trace.tables import RunInfo
    from .matched_waits import MatchedWaits

PAUSE_KINDS = (KIND_CODES[SpanKind.GC], KIND_CODES[SpanKind.CHECKPOINT])
"""Host kinds whose ideal is 0, as is that of compilations. The ideal of all other host time is its
median."""


def build_model(
    run: RunInfo,
    matched: MatchedWaits,
    pieces: Pieces,
    *,
    numbers: tuple[int, ...],
    overlap_ns: NDArray[np.int64],
    truncated: NDArray[np.bool_],
) -> tuple[ReplayModel, NDArray[np.int64]]:
    """Build the operations of a traced run, with their dependencies and ideals.

    Args:
        numbers: Steps that are replayed, ascending.
        overlap_ns: Shape (steps,): time that each of them shares with the step before.
        truncated: Shape (communications,): `find_truncated`.

    Returns:
        The model, and the operation that each piece, then each communication of ``matched``,
        became.
    """
    spans, rank_steps, comm = matched.spans, matched.rank_steps, matched.comm
    num_pieces = len(pieces.start)

    rank_step = np.concatenate((pieces.rank_step, matched.comm_rank_step))
    coords = run.coords
    position = np.array(
        [[getattr(coords[r], axis) for r in matched.line.ranks.tolist()] for axis in ("dp", "pp")],
        dtype=np.int32,
    )[:, find_positions(rank_steps.rank, matched.line.ranks)]
    stage = position[1][rank_step]
    duration = np.concatenate((pieces.end - pieces.start, _transfer_durations(matched))).astype(
        np.float64
    )
    piece_kind = np.where(
        pieces.host_kind != GAP,
        pieces.host_kind,
        np.where(pieces.compute != GAP, spans.kind[np.maximum(pieces.compute, 0)], HOST),
    )
    kind = np.concatenate((piece_kind, spans.kind[comm])).astype(np.int16)

    def labels_and_ideals() -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
        labels, work = _label_operations(matched, pieces, stage)
        ideal = ideal_durations(matched, pieces, kind=kind, label=labels, duration_ns=duration)
        step = rank_steps.step_index[matched.comm_rank_step]
        ideal[num_pieces:] = ideal_transfers(
            duration[num_pieces:], labels[num_pieces:], step, truncated=truncated
        )
        return labels, work, ideal

    # numpy releases the interpreter's lock while it works on long arrays.
    with ThreadPoolExecutor(2) as pool:
        labelled = pool.submit(labels_and_ideals)
        edges = (
            _rank_edges(matched, pieces),
            _buffered_edges(matched, num_pieces),
            _stream_edges(matched, num_pieces),
        )
        src, dst = (np.concatenate(side) for side in zip(*edges, strict=True))
        is_comm = np.arange(len(rank_step)) >= num_pieces
        order = _order_operations(matched, pieces, position[0])
        number = np.empty_like(order)
        number[order] = np.arange(len(order))
        begins = np.append(pieces.is_first, is_comm[num_pieces:])
        begins[dst] = False
        delay, ideal_delay = _delays(pieces, rank_steps, overlap_ns)
        gap = np.where(begins, delay[rank_step], 0.0)
        ideal_gap = np.where(begins, ideal_delay[rank_step], 0.0)
        labels, work, ideal = labelled.result()
        on_device = np.append(pieces.is_own, is_comm[num_pieces:])
        planned = _share_equally(matched, pieces, run=run, ideal_ns=ideal)
        kind[planned], on_device[planned] = len(KINDS), False
        own = rank_step[order]
        columns = {
            "label": labels,
            "group": np.append(
                np.full(num_pieces, NO_GROUP),
                np.where(matched.has_no_wait, NO_GROUP, matched.split.instance[comm]),
            ),
            "duration_ns": duration,
            "gap_ns": gap,
            "start_ns": np.append(matched.line.time_at(pieces.start), spans.start_ns[comm]),
            "end_ns": np.append(
                matched.line.time_at(pieces.end), spans.start_ns[comm] + spans.duration_ns[comm]
            ),
            "ideal_ns": ideal,
            "ideal_gap_ns": ideal_gap,
            "kind": kind,
            "on_device": on_device,
            "idle": np.append(find_idle(matched, pieces), np.zeros(len(comm), dtype=np.bool_)),
            "span": np.append(pieces.compute, np.full(len(comm), GAP)),
            "work": work,
        }
        # Two at once: each is a pass of random reads.
        taken = zip(columns, pool.map(lambda name: columns[name].take(order), columns), strict=True)
        of_model = dict(taken)
    of_operations = {
        name: of_model.pop(name)
        for name in ("label", "group", "duration_ns", "gap_ns", "start_ns", "end_ns")
    }
    replica = position[0][own]
    operations = Operations(
        steps=numbers,
        step=rank_steps.step_index[own],
        replica=replica,
        closes_step=np.ones(len(order), dtype=np.bool_),
        src=number[src],
        dst=number[dst],
        **of_operations,
    )
    model = ReplayModel(
        operations=operations,
        overlap_ns=overlap_ns,
        kinds=(*(kind.value for kind in KINDS), *((EVALUATION_KIND,) if len(planned) else ())),
        rank=rank_steps.rank[own],
        dp=replica,
        stage=position[1][own],
        **of_model,
    )
    return model, number


def _order_operations(
    matched: MatchedWaits, pieces: Pieces, dp: NDArray[np.int32]
) -> NDArray[np.int64]:
    """Order the operations by (step, dp, rank), pieces before communications, then by time."""
    rank_steps = matched.rank_steps
    place = np.empty(len(rank_steps.rank), dtype=np.int64)
    place[argsort_rows(rank_steps.step_index, dp, rank_steps.rank)] = np.arange(len(place))
    by_launch = stable_argsort(matched.launch)
    key = np.concatenate(
        (2 * place[pieces.rank_step], 2 * place[matched.comm_rank_step[by_launch]] + 1)
    )
    order = stable_argsort(key)
    num = len(pieces.start)
    return np.append(np.arange(num), num + by_launch)[order]


def _transfer_durations(matched: MatchedWaits) -> NDArray[np.int64]:
    """Return the transfer of each communication.

    If a member's end is only an upper bound, because its rank did not wait for it, its transfer is
    the shortest one of the instance. If all ends are bounds, it is the median of alike instances
    with known ends, or the tightest bound of alike ones if none is known, and at most the
    instance's own tightest bound.
    """
    spans, comm = matched.spans, matched.comm
    wait = np.where(matched.has_no_wait, 0, matched.split.wait_ns[comm])
    transfer: NDArray[np.int64] = spans.duration_ns[comm] - wait
    bound = (spans.flags[comm] & SpanFlag.END_BOUND) != 0
    if not bound.any():
        return transfer
    instance, num = factorize(matched.split.instance[comm])
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


def _rank_edges(
    matched: MatchedWaits, pieces: Pieces
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the edges to pieces, and those from pieces to the communications they launched."""
    num = len(pieces.start)
    follows = pieces.rank_step[1:] == pieces.rank_step[:-1]
    index = np.arange(num)
    src, dst = [index[:-1][follows]], [index[1:][follows]]

    # A communication follows the last piece that had ended when it was launched. If an empty wait
    # is at the same moment, the launch came first.
    before = np.searchsorted(pieces.end, matched.launch, side="right") - 1
    wait_ends = matched.wait_end[matched.wait_end > matched.wait_start]
    is_empty_wait = pieces.start == pieces.end
    is_empty_wait[is_empty_wait] = ~is_in_sorted(
        pieces.start[is_empty_wait], sorted_unique(wait_ends)
    )
    before -= (before >= 0) & is_empty_wait[before] & (pieces.start[before] == matched.launch)
    known = (
        (before >= 0) & (pieces.rank_step[before] == matched.comm_rank_step) if num else before >= 0
    )
    src.append(before[known])
    dst.append(num + np.flatnonzero(known))

    after = np.searchsorted(pieces.start, matched.wait_end, side="left")
    comm = matched.wait_comm
    known = (comm != NOT_FOUND) & (after < num)
    known[known] = pieces.rank_step[after[known]] == matched.comm_rank_step[comm[known]]
    src.append(num + comm[known])
    dst.append(after[known])
    return np.concatenate(src), np.concatenate(dst)


def _delays(
    pieces: Pieces, rank_steps: RankSteps, overlap_ns: NDArray[np.int64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return how long after the first rank each one begins its steps, as recorded and ideal.

    The ideal is the median over all ranks and steps. A rank that begins while the step before still
    runs elsewhere is not late, so only what is beyond that is compared.
    """
    step = rank_steps.step_index
    earliest = np.full(len(overlap_ns), np.iinfo(np.int64).max)
    np.minimum.at(earliest, step, rank_steps.start_ns)
    delay = (rank_steps.start_ns - earliest[step]).astype(np.float64)
    beyond = np.maximum(delay - overlap_ns[step], 0.0)
    known = pieces.rank_step[pieces.is_first]
    usual = float(np.median(beyond[known])) if len(known) else 0.0
    return delay, delay - beyond + usual


def _buffered_edges(
    matched: MatchedWaits, num_pieces: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the edges from buffered sends to their receives."""
    buffered = matched.buffered & ~matched.in_several_steps
    instance = matched.split.instance[matched.comm]
    sends = np.flatnonzero(buffered)
    receives = np.flatnonzero(np.isin(instance, instance[sends]) & ~buffered)
    sends = sends[np.argsort(instance[sends])]
    receives = receives[np.argsort(instance[receives])]
    return num_pieces + sends, num_pieces + receives


def _stream_edges(
    matched: MatchedWaits, num_pieces: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the edges from collectives to the asynchronous ones after them on a device stream.

    Only collectives timed on a device have a stream that keeps an order. If two overlap in the
    record, their track is no such stream.
    """
    spans = matched.spans
    flags = spans.flags[matched.comm]
    on_stream = (flags & SpanFlag.DEVICE_BEGIN_KNOWN != 0) & ~is_p2p(spans)[matched.comm]
    rows = np.flatnonzero(on_stream)
    if not (flags[rows] & SpanFlag.ASYNC).any():
        return rows[:0], rows[:0]
    row = matched.comm[rows]
    stream, _ = factorize(matched.comm_rank_step[rows], spans.track[row])
    order = argsort_rows(stream, spans.start_ns[row])
    before, after = order[:-1], order[1:]
    follows = (stream[before] == stream[after]) & (flags[rows[after]] & SpanFlag.ASYNC != 0)
    end_ns = (spans.start_ns + spans.duration_ns)[row]
    follows &= end_ns[before] <= spans.start_ns[row[after]]
    return num_pieces + rows[before[follows]], num_pieces + rows[after[follows]]


def _label_operations(
    matched: MatchedWaits, pieces: Pieces, stage: NDArray[np.int32]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Label the operations; operations of equal label have one ideal.

    The label of a compute piece is (kind, part, chunk, stage, number of pieces, ordinal), that of
    a gap the kinds before and after it and the name of its host span, that of a communication
    (kind, name, bytes).

    Returns:
        The labels, and labels of compute that do not depend on how often a span is cut.
    """
    spans, comm = matched.spans, matched.comm
    span = np.maximum(pieces.compute, 0)
    is_gap = (pieces.compute == GAP) | (pieces.host_kind != GAP)
    kind = np.where(pieces.compute == GAP, GAP, spans.kind[span]).astype(np.int64)
    before = np.append(GAP, kind[:-1])
    after = np.append(kind[1:], GAP)
    piece_columns = (
        np.where(is_gap, 1, 0),
        np.where(is_gap, pieces.host_kind, kind * MAX_PARTS**2 + pieces.part[span]),
        np.where(is_gap, before, np.where(pieces.compute == GAP, 0, spans.chunk[span])),
        np.where(is_gap, after, pieces.num_ordinals),
        np.where(is_gap, np.append(spans.name, GAP)[pieces.named_row], pieces.ordinal),
        stage[: len(span)],
    )
    piece_label, num_labels = factorize(*piece_columns)
    comm_label, _ = factorize(spans.kind[comm], spans.name[comm], spans.num_bytes[comm])
    labels = np.concatenate((piece_label, num_labels + comm_label))
    work, _ = factorize(*piece_columns[:3], stage[: len(span)])
    return labels, np.append(work, np.full(len(comm), GAP))


def ideal_durations(
    matched: MatchedWaits,
    pieces: Pieces,
    *,
    kind: NDArray[np.int16],
    label: NDArray[np.int64],
    duration_ns: NDArray[np.float64],
) -> NDArray[np.float64]:
    """Return the duration of each operation in a straggler-free step.

    That is the lower median of its label for a host gap, 0 for a pause, for the idle time in a
    compute span the lower median of such spans, divided as it is in this one, and for a compute
    span the mean self time of its (kind, chunk, part) over all ranks and stages. The latter is
    divided among the span's pieces as the spans of its stage divide theirs on average.
    Communications have theirs from `ideal_transfers`.

    Compute that ended before its host launched more has at least its own duration: shortening it
    makes nothing earlier.

    Args:
        kind: Shape (ops,): codes into `tracer.span.KINDS`.
        label: Shape (ops,): operations of equal label have one ideal.
        duration_ns: Shape (ops,): as recorded.

    Source:
        The means and medians are arXiv 2505.05713's; why the lower one: `lower_medians`.
    """
    ideal = medians_by_key(duration_ns, label, is_lower=True)
    ideal[is_one_of(kind, PAUSE_KINDS)] = 0.0
    ideal[: len(pieces.start)][compiles_at(matched.spans, pieces.named_row)] = 0.0
    own = np.flatnonzero(pieces.is_own)
    if not len(own):
        return ideal
    _share_idle(matched, pieces, ideal_ns=ideal, duration_ns=duration_ns)
    span = pieces.compute[own]
    chunk = matched.spans.chunk[span].astype(np.int64)
    work = kind[own].astype(np.int64) * MAX_PARTS**2 + pieces.part[span]
    work = work * (int(chunk.max()) + 2) + chunk + 1
    mean = means_by_key(duration_ns[own], label[own])
    span_mean = np.bincount(span, weights=mean)
    share = np.divide(mean, span_mean[span], out=np.zeros(len(own)), where=mean > 0)
    # Each piece's share of the mean self time of the spans with the same work.
    index, num = factorize(work)
    piece_of_span = np.full(int(span.max()) + 1, NOT_FOUND)
    piece_of_span[span] = np.arange(len(span))
    num_spans = np.bincount(index[piece_of_span[piece_of_span != NOT_FOUND]], minlength=num)
    ideal[own] = share * (np.bincount(index, weights=duration_ns[own]) / num_spans)[index]
    hidden = np.flatnonzero(pieces.is_hidden)
    ideal[hidden] = np.maximum(ideal[hidden], duration_ns[hidden])
    return ideal


def _share_idle(
    matched: MatchedWaits,
    pieces: Pieces,
    *,
    ideal_ns: NDArray[np.float64],
    duration_ns: NDArray[np.float64],
) -> None:
    """Make the ideal of the idle time in each compute span the median of spans of its work.

    The span's own pieces have no ideals: how many there are depends on its kernels' times.
    """
    idle = np.flatnonzero(pieces.is_idle)
    if not len(idle):
        return
    spans = matched.spans
    row = sorted_unique(pieces.compute[pieces.compute != GAP])
    at = np.searchsorted(row, pieces.compute[idle])
    whole_ns = np.bincount(at, weights=duration_ns[idle], minlength=len(row))
    work, _ = factorize(spans.kind[row], spans.chunk[row], pieces.part[row])
    usual_ns = medians_by_key(whole_ns, work, is_lower=True)
    ideal_ns[idle] = duration_ns[idle] * (usual_ns / np.maximum(whole_ns, 1.0))[at]


def find_idle(matched: MatchedWaits, pieces: Pieces) -> NDArray[np.bool_]:
    """Return which pieces are time in which a device computed nothing. Shape (pieces,)."""
    spans = matched.spans
    on_device = (spans.flags[matched.compute.row] & SpanFlag.DEVICE_END_KNOWN) != 0
    ranks = sorted_unique(spans.rank[matched.compute.row[on_device]])
    is_idle: NDArray[np.bool_] = np.isin(matched.rank_steps.rank[pieces.rank_step], ranks)
    return is_idle & ~pieces.is_own


def _share_equally(
    matched: MatchedWaits,
    pieces: Pieces,
    *,
    run: RunInfo,
    ideal_ns: NDArray[np.float64],
) -> NDArray[np.int64]:
    """Make the ideal that of equal numbers of micro-batches, and of forwards without gradients.

    The ranks of a stage may run unequal numbers of them. Evaluations are planned: their ideal is 0.

    Returns:
        The planned pieces.
    """
    spans, steps, coords = matched.spans, matched.rank_steps, run.coords
    is_call = pieces.is_call
    calls = np.flatnonzero(is_call)
    stage_of_rank = {rank: coords[rank].pp for rank in matched.line.ranks.tolist()}

    def places(rows: NDArray[np.int64]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        at = pieces.rank_step[rows]
        return steps.rank[at], steps.step_index[at]

    rank, step = places(calls)
    ideal_ns[calls] *= equal_share_ratio(
        ideal_ns[calls], rank=rank, step=step, stage_of_rank=stage_of_rank
    )
    planned: NDArray[np.int64] = calls[pieces.part[pieces.compute[calls]] == EVALUATION]
    ideal_ns[planned] = 0.0
    own = pieces.is_own & ~is_call
    own[own] = is_one_of(spans.kind[pieces.compute[own]], (FORWARD, BACKWARD))
    rows = np.flatnonzero(own)
    forward = rows[spans.kind[pieces.compute[rows]] == FORWARD]
    forward = forward[np.unique(pieces.compute[forward], return_index=True)[1]]
    trained = set(steps.rank[pieces.rank_step[forward]].tolist())
    ideal_ns[rows] *= equal_work_ratio(
        np.ones(len(forward)),
        places(forward),
        places(rows),
        stage_of_rank={rank: stage for rank, stage in stage_of_rank.items() if rank in trained},
    )
    return planned


def ideal_transfers(
    duration_ns: NDArray[np.float64],
    label: NDArray[np.int64],
    step: NDArray[np.int32],
    *,
    truncated: NDArray[np.bool_],
) -> NDArray[np.float64]:
    """Return the transfer of each communication in a straggler-free step.

    That is the median of its label; or, if its steps have two levels, the faster one: of a network
    that is slow in more than half of the steps the median is the fault itself. The levels are two
    if they differ by a finding's excess, and significantly against the changes between steps.

    Of a truncated transfer only the end was seen: it gives no ideal, and its own is at most what
    it took.

    Args:
        duration_ns: Shape (communications,): transfers as recorded.
        label: Shape (communications,): alike ones have one ideal.
        step: Shape (communications,): index of the step.
        truncated: Shape (communications,): `find_truncated`.

    Source:
        Two levels as in `faster_steps_baseline`.
    """
    number, num_labels = factorize(label)
    seen = np.flatnonzero(~truncated)
    median, num_seen = group_medians(duration_ns[seen], number[seen], num_labels)
    num_steps = int(step.max(initial=-1)) + 1
    if num_steps > 2 * THRESHOLDS.min_several:
        cell = number[seen] * num_steps + step[seen]
        level, _ = group_medians(duration_ns[seen], cell, num_labels * num_steps)
        median = np.fmin(median, _faster_levels(level.reshape(num_labels, num_steps)))
    ideal = np.where(num_seen > 0, median, np.inf)[number]
    return np.where(truncated, np.minimum(ideal, duration_ns), ideal)


def _faster_levels(levels: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the faster level of each row that has two; NaN for the others."""
    faster_levels = np.full(len(levels), np.nan)
    faster, usual = faster_steps_baseline(levels)[:, 0], row_medians(levels)
    for row in np.flatnonzero(usual > (1.0 + THRESHOLDS.min_excess_ratio) * faster).tolist():
        noise = median_change_deviation(levels[row])
        if usual[row] - faster[row] >= required_deviations(levels.shape[1]) * noise:
            faster_levels[row] = faster[row]
    return faster_levels
