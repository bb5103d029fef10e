"""The operations of a run and what each waits for: what every trace format is turned into."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from ..arrays.grouping import cumcount, sorted_unique
from ..arrays.sorting import stable_argsort

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Operations:
    """Operations of some steps, with their dependencies inside each step.

    Rows are sorted by (step, replica), and within these in an order that two
    steps or replicas of the same structure share; replaying such steps
    together is what makes it fast (`analysis.replay.program`).
    """

    steps: tuple[int, ...]
    """Step numbers, ascending."""

    step: NDArray[np.int32]
    """Shape (ops,): index into ``steps``."""

    replica: NDArray[np.int32]
    """Shape (ops,): data-parallel position, or 0 everywhere when there is no such axis."""

    label: NDArray[np.int64]
    """Shape (ops,): what the operation is; only operations of equal label are ever exchanged."""

    group: NDArray[np.int64]
    """Shape (ops,): the communication instance that it is a member of, or `NO_GROUP`."""

    duration_ns: NDArray[np.float64]
    """Shape (ops,): of a compute operation its duration, of a communication its transfer."""

    gap_ns: NDArray[np.float64]
    """Shape (ops,): how long it began after all that it waits for had ended (launch delay)."""

    start_ns: NDArray[np.int64]
    """Shape (ops,): when it began, as recorded."""

    end_ns: NDArray[np.int64]
    """Shape (ops,): when it ended, as recorded."""

    closes_step: NDArray[np.bool_]
    """Shape (ops,): operations whose last end is the step's end."""

    src: NDArray[np.int64]
    """Shape (edges,): the operation waited for ..."""

    dst: NDArray[np.int64]
    """Shape (edges,): ... by this one of the same step."""

    def __len__(self) -> int:
        return len(self.duration_ns)


def remove_host_operations(
    operations: Operations, on_device: NDArray[np.bool_]
) -> tuple[Operations, NDArray[np.int64]]:
    """Take the operations out that are not on the device.

    Args:
        operations: All of them.
        on_device: Shape (ops,).

    Returns:
        Those on the device, with every path between them kept, and which they were.
    """
    kept = np.flatnonzero(on_device)
    if len(kept) == len(operations):
        return operations, kept
    src, dst = _paths(operations, ~on_device)
    number = np.cumsum(on_device) - 1
    columns = {
        name: getattr(operations, name)[kept]
        for name in ("step", "replica", "label", "group", "duration_ns", "gap_ns",
                     "start_ns", "end_ns", "closes_step")
    }  # fmt: skip
    return replace(operations, **columns, src=number[src], dst=number[dst]), kept


def _paths(
    operations: Operations, host: NDArray[np.bool_]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return edges between device operations that stand for all paths through the host."""
    into = np.flatnonzero(host[operations.dst])
    into = into[stable_argsort(operations.dst[into])]
    before = operations.src[into]
    first = np.searchsorted(operations.dst[into], np.arange(len(operations) + 1))
    src, dst = operations.src, operations.dst
    keep = ~host[dst]
    src, dst = src[keep], dst[keep]
    found_src, found_dst = [src[:0]], [dst[:0]]
    while len(src):
        through = host[src]
        found_src.append(src[~through])
        found_dst.append(dst[~through])
        src, dst = src[through], dst[through]
        num = first[src + 1] - first[src]
        again = np.repeat(np.arange(len(src)), num)
        src, dst = before[first[src][again] + cumcount(again)], dst[again]
        src, dst = _distinct(src, dst, len(operations))
    return np.concatenate(found_src), np.concatenate(found_dst)


def _distinct(
    src: NDArray[np.int64], dst: NDArray[np.int64], num: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    key = sorted_unique(src * num + dst)
    return key // num, key % num
