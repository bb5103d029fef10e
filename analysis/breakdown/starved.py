"""Starved ranks: how long each rank waits, and which rank caused it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..arrays.grouping import NO_GROUP, factorize
from ..arrays.intervals import Line
from ..arrays.sorting import KEY_BITS, argsort_rows, pack_keys_with_rows, stable_argsort
from ..replay.model import split_by_time
from ..report.report import Starved, WaitsOn

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from ..replay.model import ReplayModel, WaitIntervals

    _Part = tuple[NDArray[np.integer[Any]], NDArray[np.integer[Any]], NDArray[np.int64]]
    """Waits or ranks that wait, the ranks on which they do, and how long."""

NO_OPERATION = -1

MIN_WAIT_RATIO = 0.01
"""Share of a step that a rank must wait to be listed."""

MAX_CULPRITS = 8
"""Ranks that the entry of a starved rank names, the largest share first."""

MAX_IDLE_HOPS = 1_000
"""Hops without any progress in time after which walks are checked for cycles."""

MAX_EXCESS_HOPS = 256
"""Operations with excess that a walk to the root visits; what is left of the wait then is
attributed within the wait. A chain that leads through so many has no single root."""

MIN_EXCESS_RATIO = 0.1
"""Share of its ideal duration by which an operation must exceed it to count as a cause. Less is
noise, of which a chain of hundreds of operations would collect as much as a fault costs."""

UNEXPLAINED_GAP_NS = 50_000
"""A gap between an operation and all that it waits for is no launch delay if it is longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitAttribution:
    """Time of each wait by the rank that caused it, one row per pair."""

    wait: NDArray[np.integer[Any]]
    """Index of the wait; those of one rank ascend."""

    on_rank: NDArray[np.integer[Any]]
    waited_ns: NDArray[np.int64]
    arrived_last: NDArray[np.int32]
    """Shape (waits,): the rank of the member whose arrival ended the wait."""


class Predecessors(NamedTuple):
    """Next operations of a walk back in time."""

    before: NDArray[np.int64]
    """Shape (operations,): the operation that it followed, else `NO_OPERATION`."""

    last_member: NDArray[np.int64]
    """Shape (operations,): the member of its instance that began last; itself outside any."""


def attribute_waits(model: ReplayModel, waits: WaitIntervals) -> WaitAttribution:
    """Attribute each wait to the ranks that caused it.

    From the arrival that ended the wait, the operations before it are walked back in time, each
    time to the predecessor that ended last. What the operations of this chain took longer than
    their ideal, beyond what those before the waiting rank took, has caused as much of the wait,
    also if it was before the wait began: it is attributed to their ranks, the nearest first. The
    rest of the wait is the schedule's: each stretch of time until its begin is attributed to the
    rank of the chain's operation. So a rank that only passed a delay on is not charged with it. If
    clocks contradict each other, a walk can enter a cycle: the rest of the wait is then attributed
    to the rank at which it did.

    Args:
        model: Operations as recorded.
        waits: The waits to attribute.

    Returns:
        Sums by pair; the pairs of a wait sum to its time.
    """
    last = np.empty(len(waits.rank), dtype=np.int32)
    pairs: list[_Part] = []
    for block in split_by_time(model, waits):
        own = block.waits
        found = Predecessors(_last_predecessor(block.model), _last_member(block.model))
        last[block.wait_rows] = block.model.rank[found.last_member[own.operation]]
        wait, on, waited_ns = _sum_by_pair(_attribute(block.model, own, found))
        pairs.append((np.arange(len(last))[block.wait_rows][wait], on, waited_ns))
    wait, on, waited_ns = (np.concatenate(each) for each in zip(*pairs, strict=True))
    return WaitAttribution(wait=wait, on_rank=on, waited_ns=waited_ns, arrived_last=last)


def _attribute(model: ReplayModel, waits: WaitIntervals, predecessors: Predecessors) -> list[_Part]:
    """Return parts of the waits of some steps; see `attribute_waits`."""
    before, last_member = predecessors
    operations = model.operations
    until = waits.end_ns.copy()
    member = last_member[waits.operation]
    parts, since = _attribute_excess(model, waits, predecessors)
    # The walk begins at what the last member followed.
    wait, at, on = np.arange(len(until)), before[member], model.rank[member]
    idle_hops, reached = 0, int(until.sum())
    while len(at):
        if idle_hops == MAX_IDLE_HOPS:
            in_cycle = _leads_into_cycle(before, last_member)[at]
            parts.append((wait[in_cycle], on[in_cycle], (until - since)[in_cycle]))
            wait, on, since = wait[~in_cycle], on[~in_cycle], since[~in_cycle]
            until, at = until[~in_cycle], at[~in_cycle]
        done = np.where(at == NO_OPERATION, since, np.maximum(operations.end_ns[at], since))
        done = np.minimum(done, until)
        parts.append((wait, on, until - done))
        going = (at != NO_OPERATION) & (done > since)
        wait, since, until, at = wait[going], since[going], done[going], at[going]
        member = last_member[at]
        on = model.rank[member]
        began = np.minimum(np.maximum(operations.start_ns[member], since), until)
        parts.append((wait, on, until - began))
        until, at = began, before[member]
        idle_hops = idle_hops + 1 if int(until.sum()) == reached else 0
        reached = int(until.sum())
    return parts


def _attribute_excess(
    model: ReplayModel, waits: WaitIntervals, predecessors: Predecessors
) -> tuple[list[_Part], NDArray[np.int64]]:
    """Attribute what of each wait excess on the way to its arrival has caused.

    Returns:
        The parts, and the begin of what is left of each wait, which ends where the wait ends.
    """
    before, last_member = predecessors
    operations = model.operations
    late_ns = _excess(operations.duration_ns, model.ideal_ns)
    gap_ns = _excess(operations.gap_ns, model.ideal_gap_ns)
    until = waits.end_ns
    if not (late_ns.any() or gap_ns.any()):
        return [], waits.start_ns.copy()
    parent = before[last_member]
    own_ns = late_ns + gap_ns[last_member]
    chain_ns, source = _sum_chains(own_ns, parent)
    member = last_member[waits.operation]

    def before_start(operation: NDArray[np.integer]) -> NDArray[np.int64]:
        previous = before[operation]
        known = np.where(previous == NO_OPERATION, 0, chain_ns[previous])
        before_ns: NDArray[np.int64] = gap_ns[operation] + known
        return before_ns

    caused = before_start(member) - before_start(waits.operation)
    left = np.clip(caused, 0, until - waits.start_ns)
    since = waits.start_ns + left
    first = np.minimum(left, gap_ns[member])
    parts: list[_Part] = [(np.arange(len(left)), model.rank[member], first)]
    left -= first
    at = source[np.append(before, NO_OPERATION)[member]]
    row = np.flatnonzero((left > 0) & (at != NO_OPERATION))
    for _ in range(MAX_EXCESS_HOPS):
        if not len(row):
            break
        here = at[row]
        charged = np.minimum(left[row], own_ns[here])
        parts.append((row, model.rank[last_member[here]], charged))
        left[row] -= charged
        at[row] = source[parent[here]]
        row = row[(left[row] > 0) & (at[row] != NO_OPERATION)]
    return parts, since - left


def _excess(recorded_ns: NDArray[np.float64], ideal_ns: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return what is above the ideal, and above noise, in whole nanoseconds."""
    above = recorded_ns - ideal_ns
    is_cause = above > np.maximum(MIN_EXCESS_RATIO * ideal_ns, UNEXPLAINED_GAP_NS)
    return np.where(is_cause, above, 0).astype(np.int64)


def _sum_chains(
    own_ns: NDArray[np.int64], parent: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the sum over each operation and all before it, and the nearest of them with excess.

    Each round doubles the length of the chains, until all have reached their ends.

    Args:
        own_ns: Shape (operations,): excess of each.
        parent: Shape (operations,): the operation before each, or `NO_OPERATION`.

    Returns:
        Shape (operations,) and (operations + 1,): the last entry is that of `NO_OPERATION`, which
        indexes it.
    """
    num = len(own_ns)
    above = np.append(np.where(parent == NO_OPERATION, num, parent), num)
    total = np.append(own_ns, 0)
    source = np.append(np.where(own_ns > 0, np.arange(num), NO_OPERATION), NO_OPERATION)
    for _ in range(num.bit_length()):
        if (above == num).all():
            break
        total += total[above]
        source = np.where(source == NO_OPERATION, source[above], source)
        above = above[above]
    return total[:num], source


def find_starved_ranks(
    waits: WaitIntervals, found: WaitAttribution, total_ns: Mapping[int, int]
) -> tuple[Starved, ...]:
    """Return the ranks that wait, the one that waits most first.

    Args:
        waits: Waits of whole steps.
        found: Who caused them.
        total_ns: Time of these steps by rank.
    """
    rank, on_rank, waited_ns = _sum_by_pair(
        [(waits.rank[found.wait], found.on_rank, found.waited_ns)]
    )
    first = np.flatnonzero(np.diff(rank, prepend=-1))
    if not len(first):
        return ()
    num = np.diff(np.append(first, len(rank)))
    ranks = rank[first].tolist()
    total = np.array([float(total_ns[one]) for one in ranks])
    ratio = waited_ns / np.repeat(total, num)
    whole = np.add.reduceat(waited_ns, first) / total
    # Pairs are ordered by rank: now also by waiting time within each rank.
    order = argsort_rows(rank, -waited_ns)
    culprit, share = on_rank[order].tolist(), ratio[order].tolist()
    starved = [
        Starved(
            rank=one,
            wait_ratio=wait_ratio,
            waits_on=tuple(
                WaitsOn(rank=culprit[row], ratio=share[row])
                for row in range(begin, begin + min(count, MAX_CULPRITS))
            ),
        )
        for one, wait_ratio, begin, count in zip(
            ranks, whole.tolist(), first.tolist(), num.tolist(), strict=True
        )
        if wait_ratio >= MIN_WAIT_RATIO
    ]
    return tuple(sorted(starved, key=lambda entry: (-entry.wait_ratio, entry.rank)))


def _last_predecessor(model: ReplayModel) -> NDArray[np.int64]:
    """Return the operation that each one followed: of all that it waits for, the last to end.

    An operation that begins later than `UNEXPLAINED_GAP_NS` after that waited for something outside
    the graph, such as a delayed stream. It then followed the last operation to end on its own rank.
    `NO_OPERATION` if there is none.
    """
    operations = model.operations
    before = np.full(len(operations), NO_OPERATION, dtype=np.int64)
    # Keys of the end with the edge's number in the low bits: the maximum needs no sort.
    end = operations.end_ns[operations.src]
    edge_bits = len(end).bit_length()
    if len(end) and (int(end.max()) - int(end.min())).bit_length() + edge_bits <= KEY_BITS:
        last = np.full(len(operations), NO_OPERATION, dtype=np.int64)
        np.maximum.at(last, operations.dst, pack_keys_with_rows(end, int(end.min()), edge_bits))
        found = np.flatnonzero(last != NO_OPERATION)
        before[found] = operations.src[last[found] & ((1 << edge_bits) - 1)]
    elif len(end):
        order = argsort_rows(operations.dst, end)
        dst = operations.dst[order]
        before[dst] = operations.src[order]  # Of several edges the last one written wins.

    line = Line.over(model.rank, operations.start_ns, operations.end_ns)
    end = line.place(model.rank, operations.end_ns)
    by_end = stable_argsort(end)
    # Strictly before, so that walks always progress, even past operations without length.
    start = line.place(model.rank, operations.start_ns)
    index = np.searchsorted(end[by_end], start, side="left") - 1
    neighbour = by_end[np.maximum(index, 0)]
    known = (index >= 0) & (model.rank[neighbour] == model.rank)
    known &= operations.step[neighbour] == operations.step
    explained = np.where(before == NO_OPERATION, np.iinfo(np.int64).min, operations.end_ns[before])
    hidden = known & (explained < operations.start_ns - UNEXPLAINED_GAP_NS)
    hidden &= operations.end_ns[neighbour] > explained
    return np.where(hidden, neighbour, before)


def _last_member(model: ReplayModel) -> NDArray[np.int64]:
    """Return the member of each operation's instance that began last; itself outside any."""
    operations = model.operations
    last = np.arange(len(operations))
    members = np.flatnonzero(operations.group != NO_GROUP)
    if not len(members):
        return last
    group, num = factorize(operations.group[members])
    latest = np.full(num, np.iinfo(np.int64).min)
    np.maximum.at(latest, group, operations.start_ns[members])
    final = np.flatnonzero(operations.start_ns[members] == latest[group])
    # Of several the lowest rank counts: the last one written wins.
    final = final[stable_argsort(-model.rank[members[final]])]
    of_group = np.empty(num, dtype=np.int64)
    of_group[group[final]] = members[final]
    last[members] = of_group[group]
    return last


def _leads_into_cycle(
    before: NDArray[np.int64], last_member: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Return from which operations a walk back never ends. Shape (operations,).

    Each round doubles the length of all walks; those that end remain at their end.
    """
    end = len(before)
    after = np.append(before[last_member], NO_OPERATION)
    after[after == NO_OPERATION] = end
    for _ in range(end.bit_length()):
        after = after[after]
    found: NDArray[np.bool_] = after[:end] != end
    return found


def _sum_by_pair(parts: list[_Part]) -> _Part:
    """Return the sum of each pair, in ascending order; pairs whose sum is 0 are left out."""
    # Most stretches of a walk have no length.
    kept = [np.flatnonzero(part[2]) for part in parts]
    row, on, waited = (
        np.concatenate([part[k][rows] for part, rows in zip(parts, kept, strict=True)])
        if parts
        else np.zeros(0, dtype=np.int64)
        for k in range(3)
    )
    pair, num = factorize(row, on) if len(row) else (row, 0)
    at = np.zeros(num, dtype=np.int64)
    at[pair] = np.arange(len(pair))
    sums = np.zeros(num, dtype=np.int64)
    np.add.at(sums, pair, waited)
    return row[at], on[at], sums
