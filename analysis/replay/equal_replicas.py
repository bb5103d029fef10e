"""Steps whose data-parallel replicas have equal structure; reads no durations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..arrays.grouping import NO_GROUP
from ..arrays.sorting import stable_argsort

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .operations import Operations


SLICE_ROWS = 1 << 16
"""Edges that are hashed at once: their temporary columns stay in a processor's cache."""


def find_steps_of_equal_replicas(
    operations: Operations, replica: NDArray[np.int32], num_replicas: int
) -> NDArray[np.bool_]:
    """Find the steps of which each replica has the same operations and dependencies.

    No edge leads from one of them into another, and each group that spans replicas joins the same
    operation of all.

    Args:
        operations: The operations.
        replica: Shape (ops,): the operation's replica, from 0.
        num_replicas: Replicas of each step.

    Returns:
        Shape (steps,).
    """
    subgraph = operations.step * np.int32(num_replicas) + replica
    num_each = np.bincount(subgraph, minlength=len(operations.steps) * num_replicas)
    by_step = num_each.reshape(-1, num_replicas)
    equal: NDArray[np.bool_] = (by_step == by_step[:, :1]).all(axis=1)
    if not equal.any():
        return equal
    # Rows are sorted by (step, replica).
    first = (np.cumsum(num_each) - num_each).astype(np.int32)
    local = np.arange(len(operations), dtype=np.int32) - first[subgraph]
    lead, beyond = _find_leads(operations.group, subgraph, local)
    for step in np.flatnonzero(equal).tolist():
        begin, size = int(first[step * num_replicas]), int(by_step[step].sum())
        for column in (operations.label, lead, beyond, operations.closes_step):
            replicas = column[begin : begin + size].reshape(num_replicas, -1)
            equal[step] &= bool((replicas == replicas[0]).all())
    # The edges of a replica are in any order: the sums of their hashes are equal.
    structure = np.zeros(len(num_each), dtype=np.uint64)
    crosses = np.zeros(len(operations.steps), dtype=np.bool_)
    for begin in range(0, len(operations.src), SLICE_ROWS):
        src, dst = (each[begin : begin + SLICE_ROWS] for each in (operations.src, operations.dst))
        np.add.at(structure, subgraph[dst], _hash_rows(local[src], local[dst]))
        crosses[operations.step[dst[subgraph[src] != subgraph[dst]]]] = True
    structures = structure.reshape(-1, num_replicas)
    equal &= (structures == structures[:, :1]).all(axis=1)
    equal &= ~crosses
    equal[_find_uneven_groups(operations, subgraph, num_replicas, lead, beyond)] = False
    return equal


def _hash_rows(*columns: NDArray[np.integer[Any]] | NDArray[np.bool_]) -> NDArray[np.uint64]:
    """Hash rows of integers to 64 bits (the finaliser of splitmix64, chained)."""
    state = np.zeros(len(columns[0]), dtype=np.uint64)
    with np.errstate(over="ignore"):
        for column in columns:
            state = (state ^ column.astype(np.uint64)) + np.uint64(0x9E3779B97F4A7C15)
            state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            state ^= state >> np.uint64(31)
    return state


def _find_leads(
    group: NDArray[np.integer[Any]], subgraph: NDArray[np.int32], local: NDArray[np.int32]
) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
    """Find the first member of each operation's group.

    Returns:
        Shape (ops,) each: the lowest ``local`` of the operation's group in its own subgraph, -1
        without a group; whether the group has members in other subgraphs.
    """
    lead = np.full(len(group), -1, dtype=np.int32)
    beyond = np.zeros(len(group), dtype=np.bool_)
    members = np.flatnonzero(group != NO_GROUP)
    if not len(members):
        return lead, beyond
    # Rows are sorted by (step, replica), so those of a group are by subgraph, then by `local`.
    ordered = members[stable_argsort(group[members])]
    group, subgraph = group[ordered], subgraph[ordered]
    new_group = np.diff(group, prepend=NO_GROUP) != 0
    begins = np.flatnonzero(new_group | (np.diff(subgraph, prepend=-1) != 0))
    lead[ordered] = np.repeat(local[ordered[begins]], np.diff(np.append(begins, len(ordered))))
    starts = np.flatnonzero(new_group)
    sizes = np.diff(np.append(starts, len(ordered)))
    last = starts + sizes - 1
    beyond[ordered] = np.repeat(subgraph[starts] != subgraph[last], sizes)
    return lead, beyond


def _find_uneven_groups(
    operations: Operations,
    subgraph: NDArray[np.int32],
    num_replicas: int,
    lead: NDArray[np.int32],
    beyond: NDArray[np.bool_],
) -> NDArray[np.int32]:
    """Return steps with a group that spans replicas, but not the same operation of them all."""
    rows = np.flatnonzero(beyond)
    if not len(rows):
        return operations.step[:0]
    rows = rows[stable_argsort(operations.group[rows])]
    group = operations.group[rows]
    starts = np.flatnonzero(np.diff(group, prepend=NO_GROUP))
    lowest = np.minimum.reduceat(lead[rows], starts)
    highest = np.maximum.reduceat(lead[rows], starts)
    new_subgraph = np.diff(group, prepend=NO_GROUP) != 0
    new_subgraph |= np.diff(subgraph[rows], prepend=-1) != 0
    num_subgraphs = np.add.reduceat(new_subgraph.astype(np.int64), starts)
    uneven = (lowest != highest) | (num_subgraphs != num_replicas)
    steps: NDArray[np.int32] = operations.step[rows[starts[uneven]]]
    return steps
