"""The functions of `loop` in Python: what they compute, and their use without a C compiler."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..arrays.grouping import NO_GROUP

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .loop import Graph

    Int32s = NDArray[np.int32]
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


def replay(  # noqa: PLR0913 - as the compiled one
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


def replay_alone(  # noqa: PLR0913 - as the compiled one
    graph: Graph,
    low: int,
    high: int,
    recorded: Float64s,
    ideal: Float64s,
    replica: Int32s,
    num_replicas: int,
    own: Float64s,
    others: Float64s,
    /,
) -> None:
    """Replay each replica with its recorded durations while all others are ideal, all at once.

    The replicas must have equal structure. Then the ideal ones of a step are equal, and stand at
    the rows of the recorded one: each row has two ends, and an item of several replicas takes the
    later arrival of both.

    Args:
        graph: The rows.
        low: First position, of a step's first row.
        high: The position after the last, of a step's last row.
        recorded: Shape (rows,), by row, in any unit.
        ideal: Likewise; equal for equal work.
        replica: Shape (rows,), by row: number of the replica, below ``num_replicas``.
        num_replicas: Number of replicas, at least 2.
        own: Shape (high - low,), by position: ends of the recorded replica; filled in.
        others: Likewise of the ideal ones.
    """
    order, first, pred = graph.order.tolist(), graph.first.tolist(), graph.pred.tolist()
    gates = [0.0] * num_replicas
    at = low
    while at < high:
        stop = at + 1
        while not graph.last[stop - 1]:
            stop += 1
        rows = order[at:stop]
        numbers = replica[rows].tolist()
        for ends in (own, others):
            for k in range(at, stop):
                ends[k - low] = _latest(ends, low, pred[first[k] : first[k + 1]])
        is_shared = len(set(numbers)) > 1
        for number in numbers:
            gates[number] = -np.inf
        for k, number in zip(range(at, stop), numbers, strict=True):
            gates[number] = max(gates[number], own[k - low], others[k - low])
        gate, others_gate = (ends[at - low : stop - low].max() for ends in (own, others))
        for k, row, number in zip(range(at, stop), rows, numbers, strict=True):
            own[k - low] = (gates[number] if is_shared else gate) + recorded[row]
            others[k - low] = (gates[number] if is_shared else others_gate) + ideal[row]
        at = stop


def replay_parts(  # noqa: PLR0913 - as the compiled one
    graph: Graph,
    low: int,
    high: int,
    recorded: Float64s,
    ideal: Float64s,
    parts: NDArray[np.uint32],
    closes: NDArray[np.bool_],
    width: int,
    latest: Float64s,
    /,
) -> None:
    """Replay one step in several scenarios, each with the recorded times of some rows.

    Args:
        graph: The rows.
        low: Position of the step's first row.
        high: The position after its last row.
        recorded: Shape (rows,), by row, in any unit.
        ideal: Likewise: the times of all other rows.
        parts: Shape (rows,), by row: bit ``w`` is set if scenario ``w`` has the recorded time.
        closes: Shape (rows,), by row: the step ends when the last of these has ended.
        width: Number of scenarios, at most `loop.MAX_WIDTH`.
        latest: Shape (width,): the step's time in each scenario; filled in.
    """
    ends = np.empty(high - low)
    closing = np.flatnonzero(closes[graph.order[low:high]])
    for number in range(width):
        durations = np.where(parts >> number & 1, recorded, ideal)
        replay(graph, low, high, durations, None, None, ends)
        latest[number] = ends[closing].max(initial=0.0)


def replay_variants(  # noqa: PLR0913 - as the compiled one
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
        width: Number of variants, at most `loop.MAX_WIDTH`.
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


def _latest(ends: Float64s, low: int, predecessors: list[int]) -> float:
    return max((float(ends[k - low]) for k in predecessors), default=0.0)
