"""Host gaps and transfers of a ByteDance trace."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rankscope.tracer.span import SpanKind

from ...arrays.sorting import stable_order
from ...replay.model import GapItems, Link, Place, Transfers
from ...replay.operations import NO_GROUP, latest_by_group
from ..transfers import Members, collect_transfers
from .format import (
    BACKWARD_COMPUTE,
    BACKWARD_SEND,
    CODE,
    DP_ONLY,
    FORWARD_COMPUTE,
    FORWARD_SEND,
    GC,
    PEER_TO_PEER,
    TYPES,
)
from .p2p_calls import hidden_by_call, left_early, since_held_up

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .reader import Trace


def gaps_of(trace: Trace) -> GapItems:
    """Return the launch gaps of compute, and the pauses, of a ByteDance trace.

    Other operations may have waited for something that the format does not record. Nor does a
    compute wait only for what the replay knows of: a send or receive that was waited for with
    others holds the worker up until all of them have ended.
    """
    rows, operations = trace.rows, trace.operations
    gap = np.minimum(operations.gap_ns.astype(np.int64), since_held_up(trace))
    numbers = np.array(rows.steps, dtype=np.int32)
    place = np.full(len(TYPES), -1, dtype=np.int8)
    place[CODE[FORWARD_COMPUTE]] = Place.FORWARD
    place[CODE[BACKWARD_COMPUTE]] = Place.BACKWARD
    late = np.flatnonzero((gap > 0) & (place[rows.type] >= 0))
    of_gap = place[rows.type[late]]
    first = _first_computes(trace)
    of_gap[np.isin(late, first)] = Place.INPUT
    pauses = np.flatnonzero(rows.type == CODE[GC])
    both = np.concatenate((late, pauses))
    return GapItems(
        step=numbers[rows.step[both]],
        rank=trace.rank[both],
        place=np.concatenate((of_gap, np.full(len(pauses), Place.GC))).astype(np.int8),
        gap_ns=np.concatenate((gap[late], (rows.end - rows.start)[pauses])),
        operation=both,
    )


def _first_computes(trace: Trace) -> NDArray[np.int64]:
    """Return each worker's first forward-compute of a step."""
    rows = trace.rows
    forward = CODE[FORWARD_COMPUTE]
    has_one = rows.count[:, forward] > 0
    found: NDArray[np.int64] = rows.first[has_one, forward]
    return found


def transfers_of(trace: Trace) -> Transfers:
    """Return the transfers of a ByteDance trace: between stages, and of parameters and gradients.

    It records no sizes: sends and receives of one direction are alike over all
    pairs, but a collective is only like itself in other steps. The small
    collectives at a step's end prove nothing there: in the published traces
    they take many times longer in the first steps than later. Instances that
    a member left before the last one entered are left out, unless clocks alone
    say so, and those of which a member's call went on for another transfer's sake.
    """
    rows, operations = trace.rows, trace.operations
    bulky = np.isin(rows.type, [CODE[name] for name in PEER_TO_PEER | DP_ONLY])
    members = np.flatnonzero((operations.group != NO_GROUP) & bulky)
    group, kind = operations.group[members], rows.type[members]
    arrival = latest_by_group(operations.group, rows.start)[members]
    pair = np.isin(kind, [CODE[name] for name in PEER_TO_PEER])
    forward = np.isin(kind, [CODE[name] for name in PEER_TO_PEER if name.startswith("forward")])
    sends = np.isin(kind, [CODE[FORWARD_SEND], CODE[BACKWARD_SEND]])
    low, high = np.iinfo(np.int64).min, np.iinfo(np.int64).min
    rank = trace.rank.astype(np.int64)
    source, target = np.full(len(rank), low), np.full(len(rank), high)
    source[members[sends]] = rank[members[sends]]
    target[members[pair & ~sends]] = rank[members[pair & ~sends]]
    source = latest_by_group(operations.group, source)[members]
    target = latest_by_group(operations.group, target)[members]
    first_rank = -latest_by_group(operations.group, -rank)[members]
    carrier = np.stack(
        (
            np.where(pair, source, -1),
            np.where(pair, target, -1),
            np.where(pair, -1, kind),
            np.where(pair, -1, first_rank),
        )
    )
    by_group: dict[int, NDArray[np.int64]] = {}

    def link(row: int) -> Link:
        if pair[row]:
            return Link(
                members=(int(source[row]), int(target[row])),
                kind=SpanKind.PP_SEND.value,
                is_pair=True,
            )
        if not by_group:
            order = stable_order(group)
            by_group[0], by_group[1] = order, group[order]
        begin, end = np.searchsorted(by_group[1], [group[row], group[row] + 1])
        ranks = np.unique(trace.rank[members[by_group[0][begin:end]]])
        return Link(members=tuple(ranks.tolist()), kind=SpanKind.DP_COMM.value, is_pair=False)

    early = left_early(trace, members, arrival, group=group, carrier=carrier)
    return collect_transfers(
        Members(
            instance=group,
            step=np.array(rows.steps, dtype=np.int32)[rows.step[members]],
            duration_ns=(rows.end - rows.start)[members],
            num_bytes=np.full(len(members), -1, dtype=np.int64),
            name=kind.astype(np.int32),
            names=TYPES,
            unclear=early | hidden_by_call(trace, members, group),
            carrier=carrier,
            alike=np.stack((np.where(pair, forward, 2 + kind), np.where(pair, -1, first_rank))),
            operation=members,
        ),
        link_of=link,
        num_operations=len(operations),
        spread_of=lambda found: (len(found.members), False),
    )
