"""The functions of `analysis.replay.loop` in Python: what the compiled ones must compute."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from rankscope.analysis.arrays.grouping import NO_GROUP

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from rankscope.analysis.replay.loop import Graph, Intervals

    Int32s = NDArray[np.int32]
    Int64s = NDArray[np.int64]
    UInt8s = NDArray[np.uint8]
    Float64s = NDArray[np.float64]


def sort(graph: Graph, num_groups: int, src: Int32s, dst: Int32s, group: Int32s, /) -> int:
    """Sort rows topologically, and fill in the arrays of a `Graph`.

    A row and all that it makes ready come before the next row that waits for nothing, so the rows
    of a step stay together.

    Args:
        graph: Its arrays are filled in; ``first`` and ``pred``, of zeros, if all rows were sorted.
        num_groups: Number of groups.
        src: Shape (edges,): the row waited for.
        dst: Shape (edges,): the row that waits.
        group: Shape (rows,): its group, or `NO_GROUP`.

    Returns:
        The number of rows sorted; fewer than all if some wait for each other.

    Source:
        Kahn, "Topological sorting of large networks" (1962).
    """
    num_rows, num_edges, order, last, first, pred = graph
    items = _items(group.tolist(), num_groups)
    successors: list[list[int]] = [[] for _ in range(num_rows)]
    missing = [0] * num_rows  # of an item, at its first row
    for source, target in zip(src.tolist(), dst.tolist(), strict=True):
        successors[source].append(items[target][0])
        missing[items[target][0]] += 1
    position = [0] * num_rows
    num_done = 0
    for root in [row for row in range(num_rows) if not missing[row] and items[row][0] == row]:
        queue = [root]
        for item in queue:  # the loop also visits what it appends
            for row in items[item]:
                position[row], order[num_done], last[num_done] = num_done, row, 0
                num_done += 1
            last[num_done - 1] = 1
            for row in items[item]:
                for target in successors[row]:
                    missing[target] -= 1
                    if not missing[target]:
                        queue.append(target)
    if num_done == num_rows and num_edges:
        at = np.array(position, dtype=np.int32)
        by_target = np.argsort(at[dst], kind="stable")
        pred[:] = at[src[by_target]]
        first[1:] = np.cumsum(np.bincount(at[dst], minlength=num_rows))
    return num_done


def _items(group: list[int], num_groups: int) -> list[list[int]]:
    """Return the rows of each row's item."""
    members: list[list[int]] = [[] for _ in range(num_groups)]
    for row, own in enumerate(group):
        if own != NO_GROUP:
            members[own].append(row)
    return [[row] if own == NO_GROUP else members[own] for row, own in enumerate(group)]


def replay(
    graph: Graph,
    low: int,
    high: int,
    duration: Float64s,
    gap: Float64s | None,
    arrivals: Float64s | None,
    ends: Float64s,
    /,
) -> None:
    """Compute the end of each row if its item begins as soon as all that it waits for has ended.

    That is, for an item and its rows::

        arrival[row] = max(end[p] for p in predecessors(row), default=0) + gap[row]
        end[row] = max(arrival[member] for member in item) + duration[row]

    Args:
        graph: The rows.
        low: First position, of a step's first row.
        high: The position after the last, of a step's last row.
        duration: Shape (rows,), by row, in any unit.
        gap: Likewise; None for none.
        arrivals: Shape (high - low,), by position; filled in if it is given.
        ends: Shape (high - low,), by position; filled in.
    """
    order, first, pred = graph.order.tolist(), graph.first.tolist(), graph.pred.tolist()
    at = low
    while at < high:
        stop = at + 1
        while not graph.last[stop - 1]:
            stop += 1
        gate = -np.inf
        for k in range(at, stop):
            arrival = _latest(ends, low, pred[first[k] : first[k + 1]])
            arrival += 0.0 if gap is None else gap[order[k]]
            if arrivals is not None:
                arrivals[k - low] = arrival
            gate = max(gate, arrival)
        for k in range(at, stop):
            ends[k - low] = gate + duration[order[k]]
        at = stop


def replay_parts(
    graph: Graph,
    low: int,
    high: int,
    recorded: Float64s,
    ideal: Float64s,
    parts: NDArray[np.uint32],
    closes: NDArray[np.bool_],
    replica: Int32s | None,
    num_replicas: int,
    width: int,
    latest: Float64s,
    /,
) -> None:
    """Replay one step in several scenarios, each with the recorded times of some rows.

    With ``replica`` each scenario is replayed once per replica, whose rows alone have recorded
    times, all at once: the replicas must have equal structure. Then the ideal ones of a step are
    equal, and are held at the rows of the recorded one: each row has two ends, and an item of
    several replicas takes the later arrival of both.

    Args:
        graph: The rows.
        low: Position of the step's first row.
        high: The position after its last row.
        recorded: Shape (rows,), by row, in any unit.
        ideal: Likewise: the times of all other rows; with replicas equal for equal work.
        parts: Shape (rows,), by row: bit ``w`` is set if scenario ``w`` has the recorded time.
        closes: Shape (rows,), by row: the step ends when the last of these has ended.
        replica: Shape (rows,), by row: number of the replica, below ``num_replicas``; or None.
        num_replicas: Number of replicas; 1 without any.
        width: Number of scenarios, at most `loop.MAX_WIDTH`.
        latest: Shape (width, replicas): the step's time in each scenario; filled in.
    """
    own, others = np.empty((2, high - low))
    rows = graph.order[low:high]
    is_closing = closes[rows].astype(np.bool_)
    for number in range(width):
        durations = np.where(parts >> number & 1, recorded, ideal)
        if replica is None:
            replay(graph, low, high, durations, None, None, own)
            latest[number] = own[is_closing].max(initial=0.0)
            continue
        _replay_alone(graph, low, durations, ideal, replica, own, others)
        latest[number] = 0.0
        ends = np.maximum(own, others)[is_closing]
        np.maximum.at(latest[number], replica[rows][is_closing], ends)


def _replay_alone(
    graph: Graph,
    low: int,
    duration: Float64s,
    ideal: Float64s,
    replica: Int32s,
    own: Float64s,
    others: Float64s,
) -> None:
    """Fill in the ends of the replica that is recorded, and of the ideal ones, by position."""
    order, first, pred = graph.order.tolist(), graph.first.tolist(), graph.pred.tolist()
    at, high = low, low + len(own)
    while at < high:
        stop = at + 1
        while not graph.last[stop - 1]:
            stop += 1
        rows = order[at:stop]
        numbers = replica[rows].tolist()
        for ends in (own, others):
            for k in range(at, stop):
                ends[k - low] = _latest(ends, low, pred[first[k] : first[k + 1]])
        gates = dict.fromkeys(numbers, -np.inf)
        for k, number in zip(range(at, stop), numbers, strict=True):
            gates[number] = max(gates[number], own[k - low], others[k - low])
        gate, others_gate = (ends[at - low : stop - low].max() for ends in (own, others))
        for k, row, number in zip(range(at, stop), rows, numbers, strict=True):
            own[k - low] = (gates[number] if len(gates) > 1 else gate) + duration[row]
            others[k - low] = (gates[number] if len(gates) > 1 else others_gate) + ideal[row]
        at = stop


def replay_variants(
    graph: Graph,
    low: int,
    high: int,
    duration: Float64s,
    gap: Float64s | None,
    ends: Float64s,
    closes: NDArray[np.bool_],
    first: Int32s,
    num_changes: int,
    variant: Int32s,
    new_duration: Float64s,
    new_gap: Float64s | None,
    width: int,
    latest: Float64s,
    /,
) -> None:
    """Replay one step in several variants, each of which has other times of some rows.

    The compiled one replays only the items that end at another time in some variant.

    Args:
        graph: The rows.
        low: Position of the step's first row.
        high: The position after its last row.
        duration: Shape (rows,), by row, in any unit.
        gap: Likewise; None for none.
        ends: Shape (high - low,), by position: ends of the replay without any change.
        closes: Shape (rows,), by row: the step ends when the last of these has ended.
        first: Shape (high - low + 1,): index of the first change of each row from ``low`` on: a
            step's rows are its positions.
        num_changes: Number of changes of these rows.
        variant: Shape (changes,): the variant, below ``width``.
        new_duration: Shape (changes,).
        new_gap: Likewise; None: gaps do not change.
        width: Number of variants.
        latest: Shape (width,): the step's time in each variant; filled in.
    """
    row = np.repeat(np.arange(low, high), np.diff(first))[:num_changes]
    closing = np.flatnonzero(closes[graph.order[low:high]])
    for number in range(width):
        mine = variant == number
        durations, gaps, by_position = duration.copy(), gap, ends.copy()
        durations[row[mine]] = new_duration[mine]
        if gap is not None and new_gap is not None:
            gaps = gap.copy()
            gaps[row[mine]] = new_gap[mine]
        replay(graph, low, high, durations, gaps, None, by_position)
        latest[number] = by_position[closing].max(initial=0.0)


def compare_replicas(
    graph: Graph,
    num_steps: int,
    num_replicas: int,
    first: Int32s,
    label: Int32s,
    group: Int32s,
    _num_groups: int,
    closes: NDArray[np.bool_],
    equal: NDArray[np.bool_],
    /,
) -> None:
    """Find the steps of which each replica has the same operations and dependencies.

    No edge leads from one of them into another, and each group that spans replicas joins the same
    operation of all.

    Args:
        graph: The rows, in the order of (step, replica).
        num_steps: Number of steps.
        num_replicas: Replicas of each step.
        first: Shape (steps x replicas + 1,): first row of each, and the number of rows.
        label: Shape (rows,).
        group: Shape (rows,): the row's group, or `NO_GROUP`.
        closes: Shape (rows,).
        equal: Shape (steps,): whether the replicas have equally many rows; made false for steps
            whose replicas differ.
    """
    position, groups = np.argsort(graph.order), group.tolist()
    for step in np.flatnonzero(equal).tolist():
        borders = first[step * num_replicas : (step + 1) * num_replicas + 1].tolist()
        leads: dict[int, dict[int, int]] = defaultdict(dict)
        for number, (begin, end) in enumerate(pairwise(borders)):
            for row in range(begin, end):
                leads[groups[row]].setdefault(number, row - begin)
        shapes: list[list[Any]] = []
        for number, (begin, end) in enumerate(pairwise(borders)):
            shapes.append([])
            for row in range(begin, end):
                at, found = position[row], leads[groups[row]]
                shape = None if groups[row] == NO_GROUP else (found[number], len(found) > 1)
                sources = graph.order[graph.pred[graph.first[at] : graph.first[at + 1]]]
                equal[step] &= bool(((sources >= begin) & (sources < end)).all())
                equal[step] &= shape is None or len(found) in {1, num_replicas}
                own = sorted((sources - begin).tolist())
                shapes[-1].append((label[row], closes[row], shape, own))
        equal[step] &= all(each == shapes[0] for each in shapes)


def last_members(  # as the compiled one
    num: int, num_groups: int, group: Int32s, start: Int64s, rank: Int32s, last: Int32s, /
) -> None:
    """Find the member of each row's group that began last; of several the lowest rank's.

    Args:
        num: Number of rows.
        num_groups: A bound above all groups.
        group: Shape (rows,): the row's group, or `NO_GROUP`.
        start: Shape (rows,).
        rank: Shape (rows,).
        last: Shape (rows,): the member, the row itself outside any group; filled in.
    """
    best: dict[int, tuple[int, int, int]] = {}
    keys = zip(start.tolist(), (-rank.astype(np.int64)).tolist(), range(num), strict=True)
    for own, key in zip(group.tolist(), keys, strict=True):
        best[own] = max(best.get(own, key), key)
    last[:] = [row if own < 0 else best[own][2] for row, own in enumerate(group.tolist())]


def attribute(
    num: int,
    before: Int32s,
    last: Int32s,
    rank: Int32s,
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
        last: Shape (operations,): `last_members`.
        rank: Shape (operations,), as are all columns up to ``ideal_gap``.
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
        on: Shape (room,): its rank, ascending within each wait; filled in.
        share_ns: Shape (room,): its time, never 0; filled in.

    Returns:
        The wait to go on with, and the number of shares.
    """

    def excess(recorded: Float64s, usual: Float64s) -> list[int]:
        above = recorded - usual
        is_cause = above > np.maximum(min_ratio * usual, min_ns)
        return [int(each) for each in np.where(is_cause, above, 0.0)]

    gaps = excess(gap, ideal_gap)
    own = [late + gaps[member] for late, member in zip(excess(duration, ideal), last, strict=True)]
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
        for at, own_ns in ((member, gaps[member]), *((last[at], ns) for at, ns in causes)):
            shares[int(rank[at])] += min(left, own_ns)
            left -= min(left, own_ns)
        _share_rest(shares, before, last, rank, start, end, member, since - left, stop)
        found = sorted((owner, ns) for owner, ns in shares.items() if ns)
        if num_shares + len(found) > room:
            return number, num_shares
        for owner, ns in found:
            wait_of[num_shares], on[num_shares], share_ns[num_shares] = number, owner, ns
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
    following: Intervals,
    spent: Int64s,
    of_compute: Int32s,
    num_waits: int,
    waited: Int64s,
    of_wait: Int32s,
    /,
) -> None:
    """Fill the steps of each rank with its operations, waits and transfers.

    Each moment belongs to an operation of the rank itself, else to a wait, else to a transfer; of
    two that overlap to the earlier one.

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
        own: Compute and host operations.
        waits: Waits.
        transfers: Communications, from the begin of the transfer.
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
    lists = [_by_rank(each) for each in (own, waits, transfers)]
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
    for number in (2, 1, 0):
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


def _latest(ends: Float64s, low: int, predecessors: list[int]) -> float:
    return max((float(ends[k - low]) for k in predecessors), default=0.0)
