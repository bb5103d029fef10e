"""The long functions of `analysis.replay.loop` in Python: what the compiled ones must compute."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from rankscope.analysis.replay.loop import Intervals

    Int32s = NDArray[np.int32]
    Int64s = NDArray[np.int64]
    UInt8s = NDArray[np.uint8]
    Float64s = NDArray[np.float64]


def attribute(
    num: int,
    before: Int32s,
    last: Int32s,
    rank: Int32s,
    owner: Int32s,
    start: Int64s,
    end: Int64s,
    duration: Float64s,
    ideal: Float64s,
    gap: Float64s,
    ideal_gap: Float64s,
    num_waits: int,
    wait: int,
    operation: Int32s,
    begin: Int64s,
    until: Int64s,
    min_ratio: float,
    min_ns: float,
    max_hops: int,
    room: int,
    wait_of: Int32s,
    on: Int32s,
    share_ns: Int64s,
    /,
) -> tuple[int, int]:
    """Attribute waits to ranks, by a walk back in time; see `analysis.breakdown.starved`.

    Args:
        num: Number of operations.
        before: Shape (operations,): the one that each followed, or -1.
        last: Shape (operations,): the member of its group that began last.
        rank: Shape (operations,), as are all columns up to ``ideal_gap``.
        owner: The rank or link that an operation's duration above its ideal is charged to.
        start: As recorded.
        end: As recorded.
        duration: As recorded.
        ideal: Ideal durations.
        gap: Launch gaps, as recorded.
        ideal_gap: Ideal launch gaps.
        num_waits: Number of waits.
        wait: The first wait to attribute.
        operation: Shape (waits,): the operation that waits.
        begin: Shape (waits,).
        until: Shape (waits,): its end.
        min_ratio: Share of its ideal from which time above it is excess ...
        min_ns: ... and least excess, in ns.
        max_hops: Operations with excess that a walk visits.
        room: Number of shares that can be filled in; at least as many as there are ranks.
        wait_of: Shape (room,): the wait of each share, ascending; filled in.
        on: Shape (room,): its rank or link, ascending within each wait; filled in.
        share_ns: Shape (room,): its time, never 0; filled in.

    Returns:
        The wait to go on with, and the number of shares.
    """

    def excess(recorded: Float64s, usual: Float64s) -> list[int]:
        above = recorded - usual
        is_cause = above > np.maximum(min_ratio * usual, min_ns)
        return [int(each) for each in np.where(is_cause, above, 0.0)]

    gaps, above = excess(gap, ideal_gap), excess(duration, ideal)
    own = [late + gaps[member] for late, member in zip(above, last, strict=True)]
    chains = _Chains(own, [int(before[member]) for member in last])
    num_shares = 0
    for number in range(wait, num_waits):
        shares: dict[int, int] = defaultdict(int)
        since, stop = int(begin[number]), int(until[number])
        member, waiting = int(last[operation[number]]), int(operation[number])
        caused = gaps[member] + chains.sum(int(before[member]))
        caused -= gaps[waiting] + chains.sum(int(before[waiting]))
        left = min(max(caused, 0), stop - since)
        since += left
        causes = chains.follow(int(before[member]), max_hops)
        charged = [(int(rank[member]), gaps[member])]
        for at, _ in causes:
            charged += [(int(owner[at]), above[at]), (int(rank[last[at]]), gaps[last[at]])]
        for culprit, own_ns in charged:
            shares[culprit] += min(left, own_ns)
            left -= min(left, own_ns)
        _share_rest(shares, before, last, rank, start, end, member, since - left, stop)
        found = sorted((culprit, ns) for culprit, ns in shares.items() if ns)
        if num_shares + len(found) > room:
            return number, num_shares
        for culprit, ns in found:
            wait_of[num_shares], on[num_shares], share_ns[num_shares] = number, culprit, ns
            num_shares += 1
    return num_waits, num_shares


class _Chains:
    """Sums of excess over each operation and all before it.

    Args:
        own: Shape (operations,): excess.
        parent: Shape (operations,): the operation before each, or -1.
    """

    def __init__(self, own: list[int], parent: list[int]) -> None:
        self._own, self._parent = own, parent
        self._sum, self._source = {-1: 0}, {-1: -1}

    def sum(self, row: int) -> int:
        """Return the excess of an operation and of all before it."""
        path = []
        while row not in self._sum:
            path.append(row)
            self._sum[row], self._source[row] = 0, -1  # a cycle ends here
            row = self._parent[row]
        for after in reversed(path):
            self._sum[after] = self._own[after] + self._sum[row]
            self._source[after] = after if self._own[after] else self._source[row]
            row = after
        return self._sum[row]

    def follow(self, row: int, max_hops: int) -> Iterator[tuple[int, int]]:
        """Yield an operation and those before it that have excess, and that."""
        for _ in range(max_hops):
            row = self._source[row]
            if row < 0:
                return
            yield row, self._own[row]
            row = self._parent[row]


def _share_rest(
    shares: dict[int, int],
    before: Int32s,
    last: Int32s,
    rank: Int32s,
    start: Int64s,
    end: Int64s,
    member: int,
    since: int,
    stop: int,
) -> None:
    """Share a stretch of time among what a member followed on, and what was before that."""
    at, owner, mark, hops, limit = int(before[member]), int(rank[member]), -1, 0, 1
    while True:
        done = min(since if at < 0 else max(int(end[at]), since), stop)
        shares[owner] += stop - done
        if at < 0 or done <= since:
            return
        member = int(last[at])
        owner = int(rank[member])
        began = min(max(int(start[member]), since), done)
        shares[owner] += done - began
        hops += 1
        if began < stop:
            mark, hops, limit = -1, 0, 1
        elif at == mark:  # a cycle (Brent's method): clocks contradict each other
            shares[owner] += stop - since
            return
        elif hops == limit:
            mark, hops, limit = at, 0, 2 * limit
        stop, at = began, int(before[member])


def fill(
    num_steps: int,
    rank: Int32s,
    step: Int32s,
    start: Int64s,
    end: Int64s,
    num: int,
    kind: NDArray[np.int16],
    step_of: Int32s,
    num_kinds: int,
    is_compute: UInt8s,
    is_launched: UInt8s,
    own: Intervals,
    waits: Intervals,
    transfers: Intervals,
    idle: Intervals,
    following: Intervals,
    spent: Int64s,
    of_compute: Int32s,
    num_waits: int,
    waited: Int64s,
    of_wait: Int32s,
    /,
) -> None:
    """Fill the steps of each rank with its operations, waits and transfers.

    Each moment belongs to an operation of the rank itself, else to a wait, else to a transfer, else
    to idle time; of two that overlap to the earlier one.

    Args:
        num_steps: Number of (rank, step).
        rank: Shape (rank steps,), ascending, as are the starts of each rank.
        step: Shape (rank steps,).
        start: Shape (rank steps,).
        end: Shape (rank steps,). Of steps of one rank that overlap, the later one is cut.
        num: Number of operations.
        kind: Shape (operations,): a number below ``num_kinds``.
        step_of: Shape (operations,).
        num_kinds: Number of kinds.
        is_compute: Shape (kinds,).
        is_launched: Shape (kinds,).
        own: Compute and host operations that are not ``idle``.
        waits: Waits.
        transfers: Communications, from the begin of the transfer.
        idle: Operations in which a device had nothing to do.
        following: Operations; time in which a rank does nothing is known from the next of them in
            the step.
        spent: Shape (2, rank steps, kinds + 3): time before the first compute of the step, and from
            it on: of the rank's own operations by kind, in transfers, in nothing before an
            operation that was launched, and in nothing else; added to.
        of_compute: Shape (operations,): the last rank step that each compute fills; filled in.
        num_waits: Number of waits.
        waited: Shape (waits,): the part of each wait in which the rank did nothing of its own;
            added to.
        of_wait: Shape (waits,): the last rank step that each wait fills; filled in.
    """
    lists = [_by_rank(each) for each in (own, waits, transfers, idle)]
    next_of = _by_rank(following)
    reach: dict[int, int] = {}
    rank_steps = zip(rank.tolist(), start.tolist(), end.tolist(), strict=True)
    for s, (of, first, stop) in enumerate(rank_steps):
        now, reach[of] = max(first, reach.get(of, first)), max(stop, reach.get(of, stop))
        has_computed = 0
        while now < stop:
            until, owner, row = _find_owner([each[of] for each in lists], now, stop)
            column = num_kinds
            if owner == 0:
                column = int(kind[row])
                if is_compute[column]:
                    of_compute[row], has_computed = s, 1
            elif owner == 3:
                column = int(kind[row])
            elif owner == 1:
                waited[row] += until - now
                of_wait[row] = s
            elif owner is None:
                after = next_of[of]
                while after and after[-1][0] < until:
                    after.pop()
                is_known = bool(after) and step_of[after[-1][2]] == step[s]
                column += 1 if is_known and is_launched[kind[after[-1][2]]] else 2
            if owner != 1:
                spent[has_computed, s, column] += until - now
            now = until


def _find_owner(
    lists: list[list[tuple[int, int, int]]], now: int, stop: int
) -> tuple[int, int | None, int]:
    """Return until when a moment's owner remains, which list it is in, and its row."""
    until, owner, row = stop, None, -1
    for number in reversed(range(len(lists))):
        left = lists[number]
        while left and left[-1][1] <= max(now, left[-1][0]):
            left.pop()
        if left:
            begin, last, found = left[-1]
            until = min(until, begin if begin > now else last)
            owner, row = (number, found) if begin <= now else (owner, row)
    return until, owner, row


def _by_rank(intervals: Intervals) -> defaultdict[int, list[tuple[int, int, int]]]:
    """Return (start, end, row) of the intervals of each rank, the first one last."""
    found = defaultdict[int, list[tuple[int, int, int]]](list)
    for row in intervals.row[::-1].tolist():
        times = int(intervals.start[row]), int(intervals.end[row]), row
        found[int(intervals.rank[row])].append(times)
    return found
