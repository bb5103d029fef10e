"""Subgraphs of a run's operations, and which of them have equal structure.

A subgraph is a whole step, or one replica's share of a step. `program` compiles and replays
them; this module only compares structures and reads no durations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..arrays.grouping import NO_GROUP
from ..arrays.sorting import argsort_rows, stable_argsort

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .operations import Operations


@dataclass(frozen=True, slots=True)
class Partition:
    """Operations divided into subgraphs: by step and replica, or by step."""

    operations: NDArray[np.int64]
    """Shape (ops,): rows of the operations, subgraph by subgraph."""

    subgraph: NDArray[np.int64]
    """Shape (ops,): the operation's subgraph."""

    local: NDArray[np.int64]
    """Shape (ops,): the operation's number in its subgraph."""

    first: NDArray[np.int64]
    """Shape (subgraphs + 1,): index of each subgraph's first row in ``operations``."""

    num_replicas: int
    """Subgraphs of each step; 1 if a subgraph is a whole step."""

    lead: NDArray[np.int64]
    """Shape (ops,): the lowest ``local`` of the operation's group in its own subgraph; -1 without
    a group."""

    beyond: NDArray[np.bool_]
    """Shape (ops,): whether the operation's group has members in other subgraphs."""


def partition_operations(
    operations: Operations, replica: NDArray[np.int64], num_replicas: int
) -> Partition:
    """Divide operations into subgraphs.

    Args:
        operations: Operations of any steps.
        replica: Shape (ops,): the operation's replica, from 0.
        num_replicas: Replicas of each step.
    """
    subgraph = operations.step.astype(np.int64) * num_replicas + replica
    order = stable_argsort(subgraph)
    num_subgraphs = len(operations.steps) * num_replicas
    first = np.concatenate(([0], np.cumsum(np.bincount(subgraph, minlength=num_subgraphs))))
    local = np.empty(len(operations), dtype=np.int64)
    local[order] = np.arange(len(operations)) - first[subgraph[order]]
    lead, beyond = _find_leads(operations.group, subgraph, local)
    return Partition(order, subgraph, local, first, num_replicas, lead, beyond)


def _hash_rows(*columns: NDArray[np.int64] | NDArray[np.bool_]) -> NDArray[np.uint64]:
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
    group: NDArray[np.int64], subgraph: NDArray[np.int64], local: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return ``lead`` and ``beyond`` of a `Partition`."""
    lead = np.full(len(group), -1, dtype=np.int64)
    beyond = np.zeros(len(group), dtype=np.bool_)
    members = np.flatnonzero(group != NO_GROUP)
    if not len(members):
        return lead, beyond
    ordered = members[argsort_rows(group[members], subgraph[members], local[members])]
    group, subgraph = group[ordered], subgraph[ordered]
    new_group = np.diff(group, prepend=NO_GROUP) != 0
    begins = np.flatnonzero(new_group | (np.diff(subgraph, prepend=-1) != 0))
    lead[ordered] = np.repeat(local[ordered[begins]], np.diff(np.append(begins, len(ordered))))
    starts = np.flatnonzero(new_group)
    sizes = np.diff(np.append(starts, len(ordered)))
    last = starts + sizes - 1
    beyond[ordered] = np.repeat(subgraph[starts] != subgraph[last], sizes)
    return lead, beyond


def hash_structures(
    operations: Operations, partition: Partition
) -> tuple[NDArray[np.uint64], NDArray[np.bool_]]:
    """Hash each subgraph's structure, and check which steps can be divided into replicas.

    A step can be divided if no edge leads from one subgraph into another, and if each group that
    spans subgraphs joins the same operation of all replicas.

    Args:
        operations: The operations.
        partition: Their subgraphs.

    Returns:
        Shape (subgraphs,): equal for subgraphs of equal structure; shape (steps,): whether the
        step can be divided.
    """
    num_subgraphs = len(partition.first) - 1
    structure = np.zeros(num_subgraphs, dtype=np.uint64)
    per_node = _hash_rows(
        partition.local, operations.label, partition.lead, partition.beyond, operations.closes_step
    )
    per_edge = _hash_rows(partition.local[operations.src], partition.local[operations.dst])
    with np.errstate(over="ignore"):
        np.add.at(structure, partition.subgraph, per_node)
        np.add.at(structure, partition.subgraph[operations.dst], per_edge)
    divides = np.ones(len(operations.steps), dtype=np.bool_)
    crossing = partition.subgraph[operations.src] != partition.subgraph[operations.dst]
    divides[operations.step[operations.dst[crossing]]] = False
    divides[_find_steps_with_uneven_groups(operations, partition)] = False
    return structure, divides


def _find_steps_with_uneven_groups(
    operations: Operations, partition: Partition
) -> NDArray[np.int32]:
    """Return steps with a group that spans replicas, but not the same operation of them all."""
    rows = np.flatnonzero(partition.beyond)
    if not len(rows):
        return operations.step[:0]
    rows = rows[argsort_rows(operations.group[rows], partition.subgraph[rows])]
    group = operations.group[rows]
    starts = np.flatnonzero(np.diff(group, prepend=NO_GROUP))
    lowest = np.minimum.reduceat(partition.lead[rows], starts)
    highest = np.maximum.reduceat(partition.lead[rows], starts)
    new_subgraph = np.diff(group, prepend=NO_GROUP) != 0
    new_subgraph |= np.diff(partition.subgraph[rows], prepend=-1) != 0
    num_subgraphs = np.add.reduceat(new_subgraph.astype(np.int64), starts)
    uneven = (lowest != highest) | (num_subgraphs != partition.num_replicas)
    steps: NDArray[np.int32] = operations.step[rows[starts[uneven]]]
    return steps
