"""The waterfall: parts of a step's time on every rank, which sum to the whole.

Each moment of a rank's step has one owner (`analysis.breakdown.occupancy`): its own compute or host
time before a wait, and a wait before a transfer.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np

from ..arrays.grouping import factorize, sorted_unique
from ..arrays.intervals import NOT_FOUND
from ..arrays.sorting import find_positions, stable_argsort
from ..replay.model import (
    BACKWARD_KINDS,
    COMPUTE_KINDS,
    EVALUATION_KIND,
    FORWARD_KINDS,
    WaitIntervals,
    split_by_time,
)
from ..replay.replayer import Replayer
from ..report.report import WaterfallSummary
from .bubble import SchedulePart, ideal_wait_ns, measure_bubble, schedule_parts
from .occupancy import Occupancy, compute_occupancy, find_rank_steps
from .starved import waits_on_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from ..replay.model import Reading, ReplayModel
    from ..replay.program import OperationTimes
    from ..report.report import PipelineBubble
    from ..trace.tables import RunInfo, StepTable
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
    place. `summarize_waterfall` says for which rank or link."""

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
    EVALUATION = "evaluation"
    """Forwards without gradients, of those that at most half of the steps have."""

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
"""Ranks and links that ``waiting_on`` of a summary names, the largest share first."""

_PART_OF_KIND = {
    "gc": Part.GC,
    "checkpoint": Part.CHECKPOINT,
    EVALUATION_KIND: Part.EVALUATION,
    "data": Part.INPUT,
}
_PARTS_BESIDE_KINDS = (Part.EXPOSED_TRANSFER, Part.HOST_GAP, Part.UNKNOWN)
"""Parts of the columns of `Occupancy.spent_ns` after those of the kinds."""


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


def build_waterfall(
    run: RunInfo,
    reading: Reading,
    steps: StepTable,
    *,
    ideal: Callable[[slice], OperationTimes] | None = None,
) -> Waterfall:
    """Split the steps of each rank into parts.

    Args:
        ideal: Returns the times of some steps' operations in the ideal full replay; None: replay
            it.

    Raises:
        CycleError: Operations of a step wait for each other.
    """
    rank_steps = find_rank_steps(reading, steps)
    if run.layout.pp > 1 and ideal is None:
        ideal = Replayer(reading.model).full_ideal_times
    ranks = sorted_unique(rank_steps.rank)
    shape = (len(ranks), len(reading.steps))
    time_ns, total_ns = np.zeros((*shape, len(PARTS)), np.int64), np.zeros(shape, np.int64)
    waiting, useful_ns = np.zeros(len(reading.waits.rank), dtype=np.int64), 0
    begin_ns, end_ns = rank_steps.bounds(len(reading.steps))
    for block in split_by_time(reading.model, reading.waits, begin_ns=begin_ns, end_ns=end_ns):
        own = rank_steps.of_block(block.first_step, len(block.model.operations.steps))
        filled = compute_occupancy(block.model, block.waits, own, launched=reading.without_launch)
        time = np.zeros((len(own), len(PARTS)), dtype=np.int64)
        useful_ns += _add_operations(
            time,
            filled,
            block.model,
            gap_before=Part.HOST_GAP if run.records_loader else Part.INPUT,
        )
        scheduled = None
        if run.layout.pp > 1 and ideal is not None:
            of_block = slice(block.first_step, block.first_step + len(block.model.operations.steps))
            scheduled = ideal_wait_ns(block.model, block.waits, ideal(of_block))
        waiting[block.wait_rows] = _add_waits(time, filled, block.model, block.waits, scheduled)
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


def summarize_waterfall(waterfall: Waterfall, waited: WaitAttribution) -> WaterfallSummary:
    """Return a waterfall summed over ranks and over steps, with what the ranks waited for.

    A wait is attributed as a whole; each culprit then has the same share of its part that counts as
    `Part.WAITING`.
    """
    rows, waits = np.flatnonzero(waterfall.waiting_ns[waited.wait] > 0), waterfall.waits
    wait, on_rank, on_link = waited.wait[rows], waited.on_rank[rows], waited.on_link[rows]
    share = waited.waited_ns[rows] / (waits.end_ns - waits.start_ns)[wait]
    culprit, num = factorize(on_rank, on_link)
    at = np.zeros(num, dtype=np.int64)
    at[culprit] = np.arange(len(culprit))
    by_culprit = np.bincount(culprit, weights=share * waterfall.waiting_ns[wait], minlength=num)
    whole = float(waterfall.total_ns.sum())
    largest = stable_argsort(-by_culprit)[:MAX_CULPRITS]
    columns = (on_rank[at[largest]], on_link[at[largest]], by_culprit[largest] / whole)
    return WaterfallSummary(
        parts=tuple(part.value for part in PARTS),
        mean_ratio={part.value: ratio for part, ratio in waterfall.mean_ratio().items()},
        waiting_on=tuple(
            waits_on_of(rank, link, ratio)
            for rank, link, ratio in zip(*(column.tolist() for column in columns), strict=True)
            if ratio > 0
        ),
        bubble=waterfall.bubble,
        ranks=tuple(waterfall.ranks.tolist()),
        by_rank_ns=waterfall.time_ns.sum(axis=1),
        steps=waterfall.steps,
        by_step_ns=waterfall.time_ns.sum(axis=0),
    )


def _add_operations(
    time: NDArray[np.int64], filled: Occupancy, model: ReplayModel, *, gap_before: Part
) -> int:
    """Add all but waits; return the useful forward and backward compute of all ranks, in ns.

    Args:
        gap_before: What gaps of the host before the first compute of a step are.
    """
    num_kinds = len(model.kinds)
    is_compute = np.array([name in COMPUTE_KINDS for name in model.kinds], dtype=np.bool_)
    actual = filled.spent_ns[1, :, :num_kinds] * is_compute
    seen = np.flatnonzero(filled.of_compute != NOT_FOUND)
    cell = filled.of_compute[seen].astype(np.int64) * num_kinds + model.kind[seen]
    ideal = np.bincount(cell, weights=model.ideal_ns[seen], minlength=actual.size)
    useful = np.minimum(actual, np.rint(ideal).astype(np.int64).reshape(actual.shape))
    time[:, CODE[Part.USEFUL_COMPUTE]] += useful.sum(axis=1)
    time[:, CODE[Part.SLOW_COMPUTE]] += (actual - useful).sum(axis=1)
    has_compute = actual.sum(axis=1, keepdims=True) > 0
    before, after = filled.spent_ns * ~np.append(is_compute, [False] * 3)
    parts = [_PART_OF_KIND.get(kind, Part.HOST_GAP) for kind in model.kinds]
    # Without any compute, nothing was input for it.
    for spent, gap in ((before * has_compute, gap_before), (before * ~has_compute + after, None)):
        for column, part in enumerate((*parts, *_PARTS_BESIDE_KINDS)):
            own = gap if gap and part is Part.HOST_GAP else part
            time[:, CODE[own]] += spent[:, column]
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
    waited = filled.waited_ns
    bubble = np.zeros_like(waited) if scheduled_ns is None else np.minimum(waited, scheduled_ns)
    seen = np.flatnonzero(filled.of_wait != NOT_FOUND)
    of_wait = filled.of_wait[seen]
    code = np.array([CODE[BUBBLES[part]] for part in SchedulePart])
    cell = of_wait.astype(np.int64) * len(PARTS)
    for part, value in (
        (CODE[Part.WAITING], waited - bubble),
        (code[schedule_parts(model, waits)[seen]], bubble),
    ):
        sums = np.bincount(cell + part, weights=value[seen], minlength=time.size)
        time += sums.astype(np.int64).reshape(time.shape)
    return waited - bubble
