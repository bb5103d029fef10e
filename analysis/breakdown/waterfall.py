"""Where a step's time goes, on every rank: parts that sum to the whole.

Each instant of a rank's step has one owner (`analysis.breakdown.occupancy`): what the
rank did itself comes before what it waited for, and that before a transfer.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np

from ..arrays.intervals import NOT_FOUND
from ..arrays.sorting import find_positions, stable_argsort
from ..replay.model import BACKWARD_KINDS, COMPUTE_KINDS, FORWARD_KINDS, WaitIntervals, has_kind
from ..report.report import WaitsOn, WaterfallSummary
from .bubble import Phase, ideal_wait_ns, phases_of, schedule_of
from .occupancy import Occupancy, occupancy_of, rank_steps_of
from .starved import blame

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..replay.model import Reading, ReplayModel
    from ..replay.program import OperationTimes
    from ..report.report import BubbleShape
    from ..trace.tables import RunInfo, SpanTable, StepTable
    from .starved import Trail


class Part(StrEnum):
    """What a rank's time went to."""

    USEFUL_COMPUTE = "useful_compute"
    """The rank's own compute, up to its ideal: the smaller of the two, summed over a step's
    forward, backward and optimizer each, so that jitter between micro-batches is no slowness."""

    SLOW_COMPUTE = "slow_compute"
    """Its own compute above that. Compute faster than ideal makes no negative part."""

    EXPOSED_TRANSFER = "exposed_transfer"
    """A communication was moving, its last member there, and the rank did nothing else."""

    WAITING = "waiting"
    """The rank stood still for a member that had not arrived, longer than the ideal replay does
    at the same place. `waiting_on` says for whom."""

    BUBBLE_WARM_UP = "bubble_warm_up"
    """Waits up to the length that they have in the ideal replay, where only the schedule causes
    any; without a pipeline there are none. This is what lies before the rank's first backward."""

    BUBBLE_STEADY = "bubble_steady"
    """Bubble that is neither."""

    BUBBLE_COOL_DOWN = "bubble_cool_down"
    """Bubble after the rank's last forward."""

    INPUT = "input"
    """Host time before the step's first compute, and ``data`` spans."""

    HOST_GAP = "host_gap"
    """Any other host time in which the rank waited for nobody. In the ByteDance format only gaps
    before compute are known to be that."""

    GC = "gc"
    CHECKPOINT = "checkpoint"
    UNKNOWN = "unknown"
    """Nothing recorded tells: a wait for a communication that was not recorded or whose members
    left early; in the ByteDance format also a gap before a communication, and what lies before a
    worker's first operation of the step and after its last."""


BUBBLES = {
    Phase.WARM_UP: Part.BUBBLE_WARM_UP,
    Phase.STEADY: Part.BUBBLE_STEADY,
    Phase.COOL_DOWN: Part.BUBBLE_COOL_DOWN,
}
PARTS: tuple[Part, ...] = tuple(Part)
CODE = {part: code for code, part in enumerate(PARTS)}
MOST_CULPRITS = 8
"""Ranks named in a summary's ``waiting_on``."""

_PART_OF_KIND = {"gc": Part.GC, "checkpoint": Part.CHECKPOINT, "data": Part.INPUT}


@dataclass(frozen=True, slots=True, kw_only=True)
class Waterfall:
    """The parts of each step on each rank."""

    ranks: NDArray[np.int32]
    """Ascending, the rows."""

    steps: tuple[int, ...]
    """Step numbers, the columns."""

    total_ns: NDArray[np.int64]
    """Shape (ranks, steps): the step's time on that rank; 0 where it took no part."""

    time_ns: NDArray[np.int64]
    """Shape (ranks, steps, parts), in the order of `PARTS`; sums to ``total_ns`` exactly."""

    schedule: BubbleShape | None
    """The pipeline's bubble by formula, beside the measured one; None without a pipeline."""

    waits: WaitIntervals
    waiting_ns: NDArray[np.int64]
    """Shape (waits,): what of each wait counts as `Part.WAITING`."""

    def of(self, part: Part) -> NDArray[np.int64]:
        """Return one part's time. Shape (ranks, steps), ns."""
        return self.time_ns[:, :, CODE[part]]

    def mean_ratio(self) -> dict[Part, float | None]:
        """Return each part's share of all ranks' time; None where there is no time."""
        whole = float(self.total_ns.sum())
        sums = self.time_ns.sum(axis=(0, 1)).tolist()
        return {
            part: value / whole if whole > 0 else None
            for part, value in zip(PARTS, sums, strict=True)
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingOn:
    """How long each rank waited on each other one beyond the bubble, one row a pair."""

    rank: NDArray[np.int32]
    on_rank: NDArray[np.int32]
    waiting_ns: NDArray[np.float64]


def waterfall_of(
    run: RunInfo,
    reading: Reading,
    spans: SpanTable,
    steps: StepTable,
    *,
    ideal: OperationTimes | None = None,
) -> Waterfall:
    """Split each rank's steps into `Part` s.

    Args:
        run: Layout and format.
        reading: The run, read.
        spans: Its spans.
        steps: Its steps' rows.
        ideal: When its operations begin and end in the ideal full replay; None: replay it.

    Raises:
        CycleError: Operations of a step wait for each other.
    """
    rank_steps = rank_steps_of(run, reading, spans, steps)
    filled = occupancy_of(reading, rank_steps)
    num = len(rank_steps)
    time = np.zeros((num, len(PARTS)), dtype=np.int64)
    useful = _add_compute(time, filled, reading.model)
    scheduled = ideal_wait_ns(reading.model, reading.waits, ideal) if run.layout.pp > 1 else None
    waiting = _add_waits(time, filled, reading, scheduled)
    _add_rest(time, filled, reading.model, is_bytedance=run.source_format == "bytedance")
    bubble = int(time[:, [CODE[part] for part in BUBBLES.values()]].sum())
    ranks = np.unique(rank_steps.rank)
    row = find_positions(rank_steps.rank, ranks)
    shape = (len(ranks), len(reading.steps))
    time_ns, total_ns = np.zeros((*shape, len(PARTS)), np.int64), np.zeros(shape, np.int64)
    time_ns[row, rank_steps.step_index] = time
    total_ns[row, rank_steps.step_index] = rank_steps.end_ns - rank_steps.start_ns
    return Waterfall(
        ranks=ranks,
        steps=reading.steps,
        total_ns=total_ns,
        time_ns=time_ns,
        schedule=schedule_of(reading, run.layout, bubble_ns=bubble, compute_ns=useful),
        waits=reading.waits,
        waiting_ns=waiting,
    )


def waiting_on(
    model: ReplayModel, waterfall: Waterfall, *, trail: Trail | None = None
) -> WaitingOn:
    """Follow the waiting beyond the bubble to the ranks that it was for.

    A wait is followed whole, as `starved.blame` does, and each rank on the way
    takes the same share of what of it counts as `Part.WAITING`.

    Args:
        model: The run's operations.
        waterfall: Its parts.
        trail: That of ``model``; None: find it.
    """
    counted = np.flatnonzero(waterfall.waiting_ns > 0)
    waits = waterfall.waits
    # Each wait stands in for a rank of its own, so that the sums stay apart.
    found = blame(
        model,
        WaitIntervals(
            rank=np.arange(len(counted), dtype=np.int32),
            operation=waits.operation[counted],
            start_ns=waits.start_ns[counted],
            end_ns=waits.end_ns[counted],
        ),
        trail=trail,
    )
    whole = (waits.end_ns - waits.start_ns)[counted]
    share = found.waited_ns / whole[found.rank]
    rank = waits.rank[counted[found.rank]]
    pair = rank.astype(np.int64) * (int(model.rank.max(initial=0)) + 1) + found.on_rank
    pairs, first, index = np.unique(pair, return_index=True, return_inverse=True)
    weights = share * waterfall.waiting_ns[counted[found.rank]]
    sums = np.bincount(index, weights=weights, minlength=len(pairs))
    return WaitingOn(
        rank=rank[first],
        on_rank=found.on_rank[first],
        waiting_ns=sums.astype(np.float64),
    )


def summary_of(
    model: ReplayModel, waterfall: Waterfall, *, trail: Trail | None = None
) -> WaterfallSummary:
    """Sum a waterfall over ranks and over steps, for a report.

    Args:
        model: The run's operations.
        waterfall: Its parts.
        trail: That of ``model``; None: find it.
    """
    found = waiting_on(model, waterfall, trail=trail)
    by_culprit = np.bincount(found.on_rank, weights=found.waiting_ns)
    whole = float(waterfall.total_ns.sum())
    largest = stable_argsort(-by_culprit)[:MOST_CULPRITS].tolist()
    return WaterfallSummary(
        parts=tuple(part.value for part in PARTS),
        mean_ratio={part.value: ratio for part, ratio in waterfall.mean_ratio().items()},
        waiting_on=tuple(
            WaitsOn(rank=rank, ratio=float(by_culprit[rank]) / whole)
            for rank in largest
            if by_culprit[rank] > 0
        ),
        bubble=waterfall.schedule,
        ranks=tuple(waterfall.ranks.tolist()),
        by_rank_ns=waterfall.time_ns.sum(axis=1),
        steps=waterfall.steps,
        by_step_ns=waterfall.time_ns.sum(axis=0),
    )


def _add_compute(time: NDArray[np.int64], filled: Occupancy, model: ReplayModel) -> int:
    """Add each rank's compute by kind; return the useful time of forward and backward."""
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
    reading: Reading,
    scheduled_ns: NDArray[np.int64] | None,
) -> NDArray[np.int64]:
    """Add waits, each as bubble up to what the schedule causes; return what of each is beyond."""
    waits = reading.waits
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
    phase = phases_of(reading.model, waits)[seen]
    for which, part in BUBBLES.items():
        at = phase == which
        np.add.at(time[:, CODE[part]], of_wait[at], bubble[seen[at]])
    return waited - bubble


def _add_rest(
    time: NDArray[np.int64], filled: Occupancy, model: ReplayModel, *, is_bytedance: bool
) -> None:
    """Add transfers, host time and what nothing tells."""
    part = np.full(len(filled.own), CODE[Part.UNKNOWN], dtype=np.int64)
    is_compute = has_kind(model, COMPUTE_KINDS)
    by_own, free = filled.own != NOT_FOUND, (filled.own == NOT_FOUND) & (filled.wait == NOT_FOUND)
    code = np.array([CODE[_PART_OF_KIND.get(name, Part.HOST_GAP)] for name in model.kinds])
    part[by_own] = code[model.kind[filled.own[by_own]]]
    part[filled.transfer != NOT_FOUND] = CODE[Part.EXPOSED_TRANSFER]
    if is_bytedance:
        # Of what has a launch gap there: compute, and the pauses that count as such.
        launched = is_compute | has_kind(model, frozenset({"gc"}))
        known = free & (filled.transfer == NOT_FOUND) & (filled.follows != NOT_FOUND)
        known[known] = launched[filled.follows[known]]
        part[known] = CODE[Part.HOST_GAP]
    early = filled.end_ns <= _first_compute(filled, model, len(time))[filled.rank_step]
    part[early & (part == CODE[Part.HOST_GAP])] = CODE[Part.INPUT]
    counted = free.copy()
    counted[by_own] = ~is_compute[filled.own[by_own]]
    cell = filled.rank_step[counted] * len(PARTS) + part[counted]
    time += _sums(cell, filled.length_ns[counted], time.size).reshape(time.shape)


def _first_compute(filled: Occupancy, model: ReplayModel, num: int) -> NDArray[np.int64]:
    """Return when each rank's first compute of each step begins; the earliest time if none does."""
    first = np.full(num, np.iinfo(np.int64).max)
    rows = np.flatnonzero(filled.own != NOT_FOUND)
    rows = rows[has_kind(model, COMPUTE_KINDS)[filled.own[rows]]]
    np.minimum.at(first, filled.rank_step[rows], filled.end_ns[rows] - filled.length_ns[rows])
    return np.where(first == np.iinfo(np.int64).max, np.iinfo(np.int64).min, first)


def _sums(index: NDArray[np.int64], value: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    """Sum whole numbers by index; exact below 2^53, which is a hundred days in ns."""
    sums: NDArray[np.int64] = np.bincount(index, weights=value, minlength=size).astype(np.int64)
    return sums
