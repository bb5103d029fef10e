"""Order the nodes of a dependency graph by level, and replay it.

One schedule serves many *lanes* at once: steps of equal structure, and
replicas (data-parallel positions) whose own parts look alike. A node's end is
then one row of a matrix, and a level of the graph is a handful of numpy calls.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from ..arrays.grouping import sorted_unique
from ..arrays.sorting import argsort_rows, stable_argsort
from ..trace.errors import CycleError

if TYPE_CHECKING:
    from numpy.typing import NDArray

UNORDERED = -1
NUM_SLOTS = 16
"""Nodes with more predecessors than this are reduced one by one instead of slot by slot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """Nodes ``[first, last)`` of the schedule, which depend on earlier levels only."""

    first: int
    last: int
    slots: tuple[NDArray[np.int64], ...]
    """Slot k: the k-th predecessor of the level's first ``len(slot)`` nodes with any."""

    num_roots: int
    """Nodes at the level's end without a predecessor: they begin at 0."""

    wide: tuple[tuple[int, NDArray[np.int64]], ...]
    """(node, predecessors) of the nodes with more than `NUM_SLOTS`; they follow the slotted."""

    across: NDArray[np.int64]
    """Nodes of the level that wait for the same node of every replica."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A graph in replay order. Node numbers are positions in that order."""

    num_nodes: int
    levels: tuple[Level, ...]
    position: NDArray[np.int64]
    """Shape (nodes,): position in the schedule of each node as the caller numbered it."""


def order_by_level(
    num_nodes: int,
    src: NDArray[np.int64],
    dst: NDArray[np.int64],
    *,
    across: NDArray[np.bool_],
) -> Schedule:
    """Sort a graph into levels: a node's level is one above its highest predecessor's.

    Args:
        num_nodes: Nodes are numbered ``0 .. num_nodes - 1``.
        src: Shape (edges,): the node waited for.
        dst: Shape (edges,): the node that waits.
        across: Shape (nodes,): nodes that wait for the same node of every replica.

    Raises:
        CycleError: Some nodes wait for each other.
    """
    level = _acyclic_levels(num_nodes, src, dst)
    fan_in = np.bincount(dst, minlength=num_nodes)
    # Within a level: wide nodes first, then by falling fan-in, so that the nodes
    # which have a k-th predecessor are always a prefix.
    order = argsort_rows(level, -fan_in)
    position = np.empty(num_nodes, dtype=np.int64)
    position[order] = np.arange(num_nodes)
    sources = position[src[stable_argsort(position[dst])]]
    first_edge = np.concatenate(([0], np.cumsum(fan_in[order])))
    borders = np.concatenate(([0], np.cumsum(np.bincount(level))))
    across = across[order]
    levels = tuple(
        _level(first, last, first_edge, sources, across)
        for first, last in pairwise(borders.tolist())
    )
    return Schedule(num_nodes=num_nodes, levels=levels, position=position)


def replay(schedule: Schedule, durations: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return when each node ends if it begins as soon as all that it waits for has ended.

    That is::

        end[n] = max(end[p] for p before n) + durations[n]      (0 where nothing is before n)

    Nodes marked ``across`` take that maximum over all replicas.

    Args:
        schedule: The graph.
        durations: Shape (nodes, replicas, lanes) in schedule order, any unit.

    Returns:
        Ends, same shape and unit, the graph's roots beginning at 0.
    """
    num_nodes, num_replicas, num_lanes = durations.shape
    width = num_replicas * num_lanes
    flat = np.ascontiguousarray(durations).reshape(num_nodes, width)
    ends = np.empty_like(flat)
    widest = max((level.last - level.first for level in schedule.levels), default=0)
    begin, other = np.empty((widest, width)), np.empty((widest, width))
    for level in schedule.levels:
        num = level.last - level.first
        here = begin[:num]
        num_wide = len(level.wide)
        for node, sources in level.wide:
            np.max(ends[sources], axis=0, out=here[node - level.first])
        for k, slot in enumerate(level.slots):
            target = here[num_wide : num_wide + len(slot)]
            if k == 0:
                np.take(ends, slot, axis=0, out=target, mode="clip")
            else:
                again = other[: len(slot)]
                np.take(ends, slot, axis=0, out=again, mode="clip")
                np.maximum(target, again, out=target)
        if level.num_roots:
            here[num - level.num_roots :] = 0.0
        if len(level.across) and num_replicas > 1:
            rows = here[level.across - level.first].reshape(-1, num_replicas, num_lanes)
            latest = np.broadcast_to(rows.max(axis=1, keepdims=True), rows.shape)
            here[level.across - level.first] = latest.reshape(-1, width)
        np.add(here, flat[level.first : level.last], out=ends[level.first : level.last])
    return ends.reshape(durations.shape)


def _acyclic_levels(
    num_nodes: int, src: NDArray[np.int64], dst: NDArray[np.int64]
) -> NDArray[np.int64]:
    level = node_levels(num_nodes, src, dst)
    num_circling = int((level == UNORDERED).sum())
    if num_circling:
        raise CycleError(num_circling)
    return level


def node_levels(
    num_nodes: int, src: NDArray[np.int64], dst: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return each node's level, `UNORDERED` where it is in a circle or behind one.

    Source:
        Kahn, "Topological sorting of large networks" (1962), a whole frontier at a time.
    """
    level = np.full(num_nodes, UNORDERED, dtype=np.int64)
    missing = np.bincount(dst, minlength=num_nodes)
    targets = dst[stable_argsort(src)]
    first = np.concatenate(([0], np.cumsum(np.bincount(src, minlength=num_nodes))))
    frontier = np.flatnonzero(missing == 0)
    depth = 0
    while len(frontier):
        level[frontier] = depth
        depth += 1
        reached = targets[_concatenated_ranges(first[frontier], first[frontier + 1])]
        np.subtract.at(missing, reached, 1)
        frontier = sorted_unique(reached[missing[reached] == 0])
    return level


def _concatenated_ranges(first: NDArray[np.int64], last: NDArray[np.int64]) -> NDArray[np.int64]:
    """Concatenate ``arange(f, l)`` for each pair."""
    counts = last - first
    total = int(counts.sum())
    offsets = np.repeat(np.cumsum(counts) - counts, counts)
    ranges: NDArray[np.int64] = np.repeat(first, counts) + np.arange(total) - offsets
    return ranges


def _level(
    first: int,
    last: int,
    first_edge: NDArray[np.int64],
    sources: NDArray[np.int64],
    across: NDArray[np.bool_],
) -> Level:
    fan_in = np.diff(first_edge[first : last + 1])
    num_wide = int((fan_in > NUM_SLOTS).sum())
    num_roots = int((fan_in == 0).sum())
    slots = []
    for k in range(int(fan_in[num_wide:].max(initial=0))):
        nodes = first + num_wide + np.arange(int((fan_in[num_wide:] > k).sum()))
        slots.append(sources[first_edge[nodes] + k])
    wide = tuple(
        (node, sources[first_edge[node] : first_edge[node + 1]])
        for node in range(first, first + num_wide)
    )
    return Level(
        first=first,
        last=last,
        slots=tuple(slots),
        num_roots=num_roots,
        wide=wide,
        across=first + np.flatnonzero(across[first:last]),
    )
