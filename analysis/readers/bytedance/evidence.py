"""Host gaps and transfers of a ByteDance trace, on which its findings rest.

The format records no calls. Which transfers a worker waited for together is inferred from what
begins and ends together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rankscope.tracer.span import SpanKind

from ...arrays.grouping import NO_GROUP, factorize, is_one_of
from ...arrays.intervals import Line
from ...arrays.sorting import argsort_rows, stable_argsort
from ...replay.model import GapItems, Link, Place, Transfers
from ..transfers import InstanceMembers, collect_transfers
from .blocks import Rows, map_steps, map_steps_of
from .format import (
    CLOCK_ERROR_TRANSFER_NS,
    CODE,
    COMPUTE_CODES,
    DP_ONLY,
    NO_OP_SLACK_NS,
    PEER_TO_PEER,
    TYPES,
    OpType,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from .graph import Trace


SAME_END_NS = 10_000
"""Transfers of one worker that end within this of each other end with one call. Start and duration
are rounded separately: as 32-bit floats by 2 us each, 40 s into a step."""

MAX_CLOCK_BOUND_TRANSFERS = 3
"""The clock offset of two ranks counts as known if it is bounded to within this many of their
transfers: two, and the difference between the shortest each way."""

PEER_TO_PEER_CODES = tuple(CODE[name] for name in PEER_TO_PEER)

MAX_NS = np.iinfo(np.int64).max // 4

MAX_OVERLAP_RATIO = 0.05
"""Share of computes that may overlap an open transfer although their worker waits for each."""


def find_gaps(trace: Trace) -> GapItems:
    """Return the launch gaps of compute, and the GC pauses.

    Other operations have no gaps (decision 20). The gap of a compute begins with the end of its
    worker's last transfer, if that is later than its dependencies in the replay: a transfer that
    was waited for together with others blocks the worker until all of them have ended.
    """
    rows, operations = trace.rows, trace.operations
    numbers = np.array(rows.steps, dtype=np.int32)
    place = np.full(len(TYPES), -1, dtype=np.int8)
    place[CODE[OpType.FORWARD_COMPUTE]] = Place.FORWARD
    place[CODE[OpType.BACKWARD_COMPUTE]] = Place.BACKWARD
    late = np.flatnonzero(operations.gap_ns > 0)
    late = late[place[rows.type[late]] >= 0]
    since_ns = time_since_last_transfer(trace, late)
    gap_ns = np.minimum(operations.gap_ns[late].astype(np.int64), since_ns)
    late, gap_ns = late[gap_ns > 0], gap_ns[gap_ns > 0]
    gap_place = place[rows.type[late]]
    forward = CODE[OpType.FORWARD_COMPUTE]
    first = rows.first[rows.count[:, forward] > 0, forward]
    gap_place[np.isin(late, first)] = Place.INPUT
    pauses = np.flatnonzero(rows.type == CODE[OpType.GC])
    both = np.concatenate((late, pauses))
    return GapItems(
        step=numbers[rows.step[both]],
        rank=rows.rank[both],
        place=np.concatenate((gap_place, np.full(len(pauses), Place.GC))).astype(np.int8),
        gap_ns=np.concatenate((gap_ns, rows.end[pauses] - rows.start[pauses])),
        operation=both,
    )


def find_transfers(trace: Trace) -> Transfers:
    """Return the transfers between stages, and those of parameters and gradients.

    The format records no sizes. Sends and receives of one direction are alike over all pairs, but
    a collective is only alike to itself in other steps. The small collectives at a step's end are
    excluded: in the published traces they take many times longer in the first steps than later.
    Also excluded are instances that a member left before the last one entered, unless that may be a
    clock error, and instances that another transfer of the same call delayed.
    """
    rows, members = trace.rows, _find_members(trace)
    operation, group, kind = members.operation, members.group, members.kind
    pair = is_one_of(kind, PEER_TO_PEER_CODES)
    forward = is_one_of(kind, [CODE[name] for name in PEER_TO_PEER if name.startswith("forward")])
    link_key = np.stack(
        (
            np.where(pair, members.source, -1),
            np.where(pair, members.target, -1),
            np.where(pair, -1, kind),
            np.where(pair, -1, members.first_rank),
        )
    )

    def link(row: int) -> Link:
        if pair[row]:
            return Link(
                members=(int(members.source[row]), int(members.target[row])),
                kind=SpanKind.PP_SEND.value,
                is_pair=True,
            )
        ranks = np.unique(rows.rank[operation[group == group[row]]])
        return Link(members=tuple(ranks.tolist()), kind=SpanKind.DP_COMM.value, is_pair=False)

    is_unclear = rows.end[operation] - trace.arrival_ns[operation] <= CLOCK_ERROR_TRANSFER_NS
    is_unclear |= is_delayed_in_call(trace, operation, group)
    return collect_transfers(
        InstanceMembers(
            instance=group,
            step=np.array(rows.steps, dtype=np.int32)[rows.step[operation]],
            duration_ns=rows.end[operation] - rows.start[operation],
            num_bytes=np.broadcast_to(np.int64(-1), len(operation)),
            name=kind.astype(np.int32),
            names=TYPES,
            is_unclear=is_unclear,
            link_key=link_key,
            alike_key=np.stack(
                (np.where(pair, forward, 2 + kind), np.where(pair, -1, members.first_rank))
            ),
            operation=operation,
        ),
        make_link=link,
        num_operations=len(rows),
        link_extent=lambda found: (len(found.members), False),
    )


class Members(NamedTuple):
    """Members of the transfers that are compared, by communication instance."""

    operation: NDArray[np.int64]
    group: NDArray[np.integer[Any]]
    """Ascending within each part of `map_steps`, whose groups are its own."""

    kind: NDArray[np.int8]
    source: NDArray[np.int32]
    """The sending rank of a pair."""

    target: NDArray[np.int32]
    """The receiving rank of a pair."""

    first_rank: NDArray[np.int32]
    """The lowest rank of the instance."""


def _find_members(trace: Trace) -> Members:
    is_bulky = np.isin(np.arange(len(TYPES)), [CODE[name] for name in PEER_TO_PEER | DP_ONLY])

    def find(rows: Rows, part: slice) -> Members:
        group = trace.operations.group[part]
        own = np.flatnonzero(is_bulky[rows.type] & (group != NO_GROUP))
        own = own[stable_argsort(group[own])]
        group, kind, rank = group[own], rows.type[own], rows.rank[own]
        first = np.flatnonzero(np.diff(group, prepend=NO_GROUP))
        sizes = np.diff(first, append=len(own))

        def largest(value: NDArray[np.int32]) -> NDArray[np.int32]:
            most: NDArray[np.int32] = value
            if len(first):
                most = np.repeat(np.maximum.reduceat(value, first), sizes)
            return most

        sends = is_one_of(kind, (CODE[OpType.FORWARD_SEND], CODE[OpType.BACKWARD_SEND]))
        return Members(
            operation=own + part.start,
            group=group,
            kind=kind,
            source=largest(np.where(sends, rank, -1)),
            target=largest(np.where(sends, -1, rank)),
            first_rank=-largest(-rank),
        )

    parts = map_steps(find, trace.rows) or [find(trace.rows, slice(0, 0))]
    return Members(*map(np.concatenate, zip(*parts, strict=True)))


def time_since_last_transfer(trace: Trace, operations: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the time from the end of the worker's last send or receive to each operation's start.

    Args:
        operations: Shape (operations,): some of its operations, ascending.

    Returns:
        Shape (operations,), ns. The largest integer if there was none, and everywhere if transfers
        overlap the computes.
    """
    since = np.full(len(operations), np.iinfo(np.int64).max)

    def measure(rows: Rows, part: slice) -> int:
        """Fill in some steps, and return the number of computes that overlap a transfer."""
        transfers = np.flatnonzero(is_one_of(rows.type, PEER_TO_PEER_CODES))
        if not len(transfers):
            return 0
        line = Line.over(rows.worker, rows.start, rows.end)
        begin, end = (
            np.sort(line.place(rows.worker[transfers], times[transfers]))
            for times in (rows.start, rows.end)
        )
        own = slice(*np.searchsorted(operations, (part.start, part.stop)).tolist())
        some = operations[own] - part.start
        start = line.place(rows.worker[some], rows.start[some])
        last = np.searchsorted(end, start + NO_OP_SLACK_NS, side="right") - 1
        known = (last >= 0) & (end[last] // line.stride_ns == start // line.stride_ns)
        since[own][known] = np.maximum(start[known] - end[last[known]], 0)
        # A host that waits for each transfer computes nothing while one is open. Their edges
        # overlap even so: in a published trace by more than 50 us.
        computes = np.flatnonzero(is_one_of(rows.type, COMPUTE_CODES))
        middle = (rows.start[computes] + rows.end[computes]) // 2
        position = line.place(rows.worker[computes], middle)
        is_open = np.searchsorted(begin, position) > np.searchsorted(end, position, side="right")
        return int(is_open.sum())

    if sum(map_steps(measure, trace.rows)) > MAX_OVERLAP_RATIO * len(trace.computes):
        since[:] = np.iinfo(np.int64).max
    return since


def is_delayed_in_call(
    trace: Trace, members: NDArray[np.int64], group: NDArray[np.integer[Any]]
) -> NDArray[np.bool_]:
    """Return the members that ended late because another transfer of their call did.

    The other end of that transfer arrived later than the other end of the member's own.

    Args:
        members: Shape (members,): operations that are members of a group.
        group: Shape (members,): their groups.
    """
    rows = trace.rows
    pairs = np.flatnonzero(is_one_of(rows.type[members], PEER_TO_PEER_CODES))
    transfers = members[pairs]
    arrival = arrival_times(trace, transfers, group[pairs])
    delayed = np.zeros(len(members), dtype=np.bool_)

    def find(own: slice) -> None:
        # Transfers of a worker that end together are of one call.
        worker, end = rows.worker[transfers[own]], rows.end[transfers[own]]
        order = argsort_rows(worker, end)
        worker, end = worker[order], end[order]
        begins = np.ones(len(order), dtype=np.bool_)
        begins[1:] = (worker[1:] != worker[:-1]) | (end[1:] - end[:-1] > SAME_END_NS)
        call = np.empty(len(order), dtype=np.int64)
        call[order] = np.cumsum(begins) - 1
        latest = np.full(int(begins.sum()), np.iinfo(np.int64).min)
        np.maximum.at(latest, call, arrival[own])
        delayed[pairs[own]] = latest[call] > arrival[own] + NO_OP_SLACK_NS

    map_steps_of(find, rows, transfers)
    return delayed


def arrival_times(
    trace: Trace, transfers: NDArray[np.int64], group: NDArray[np.integer[Any]]
) -> NDArray[np.int64]:
    """Return the later arrival of each transfer's two ends, by its own worker's clock.

    Neither end leaves before the other has arrived, which bounds the offset between their clocks.
    The offset is 0 if that is within the bounds. Otherwise, if the bounds are tight because each
    end was at some time the last one, it is their middle; else it is the nearer bound.

    Args:
        transfers: Shape (transfers,): operations.
        group: Shape (transfers,): equal for the two ends of one transfer.
    """
    start, end = trace.rows.start[transfers], trace.rows.end[transfers]
    if not len(transfers):
        return start
    rank = trace.rows.rank[transfers].astype(np.int64)
    num_ranks = int(rank.max()) + 1

    def bound(own: slice) -> tuple[NDArray[Any], ...]:
        order = stable_argsort(group[own])
        other = np.empty(len(order), dtype=np.int32)
        other[order[::2]], other[order[1::2]] = order[1::2], order[::2]
        start_ns, end_ns, from_rank = start[own], end[own], rank[own]
        key = from_rank * num_ranks + from_rank[other]
        pair, num = factorize(key)
        keys, bounds = np.empty(num, dtype=np.int64), _no_bounds(num)
        keys[pair] = key
        least = start_ns[other] - end_ns
        shortest = end_ns - start_ns
        _tighten(bounds, pair, (least, -least[other], np.minimum(shortest, shortest[other])))
        return other, pair.astype(np.int32), keys, *bounds

    parts = map_steps_of(bound, trace.rows, transfers)
    of_pair, num = factorize(np.concatenate([part[2] for part in parts]))
    bounds = _no_bounds(num)
    _tighten(bounds, of_pair, [np.concatenate(each) for each in list(zip(*parts, strict=True))[3:]])
    least, most, shortest = bounds
    offset = np.clip(0, least, most)
    tight = (offset != 0) & (most - least <= MAX_CLOCK_BOUND_TRANSFERS * shortest)
    offset[tight] = (least[tight] + most[tight]) // 2
    offset[most < least] = 0  # sends were buffered: there is no bound
    offset = offset[of_pair]
    arrivals, begin, first_pair = [], 0, 0
    for other, pair, keys, *_ in parts:
        own = start[begin : begin + len(other)]
        arrivals.append(np.maximum(own, own[other] - offset[first_pair:][pair]))
        begin, first_pair = begin + len(other), first_pair + len(keys)
    return np.concatenate(arrivals)


def _no_bounds(num: int) -> tuple[NDArray[np.int64], ...]:
    """Return the least and the most offset, and the shortest transfer, of pairs without any."""
    return np.full(num, -MAX_NS), np.full(num, MAX_NS), np.full(num, MAX_NS)


def _tighten(
    bounds: Sequence[NDArray[np.int64]],
    pair: NDArray[np.int64],
    measured: Sequence[NDArray[np.int64]],
) -> None:
    least, most, shortest = bounds
    np.maximum.at(least, pair, measured[0])
    np.minimum.at(most, pair, measured[1])
    np.minimum.at(shortest, pair, measured[2])
