"""The waterfall: parts of a step's time on every rank, which sum to the whole.

Each moment of a rank's step has one owner (`analysis.breakdown.occupancy`): its own compute or host
time before a wait, and a wait before a transfer.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import numpy as np

from ..arrays.grouping import factorize
from ..arrays.intervals import NOT_FOUND
from ..arrays.sorting import find_positions, stable_argsort
from ..replay.model import (
    BACKWARD_KINDS,
    COMPUTE_KINDS,
    FORWARD_KINDS,
    WaitIntervals,
    has_kind,
    split_by_time,
)
from ..replay.what_if import Replayer
from ..report.report import WaitsOn, WaterfallSummary
from .bubble import SchedulePart, ideal_wait_ns, measure_bubble, schedule_parts
from .occupancy import Occupancy, compute_occupancy, find_next_operations, find_rank_steps

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from ..replay.model import Reading, ReplayModel
    from ..replay.program import OperationTimes
    from ..report.report import PipelineBubble
    from ..trace.tables import RunInfo, SpanTable, StepTable
    from .starved import WaitAttribution


class Part(StrEnum):
    """Part of a rank's time."""

    USEFUL_COMPUTE = "useful_compute"
    """Compute of the rank up to its ideal: the smaller of the two, for the step's forward, backward
    and optimizer each, so that jitter between micro-batches does not count as slow."""

    SLOW_COMPUTE = "slow_compute"
    """Compute above its ideal. Compute below its ideal makes no negative part."""

    EXPOSED_TRANSFER = "exposed_transfer"
    """A communication transferred, after its arrival, and the rank did nothing else."""

    WAITING = "waiting"
    """The rank waited for a member to arrive, beyond the wait in the ideal replay at the same
    place. `attribute_waiting` says on which rank."""

    BUBBLE_WARM_UP = "bubble_warm_up"
    """Waits up to their length in the ideal replay, where only the schedule causes waits; none
    without a pipeline. This part is before the rank's first backward."""

    BUBBLE_STEADY = "bubble_steady"
    """Bubble between warm-up and cool-down."""

    BUBBLE_COOL_DOWN = "bubble_cool_down"
    """Bubble after the rank's last forward."""

    INPUT = "input"
    """Host time before the step's first compute, and ``data`` spans."""

    HOST_GAP = "host_gap"
    """All other host time in which the rank did not wait for another one. In the ByteDance format
    only gaps before compute are known to be that."""

    GC = "gc"
    CHECKPOINT = "checkpoint"
    UNKNOWN = "unknown"
    """No record explains it: a wait for a communication that was not recorded or whose members left
    early. In the ByteDance format also a gap before a communication, and the time before a worker's
    first operation of the step and after its last."""


BUBBLES = {
    SchedulePart.WARM_UP: Part.BUBBLE_WARM_UP,
    SchedulePart.STEADY: Part.BUBBLE_STEADY,
    SchedulePart.COOL_DOWN: Part.BUBBLE_COOL_DOWN,
}
PARTS: tuple[Part, ...] = tuple(Part)
CODE = {part: code for code, part in enumerate(PARTS)}
MAX_CULPRITS = 8
"""Ranks that ``waiting_on`` of a summary names, the largest share first."""

_PART_OF_KIND = {"gc": Part.GC, "checkpoint": Part.CHECKPOINT, "data": Part.INPUT}


@dataclass(frozen=True, slots=True, kw_only=True)
class Waterfall:
    """The parts of each step on each rank."""

    ranks: NDArray[np.int32]
    """Ascending, the rows."""

    steps: tuple[int, ...]
    """Step numbers, the columns."""

    total_ns: NDArray[np.int64]
    """Shape (ranks, steps): the step's time on that rank; 0 if it took no part."""

    time_ns: NDArray[np.int64]
    """Shape (ranks, steps, parts), in the order of `PARTS`; sums to ``total_ns`` exactly."""

    bubble: PipelineBubble | None
    """The bubble by formula and as measured; None without a pipeline."""

    waits: WaitIntervals
    waiting_ns: NDArray[np.int64]
    """Shape (waits,): the part of each wait that counts as `Part.WAITING`."""

    def of(self, part: Part) -> NDArray[np.int64]:
        """Return the time of one part. Shape (ranks, steps)."""
        return self.time_ns[:, :, CODE[part]]

    def mean_ratio(self) -> dict[Part, float | None]:
        """Return the share of each part in the time of all ranks; None if that is 0."""
        whole = float(self.total_ns.sum())
        sums = self.time_ns.sum(axis=(0, 1)).tolist()
        return {
            part: value / whole if whole > 0 else None
            for part, value in zip(PARTS, sums, strict=True)
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingAttribution:
    """Waiting time of each rank on each other rank beyond the bubble, one row per pair."""

    rank: NDArray[np.int32]
    on_rank: NDArray[np.integer[Any]]
    waiting_ns: NDArray[np.float64]


def build_waterfall(
    run: RunInfo,
    reading: Reading,
    spans: SpanTable,
    steps: StepTable,
    *,
    ideal: Callable[[slice], OperationTimes] | None = None,
) -> Waterfall:
    """Split the steps of each rank into parts.

    Args:
        run: Layout and source format.
        reading: Operations and waits of the run.
        spans: Its spans.
        steps: Its step rows.
        ideal: Returns the times of some steps' operations in the ideal full replay; None: replay
            it.

    Raises:
        CycleError: Operations of a step wait for each other.
    """
    rank_steps = find_rank_steps(run, reading, spans, steps)
    if run.layout.pp > 1 and ideal is None:
        ideal = Replayer(reading.model).full_ideal_times
    ranks = np.unique(rank_steps.rank)
    shape = (len(ranks), len(reading.steps))
    time_ns, total_ns = np.zeros((*shape, len(PARTS)), np.int64), np.zeros(shape, np.int64)
    waiting, useful_ns = np.zeros(len(reading.waits.rank), dtype=np.int64), 0
    is_bytedance = run.source_format == "bytedance"
    begin_ns, end_ns = rank_steps.bounds(len(reading.steps))
    for block in split_by_time(reading.model, reading.waits, begin_ns=begin_ns, end_ns=end_ns):
        own = rank_steps.of_block(block.first_step, len(block.model.operations.steps))
        filled = compute_occupancy(block.model, block.waits, own)
        time = np.zeros((len(own), len(PARTS)), dtype=np.int64)
        useful_ns += _add_compute(time, filled, block.model)
        scheduled = None
        if run.layout.pp > 1 and ideal is not None:
            of_block = slice(block.first_step, block.first_step + len(block.model.operations.steps))
            scheduled = ideal_wait_ns(block.model, block.waits, ideal(of_block))
        waiting[block.wait_rows] = _add_waits(time, filled, block.model, block.waits, scheduled)
        follows = find_next_operations(block.model, filled, own) if is_bytedance else None
        _add_rest(time, filled, block.model, follows)
        row, column = find_positions(own.rank, ranks), own.step_index + block.first_step
        time_ns[row, column] = time
        total_ns[row, column] = own.end_ns - own.start_ns
    bubble_ns = int(time_ns[:, :, [CODE[part] for part in BUBBLES.values()]].sum())
    return Waterfall(
        ranks=ranks,
        steps=reading.steps,
        total_ns=total_ns,
        time_ns=time_ns,
        bubble=measure_bubble(reading, run.layout, bubble_ns=bubble_ns, compute_ns=useful_ns),
        waits=reading.waits,
        waiting_ns=waiting,
    )


def attribute_waiting(waterfall: Waterfall, found: WaitAttribution) -> WaitingAttribution:
    """Attribute the waiting beyond the bubble to the ranks that caused it.

    A wait is attributed as a whole; each rank then has the same share of its part that counts as
    `Part.WAITING`.

    Args:
        waterfall: The run's waterfall.
        found: Who caused its waits.
    """
    rows = np.flatnonzero(waterfall.waiting_ns[found.wait] > 0)
    wait, on_rank, waits = found.wait[rows], found.on_rank[rows], waterfall.waits
    share = found.waited_ns[rows] / (waits.end_ns - waits.start_ns)[wait]
    rank, weights = waits.rank[wait], share * waterfall.waiting_ns[wait]
    pair, num = factorize(rank, on_rank)
    at = np.zeros(num, dtype=np.int64)
    at[pair] = np.arange(len(pair))
    return WaitingAttribution(
        rank=rank[at],
        on_rank=on_rank[at],
        waiting_ns=np.bincount(pair, weights=weights, minlength=num).astype(np.float64),
    )


def summarize_waterfall(waterfall: Waterfall, waited: WaitAttribution) -> WaterfallSummary:
    """Return a waterfall summed over ranks and over steps.

    Args:
        waterfall: The run's waterfall.
        waited: Who caused its waits.
    """
    found = attribute_waiting(waterfall, waited)
    by_culprit = np.bincount(found.on_rank, weights=found.waiting_ns)
    whole = float(waterfall.total_ns.sum())
    largest = stable_argsort(-by_culprit)[:MAX_CULPRITS].tolist()
    return WaterfallSummary(
        parts=tuple(part.value for part in PARTS),
        mean_ratio={part.value: ratio for part, ratio in waterfall.mean_ratio().items()},
        waiting_on=tuple(
            WaitsOn(rank=rank, ratio=float(by_culprit[rank]) / whole)
            for rank in largest
            if by_culprit[rank] > 0
        ),
        bubble=waterfall.bubble,
        ranks=tuple(waterfall.ranks.tolist()),
        by_rank_ns=waterfall.time_ns.sum(axis=1),
        steps=waterfall.steps,
        by_step_ns=waterfall.time_ns.sum(axis=0),
    )


def _add_compute(time: NDArray[np.int64], filled: Occupancy, model: ReplayModel) -> int:
    """Add compute; return the useful forward and backward compute of all ranks, in ns."""
    is_compute = has_kind(model, COMPUTE_KINDS)
    rows = np.flatnonzero(filled.own != NOT_FOUND)
    rows = rows[is_compute[filled.own[rows]]]
    num_kinds = len(model.kinds)
    own = filled.own[rows]
    cell = filled.rank_step[rows] * num_kinds + model.kind[own]
    size = len(time) * num_kinds
    actual = _sums(cell, filled.length_ns[rows], size)
    of_operation = np.full(len(model.operations), NOT_FOUND)
    of_operation[own] = cell
    seen = np.flatnonzero(of_operation != NOT_FOUND)
    ideal = np.bincount(of_operation[seen], weights=model.ideal_ns[seen], minlength=size)
    useful = np.minimum(actual, np.rint(ideal).astype(np.int64)).reshape(-1, num_kinds)
    time[:, CODE[Part.USEFUL_COMPUTE]] += useful.sum(axis=1)
    slow = actual.reshape(-1, num_kinds) - useful
    time[:, CODE[Part.SLOW_COMPUTE]] += slow.sum(axis=1)
    of_pipeline = [name in FORWARD_KINDS | BACKWARD_KINDS for name in model.kinds]
    return int(useful[:, of_pipeline].sum())


def _add_waits(
    time: NDArray[np.int64],
    filled: Occupancy,
    model: ReplayModel,
    waits: WaitIntervals,
    scheduled_ns: NDArray[np.int64] | None,
) -> NDArray[np.int64]:
    """Add waits as bubble, up to what the schedule causes, and as waiting; return the latter."""
    rows = np.flatnonzero(filled.wait != NOT_FOUND)
    wait = filled.wait[rows]
    waited = _sums(wait, filled.length_ns[rows], len(waits.rank))
    bubble = np.zeros_like(waited)
    if scheduled_ns is not None:
        bubble = np.minimum(waited, scheduled_ns)
    rank_step = np.full(len(waited), NOT_FOUND)
    rank_step[wait] = filled.rank_step[rows]
    seen = np.flatnonzero(rank_step != NOT_FOUND)
    of_wait = rank_step[seen]
    np.add.at(time[:, CODE[Part.WAITING]], of_wait, (waited - bubble)[seen])
    position = schedule_parts(model, waits)[seen]
    for which, part in BUBBLES.items():
        at = position == which
        np.add.at(time[:, CODE[part]], of_wait[at], bubble[seen[at]])
    return waited - bubble


def _add_rest(
    time: NDArray[np.int64],
    filled: Occupancy,
    model: ReplayModel,
    follows: NDArray[np.int64] | None,
) -> None:
    """Add transfers, host time and unknown time.

    Args:
        time: Shape (rank steps, parts), to which is added.
        filled: What fills the steps.
        model: Their operations.
        follows: `find_next_operations` in the ByteDance format; None in our own, which records
            what a host does.
    """
    part = np.full(len(filled.own), CODE[Part.UNKNOWN], dtype=np.int64)
    is_compute = has_kind(model, COMPUTE_KINDS)
    by_own, free = filled.own != NOT_FOUND, (filled.own == NOT_FOUND) & (filled.wait == NOT_FOUND)
    code = np.array([CODE[_PART_OF_KIND.get(name, Part.HOST_GAP)] for name in model.kinds])
    part[by_own] = code[model.kind[filled.own[by_own]]]
    part[filled.transfer != NOT_FOUND] = CODE[Part.EXPOSED_TRANSFER]
    if follows is not None:
        # Only compute and gc have launch gaps in this format.
        launched = is_compute | has_kind(model, frozenset({"gc"}))
        known = free & (filled.transfer == NOT_FOUND) & (follows != NOT_FOUND)
        known[known] = launched[follows[known]]
        part[known] = CODE[Part.HOST_GAP]
    early = filled.end_ns <= _first_compute(filled, model, len(time))[filled.rank_step]
    part[early & (part == CODE[Part.HOST_GAP])] = CODE[Part.INPUT]
    counted = free.copy()
    counted[by_own] = ~is_compute[filled.own[by_own]]
    cell = filled.rank_step[counted] * len(PARTS) + part[counted]
    time += _sums(cell, filled.length_ns[counted], time.size).reshape(time.shape)


def _first_compute(filled: Occupancy, model: ReplayModel, num: int) -> NDArray[np.int64]:
    """Return the begin of each rank's first compute of each step; the minimum int64 if none."""
    first = np.full(num, np.iinfo(np.int64).max)
    rows = np.flatnonzero(filled.own != NOT_FOUND)
    rows = rows[has_kind(model, COMPUTE_KINDS, filled.own[rows])]
    np.minimum.at(first, filled.rank_step[rows], filled.end_ns[rows] - filled.length_ns[rows])
    return np.where(first == np.iinfo(np.int64).max, np.iinfo(np.int64).min, first)


def _sums(index: NDArray[np.int64], value: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    """Return sums of integers by index; exact below 2^53, a hundred days in ns."""
    sums: NDArray[np.int64] = np.bincount(index, weights=value, minlength=size).astype(np.int64)
    return sums
