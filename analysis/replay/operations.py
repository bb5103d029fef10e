"""Operations of a run and their dependencies: the form that every trace format is turned into."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ..arrays.grouping import cumcount, sorted_unique
from ..arrays.sorting import stable_argsort

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Operations:
    """Operations of some steps, with their dependencies inside each step.

    Rows are sorted by (step, replica), and within these in an order that is equal for two steps
    or replicas of the same structure: such steps are replayed together
    (`analysis.replay.program`).
    """

    steps: tuple[int, ...]
    """Step numbers, ascending."""

    step: NDArray[np.int32]
    """Shape (ops,): index into ``steps``."""

    replica: NDArray[np.int32]
    """Shape (ops,): data-parallel position; 0 everywhere if there is no such axis."""

    label: NDArray[np.integer[Any]]
    """Shape (ops,): operations of equal label do the same work at different times or ranks."""

    group: NDArray[np.integer[Any]]
    """Shape (ops,): the communication instance that it is a member of, or `NO_GROUP`."""

    duration_ns: NDArray[np.float64]
    """Shape (ops,): the duration of compute, the transfer of communication."""

    gap_ns: NDArray[np.float64]
    """Shape (ops,): launch gap: time from the end of all its dependencies to its start."""

    start_ns: NDArray[np.int64]
    """Shape (ops,): as recorded."""

    end_ns: NDArray[np.int64]
    """Shape (ops,): as recorded."""

    closes_step: NDArray[np.bool_]
    """Shape (ops,): the step ends when the last of these has ended."""

    src: NDArray[np.integer[Any]]
    """Shape (edges,): the operation waited for ..."""

    dst: NDArray[np.integer[Any]]
    """Shape (edges,): ... by this one of the same step."""

    def __len__(self) -> int:
        return len(self.duration_ns)


def remove_host_operations(
    operations: Operations, on_device: NDArray[np.bool_]
) -> tuple[Operations, NDArray[np.int64]]:
    """Return the device operations, with edges that bypass host operations.

    A host gap takes no time in the device replay. If gaps stayed in the graph, a gap that only
    some replicas have would give replicas of equal work different structures, and each structure
    costs a replay of its own.

    Args:
        on_device: Shape (ops,).

    Returns:
        The device operations, with every path between them kept, and their rows.
    """
    kept = np.flatnonzero(on_device)
    if len(kept) == len(operations):
        return operations, kept
    src, dst = _bypass_host(operations, ~on_device)
    number = np.cumsum(on_device) - 1
    columns = {
        name: getattr(operations, name)[kept]
        for name in ("step", "replica", "label", "group", "duration_ns", "gap_ns",
                     "start_ns", "end_ns", "closes_step")
    }  # fmt: skip
    return replace(operations, **columns, src=number[src], dst=number[dst]), kept


def _bypass_host(
    operations: Operations, host: NDArray[np.bool_]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return edges between device operations that replace all paths through host operations."""
    into_host = np.flatnonzero(host[operations.dst])
    into_host = into_host[stable_argsort(operations.dst[into_host])]
    predecessors = operations.src[into_host]
    first = np.searchsorted(operations.dst[into_host], np.arange(len(operations) + 1))
    src, dst = operations.src, operations.dst
    keep = ~host[dst]
    src, dst = src[keep], dst[keep]
    found_src, found_dst = [src[:0]], [dst[:0]]
    while len(src):
        from_host = host[src]
        found_src.append(src[~from_host])
        found_dst.append(dst[~from_host])
        src, dst = src[from_host], dst[from_host]
        num = first[src + 1] - first[src]
        edge = np.repeat(np.arange(len(src)), num)
        src, dst = predecessors[first[src][edge] + cumcount(edge)], dst[edge]
        src, dst = np.divmod(sorted_unique(src * len(operations) + dst), len(operations))
    return np.concatenate(found_src), np.concatenate(found_dst)
