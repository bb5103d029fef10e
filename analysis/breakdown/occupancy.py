"""Occupancy of a rank's steps: the operation, wait or transfer that fills each moment.

A step is split at every begin and end into stretches, and each stretch has one owner: an operation
of the rank itself before a wait, and a wait before a transfer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..arrays.grouping import NO_GROUP, max_over_group
from ..arrays.intervals import NOT_FOUND, Line, find_covering
from ..arrays.sorting import argsort_rows, find_positions, stable_argsort
from ..replay.model import BUFFERED_KIND, COMPUTE_KINDS, HOST_KINDS, P2P_KINDS, has_kind

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..replay.model import Reading, ReplayModel, WaitIntervals
    from ..trace.tables import RunInfo, SpanTable, StepTable


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
    """Stretches of time that fill the steps of each rank without gaps and overlaps."""

    rank_step: NDArray[np.int64]
    """Shape (stretches,), as all columns: index into the `RankSteps`."""

    end_ns: NDArray[np.int64]
    length_ns: NDArray[np.int64]
    own: NDArray[np.int64]
    """The compute or host operation that fills it, else `NOT_FOUND`."""

    wait: NDArray[np.int64]
    """Index of the wait that fills it, else `NOT_FOUND`; never together with ``own``."""

    transfer: NDArray[np.int64]
    """The communication whose transfer fills it, else `NOT_FOUND`; never together with both."""


def find_rank_steps(
    run: RunInfo, reading: Reading, spans: SpanTable, steps: StepTable
) -> RankSteps:
    """Return the begin and the end of each step on each rank.

    Our tracer records them. The ByteDance format does not: there a step lasts, on every rank, from
    the first operation of the job to its last.

    Args:
        run: Its source format.
        reading: The steps that take part.
        spans: Spans of these steps, of any epochs.
        steps: Rows of any epochs; the last epoch of a step counts.
    """
    numbers = np.array(reading.steps, dtype=np.int64)
    if run.source_format == "bytedance":
        return _whole_steps(numbers, reading, spans)
    taken = np.flatnonzero(np.isin(steps.step, numbers))
    taken = taken[argsort_rows(steps.rank[taken], steps.step[taken], steps.epoch[taken])]
    rank, step = steps.rank[taken], steps.step[taken]
    is_last = np.ones(len(taken), dtype=np.bool_)
    is_last[:-1] = (rank[1:] != rank[:-1]) | (step[1:] != step[:-1])
    return _in_order(
        rank[is_last],
        find_positions(step[is_last], numbers),
        steps.start_ns[taken[is_last]],
        steps.end_ns[taken[is_last]],
    )


def compute_occupancy(model: ReplayModel, waits: WaitIntervals, rank_steps: RankSteps) -> Occupancy:
    """Return what fills the steps of each rank.

    Args:
        model: Operations of a run.
        waits: Its waits.
        rank_steps: Begin and end of each step on each rank.
    """
    operations = model.operations
    line = Line.over(
        np.concatenate((rank_steps.rank, model.rank, waits.rank)),
        np.concatenate((rank_steps.start_ns, operations.start_ns, waits.start_ns)),
        np.concatenate((rank_steps.end_ns, operations.end_ns, waits.end_ns)),
    )
    own = np.flatnonzero(is_own(model))
    own_at = _place_intervals(
        line, model.rank[own], operations.start_ns[own], operations.end_ns[own]
    )
    wait_at = _place_intervals(line, waits.rank, waits.start_ns, waits.end_ns)
    transfer, began = exposable_transfers(model)
    transfer_at = _place_intervals(line, model.rank[transfer], began, operations.end_ns[transfer])
    whole = _place_intervals(line, rank_steps.rank, rank_steps.start_ns, rank_steps.end_ns)
    # np.unique would hash, which takes several times as long here.
    borders = np.sort(
        np.concatenate([part for at in (own_at, wait_at, transfer_at, whole) for part in at[:2]])
    )
    borders = borders[np.diff(borders, prepend=-1) > 0]
    first, last = borders[:-1], borders[1:]
    rank_step = _owner(whole, np.arange(len(rank_steps)), first)
    inside = rank_step != NOT_FOUND
    first, last, rank_step = first[inside], last[inside], rank_step[inside]
    by_own = _owner(own_at, own, first)
    by_wait = np.where(
        by_own == NOT_FOUND, _owner(wait_at, np.arange(len(waits.rank)), first), NOT_FOUND
    )
    free = (by_own == NOT_FOUND) & (by_wait == NOT_FOUND)
    return Occupancy(
        rank_step=rank_step,
        end_ns=line.time_at(last),
        length_ns=last - first,
        own=by_own,
        wait=by_wait,
        transfer=np.where(free, _owner(transfer_at, transfer, first), NOT_FOUND),
    )


def is_own(model: ReplayModel) -> NDArray[np.bool_]:
    """Return which operations are compute or host time of their rank. Shape (operations,)."""
    return has_kind(model, COMPUTE_KINDS | HOST_KINDS)


def exposable_transfers(model: ReplayModel) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the communications whose transfer can delay their rank.

    These are the collectives, and the p2p that another operation of the same rank waits for.

    Returns:
        The operations, and the begin of the transfer of each, in ns.
    """
    operations = model.operations
    own, p2p = is_own(model), has_kind(model, P2P_KINDS)
    src, dst = operations.src, operations.dst
    in_group = operations.group != NO_GROUP
    known = in_group | has_kind(model, frozenset({BUFFERED_KIND}))
    held = known[src] & ~own[src] & (model.rank[src] == model.rank[dst]) & ~p2p[dst]
    exposable = in_group & ~own & ~p2p
    exposable[src[held]] = True
    rows = np.flatnonzero(exposable)
    return rows, max_over_group(operations.group, operations.start_ns)[rows]


def _whole_steps(numbers: NDArray[np.int64], reading: Reading, spans: SpanTable) -> RankSteps:
    taken = np.isin(spans.step, numbers)
    index = find_positions(spans.step[taken], numbers)
    first = np.full(len(numbers), np.iinfo(np.int64).max)
    last = np.full(len(numbers), np.iinfo(np.int64).min)
    np.minimum.at(first, index, spans.start_ns[taken])
    np.maximum.at(last, index, (spans.start_ns + spans.duration_ns)[taken])
    ranks = np.unique(reading.model.rank)
    of_step = np.tile(np.arange(len(numbers)), len(ranks))
    return _in_order(np.repeat(ranks, len(numbers)), of_step, first[of_step], last[of_step])


def _in_order(
    rank: NDArray[np.int32],
    step_index: NDArray[np.int64],
    start_ns: NDArray[np.int64],
    end_ns: NDArray[np.int64],
) -> RankSteps:
    order = argsort_rows(rank, start_ns)
    return RankSteps(
        rank=rank[order],
        step_index=step_index[order],
        start_ns=start_ns[order],
        end_ns=end_ns[order],
    )


def _place_intervals(
    line: Line,
    rank: NDArray[np.int32],
    start_ns: NDArray[np.int64],
    end_ns: NDArray[np.int64],
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return sorted (start, end, index) on the line; if two overlap, the later one is cut."""
    start = line.place(rank, start_ns)
    end = start + (end_ns - start_ns)
    order = stable_argsort(start)
    start, end = start[order], end[order]
    if len(order):
        reach = np.maximum.accumulate(end)
        start = np.maximum(start, np.append(start[0], reach[:-1]))
    real = start < end
    return start[real], end[real], order[real]


def _owner(
    placed: tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]],
    number: NDArray[np.int64],
    point: NDArray[np.int64],
) -> NDArray[np.int64]:
    """Return the number of the interval that contains each point, else `NOT_FOUND`."""
    start, end, index = placed
    held = find_covering(start, end, point)
    found: NDArray[np.int64] = np.where(
        held == NOT_FOUND, NOT_FOUND, np.append(number[index], NOT_FOUND)[held]
    )
    return found


def find_next_operations(
    model: ReplayModel, filled: Occupancy, rank_steps: RankSteps
) -> NDArray[np.int64]:
    """Return the operation, p2p excepted, that begins next on the same rank in the same step.

    Args:
        model: Operations of a run.
        filled: What fills the steps.
        rank_steps: The steps of ``filled``.

    Returns:
        Shape (stretches,); `NOT_FOUND` if there is none.
    """
    operations = model.operations
    rows = np.flatnonzero(~has_kind(model, P2P_KINDS))
    rank, begin = model.rank[rows], operations.start_ns[rows]
    of_stretch = rank_steps.rank[filled.rank_step]
    line = Line.over(
        np.concatenate((rank, of_stretch)),
        np.concatenate((begin, filled.end_ns)),
        np.concatenate((begin, filled.end_ns)),
    )
    start, at = line.place(rank, begin), line.place(of_stretch, filled.end_ns)
    order = stable_argsort(start)
    index = np.searchsorted(start[order], at, side="left")
    found = np.append(rows[order], NOT_FOUND)[index]
    known = found != NOT_FOUND
    known[known] = model.rank[found[known]] == of_stretch[known]
    step = rank_steps.step_index[filled.rank_step]
    known[known] &= operations.step[found[known]] == step[known]
    return np.where(known, found, NOT_FOUND)
