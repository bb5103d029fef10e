"""Host gaps and transfers of a traced run, on which its findings rest."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np

from rankscope.tracer.span import KIND_CODES, KINDS, SpanFlag, SpanKind

from ...arrays.grouping import factorize, max_over_group, sorted_unique
from ...arrays.intervals import NOT_FOUND, find_covering
from ...arrays.sorting import argsort_rows, is_in_sorted
from ...replay.model import GapItems, Link, Place, Transfers
from ...trace.tables import traced_groups
from ..transfers import MAX_DELAY_RATIO, InstanceMembers, collect_transfers
from ..waits import is_p2p
from .pieces import EVALUATION, GAP, Pieces, compiles_at

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ...trace.tables import RunInfo, SpanTable, StepTable
    from ..waits import WaitSplit
    from .matched_waits import MatchedWaits

_PLACE_BY_HOST_KIND = {
    KIND_CODES[SpanKind.GC]: Place.GC,
    KIND_CODES[SpanKind.DATA]: Place.DATA,
    KIND_CODES[SpanKind.CHECKPOINT]: Place.CHECKPOINT,
}
_PLACE_BY_NEXT_KIND = {
    KIND_CODES[SpanKind.FORWARD]: Place.FORWARD,
    KIND_CODES[SpanKind.BACKWARD]: Place.BACKWARD,
}


def find_gaps(
    matched: MatchedWaits,
    pieces: Pieces,
    steps: StepTable,
    *,
    numbers: NDArray[np.int32],
    piece_number: NDArray[np.int64],
    records_loader: bool = False,
) -> GapItems:
    """Return the host gaps of a traced run, with their places in the step.

    A gap before a receive is placed before the compute that the receive feeds. Time between two
    steps of a rank is before the first compute of the later one. Without ``data`` spans that is
    `Place.INPUT`; if a rank recorded when it waited for its input, or would have, the rest is a
    late launch.

    Args:
        piece_number: Shape (pieces,): the operation that each piece became.
        records_loader: See `RunInfo.records_loader`.
    """
    rows = np.flatnonzero(~pieces.is_own & (pieces.end > pieces.start))
    rank_step = pieces.rank_step[rows]
    waited = _waited_between_steps(matched)
    place, first_place = _gap_places(
        matched, pieces, waited, numbers, records_loader=records_loader
    )
    pause = _pauses_between_steps(matched, pieces, steps)
    first = np.flatnonzero(pause)
    place_before = first_place[pieces.rank_step[first]]
    is_input = 2 * waited[pieces.rank_step[first]] > pause[first]
    place_before = np.where(is_input, Place.DATA, place_before)
    index = matched.rank_steps.step_index
    return GapItems(
        step=numbers[np.concatenate((index[rank_step], index[pieces.rank_step[first]]))],
        rank=matched.rank_steps.rank[np.concatenate((rank_step, pieces.rank_step[first]))],
        place=np.concatenate((place[rows], place_before)).astype(np.int8),
        gap_ns=np.concatenate(((pieces.end - pieces.start)[rows], pause[first])),
        operation=piece_number[np.concatenate((rows, first))],
        name=np.append(
            np.append(matched.spans.name, GAP)[pieces.named_row[rows]], np.full(len(first), GAP)
        ).astype(np.int32),
        names=matched.spans.names,
        in_compute=np.append(pieces.is_idle[rows], np.zeros(len(first), dtype=np.bool_)),
    )


def _gap_places(
    matched: MatchedWaits,
    pieces: Pieces,
    waited_ns: NDArray[np.float64],
    numbers: NDArray[np.int32],
    *,
    records_loader: bool,
) -> tuple[NDArray[np.int8], NDArray[np.int8]]:
    """Return the place of each piece as a gap, and of the time before the first compute."""
    num = len(pieces.start)
    own = pieces.is_own
    index = np.arange(num)
    next_own = np.minimum.accumulate(np.where(own, index, num)[::-1])[::-1]
    known = next_own < num
    known[known] = pieces.rank_step[next_own[known]] == pieces.rank_step[known]
    place = np.full(num, Place.OTHER, dtype=np.int8)
    next_kind = matched.spans.kind[pieces.compute[next_own[known]]]
    for code, place_before in _PLACE_BY_NEXT_KIND.items():
        place[np.flatnonzero(known)[next_kind == code]] = place_before

    launched = sorted_unique(matched.launch[~is_p2p(matched.spans)[matched.comm]])
    # A collective that is launched before a forward or backward (a gather of its weights) feeds it,
    # so such a gap keeps the place of that compute.
    place[is_in_sorted(pieces.end, launched) & (place == Place.OTHER)] = Place.LAUNCH

    last_own = np.maximum.accumulate(np.where(own, index, NOT_FOUND))
    is_first = last_own < 0
    is_first[~is_first] = pieces.rank_step[last_own[~is_first]] != pieces.rank_step[~is_first]
    evaluates = own.copy()
    evaluates[own] = pieces.part[pieces.compute[own]] == EVALUATION
    beside = known & evaluates[np.minimum(next_own, num - 1)]
    beside |= ~is_first & evaluates[np.maximum(last_own, 0)]
    num_data, data_ns = _recorded_input(matched, numbers)
    length = (pieces.end - pieces.start).astype(np.float64)
    shown = (pieces.host_kind == KIND_CODES[SpanKind.DATA]) & ~own
    shown_ns = waited_ns + np.bincount(
        pieces.rank_step[shown], weights=length[shown], minlength=len(num_data)
    )
    before = is_first & ~own & ~shown & (pieces.named_row == GAP)
    gap_ns = np.bincount(pieces.rank_step[before], weights=length[before], minlength=len(num_data))
    # The host of a device that is behind waited for the input earlier than the device did.
    is_recorded = (num_data > 0) | (waited_ns > 0) | records_loader
    is_late = is_recorded & (2 * (data_ns - shown_ns) <= gap_ns)
    first_place = np.where(is_late, Place.FORWARD, Place.INPUT)
    first_place[pieces.rank_step[is_first & beside]] = Place.EVALUATION
    place[is_first & known] = first_place[pieces.rank_step[is_first & known]]
    for code, host_place in _PLACE_BY_HOST_KIND.items():
        place[pieces.host_kind == code] = host_place
    place[pieces.named_row != GAP] = Place.SPAN
    place[compiles_at(matched.spans, pieces.named_row)] = Place.COMPILATION
    kept = place == Place.GC, place == Place.CHECKPOINT, place == Place.COMPILATION
    place[beside & ~np.logical_or.reduce(kept)] = Place.EVALUATION
    # A gap inside a compute span was taken by a host span of another kind.
    inside = (pieces.compute != GAP) & (pieces.host_kind == GAP)
    place[inside] = Place.OTHER
    return place, first_place


def _recorded_input(
    matched: MatchedWaits, numbers: NDArray[np.int32]
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return number and total ns of the ``data`` spans of each (rank, step).

    By its number: a host that runs ahead fetches the input before its device begins the step.
    """
    spans, steps = matched.spans, matched.rank_steps
    rows = np.flatnonzero(spans.kind == KIND_CODES[SpanKind.DATA])
    num = len(rows)
    cell, num_cells = factorize(
        np.concatenate((spans.rank[rows], steps.rank)),
        np.concatenate((spans.step[rows], numbers[steps.step_index])),
    )
    counts = np.bincount(cell[:num], minlength=num_cells)
    total_ns = np.bincount(cell[:num], weights=spans.duration_ns[rows], minlength=num_cells)
    num_spans: NDArray[np.int64] = counts[cell[num:]].astype(np.int64)
    data_ns: NDArray[np.float64] = total_ns[cell[num:]].astype(np.float64)
    return num_spans, data_ns


def _waited_between_steps(matched: MatchedWaits) -> NDArray[np.float64]:
    """Return how long each rank waited for input right before each of its steps, ns."""
    spans, steps = matched.spans, matched.rank_steps
    rows = np.flatnonzero(spans.kind == KIND_CODES[SpanKind.DATA])
    start = matched.line.place(spans.rank[rows], spans.start_ns[rows])
    is_between = find_covering(steps.start, steps.end, start) == NOT_FOUND
    following = np.searchsorted(steps.start, start[is_between], side="right")
    num = len(steps.start)
    waited = np.zeros(num + 1, dtype=np.float64)
    np.add.at(waited, following, spans.duration_ns[rows[is_between]])
    return waited[:num]


def _pauses_between_steps(
    matched: MatchedWaits, pieces: Pieces, steps: StepTable
) -> NDArray[np.int64]:
    """Return, at the first piece of each (step, rank), the time since the rank's step before."""
    order = argsort_rows(steps.epoch, steps.rank, steps.step)
    epoch, rank, step = steps.epoch[order], steps.rank[order], steps.step[order]
    follows = np.zeros(len(order), dtype=np.bool_)
    follows[1:] = (epoch[1:] == epoch[:-1]) & (rank[1:] == rank[:-1]) & (step[1:] == step[:-1] + 1)
    pause = np.diff(steps.start_ns[order], prepend=0)
    pause[1:] -= (steps.end_ns - steps.start_ns)[order][:-1]
    pause = np.where(follows, np.maximum(pause, 0), 0)
    start = matched.line.place(steps.rank[order], steps.start_ns[order])
    by_rank_step = np.zeros(len(matched.rank_steps.start), dtype=np.int64)
    by_rank_step[np.searchsorted(matched.rank_steps.start, start)] = pause
    return np.where(pieces.is_first, by_rank_step[pieces.rank_step], 0)


def find_transfers(
    matched: MatchedWaits,
    numbers: NDArray[np.int32],
    run: RunInfo,
    *,
    number: NDArray[np.int64],
    truncated: NDArray[np.bool_],
) -> Transfers:
    """Return the transfers of a traced run.

    Links inside one host are compared with each other only. Instances are excluded if they have a
    buffered send, are rooted and a member left early, were delayed by another communication of
    the same call, had begun before the receive was posted, or have an end that is only a bound.

    Args:
        numbers: Numbers of its steps.
        number: The operation that each piece, then each communication of ``matched``, became.
        truncated: Shape (communications,): `find_truncated`.
    """
    spans, comm = matched.spans, matched.comm
    groups = {group.group_id: group for group in traced_groups(run)}
    hosts: defaultdict[int, str] = defaultdict(str)
    hosts.update({rank: info.host for rank, info in run.ranks.items()})
    is_unclear = (spans.flags[comm] & SpanFlag.END_BOUND) != 0
    is_unclear |= truncated | matched.has_no_wait | is_delayed_in_call(spans, matched.split, comm)
    pair = is_p2p(spans)[comm]
    # The pairs of a context-parallel ring send inside compute; they keep the kind of their axis.
    pair_kind = spans.kind[comm].astype(np.int64)
    pair_kind[pair_kind == KIND_CODES[SpanKind.PP_RECV]] = KIND_CODES[SpanKind.PP_SEND]
    source, target = spans.src_rank[comm], spans.dst_rank[comm]
    ids, group = np.unique(spans.group_id[comm], return_inverse=True)

    def link(row: int) -> Link:
        if pair[row]:
            return Link(
                members=(int(source[row]), int(target[row])),
                kind=KINDS[int(pair_kind[row])].value,
                is_pair=True,
            )
        return Link(
            members=groups[int(ids[group[row]])].members,
            kind=KINDS[int(spans.kind[comm[row]])].value,
            is_pair=False,
        )

    return collect_transfers(
        InstanceMembers(
            instance=matched.split.instance[comm],
            step=numbers[matched.rank_steps.step_index[matched.comm_rank_step]],
            duration_ns=spans.duration_ns[comm],
            num_bytes=spans.num_bytes[comm],
            name=spans.name[comm],
            names=spans.names,
            is_unclear=is_unclear,
            link_key=np.stack(
                (np.where(pair, source, -1), np.where(pair, target, -1), group * ~pair)
            ),
            alike_key=np.stack(
                (
                    np.where(pair, NOT_FOUND - 1 - pair_kind, spans.kind[comm]),
                    np.where(pair, target > source, spans.name[comm]),
                    spans.num_bytes[comm],
                )
            ),
            operation=number[len(number) - len(comm) :],
        ),
        make_link=link,
        num_operations=len(number),
        link_extent=lambda found: (
            len(found.members),
            len({hosts[rank] for rank in found.members}) > 1,
        ),
    )


def is_delayed_in_call(
    spans: SpanTable, split: WaitSplit, comm: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Return the last members whose end another communication of their call delayed.

    The communications of one call run as one: in a ring that sends to the next rank and receives
    from the one before, neither ends before both other ranks have arrived. The member that
    entered last did not wait, so its duration is the transfer, unless a member of another
    communication of its call entered even later. Then no member's duration is the transfer.

    Returns:
        Shape as ``comm``.
    """
    delayed = np.zeros(len(comm), dtype=np.bool_)
    in_call = np.flatnonzero(spans.interval_id[comm] != 0)
    if not len(in_call):
        return delayed
    rows = comm[in_call]
    call, _ = factorize(spans.epoch[rows], spans.rank[rows], spans.interval_id[rows])
    start, wait, length = spans.start_ns[rows], split.wait_ns[rows], spans.duration_ns[rows]
    latest = max_over_group(call, start + wait)
    delayed[in_call] = (wait == 0) & (latest <= start + length)
    delayed[in_call] &= latest - start > MAX_DELAY_RATIO * length
    return delayed
