"""Who waits, how much, and on whom: followed to the rank that made it wait."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from analysis.intervals import Line
from analysis.report import Starved, WaitsOn

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_HOPS = 64
"""A chain of waits longer than this ends where it stands; pipelines are shorter."""

LEAST_RATIO = 0.01
"""Ranks that wait less of a step than this are not listed."""

MOST_CULPRITS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitIntervals:
    """When a rank stood waiting for another one that had not yet arrived.

    Intervals of one rank do not overlap.
    """

    rank: NDArray[np.int32]
    """Who waits ..."""

    on_rank: NDArray[np.int32]
    """... for whom."""

    start_ns: NDArray[np.int64]
    end_ns: NDArray[np.int64]


def root_waits(waits: WaitIntervals) -> WaitIntervals:
    """Follow each wait to its root.

    While rank A waits for B, B either works, and A waits on B, or B itself
    waits for C, and for that time A waits on C; and so on.

    Args:
        waits: Direct waits.

    Returns:
        Waits on the rank that worked meanwhile. Their lengths sum to the
        direct ones', rank by rank.
    """
    if not len(waits.rank):
        return waits
    everyone = np.concatenate((waits.rank, waits.on_rank))
    line = Line.over(everyone, np.tile(waits.start_ns, 2), np.tile(waits.end_ns, 2))
    at = line.place(waits.rank, waits.start_ns)
    order = np.argsort(at)
    table = (at[order], (at + waits.end_ns - waits.start_ns)[order], waits.on_rank[order])
    open_, done = waits, []
    for _ in range(MAX_HOPS):
        working, open_ = _one_hop(open_, line, table)
        done.append(working)
        if not len(open_.rank):
            break
    return _joined([*done, open_])


def starved_ranks(waits: WaitIntervals, total_ns: dict[int, int]) -> tuple[Starved, ...]:
    """List the ranks that wait, the one that waits most first.

    Args:
        waits: Direct waits of whole steps.
        total_ns: Time of these steps by rank.
    """
    root = root_waits(waits)
    length = root.end_ns - root.start_ns
    pairs, index = np.unique(
        np.stack((root.rank, root.on_rank), axis=1).reshape(-1, 2), axis=0, return_inverse=True
    )
    sums = np.bincount(index.reshape(-1), weights=length, minlength=len(pairs))
    by_rank: dict[int, list[WaitsOn]] = {}
    for (rank, on), waited in zip(pairs.tolist(), sums.tolist(), strict=True):
        by_rank.setdefault(rank, []).append(WaitsOn(rank=on, ratio=waited / total_ns[rank]))
    starved = [
        Starved(
            rank=rank,
            wait_ratio=sum(part.ratio for part in parts),
            waits_on=tuple(sorted(parts, key=lambda part: -part.ratio)[:MOST_CULPRITS]),
        )
        for rank, parts in by_rank.items()
    ]
    starved = [entry for entry in starved if entry.wait_ratio >= LEAST_RATIO]
    return tuple(sorted(starved, key=lambda entry: (-entry.wait_ratio, entry.rank)))


def _one_hop(
    waits: WaitIntervals,
    line: Line,
    table: tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int32]],
) -> tuple[WaitIntervals, WaitIntervals]:
    """Split each wait into the time its culprit worked, and the time it waited itself."""
    starts, ends, on = table
    begin = line.place(waits.on_rank, waits.start_ns)
    end = begin + waits.end_ns - waits.start_ns
    first = np.searchsorted(ends, begin, side="right")
    last = np.searchsorted(starts, end, side="left")
    num = np.maximum(last - first, 0)
    wait = np.repeat(np.arange(len(num)), num)
    nth = np.arange(len(wait)) - np.repeat(np.cumsum(num) - num, num)
    other = first[wait] + nth
    cut_begin = np.maximum(starts[other], begin[wait])
    cut_end = np.minimum(ends[other], end[wait])
    shift = waits.start_ns[wait] - begin[wait]
    passed_on = WaitIntervals(
        rank=waits.rank[wait],
        on_rank=on[other],
        start_ns=cut_begin + shift,
        end_ns=cut_end + shift,
    )
    # What is left of each wait lies before, between and after the culprit's own waits.
    left_begin = np.concatenate((begin, cut_end))
    owner = np.concatenate((np.arange(len(begin)), wait))
    order = np.lexsort((left_begin, owner))
    left_begin, owner = left_begin[order], owner[order]
    next_cut = np.lexsort((cut_begin, wait))
    left_end = np.empty_like(left_begin)
    is_last = np.append(owner[1:] != owner[:-1], True)
    left_end[is_last] = end[owner[is_last]]
    left_end[~is_last] = cut_begin[next_cut]
    real = left_end > left_begin
    owner, left_begin, left_end = owner[real], left_begin[real], left_end[real]
    shift = waits.start_ns[owner] - begin[owner]
    working = WaitIntervals(
        rank=waits.rank[owner],
        on_rank=waits.on_rank[owner],
        start_ns=left_begin + shift,
        end_ns=left_end + shift,
    )
    return working, passed_on


def _joined(parts: list[WaitIntervals]) -> WaitIntervals:
    return WaitIntervals(
        rank=np.concatenate([part.rank for part in parts]),
        on_rank=np.concatenate([part.on_rank for part in parts]),
        start_ns=np.concatenate([part.start_ns for part in parts]),
        end_ns=np.concatenate([part.end_ns for part in parts]),
    )
