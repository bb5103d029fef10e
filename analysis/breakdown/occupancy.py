"""Occupancy of a rank's steps: how long operations, waits and transfers fill them.

Each moment has one owner: an operation of the rank itself before a wait, a wait before a transfer,
and a transfer before the idle time of a device: communication is exposed if no compute covers it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..arrays.grouping import NO_GROUP, sorted_unique
from ..arrays.intervals import NOT_FOUND
from ..arrays.sorting import argsort_rows, find_positions
from ..replay import loop
from ..replay.model import (
    BUFFERED_KIND,
    COMPUTE_KINDS,
    EVALUATION_KIND,
    HOST_KINDS,
    P2P_KINDS,
    has_kind,
    last_members,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..replay.model import Reading, ReplayModel, WaitIntervals
    from ..trace.tables import StepTable


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSteps:
    """Begin and end of each step on each rank, ordered by (rank, start)."""

    rank: NDArray[np.int32]
    step_index: NDArray[np.int64]
    start_ns: NDArray[np.int64]
    end_ns: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.rank)

    def bounds(self, num: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the first begin and the last end of each of ``num`` steps."""
        begin = np.full(num, np.iinfo(np.int64).max)
        end = np.full(num, np.iinfo(np.int64).min)
        np.minimum.at(begin, self.step_index, self.start_ns)
        np.maximum.at(end, self.step_index, self.end_ns)
        return begin, end

    def of_block(self, first: int, num: int) -> RankSteps:
        """Return ``num`` steps from index ``first`` on, numbered from 0."""
        rows = np.flatnonzero((self.step_index >= first) & (self.step_index < first + num))
        return RankSteps(
            rank=self.rank[rows],
            step_index=self.step_index[rows] - first,
            start_ns=self.start_ns[rows],
            end_ns=self.end_ns[rows],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Occupancy:
    """Time that fills the steps of each rank without gaps and overlaps."""

    spent_ns: NDArray[np.int64]
    """Shape (2, rank steps, kinds + 3): before the first compute of the step, and from it on. Own
    operations by kind, then the columns `TRANSFER`, `LAUNCH` and `NOTHING`, from the last one."""

    of_compute: NDArray[np.int32]
    """Shape (operations,): the rank step that a compute fills, else `NOT_FOUND`."""

    waited_ns: NDArray[np.int64]
    """Shape (waits,): time that each wait fills."""

    of_wait: NDArray[np.int32]
    """Shape (waits,): the rank step that it fills, else `NOT_FOUND`."""


TRANSFER, LAUNCH, NOTHING = -3, -2, -1
"""Time in transfers; in which the rank does nothing until an operation begins that a host launches;
and in which nothing is known."""


def find_rank_steps(reading: Reading, steps: StepTable) -> RankSteps:
    """Return the begin and the end of each step on each rank.

    Our tracer records them. The ByteDance format does not: there a step lasts, on every rank, from
    the first operation of the job to its last.

    Args:
        steps: Rows of any epochs; the last epoch of a step counts.
    """
    numbers = np.array(reading.steps, dtype=np.int64)
    if reading.bounds_ns is not None:
        ranks = sorted_unique(reading.model.rank)
        step_index = np.tile(np.arange(len(numbers)), len(ranks))
        rank = np.repeat(ranks, len(numbers))
        start_ns, end_ns = (bound_ns[step_index] for bound_ns in reading.bounds_ns)
    else:
        taken = np.flatnonzero(np.isin(steps.step, numbers))
        taken = taken[argsort_rows(steps.rank[taken], steps.step[taken], steps.epoch[taken])]
        rank, step = steps.rank[taken], steps.step[taken]
        is_last = np.ones(len(taken), dtype=np.bool_)
        is_last[:-1] = (rank[1:] != rank[:-1]) | (step[1:] != step[:-1])
        taken, rank = taken[is_last], rank[is_last]
        step_index = find_positions(step[is_last], numbers)
        start_ns, end_ns = steps.start_ns[taken], steps.end_ns[taken]
    order = argsort_rows(rank, start_ns)
    return RankSteps(
        rank=rank[order],
        step_index=step_index[order],
        start_ns=start_ns[order],
        end_ns=end_ns[order],
    )


def compute_occupancy(
    model: ReplayModel,
    waits: WaitIntervals,
    rank_steps: RankSteps,
    *,
    launched: frozenset[str] = frozenset(),
) -> Occupancy:
    """Return what fills the steps of each rank.

    Args:
        rank_steps: Begin and end of each step on each rank.
        launched: Kinds of operations that, if they begin next (p2p excepted), explain time in
            which a rank does nothing.
    """
    operations, num, num_waits = model.operations, len(model.rank), len(waits.rank)
    arrival_ns = operations.start_ns[last_members(model)]
    others = np.flatnonzero(~has_kind(model, P2P_KINDS))
    following = _in_order(others, model.rank, operations.start_ns)
    own = following[is_own(model)[following]]
    is_idle = np.zeros(num, dtype=np.bool_) if model.idle is None else model.idle
    own, idle = own[~is_idle[own]], own[is_idle[own]]
    transfers = _in_order(find_exposable_transfers(model), model.rank, arrival_ns)
    columns = model.rank, operations.start_ns, operations.end_ns
    is_compute, is_launched = (
        np.array([kind in names for kind in model.kinds], dtype=np.uint8)
        for names in (COMPUTE_KINDS, launched)
    )
    found = Occupancy(
        spent_ns=np.zeros((2, len(rank_steps), len(model.kinds) + 3), dtype=np.int64),
        of_compute=np.full(num, NOT_FOUND, dtype=np.int32),
        waited_ns=np.zeros(num_waits, dtype=np.int64),
        of_wait=np.full(num_waits, NOT_FOUND, dtype=np.int32),
    )
    loop.functions.fill(
        len(rank_steps), rank_steps.rank, rank_steps.step_index.astype(np.int32),
        rank_steps.start_ns, rank_steps.end_ns, num, model.kind, operations.step, len(model.kinds),
        is_compute, is_launched,
        loop.Intervals(len(own), num, own, *columns),
        loop.Intervals(
            num_waits, num_waits,
            _in_order(np.arange(num_waits), waits.rank, waits.start_ns),
            waits.rank, waits.start_ns, waits.end_ns,
        ),
        loop.Intervals(len(transfers), num, transfers, model.rank, arrival_ns, operations.end_ns),
        loop.Intervals(len(idle), num, idle, *columns),
        loop.Intervals(len(following), num, following, *columns),
        found.spent_ns, found.of_compute, num_waits, found.waited_ns, found.of_wait
    )  # fmt: skip
    return found


def _in_order(
    rows: NDArray[np.int64], rank: NDArray[np.int32], start_ns: NDArray[np.int64]
) -> NDArray[np.int32]:
    order = argsort_rows(rank[rows], start_ns[rows])
    return rows[order].astype(np.int32)


def is_own(model: ReplayModel) -> NDArray[np.bool_]:
    """Return which operations are compute or host time of their rank. Shape (operations,)."""
    return has_kind(model, COMPUTE_KINDS | HOST_KINDS | {EVALUATION_KIND})


def find_exposable_transfers(model: ReplayModel) -> NDArray[np.int64]:
    """Return the communications whose transfer can delay their rank.

    These are the collectives, and the p2p that another operation of the same rank waits for.
    """
    operations = model.operations
    own, p2p = is_own(model), has_kind(model, P2P_KINDS)
    src, dst = operations.src, operations.dst
    in_group = operations.group != NO_GROUP
    known = in_group | has_kind(model, frozenset({BUFFERED_KIND}))
    held = known[src] & ~own[src] & (model.rank[src] == model.rank[dst]) & ~p2p[dst]
    exposable = in_group & ~own & ~p2p
    exposable[src[held]] = True
    return np.flatnonzero(exposable)
