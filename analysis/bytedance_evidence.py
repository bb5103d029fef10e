"""Host gaps and transfers of a ByteDance trace."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from analysis.bytedance_format import (
    BACKWARD_COMPUTE,
    BACKWARD_SEND,
    CODE,
    DP_ONLY,
    FORWARD_COMPUTE,
    FORWARD_SEND,
    GC,
    NO_OP_SLACK_NS,
    PEER_TO_PEER,
    TYPES,
)
from analysis.distinct import number_rows
from analysis.evidence import GapItems, Link, Place, Transfers
from analysis.intervals import Line
from analysis.operations import NO_GROUP, latest_by_group
from analysis.ordering import sort_rows, stable_order
from analysis.transfers import Members, collect_transfers
from tracer.span import SpanKind

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from analysis.bytedance import Trace

LEAST_TOGETHER = 0.05
"""Share of the transfers that begin and end with another one where a call posts several.

With few micro-batches to a stage most are posted alone, before the first backward and after the
last forward. By chance none is: times are exact to a microsecond.
"""


def gaps_of(trace: Trace) -> GapItems:
    """Return the launch gaps of compute, and the pauses, of a ByteDance trace.

    Other operations may have waited for something that the format does not record. Nor does a
    compute wait only for what the replay knows of: a send or receive that was posted in one call
    with others holds the worker up until all of them have ended.
    """
    rows, operations = trace.rows, trace.operations
    gap = np.minimum(operations.gap_ns.astype(np.int64), _since_held_up(trace))
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


def _since_held_up(trace: Trace) -> NDArray[np.int64]:
    """Return how long before each operation its worker's last send or receive had ended.

    Shape (ops,). The largest number where there was none, and everywhere if transfers run beside
    the computes: in no call do a send and a receive begin and end together.
    """
    rows = trace.rows
    since = np.full(len(rows.row), np.iinfo(np.int64).max)
    transfers = np.flatnonzero(np.isin(rows.type, [CODE[name] for name in PEER_TO_PEER]))
    if not _in_one_call(trace, transfers):
        return since
    worker = rows.worker.astype(np.int32)
    line = Line.over(worker, rows.start, rows.end)
    end = np.sort(line.place(worker[transfers], rows.end[transfers]))
    start = line.place(worker, rows.start)
    last = np.searchsorted(end, start + NO_OP_SLACK_NS, side="right") - 1
    held = np.flatnonzero((last >= 0) & (end[last] // line.stride_ns == start // line.stride_ns))
    since[held] = np.maximum(start[held] - end[last[held]], 0)
    return since


def _hidden_by_call(
    trace: Trace, members: NDArray[np.int64], arrival: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Tell the members whose end is that of a call with a transfer whose partner came later.

    Args:
        trace: The trace.
        members: Shape (members,): operations that are members of a group.
        arrival: Shape (members,): when the last of each one's group was there.
    """
    rows = trace.rows
    pairs = np.isin(rows.type[members], [CODE[name] for name in PEER_TO_PEER])
    transfers = members[pairs]
    hidden = np.zeros(len(members), dtype=np.bool_)
    if not _in_one_call(trace, transfers):
        return hidden
    call, num = number_rows(rows.worker[transfers], rows.start[transfers], rows.end[transfers])
    latest = np.zeros(num, dtype=np.int64)
    np.maximum.at(latest, call, arrival[pairs])
    hidden[pairs] = latest[call] > arrival[pairs] + NO_OP_SLACK_NS
    return hidden


def _in_one_call(trace: Trace, transfers: NDArray[np.int64]) -> bool:
    """Tell whether sends and receives of one worker begin and end together more than by chance."""
    rows = trace.rows
    order = transfers[sort_rows(rows.worker[transfers], rows.start[transfers], rows.end[transfers])]
    before, after = order[:-1], order[1:]
    together = rows.worker[before] == rows.worker[after]
    together &= rows.start[before] == rows.start[after]
    together &= (rows.end[before] == rows.end[after]) & (rows.type[before] != rows.type[after])
    return bool(together.sum() > LEAST_TOGETHER * len(transfers))


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
    a member left before the last one entered are left out, and those of which
    a member's call went on for another transfer's sake.
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

    return collect_transfers(
        Members(
            instance=group,
            step=np.array(rows.steps, dtype=np.int32)[rows.step[members]],
            duration_ns=(rows.end - rows.start)[members],
            num_bytes=np.full(len(members), -1, dtype=np.int64),
            name=kind.astype(np.int32),
            names=TYPES,
            unclear=(rows.end[members] < arrival) | _hidden_by_call(trace, members, arrival),
            carrier=np.stack(
                (
                    np.where(pair, source, -1),
                    np.where(pair, target, -1),
                    np.where(pair, -1, kind),
                    np.where(pair, -1, first_rank),
                )
            ),
            alike=np.stack((np.where(pair, forward, 2 + kind), np.where(pair, -1, first_rank))),
            operation=members,
        ),
        link_of=link,
        num_operations=len(operations),
        spread_of=lambda found: (len(found.members), False),
    )
