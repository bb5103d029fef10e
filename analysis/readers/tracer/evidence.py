"""Host gaps and transfers of a traced run."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np

from rankscope.tracer.span import KIND_CODES, KINDS, SpanFlag, SpanKind

from ...arrays.grouping import factorize, max_over_group, sorted_unique
from ...arrays.intervals import NOT_FOUND
from ...arrays.sorting import argsort_rows, is_in_sorted
from ...replay.model import GapItems, Link, Place, Transfers
from ...trace.tables import traced_groups
from ..transfers import InstanceMembers, collect_transfers
from ..waits import is_p2p
from .pieces import GAP, Pieces, is_own_compute

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

MAX_DELAY_RATIO = 0.05
"""Share of a communication for which another of its call may have waited: half of the least excess
that is a finding."""


def find_gaps(
    joined: MatchedWaits,
    pieces: Pieces,
    steps: StepTable,
    *,
    numbers: NDArray[np.int32],
    piece_number: NDArray[np.int64],
) -> GapItems:
    """Return the host gaps of a traced run, each with where in the step it lies.

    A gap before a receive counts as before the compute that the receive feeds.
    Time between two steps of a rank counts as `Place.INPUT` of the later one.

    Args:
        joined: The run.
        pieces: What its ranks did between their waits.
        steps: The steps that take part.
        numbers: Their numbers, ascending.
        piece_number: Shape (pieces,): the operation that each piece became.
    """
    rows = np.flatnonzero(~is_own_compute(pieces, len(pieces.start)) & (pieces.end > pieces.start))
    window = pieces.window[rows]
    place = _gap_places(joined, pieces)[rows]
    between = _pauses_between_steps(joined, pieces, steps)
    first = np.flatnonzero(between)
    index = joined.windows.step_index
    return GapItems(
        step=numbers[np.concatenate((index[window], index[pieces.window[first]]))],
        rank=joined.windows.rank[np.concatenate((window, pieces.window[first]))],
        place=np.concatenate((place, np.full(len(first), Place.INPUT))).astype(np.int8),
        gap_ns=np.concatenate(((pieces.end - pieces.start)[rows], between[first])),
        operation=piece_number[np.concatenate((rows, first))],
    )


def _gap_places(joined: MatchedWaits, pieces: Pieces) -> NDArray[np.int8]:
    num = len(pieces.start)
    own = is_own_compute(pieces, num)
    index = np.arange(num)
    follows = np.minimum.accumulate(np.where(own, index, num)[::-1])[::-1]
    known = follows < num
    known[known] = pieces.window[follows[known]] == pieces.window[known]
    place = np.full(num, Place.OTHER, dtype=np.int8)
    kind = joined.spans.kind[pieces.compute[follows[known]]]
    for code, before in _PLACE_BY_NEXT_KIND.items():
        place[np.flatnonzero(known)[kind == code]] = before

    launched = sorted_unique(joined.launch[~is_p2p(joined.spans)[joined.comm]])
    # What is launched before a forward or backward (a gather of its weights) feeds it.
    place[is_in_sorted(pieces.end, launched) & (place == Place.OTHER)] = Place.LAUNCH

    earlier = np.maximum.accumulate(np.where(own, index, NOT_FOUND))
    is_first = earlier < 0
    is_first[~is_first] = pieces.window[earlier[~is_first]] != pieces.window[~is_first]
    place[is_first & known] = Place.INPUT
    for code, of_kind in _PLACE_BY_HOST_KIND.items():
        place[pieces.host_kind == code] = of_kind
    # A gap inside a compute span is what a host span of another kind took from it.
    inside = (pieces.compute != GAP) & (pieces.host_kind == GAP)
    place[inside] = Place.OTHER
    return place


def _pauses_between_steps(
    joined: MatchedWaits, pieces: Pieces, steps: StepTable
) -> NDArray[np.int64]:
    """Return, at each window's first piece, how long after the rank's step before it began."""
    order = argsort_rows(steps.epoch, steps.rank, steps.step)
    epoch, rank, step = steps.epoch[order], steps.rank[order], steps.step[order]
    follows = np.zeros(len(order), dtype=np.bool_)
    follows[1:] = (epoch[1:] == epoch[:-1]) & (rank[1:] == rank[:-1]) & (step[1:] == step[:-1] + 1)
    pause = np.diff(steps.start_ns[order], prepend=0)
    pause[1:] -= (steps.end_ns - steps.start_ns)[order][:-1]
    pause = np.where(follows, np.maximum(pause, 0), 0)
    start = joined.line.place(steps.rank[order], steps.start_ns[order])
    of_window = np.zeros(len(joined.windows.start), dtype=np.int64)
    of_window[np.searchsorted(joined.windows.start, start)] = pause
    first = np.diff(pieces.window, prepend=NOT_FOUND) != 0
    return np.where(first, of_window[pieces.window], 0)


def find_transfers(
    joined: MatchedWaits, numbers: NDArray[np.int32], run: RunInfo, *, number: NDArray[np.int64]
) -> Transfers:
    """Return the transfers of a traced run.

    Links inside one host are held against such. Instances with a buffered
    send, rooted ones that a member left early, those that another of the same
    call held, and those whose end is only a bound tell nothing and are left out.

    Args:
        joined: The run.
        numbers: Its steps' numbers.
        run: Its groups, and the hosts of its ranks.
        number: The operation that each piece, then each communication of ``joined``, became.
    """
    spans, comm = joined.spans, joined.comm
    groups = {group.group_id: group for group in traced_groups(run)}
    hosts: defaultdict[int, str] = defaultdict(str)
    hosts.update({info.rank: info.host for epoch in run.epochs for info in epoch.ranks})
    unclear = (spans.flags[comm] & SpanFlag.END_BOUND) != 0
    unclear |= joined.waits_for_nobody | is_delayed_in_call(spans, joined.split, comm)
    pair = is_p2p(spans)[comm]
    # A ring of context parallel ranks sends inside compute: its pairs are its axis's.
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
            instance=joined.split.instance[comm],
            step=numbers[joined.windows.step_index[joined.comm_window]],
            duration_ns=spans.duration_ns[comm],
            num_bytes=spans.num_bytes[comm],
            name=spans.name[comm],
            names=spans.names,
            is_unclear=unclear,
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
        link_extent=lambda found: (len(found.members), _crosses_hosts(found.members, hosts)),
    )


def _crosses_hosts(members: tuple[int, ...], hosts: defaultdict[int, str]) -> bool:
    return len(set(map(hosts.__getitem__, members))) > 1


def is_delayed_in_call(
    spans: SpanTable, split: WaitSplit, comm: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Tell the last members of communications that another one of their call kept from ending.

    What one call issued runs as one: in a ring that sends to the next rank and
    receives from the one before, neither ends before both partners have come.
    The member that entered last waited for nobody, so its duration is the
    transfer; but not where a partner of another operation of its call entered
    later still: then no member's duration is.

    Args:
        spans: The table.
        split: Its split.
        comm: Rows of communications.

    Returns:
        Shape as ``comm``.
    """
    held = np.zeros(len(comm), dtype=np.bool_)
    at = np.flatnonzero(spans.interval_id[comm] != 0)
    if not len(at):
        return held
    rows = comm[at]
    call, _ = factorize(spans.epoch[rows], spans.rank[rows], spans.interval_id[rows])
    start, wait, length = spans.start_ns[rows], split.wait_ns[rows], spans.duration_ns[rows]
    latest = max_over_group(call, start + wait)
    held[at] = (wait == 0) & (latest <= start + length)
    held[at] &= latest - start > MAX_DELAY_RATIO * length
    return held
