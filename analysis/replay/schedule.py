"""Levels of a dependency graph, and the replay of all its nodes level by level.

One schedule replays many columns at once: steps of equal structure, and replicas
(data-parallel positions) whose own parts are equal. The ends of a node are then one row of a
matrix, and a level of the graph is a handful of numpy calls.
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
"""A node with more predecessors than this is reduced on its own instead of slot by slot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """Nodes ``[first, last)`` of the schedule, which only depend on earlier levels."""

    first: int
    last: int
    slots: tuple[NDArray[np.int64], ...]
    """Slot k: the k-th predecessor of the first ``len(slot)`` nodes after the wide ones."""

    num_roots: int
    """Nodes without a predecessor, at the level's end: they begin at 0."""

    wide: tuple[tuple[int, NDArray[np.int64]], ...]
    """(node, predecessors) of the nodes with more than `NUM_SLOTS`, at the level's begin."""

    across: NDArray[np.int64]
    """Nodes that wait for the same node of every replica."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Graph in replay order. Nodes are numbered by their position in that order."""

    num_nodes: int
    levels: tuple[Level, ...]
    position: NDArray[np.int64]
    """Shape (nodes,): position of each node, by the caller's numbers."""


def order_by_level(
    num_nodes: int,
    src: NDArray[np.int64],
    dst: NDArray[np.int64],
    *,
    across: NDArray[np.bool_],
) -> Schedule:
    """Sort a graph into levels; a node's level is one above its highest predecessor's.

    Args:
        num_nodes: Nodes are numbered ``0 .. num_nodes - 1``.
        src: Shape (edges,): the node waited for.
        dst: Shape (edges,): the node that waits.
        across: Shape (nodes,): whether the node waits for the same node of every replica.

    Raises:
        CycleError: Some nodes depend on each other.
    """
    level = node_levels(num_nodes, src, dst)
    num_unordered = int((level == UNORDERED).sum())
    if num_unordered:
        raise CycleError(num_unordered)
    fan_in = np.bincount(dst, minlength=num_nodes)
    # Within a level: wide nodes first, then by falling fan-in, so that the nodes with a k-th
    # predecessor are always a prefix.
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
    """Return the end of each node if it begins as soon as all its predecessors have ended.

    That is::

        end[n] = max(end[p] for p in predecessors(n), default=0) + durations[n]

    For nodes marked ``across`` the maximum is over all replicas.

    Args:
        schedule: The graph.
        durations: Shape (nodes, replicas, columns) in schedule order, in any unit.

    Returns:
        Ends, in the same shape and unit.
    """
    num_nodes, num_replicas, num_columns = durations.shape
    width = num_replicas * num_columns
    flat = np.ascontiguousarray(durations).reshape(num_nodes, width)
    ends = np.empty_like(flat)
    widest = max((level.last - level.first for level in schedule.levels), default=0)
    begin, buffer = np.empty((widest, width)), np.empty((widest, width))
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
                candidate = buffer[: len(slot)]
                np.take(ends, slot, axis=0, out=candidate, mode="clip")
                np.maximum(target, candidate, out=target)
        if level.num_roots:
            here[num - level.num_roots :] = 0.0
        if len(level.across) and num_replicas > 1:
            rows = here[level.across - level.first].reshape(-1, num_replicas, num_columns)
            latest = np.broadcast_to(rows.max(axis=1, keepdims=True), rows.shape)
            here[level.across - level.first] = latest.reshape(-1, width)
        np.add(here, flat[level.first : level.last], out=ends[level.first : level.last])
    return ends.reshape(durations.shape)


def node_levels(
    num_nodes: int, src: NDArray[np.int64], dst: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return each node's level; `UNORDERED` if it is in a cycle or depends on one.

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
        reached = targets[_concatenate_ranges(first[frontier], first[frontier + 1])]
        np.subtract.at(missing, reached, 1)
        frontier = sorted_unique(reached[missing[reached] == 0])
    return level


def _concatenate_ranges(first: NDArray[np.int64], last: NDArray[np.int64]) -> NDArray[np.int64]:
    """Concatenate ``arange(f, l)`` of each pair."""
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
