"""The what-if analysis: step times of a run in which parts are recorded and the rest is ideal.

``S = T / T_ideal``. ``S_X`` replays the ideal run with the recorded durations of X put back,
``M_X`` the recorded run with X made ideal.

Source: arXiv 2505.05713.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np

from .loop import MAX_WIDTH
from .operations import remove_host_operations
from .program import OperationTimes, Program, compile_program
from .step_overlap import StepOverlap

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from .model import ReplayModel
    from .program import Change

MAX_ISOLATED_COST = 100_000_000
"""Largest number of durations replayed to put each dp position back: about a second."""

WORST_SHARE = 0.03
"""Share of the workers that M_W makes ideal. Source: arXiv 2505.05713, section 5.1."""

ROUNDING = 1e-9
"""One nanosecond in a second: the resolution of recorded times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """Step times of the device replay in ns, each of shape (steps,)."""

    steps: tuple[int, ...]
    replayed_ns: NDArray[np.float64]
    ideal_ns: NDArray[np.float64]
    by_kind_ns: Mapping[str, NDArray[np.float64]]
    by_dp_ns: Mapping[int, NDArray[np.float64]]
    by_stage_ns: Mapping[int, NDArray[np.float64]]
    by_worker_ns: Mapping[tuple[int, int], NDArray[np.float64]]
    """By (dp, stage), exact: only that worker's operations are put back."""

    m_w: float | None
    m_s: float | None
    """None if all operations are of one stage."""

    def slowdown(self, with_part_ns: NDArray[np.float64]) -> float | None:
        """Return S over all steps, given the step times with a part put back."""
        return ratio(_mean(with_part_ns), _mean(self.ideal_ns))

    def worker_slowdowns(self) -> dict[tuple[int, int], float | None]:
        """Return the paper's shortcut for each S_w, the smaller of S_dp and S_stage."""
        of_dp = {dp: self.slowdown(times) for dp, times in self.by_dp_ns.items()}
        of_stage = {stage: self.slowdown(times) for stage, times in self.by_stage_ns.items()}
        return {
            (dp, stage): None if one is None or other is None else min(one, other)
            for dp, stage in self.by_worker_ns
            for one, other in ((of_dp[dp], of_stage[stage]),)
        }


class Replayer:
    """Replays one model with any part of it recorded and the rest ideal, or the reverse.

    Safe to use from several threads.
    """

    def __init__(self, model: ReplayModel) -> None:
        self.model = model
        operations, rows = remove_host_operations(model.operations, model.on_device)
        # A view of the columns instead of a copy, if all operations are of the device.
        self._device_rows = slice(None) if operations is model.operations else rows
        self._device = compile_program(operations, compare_replicas=True)
        self._full = self._device if operations is model.operations else None
        self._compiling = Lock()
        self._overlap = StepOverlap(model)
        self._recorded_ns = operations.duration_ns
        self._ideal_ns = model.ideal_ns[self._device_rows]

    def recorded(self) -> NDArray[np.float64]:
        """Return T of the device replay: recorded durations, no launch gaps. Shape (steps,), ns."""
        return self._device.step_times(self._recorded_ns)

    def ideal(self) -> NDArray[np.float64]:
        """Return T_ideal of the device replay. Shape (steps,), ns."""
        return self._device.step_times(self._ideal_ns)

    def put_back(self, part: NDArray[np.bool_]) -> NDArray[np.float64]:
        """Return the step times of the ideal run with a part's recorded durations put back.

        Args:
            part: Shape (ops,).

        Returns:
            Shape (steps,), ns.
        """
        is_put_back = part[self._device_rows]
        return self._device.step_times(np.where(is_put_back, self._recorded_ns, self._ideal_ns))

    def put_back_each(self, parts: NDArray[np.uint32], num: int) -> NDArray[np.float64]:
        """Return the same for several parts at once.

        Args:
            parts: Shape (ops,): bit ``w`` is set if the operation is in part ``w``.
            num: Number of parts, at most `loop.MAX_WIDTH`.

        Returns:
            Shape (parts, steps), ns.
        """
        return self._device.partial_step_times(
            self._recorded_ns, self._ideal_ns, parts[self._device_rows], num
        )

    def made_ideal(self, part: NDArray[np.bool_]) -> NDArray[np.float64]:
        """Return the step times of the recorded run with a part made ideal. Shape (steps,), ns."""
        is_ideal = part[self._device_rows]
        return self._device.step_times(np.where(is_ideal, self._ideal_ns, self._recorded_ns))

    def put_back_by_dp(
        self, parts: NDArray[np.uint32], num: int
    ) -> tuple[dict[int, NDArray[np.float64]], ...]:
        """Return, for parts and dp positions, the step times of the ideal run with one put back.

        Args:
            parts: Shape (ops,): bit ``w`` is set if the operation is in part ``w``.
            num: Number of parts, at most `loop.MAX_WIDTH`.

        Returns:
            For each part, by dp position, shape (steps,), ns. Empty if the replay would exceed
            `MAX_ISOLATED_COST`, because many dp positions differ in structure.
        """
        if self._device.isolated_cost() > MAX_ISOLATED_COST:
            return ({},) * num
        times = self._device.isolated_step_times(
            self._recorded_ns, self._ideal_ns, parts[self._device_rows], num
        )
        replicas = self._device.replicas.tolist()
        return tuple(dict(zip(replicas, of_part, strict=True)) for of_part in times)

    def full_recorded(self) -> NDArray[np.float64]:
        """Return T of the full replay: recorded durations and launch gaps. Shape (steps,), ns."""
        return self.full_with(self.model.operations.duration_ns)

    def full_ideal(self) -> NDArray[np.float64]:
        """Return T_ideal of the full replay: host gaps at their median. Shape (steps,), ns."""
        return self.full_with(self.model.ideal_ns, self.model.ideal_gap_ns)

    def full_without(self, part: NDArray[np.bool_]) -> NDArray[np.float64]:
        """Return T of the full recorded replay with a part made ideal. Shape (steps,), ns."""
        operations, model = self.model.operations, self.model
        return self.full_with(
            np.where(part, model.ideal_ns, operations.duration_ns),
            np.where(part, model.ideal_gap_ns, operations.gap_ns),
        )

    def full_with(
        self, duration_ns: NDArray[np.float64], gap_ns: NDArray[np.float64] | None = None
    ) -> NDArray[np.float64]:
        """Return T of the full replay with other durations and launch gaps.

        Time that a step shares with the one before is the latter's, as in the recorded times. How
        long that is follows from the times (`StepOverlap`).

        Args:
            duration_ns: Shape (ops,).
            gap_ns: Shape (ops,); None for the recorded ones.

        Returns:
            Shape (steps,), ns.
        """
        gaps = self.model.operations.gap_ns if gap_ns is None else gap_ns
        gaps, shared_ns = self._overlap.shift(duration_ns, gaps)
        return self._full_program().step_times(duration_ns, gaps) - shared_ns

    def full_with_each(
        self,
        duration_ns: NDArray[np.float64],
        gap_ns: NDArray[np.float64],
        changes: Sequence[Change],
    ) -> NDArray[np.float64]:
        """Return T of the full replay with each of several changes alone.

        Args:
            duration_ns: Shape (ops,).
            gap_ns: Shape (ops,).

        Returns:
            Shape (changes, steps), ns.
        """
        shifted, shared_ns = self._overlap.shift_each(duration_ns, gap_ns, changes)
        gaps, _ = self._overlap.shift(duration_ns, gap_ns)
        return self._full_program().changed_step_times(duration_ns, gaps, shifted) - shared_ns

    def full_ideal_times(self, steps: slice) -> OperationTimes:
        """Return the start and end of each operation of some steps in the ideal full replay.

        In it a rank begins a step late only as long as the ideal step before keeps it.
        """
        model, program = self.model, self._full_program()
        times = program.operation_times(model.ideal_ns, model.ideal_gap_ns, steps=steps)
        if model.overlap_ns is None or not model.overlap_ns[steps].any():
            return times
        numbers = np.arange(len(model.overlap_ns))[steps]
        rows = slice(*np.searchsorted(model.operations.step, [numbers[0], numbers[-1] + 1]))
        step = model.operations.step[rows] - numbers[0]
        rank = model.rank[rows]
        ends = np.full((len(numbers), int(rank.max()) + 1), np.nan)
        ends[step, rank] = 0.0
        np.maximum.at(ends, (step, rank), times.end_ns)
        late = np.zeros_like(ends)
        late[1:] = (ends - np.nanmin(ends, axis=1, keepdims=True))[:-1]
        shared = np.minimum(model.operations.gap_ns[rows], model.overlap_ns[steps][step])
        gaps = model.ideal_gap_ns.copy()
        gaps[rows] -= np.fmax(shared - late[step, rank], 0.0)
        return program.operation_times(model.ideal_ns, gaps, steps=steps)

    def _full_program(self) -> Program:
        with self._compiling:
            if self._full is None:
                self._full = compile_program(self.model.operations)
            return self._full


def what_if(replayer: Replayer) -> WhatIf:
    """Return T, T_ideal, and T with each kind, dp position, stage and worker put back."""
    model = replayer.model
    stages = np.flatnonzero(np.bincount(model.stage)).tolist()
    by_dp: dict[int, NDArray[np.float64]] = {}
    by_worker: dict[tuple[int, int], NDArray[np.float64]] = {}
    for begin in range(0, len(stages), MAX_WIDTH - 1):
        block = stages[begin : begin + MAX_WIDTH - 1]
        bits = np.ones(max(stages) + 1, dtype=np.uint32)  # the first part is the whole position
        bits[block] |= np.uint32(2) << np.arange(len(block), dtype=np.uint32)
        by_dp, *by_stage = replayer.put_back_by_dp(bits[model.stage], 1 + len(block))
        for stage, of_stage in zip(block, by_stage, strict=True):
            by_worker |= {(dp, stage): times for dp, times in of_stage.items()}
    kinds = np.flatnonzero(np.bincount(model.kind, minlength=len(model.kinds))).tolist()
    times_of = _put_back_each(replayer, kinds, stages)
    result = WhatIf(
        steps=model.operations.steps,
        replayed_ns=times_of["all", 0],
        ideal_ns=times_of["none", 0],
        by_kind_ns={model.kinds[code]: times_of["kind", code] for code in kinds},
        by_dp_ns=by_dp,
        by_stage_ns={stage: times_of["stage", stage] for stage in stages},
        by_worker_ns=by_worker,
        m_w=None,
        m_s=None,
    )
    return _add_m_w_and_m_s(result, replayer, times_of["without last stage", 0])


def _put_back_each(
    replayer: Replayer, kinds: Sequence[int], stages: Sequence[int]
) -> dict[tuple[str, int], NDArray[np.float64]]:
    """Return the step times with nothing, each kind, each stage, all but the last stage, all."""
    model = replayer.model
    parts = [("none", 0), *(("kind", code) for code in kinds)]
    parts += [*(("stage", stage) for stage in stages), ("without last stage", 0), ("all", 0)]
    found: dict[tuple[str, int], NDArray[np.float64]] = {}
    for begin in range(0, len(parts), MAX_WIDTH):
        block = parts[begin : begin + MAX_WIDTH]
        by_kind = np.zeros(len(model.kinds), dtype=np.uint32)
        by_stage = np.zeros(max(stages) + 1, dtype=np.uint32)
        for bit, (name, code) in enumerate(block):
            if name == "kind":
                by_kind[code] |= 1 << bit
            elif name == "stage":
                by_stage[code] |= 1 << bit
            elif name != "none":
                by_stage[: None if name == "all" else -1] |= 1 << bit
        times = replayer.put_back_each(by_kind[model.kind] | by_stage[model.stage], len(block))
        found |= dict(zip(block, times, strict=True))
    return found


def _mean(values: NDArray[np.float64]) -> float:
    """Return ``values.mean()``, three times as fast for few values."""
    return float(np.add.reduce(values)) / len(values)


def ratio(above: float, below: float) -> float | None:
    """Return ``above / below``; None if ``below`` is not positive."""
    return above / below if below > 0 else None


def recoverable_ratio(recorded: float, without: float, ideal: float) -> float | None:
    """Return the share of the time above ideal that a part costs: (T - T_without) / (T - T_ideal).

    None if the recorded run is not slower than the ideal one.
    """
    return ratio(recorded - without, recorded - ideal)


def share_of_excess(recorded: float, without: float, ideal: float) -> float | None:
    """Return M of a part made ideal: (T - T_without) / (T - T_ideal), of either sign.

    None if the recorded run takes as long as the ideal one, up to `ROUNDING`.

    Source:
        arXiv 2505.05713, section 5.
    """
    if abs(recorded - ideal) <= ROUNDING * ideal:
        return None
    return (recorded - without) / (recorded - ideal)


def _add_m_w_and_m_s(
    result: WhatIf, replayer: Replayer, without_last_stage_ns: NDArray[np.float64]
) -> WhatIf:
    """Add M_W, with the worst 3 % of workers ideal, and M_S, with the last stage ideal."""
    model = replayer.model
    num_stages = int(model.stage.max()) + 1
    # Of the ranks' type: ufunc.at is slow with mixed types.
    num_workers = (int(model.dp.max()) + 1) * num_stages
    lowest = np.full(num_workers, np.iinfo(np.int32).max, dtype=model.rank.dtype)
    worker = model.dp.astype(np.int64) * num_stages + model.stage
    np.minimum.at(lowest, worker, model.rank)
    lowest_rank = {
        (dp, stage): lowest[dp * num_stages + stage] for dp, stage in result.by_worker_ns
    }
    slowdowns = result.worker_slowdowns()
    workers = sorted(
        lowest_rank, key=lambda worker: (-(slowdowns[worker] or 0.0), lowest_rank[worker])
    )
    worst = workers[: math.ceil(WORST_SHARE * len(workers))]
    is_worst = np.zeros(len(lowest), dtype=np.bool_)
    is_worst[[dp * num_stages + stage for dp, stage in worst]] = True
    recorded, ideal = float(result.replayed_ns.mean()), float(result.ideal_ns.mean())
    return replace(
        result,
        m_w=share_of_excess(recorded, float(replayer.made_ideal(is_worst[worker]).mean()), ideal)
        if workers
        else None,
        m_s=None
        if len(result.by_stage_ns) == 1  # one stage has no share: it is the run
        else share_of_excess(recorded, float(without_last_stage_ns.mean()), ideal),
    )
