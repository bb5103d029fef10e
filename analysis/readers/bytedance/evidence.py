"""Host gaps and transfers of a ByteDance trace."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rankscope.tracer.span import SpanKind

from ...arrays.group_stats import mean_absolute_deviations
from ...arrays.grouping import NO_GROUP, factorize, max_over_group
from ...arrays.intervals import Line
from ...arrays.sorting import argsort_rows, stable_argsort
from ...replay.model import GapItems, Link, Place, Transfers
from ..transfers import InstanceMembers, collect_transfers
from .format import (
    BACKWARD_COMPUTE,
    BACKWARD_SEND,
    CLOCK_ERROR_TRANSFER_NS,
    CODE,
    DP_ONLY,
    FORWARD_COMPUTE,
    FORWARD_SEND,
    GC,
    NO_OP_SLACK_NS,
    PEER_TO_PEER,
    TYPES,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .graph import Trace


SAME_END_NS = 10_000
"""Transfers of one worker that end within this of each other end with one call, whenever each was
posted. Start and duration are rounded apart: as 32-bit floats by 2 us each, 40 s into a step."""

MAX_CLOCK_BOUND_TRANSFERS = 3
"""Clocks of two ranks are known where they are bounded to within so many of their transfers: two,
and the difference between the shortest each way."""

MAX_NS = np.iinfo(np.int64).max // 4

MAX_OVERLAP_RATIO = 0.05
"""Share of the computes that may run beside an open transfer of a worker that waits for each."""


def find_gaps(trace: Trace) -> GapItems:
    """Return the launch gaps of compute, and the pauses, of a ByteDance trace.

    Other operations may have waited for something that the format does not record. Nor does a
    compute wait only for what the replay knows of: a send or receive that was waited for with
    others holds the worker up until all of them have ended.
    """
    rows, operations = trace.rows, trace.operations
    gap = np.minimum(operations.gap_ns.astype(np.int64), time_since_last_transfer(trace))
    numbers = np.array(rows.steps, dtype=np.int32)
    place = np.full(len(TYPES), -1, dtype=np.int8)
    place[CODE[FORWARD_COMPUTE]] = Place.FORWARD
    place[CODE[BACKWARD_COMPUTE]] = Place.BACKWARD
    late = np.flatnonzero((gap > 0) & (place[rows.type] >= 0))
    of_gap = place[rows.type[late]]
    first = _find_first_computes(trace)
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


def _find_first_computes(trace: Trace) -> NDArray[np.int64]:
    """Return each worker's first forward-compute of a step."""
    rows = trace.rows
    forward = CODE[FORWARD_COMPUTE]
    has_one = rows.count[:, forward] > 0
    found: NDArray[np.int64] = rows.first[has_one, forward]
    return found


def find_transfers(trace: Trace) -> Transfers:
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
    arrival = trace.arrival_ns[members]
    pair = np.isin(kind, [CODE[name] for name in PEER_TO_PEER])
    forward = np.isin(kind, [CODE[name] for name in PEER_TO_PEER if name.startswith("forward")])
    sends = np.isin(kind, [CODE[FORWARD_SEND], CODE[BACKWARD_SEND]])
    low, high = np.iinfo(np.int64).min, np.iinfo(np.int64).min
    rank = trace.rank.astype(np.int64)
    source, target = np.full(len(rank), low), np.full(len(rank), high)
    source[members[sends]] = rank[members[sends]]
    target[members[pair & ~sends]] = rank[members[pair & ~sends]]
    source = max_over_group(operations.group, source)[members]
    target = max_over_group(operations.group, target)[members]
    first_rank = -max_over_group(operations.group, -rank)[members]
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
            order = stable_argsort(group)
            by_group[0], by_group[1] = order, group[order]
        begin, end = np.searchsorted(by_group[1], [group[row], group[row] + 1])
        ranks = np.unique(trace.rank[members[by_group[0][begin:end]]])
        return Link(members=tuple(ranks.tolist()), kind=SpanKind.DP_COMM.value, is_pair=False)

    early = is_left_early(trace, members, arrival, group=group, carrier=carrier)
    return collect_transfers(
        InstanceMembers(
            instance=group,
            step=np.array(rows.steps, dtype=np.int32)[rows.step[members]],
            duration_ns=(rows.end - rows.start)[members],
            num_bytes=np.full(len(members), -1, dtype=np.int64),
            name=kind.astype(np.int32),
            names=TYPES,
            unclear=early | is_delayed_in_call(trace, members, group),
            carrier=carrier,
            alike=np.stack((np.where(pair, forward, 2 + kind), np.where(pair, -1, first_rank))),
            operation=members,
        ),
        link_of=link,
        num_operations=len(operations),
        spread_of=lambda found: (len(found.members), False),
    )


def time_since_last_transfer(trace: Trace) -> NDArray[np.int64]:
    """Return how long before each operation its worker's last send or receive had ended.

    Shape (ops,). The largest number where there was none, and everywhere if transfers run beside
    the computes.
    """
    rows = trace.rows
    since = np.full(len(rows.row), np.iinfo(np.int64).max)
    transfers = np.flatnonzero(np.isin(rows.type, [CODE[name] for name in PEER_TO_PEER]))
    if not len(transfers):
        return since
    worker = rows.worker.astype(np.int32)
    line = Line.over(worker, rows.start, rows.end)
    start = line.place(worker, rows.start)
    end = np.sort(line.place(worker[transfers], rows.end[transfers]))
    if _overlap_compute(trace, line, np.sort(start[transfers]), end):
        return since
    last = np.searchsorted(end, start + NO_OP_SLACK_NS, side="right") - 1
    held = np.flatnonzero((last >= 0) & (end[last] // line.stride_ns == start // line.stride_ns))
    since[held] = np.maximum(start[held] - end[last[held]], 0)
    return since


def is_delayed_in_call(
    trace: Trace, members: NDArray[np.int64], group: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Tell the members whose end is that of a call with a transfer whose partner came later.

    Args:
        trace: The trace.
        members: Shape (members,): operations that are members of a group.
        group: Shape (members,): their groups.
    """
    rows = trace.rows
    pairs = np.isin(rows.type[members], [CODE[name] for name in PEER_TO_PEER])
    transfers = members[pairs]
    arrival = arrival_times(trace, transfers, group[pairs])
    call, num = _find_calls(trace, transfers)
    latest = np.full(num, np.iinfo(np.int64).min)
    np.maximum.at(latest, call, arrival)
    hidden = np.zeros(len(members), dtype=np.bool_)
    hidden[pairs] = latest[call] > arrival + NO_OP_SLACK_NS
    return hidden


def arrival_times(
    trace: Trace, transfers: NDArray[np.int64], group: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return when both ends of each transfer were there, by its own worker's clock.

    Neither end leaves before the other is there, which bounds how far their clocks are apart.
    Within the bounds clocks are taken to agree. Where they cannot, and either end was the last at
    some time, the bounds are a transfer away on both sides, and the middle is taken; else the
    nearer bound.

    Args:
        trace: The trace.
        transfers: Shape (transfers,).
        group: Shape (transfers,): equal for the two ends of one.
    """
    start, end = trace.rows.start[transfers], trace.rows.end[transfers]
    if not len(transfers):
        return start
    order = np.argsort(group, kind="stable")
    other = np.empty(len(order), dtype=np.int64)
    other[order[::2]], other[order[1::2]] = order[1::2], order[::2]
    rank = trace.rank[transfers].astype(np.int64)
    pair, num = factorize(rank, rank[other])
    least, most = np.full(num, -MAX_NS), np.full(num, MAX_NS)
    shortest = np.full(num, MAX_NS)
    np.maximum.at(least, pair, start[other] - end)
    np.minimum.at(most, pair, end[other] - start)
    np.minimum.at(shortest, pair, np.minimum(end - start, (end - start)[other]))
    apart = np.clip(0, least, most)
    tight = (apart != 0) & (most - least <= MAX_CLOCK_BOUND_TRANSFERS * shortest)
    apart[tight] = (least[tight] + most[tight]) // 2
    apart[most < least] = 0  # sends were buffered: they bound nothing
    found: NDArray[np.int64] = np.maximum(start, start[other] - apart[pair])
    return found


def _find_calls(trace: Trace, transfers: NDArray[np.int64]) -> tuple[NDArray[np.int64], int]:
    """Return the call of each transfer, shape (transfers,), and how many there are."""
    rows = trace.rows
    order = argsort_rows(rows.worker[transfers], rows.end[transfers])
    worker, end = rows.worker[transfers[order]], rows.end[transfers[order]]
    begins = np.ones(len(order), dtype=np.bool_)
    begins[1:] = (worker[1:] != worker[:-1]) | (end[1:] - end[:-1] > SAME_END_NS)
    call = np.empty(len(order), dtype=np.int64)
    call[order] = np.cumsum(begins) - 1
    return call, int(begins.sum())


def _overlap_compute(
    trace: Trace, line: Line, start: NDArray[np.int64], end: NDArray[np.int64]
) -> bool:
    """Tell whether transfers run beside computes: one is open in the middle of some.

    A host that waits for each at once computes nothing while one is open. At their ends both
    overlap even so: in a published trace by more than 50 us.

    Args:
        trace: The trace.
        line: Holds all workers' times.
        start: Shape (transfers,): when they begin on it, ascending.
        end: Shape (transfers,): when they end, ascending.
    """
    rows = trace.rows
    computes = np.flatnonzero(
        (rows.type == CODE[FORWARD_COMPUTE]) | (rows.type == CODE[BACKWARD_COMPUTE])
    )
    middle = (rows.start[computes] + rows.end[computes]) // 2
    at = line.place(rows.worker[computes].astype(np.int32), middle)
    is_open = np.searchsorted(start, at) > np.searchsorted(end, at, side="right")
    return bool(is_open.sum() > MAX_OVERLAP_RATIO * len(computes))


def is_left_early(
    trace: Trace,
    members: NDArray[np.int64],
    arrival: NDArray[np.int64],
    *,
    group: NDArray[np.int64],
    carrier: NDArray[np.int64],
) -> NDArray[np.bool_]:
    """Tell the members that left before the last one entered.

    Clocks that disagree make it look so wherever the transfer is shorter than their error: left
    out for that, the shortest instances of some links would go and those links look slow. Members
    that leave together show themselves: their ends lie at one distance, however long they wait.

    Args:
        trace: The trace.
        members: Shape (members,): operations that are members of a group.
        arrival: Shape (members,): when the last of each one's group was there.
        group: Shape (members,): their groups.
        carrier: Shape (keys, members): columns of members of one link are equal.
    """
    rows = trace.rows
    end = rows.end[members]
    early = end < arrival
    unsure = early & (end - arrival > CLOCK_ERROR_TRANSFER_NS)
    if not unsure.any():
        return early
    of_group, num = factorize(group)
    others = np.bincount(of_group, minlength=num)[of_group] - 1
    since = end - int(end.min())  # sums of it are exact
    total = np.zeros(num, dtype=np.int64)
    np.add.at(total, of_group, since)
    apart = since - (total[of_group] - since) / np.maximum(others, 1)
    key, num_keys = factorize(*carrier, trace.rank[members].astype(np.int64))
    lasts = (end - rows.start[members]).astype(np.float64)
    together = mean_absolute_deviations(apart, key, num_keys) < mean_absolute_deviations(
        lasts, key, num_keys
    )
    early[unsure] &= ~together[key[unsure]]
    return early
