"""The operations of a device replay: host time taken out, what followed it hung on what preceded.

A host gap takes no time in a device replay. Left in the graph, gaps that some
replicas have and others have not would make replicas of equal work look
unlike, and each would cost a replay of its own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ..arrays.grouping import distinct
from ..arrays.sorting import stable_order
from .operations import positions_in_runs

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .operations import Operations


def without_host(
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
    into = into[stable_order(operations.dst[into])]
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
        src, dst = before[first[src][again] + positions_in_runs(again)], dst[again]
        src, dst = _distinct(src, dst, len(operations))
    return np.concatenate(found_src), np.concatenate(found_dst)


def _distinct(
    src: NDArray[np.int64], dst: NDArray[np.int64], num: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    key = distinct(src * num + dst)
    return key // num, key % num
