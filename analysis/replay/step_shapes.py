"""Cut operations into instances, one a step or one a step and replica, and tell which are alike."""

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
    """One way to cut the operations into instances: by step and replica, or by step."""

    operations: NDArray[np.int64]
    """Shape (ops,): all of them, instance by instance."""

    instance: NDArray[np.int64]
    """Shape (ops,): which instance each is of."""

    local: NDArray[np.int64]
    """Shape (ops,): its number in its instance."""

    first: NDArray[np.int64]
    """Shape (instances + 1,): where each instance begins in ``operations``."""

    num_replicas: int
    """Of each step; 1 where an instance is a whole step."""

    lead: NDArray[np.int64]
    """Each operation's lead: the lowest local member of its group in its own instance, -1 without
    a group."""

    beyond: NDArray[np.bool_]
    """Whether an operation's group reaches beyond its instance."""


def partition_operations(
    operations: Operations, replica: NDArray[np.int64], num_replicas: int
) -> Partition:
    """Cut operations into instances.

    Args:
        operations: Of any steps.
        replica: Shape (ops,): each one's replica, from 0.
        num_replicas: Of each step.
    """
    instance = operations.step.astype(np.int64) * num_replicas + replica
    order = stable_argsort(instance)
    num_instances = len(operations.steps) * num_replicas
    first = np.concatenate(([0], np.cumsum(np.bincount(instance, minlength=num_instances))))
    local = np.empty(len(operations), dtype=np.int64)
    local[order] = np.arange(len(operations)) - first[instance[order]]
    lead, beyond = _find_leads(operations.group, instance, local)
    return Partition(order, instance, local, first, num_replicas, lead, beyond)


def _hash_rows(*parts: NDArray[np.int64] | NDArray[np.bool_]) -> NDArray[np.uint64]:
    """Hash rows of integers to 64 bits (the finaliser of splitmix64, chained)."""
    state = np.zeros(len(parts[0]), dtype=np.uint64)
    with np.errstate(over="ignore"):
        for part in parts:
            state = (state ^ part.astype(np.uint64)) + np.uint64(0x9E3779B97F4A7C15)
            state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            state ^= state >> np.uint64(31)
    return state


def _find_leads(
    group: NDArray[np.int64], instance: NDArray[np.int64], local: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return each operation's lead, and whether its group reaches beyond its instance."""
    lead = np.full(len(group), -1, dtype=np.int64)
    beyond = np.zeros(len(group), dtype=np.bool_)
    members = np.flatnonzero(group != NO_GROUP)
    if not len(members):
        return lead, beyond
    ordered = members[argsort_rows(group[members], instance[members], local[members])]
    group, instance = group[ordered], instance[ordered]
    new_group = np.diff(group, prepend=NO_GROUP) != 0
    begins = np.flatnonzero(new_group | (np.diff(instance, prepend=-1) != 0))
    lead[ordered] = np.repeat(local[ordered[begins]], np.diff(np.append(begins, len(ordered))))
    starts = np.flatnonzero(new_group)
    sizes = np.diff(np.append(starts, len(ordered)))
    last = starts + sizes - 1
    beyond[ordered] = np.repeat(instance[starts] != instance[last], sizes)
    return lead, beyond


def hash_structures(
    operations: Operations, frame: Partition
) -> tuple[NDArray[np.uint64], NDArray[np.bool_]]:
    """Hash each instance's structure; tell which steps may be cut into replicas at all.

    Args:
        operations: As they were cut.
        frame: The cut.

    Returns:
        Shape (instances,), equal for instances of equal structure; and shape (steps,).
    """
    num_instances = len(frame.first) - 1
    signature = np.zeros(num_instances, dtype=np.uint64)
    per_node = _hash_rows(
        frame.local, operations.label, frame.lead, frame.beyond, operations.closes_step
    )
    per_edge = _hash_rows(frame.local[operations.src], frame.local[operations.dst])
    with np.errstate(over="ignore"):
        np.add.at(signature, frame.instance, per_node)
        np.add.at(signature, frame.instance[operations.dst], per_edge)
    fits = np.ones(len(operations.steps), dtype=np.bool_)
    crossing = frame.instance[operations.src] != frame.instance[operations.dst]
    fits[operations.step[operations.dst[crossing]]] = False
    fits[_find_steps_with_uneven_groups(operations, frame)] = False
    return signature, fits


def _find_steps_with_uneven_groups(operations: Operations, frame: Partition) -> NDArray[np.int32]:
    """Find steps with a group that joins several replicas, but not the same nodes of them all."""
    rows = np.flatnonzero(frame.beyond)
    if not len(rows):
        return operations.step[:0]
    rows = rows[argsort_rows(operations.group[rows], frame.instance[rows])]
    group = operations.group[rows]
    starts = np.flatnonzero(np.diff(group, prepend=NO_GROUP))
    lowest = np.minimum.reduceat(frame.lead[rows], starts)
    highest = np.maximum.reduceat(frame.lead[rows], starts)
    new_instance = np.diff(group, prepend=NO_GROUP) != 0
    new_instance |= np.diff(frame.instance[rows], prepend=-1) != 0
    num_instances = np.add.reduceat(new_instance.astype(np.int64), starts)
    uneven = (lowest != highest) | (num_instances != frame.num_replicas)
    steps: NDArray[np.int32] = operations.step[rows[starts[uneven]]]
    return steps
