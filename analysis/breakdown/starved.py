"""Starved ranks: how long each rank waits, and which rank or link caused it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ..arrays.grouping import factorize
from ..arrays.intervals import Line
from ..arrays.sorting import argsort_rows, stable_argsort
from ..replay import loop
from ..replay.model import NO_LINK, last_members, split_by_time
from ..report.report import Starved, WaitsOn

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

    from ..replay.model import ReplayModel, WaitIntervals

    _Part = tuple[NDArray[np.integer[Any]], NDArray[np.integer[Any]], NDArray[np.int64]]
    """Waits, the ranks or links on which they do, and how long."""

NO_OPERATION = -1

MIN_WAIT_RATIO = 0.01
"""Share of a step that a rank must wait to be listed."""

MAX_CULPRITS = 8
"""Ranks and links that the entry of a starved rank names, the largest share first."""

MAX_EXCESS_HOPS = 256
"""Operations with excess that a walk to the root visits; what is left of the wait then is
attributed within the wait. A chain that leads through so many has no single root."""

MIN_EXCESS_RATIO = 0.1
"""Share of its ideal duration by which an operation must exceed it to count as a cause. Less is
noise, of which a chain of hundreds of operations would collect as much as a fault costs."""

SHARES_PER_WAIT = 4
"""Room for the shares of waits; if there are more, they are copied in several parts."""

UNEXPLAINED_GAP_NS = 50_000
"""A gap between an operation and all that it waits for is no launch delay if it is longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitAttribution:
    """Time of each wait by what caused it, one row per pair."""

    wait: NDArray[np.integer[Any]]
    """Index of the wait; those of one rank ascend."""

    on_rank: NDArray[np.int32]
    """The rank that caused it; `NO_LINK` (-1) if a link did."""

    on_link: NDArray[np.int32]
    """The link whose transfer took longer than its ideal; `NO_LINK` if a rank caused the wait."""

    waited_ns: NDArray[np.int64]
    arrived_last: NDArray[np.int32]
    """Shape (waits,): the rank of the member whose arrival ended the wait."""


def attribute_waits(
    model: ReplayModel, waits: WaitIntervals, link_of_operation: NDArray[np.int32] | None = None
) -> WaitAttribution:
    """Attribute each wait to the ranks and links that caused it.

    From the arrival that ended the wait, the operations before it are walked back in time, each
    time to the predecessor that ended last. What the operations of this chain took longer than
    their ideal, beyond what those before the waiting rank took, has caused as much of the wait,
    also if it was before the wait began, the nearest first: the transfer of a communication is
    attributed to its link, all else to the rank. The rest of the wait is the schedule's: each
    stretch of time until its begin is attributed to the rank of the chain's operation. So a rank
    that only passed a delay on is not charged with it. If clocks contradict each other, a walk can
    enter a cycle: the rest of the wait is then attributed to the rank at which it did.

    Args:
        link_of_operation: Shape (ops,): as of `Transfers`; None: transfers are attributed to the
            member that arrived last.

    Returns:
        Sums by pair; the pairs of a wait sum to its time.
    """
    arrived_last = np.empty(len(waits.rank), dtype=np.int32)
    num_ranks = int(model.rank.max(initial=0)) + 1
    parts = []
    for block in split_by_time(model, waits):
        last = last_members(block.model)
        arrived_last[block.wait_rows] = block.model.rank[last[block.waits.operation]]
        number = np.arange(len(arrived_last))[block.wait_rows]
        owner = block.model.rank[last]
        if link_of_operation is not None:
            link = link_of_operation[block.rows]
            owner = np.where(link == NO_LINK, owner, num_ranks + link).astype(np.int32)
        for wait, on, waited_ns in _attribute(block.model, block.waits, last, owner):
            parts.append((number[wait], on, waited_ns))
    wait, on, waited_ns = (np.concatenate(each) for each in zip(*parts, strict=True))
    is_link = on >= num_ranks
    return WaitAttribution(
        wait=wait,
        on_rank=np.where(is_link, NO_LINK, on).astype(np.int32),
        on_link=np.where(is_link, on - num_ranks, NO_LINK).astype(np.int32),
        waited_ns=waited_ns,
        arrived_last=arrived_last,
    )


def _attribute(
    model: ReplayModel, waits: WaitIntervals, last: NDArray[np.int32], owner: NDArray[np.int32]
) -> Iterator[_Part]:
    """Yield the shares of the waits of some steps, in order of wait and owner."""
    operations, num_waits = model.operations, len(waits.rank)
    before = _last_predecessor(model)
    num_owners = int(max(model.rank.max(initial=0), owner.max(initial=0))) + 1
    room = SHARES_PER_WAIT * num_waits + num_owners
    wait_of, on = np.empty((2, room), dtype=np.int32)
    share_ns = np.empty(room, dtype=np.int64)
    wait = 0
    while True:
        wait, num_shares = loop.functions.attribute(
            len(last), before, last, model.rank, owner, operations.start_ns, operations.end_ns,
            operations.duration_ns, model.ideal_ns, operations.gap_ns, model.ideal_gap_ns,
            num_waits, wait, waits.operation.astype(np.int32), waits.start_ns, waits.end_ns,
            MIN_EXCESS_RATIO, UNEXPLAINED_GAP_NS, MAX_EXCESS_HOPS, room, wait_of, on, share_ns
        )  # fmt: skip
        shares = slice(num_shares)
        yield wait_of[shares].copy(), on[shares].copy(), share_ns[shares].copy()
        if wait == num_waits:
            return


def find_starved_ranks(
    waits: WaitIntervals, waited: WaitAttribution, total_ns: Mapping[int, int]
) -> tuple[Starved, ...]:
    """Return the ranks that wait, the one that waits most first."""
    if not len(waited.wait):
        return ()
    pair, num = factorize(waits.rank[waited.wait], waited.on_rank, waited.on_link)
    at = np.zeros(num, dtype=np.int64)
    at[pair] = np.arange(len(pair))
    rank, waited_ns = waits.rank[waited.wait[at]], np.zeros_like(at)
    np.add.at(waited_ns, pair, waited.waited_ns)
    first = np.flatnonzero(np.diff(rank, prepend=-1))
    counts = np.diff(np.append(first, len(rank)))
    ranks = rank[first].tolist()
    total = np.array([float(total_ns[one]) for one in ranks])
    ratio = waited_ns / np.repeat(total, counts)
    whole = np.add.reduceat(waited_ns, first) / total
    # Pairs are ordered by rank: now also by waiting time within each rank.
    order = argsort_rows(rank, -waited_ns)
    columns = (waited.on_rank[at[order]], waited.on_link[at[order]], ratio[order])
    waits_on = [waits_on_of(*row) for row in zip(*(c.tolist() for c in columns), strict=True)]
    starved = [
        Starved(
            rank=one,
            wait_ratio=wait_ratio,
            waits_on=tuple(waits_on[begin : begin + min(count, MAX_CULPRITS)]),
        )
        for one, wait_ratio, begin, count in zip(
            ranks, whole.tolist(), first.tolist(), counts.tolist(), strict=True
        )
        if wait_ratio >= MIN_WAIT_RATIO
    ]
    return tuple(sorted(starved, key=lambda entry: (-entry.wait_ratio, entry.rank)))


def waits_on_of(rank: int, link: int, ratio: float) -> WaitsOn:
    """Return what is waited for, of a row of an attribution."""
    if link == NO_LINK:
        return WaitsOn(rank=rank, ratio=ratio)
    return WaitsOn(rank=None, link=link, ratio=ratio)


def _last_predecessor(model: ReplayModel) -> NDArray[np.int32]:
    """Return the operation that each one followed: of all that it waits for, the last to end.

    An operation that begins later than `UNEXPLAINED_GAP_NS` after that waited for something outside
    the graph, such as a delayed stream. It then followed the last operation to end on its own rank,
    which is of the step before only if that still ran elsewhere when the step began: a pipeline
    without a barrier. `NO_OPERATION` if there is none.
    """
    operations = model.operations
    before = np.full(len(operations), NO_OPERATION, dtype=np.int32)
    end = operations.end_ns[operations.src]
    latest = np.full(len(operations), np.iinfo(np.int64).min)
    np.maximum.at(latest, operations.dst, end)
    is_last = end == latest[operations.dst]
    before[operations.dst[is_last]] = operations.src[is_last]  # of several the last one written
    explained = np.where(before == NO_OPERATION, np.iinfo(np.int64).min, operations.end_ns[before])
    late = np.flatnonzero(explained < operations.start_ns - UNEXPLAINED_GAP_NS)
    line = Line.over(model.rank, operations.start_ns, operations.end_ns)
    end = line.place(model.rank, operations.end_ns)
    by_end = stable_argsort(end)
    start = line.place(model.rank[late], operations.start_ns[late])

    def last_ended(side: Literal["left", "right"]) -> tuple[NDArray[np.intp], NDArray[np.int32]]:
        """Return the last operation to end on the rank, and how many steps earlier it is."""
        index = np.searchsorted(end[by_end], start, side=side) - 1
        row = by_end[np.maximum(index, 0)]
        is_own = (index >= 0) & (model.rank[row] == model.rank[late])
        return row, np.where(is_own, operations.step[late] - operations.step[row], NO_OPERATION)

    # Strictly before, so that walks always progress, even past operations without length.
    neighbour, num_steps = last_ended("left")
    is_known = num_steps == 0
    if model.overlap_ns is not None:
        previous, num_steps = last_ended("right")
        is_late = ~is_known & (num_steps == 1) & (model.overlap_ns > 0)[operations.step[late]]
        neighbour = np.where(is_late, previous, neighbour)
        is_known |= is_late
    is_known &= operations.end_ns[neighbour] > explained[late]
    before[late[is_known]] = neighbour[is_known]
    return before
