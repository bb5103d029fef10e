"""Who waits, how much, and on whom: followed to the rank that made it wait."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..arrays.grouping import NO_GROUP, factorize
from ..arrays.intervals import Line
from ..arrays.sorting import KEY_BITS, argsort_rows, pack_keys_with_rows, stable_argsort
from ..report.report import Starved, WaitsOn

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from ..replay.model import ReplayModel, WaitIntervals

NOBODY = -1

LEAST_RATIO = 0.01
"""Ranks that wait less of a step than this are not listed."""

MOST_CULPRITS = 8

MOST_IDLE_HOPS = 1_000
"""Operations without length after which a walk is looked at for going round in a circle."""

UNEXPLAINED_GAP_NS = 50_000
"""A gap longer than this between an operation and all that it waits for is no launch delay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Blame:
    """How long each rank waited on each other one, one row a pair."""

    rank: NDArray[np.int32]
    on_rank: NDArray[np.int32]
    waited_ns: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Trail:
    """Where a walk back in time goes on; found once for a run."""

    before: NDArray[np.int64]
    """Shape (ops,): what the operation followed, `NOBODY` where there is nothing."""

    last_member: NDArray[np.int64]
    """Shape (ops,): the member of its group that began last; else itself."""


def trail_of(model: ReplayModel) -> Trail:
    """Return where walks back through a run's operations go on."""
    return Trail(_last_predecessor(model), _last_member(model))


def blame(model: ReplayModel, waits: WaitIntervals, *, trail: Trail | None = None) -> Blame:
    """Follow each wait to the ranks that made it so long.

    From the last member's arrival the chain of what had to be done for it is
    walked back, each time to the predecessor that ended last, until the time
    at which the wait began. Each stretch of that chain is blamed on the rank
    that it lies on: a rank that merely passed lateness on is not blamed for it.
    Where clocks contradict each other a walk can come round in a circle: what
    is left of the wait is then blamed on the rank at which it does.

    Args:
        model: Operations as recorded.
        waits: What to follow.
        trail: That of ``model``; None: find it.

    Returns:
        Sums by pair, by ascending rank; over the pairs of one rank they are what it waited.
    """
    trail = trail_of(model) if trail is None else trail
    before, last_member = trail.before, trail.last_member
    operations = model.operations
    rank, until = waits.rank.copy(), waits.end_ns.copy()
    since, member = waits.start_ns.copy(), last_member[waits.operation]
    parts: list[tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int64]]] = []
    # A member's launch, then what it waited for, and so on back in time.
    at, on = before[member], model.rank[member]
    idle_hops, reached = 0, int(until.sum())
    while len(at):
        if idle_hops == MOST_IDLE_HOPS:
            circling = _circling(before, last_member)[at]
            parts.append((rank[circling], on[circling], (until - since)[circling]))
            rank, on, since = rank[~circling], on[~circling], since[~circling]
            until, at = until[~circling], at[~circling]
        done = np.where(at == NOBODY, since, np.maximum(operations.end_ns[at], since))
        done = np.minimum(done, until)
        parts.append((rank, on, until - done))
        going = (at != NOBODY) & (done > since)
        rank, since, until, at = rank[going], since[going], done[going], at[going]
        member = last_member[at]
        on = model.rank[member]
        began = np.minimum(np.maximum(operations.start_ns[member], since), until)
        parts.append((rank, on, until - began))
        until, at = began, before[member]
        idle_hops = idle_hops + 1 if int(until.sum()) == reached else 0
        reached = int(until.sum())
    return _summed(parts)


def starved_ranks(
    model: ReplayModel,
    waits: WaitIntervals,
    total_ns: Mapping[int, int],
    *,
    trail: Trail | None = None,
) -> tuple[Starved, ...]:
    """List the ranks that wait, the one that waits most first.

    Args:
        model: Operations as recorded.
        waits: When ranks waited, in whole steps.
        total_ns: Time of these steps by rank.
        trail: That of ``model``; None: find it.
    """
    found = blame(model, waits, trail=trail)
    first = np.flatnonzero(np.diff(found.rank, prepend=NOBODY))
    if not len(first):
        return ()
    num = np.diff(np.append(first, len(found.rank)))
    ranks = found.rank[first].tolist()
    total = np.array([float(total_ns[rank]) for rank in ranks])
    ratio = found.waited_ns / np.repeat(total, num)
    whole = np.add.reduceat(found.waited_ns, first) / total
    # Pairs come by rank: the most guilty of each stand before the others of the same rank.
    order = argsort_rows(found.rank, -found.waited_ns)
    culprit, share = found.on_rank[order].tolist(), ratio[order].tolist()
    starved = [
        Starved(
            rank=rank,
            wait_ratio=wait_ratio,
            waits_on=tuple(
                WaitsOn(rank=culprit[row], ratio=share[row])
                for row in range(begin, begin + min(count, MOST_CULPRITS))
            ),
        )
        for rank, wait_ratio, begin, count in zip(
            ranks, whole.tolist(), first.tolist(), num.tolist(), strict=True
        )
        if wait_ratio >= LEAST_RATIO
    ]
    return tuple(sorted(starved, key=lambda entry: (-entry.wait_ratio, entry.rank)))


def _last_predecessor(model: ReplayModel) -> NDArray[np.int64]:
    """Return, for each operation, what it followed: of all it waits for, what ended last.

    An operation that begins a while after that waited for something that the
    graph does not know (its stream was held up, say). Then it followed what
    last ended on its own rank. `NOBODY` where there is nothing.
    """
    operations = model.operations
    before = np.full(len(operations), NOBODY, dtype=np.int64)
    # The end with the edge's number below it: the largest tells the edge, without a sort.
    end = operations.end_ns[operations.src]
    edge_bits = len(end).bit_length()
    if len(end) and (int(end.max()) - int(end.min())).bit_length() + edge_bits <= KEY_BITS:
        last = np.full(len(operations), NOBODY, dtype=np.int64)
        np.maximum.at(last, operations.dst, pack_keys_with_rows(end, int(end.min()), edge_bits))
        found = np.flatnonzero(last != NOBODY)
        before[found] = operations.src[last[found] & ((1 << edge_bits) - 1)]
    elif len(end):
        order = argsort_rows(operations.dst, end)
        dst = operations.dst[order]
        before[dst] = operations.src[order]  # of several the last one stays

    line = Line.over(model.rank, operations.start_ns, operations.end_ns)
    end = line.place(model.rank, operations.end_ns)
    by_end = stable_argsort(end)
    # Strictly before, so that walking back always gets on, past empty operations too.
    start = line.place(model.rank, operations.start_ns)
    index = np.searchsorted(end[by_end], start, side="left") - 1
    neighbour = by_end[np.maximum(index, 0)]
    known = (index >= 0) & (model.rank[neighbour] == model.rank)
    known &= operations.step[neighbour] == operations.step
    explained = np.where(before == NOBODY, np.iinfo(np.int64).min, operations.end_ns[before])
    hidden = known & (explained < operations.start_ns - UNEXPLAINED_GAP_NS)
    hidden &= operations.end_ns[neighbour] > explained
    return np.where(hidden, neighbour, before)


def _last_member(model: ReplayModel) -> NDArray[np.int64]:
    """Return, for each operation, the member of its group that began last; else itself."""
    operations = model.operations
    last = np.arange(len(operations))
    members = np.flatnonzero(operations.group != NO_GROUP)
    if not len(members):
        return last
    order = members[
        argsort_rows(operations.group[members], operations.start_ns[members], -model.rank[members])
    ]
    ends = np.flatnonzero(np.append(np.diff(operations.group[order]) != 0, True))
    last[order] = np.repeat(order[ends], np.diff(np.append(-1, ends)))
    return last


def _circling(before: NDArray[np.int64], last_member: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Tell the operations from which walking back never ends. Shape (ops,).

    Each round doubles the length of the walks: those that end are at their end.
    """
    nobody = len(before)
    after = np.append(before[last_member], NOBODY)
    after[after == NOBODY] = nobody
    for _ in range(nobody.bit_length()):
        after = after[after]
    found: NDArray[np.bool_] = after[:nobody] != nobody
    return found


def _summed(
    parts: list[tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int64]]],
) -> Blame:
    if not parts:
        nobody = np.zeros(0, dtype=np.int32)
        return Blame(rank=nobody, on_rank=nobody, waited_ns=nobody.astype(np.int64))
    # Most stretches of a chain are of no length.
    kept = [np.flatnonzero(part[2]) for part in parts]
    rank, on, waited = (
        np.concatenate([part[k][rows] for part, rows in zip(parts, kept, strict=True)])
        for k in (0, 1, 2)
    )
    if not len(rank):
        return _summed([])
    index, num = factorize(rank, on)
    row = np.zeros(num, dtype=np.int64)
    row[index] = np.arange(len(index))
    sums = np.zeros(num, dtype=np.int64)
    np.add.at(sums, index, waited)
    real = sums > 0
    return Blame(rank=rank[row[real]], on_rank=on[row[real]], waited_ns=sums[real])
