"""The what-if analysis of a ByteDance trace as a whole, from columns to results.

It gives what `analysis.replay.what_if.what_if` gives, for traces of any size: each
structure's graph is inferred once, and all replicas that share it are
replayed as the lanes of one row.

Source: arXiv 2505.05713.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from ...arrays.grouping import sorted_unique
from ...arrays.sorting import argsort_rows, find_positions
from ...replay.batched_program import compile_shapes
from ...replay.batched_replay import ShapeColumns, StepRange
from ...replay.what_if import WORST_SHARE, WhatIf, share_of_excess
from ...trace.errors import CycleError, EmptyRunError
from .blocks import NUM_TYPES, build_blocks, describe_unpaired
from .format import FOLDED, TYPES
from .shapes import build_shape_tables, ideal_durations, recorded_durations

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from ...replay.batched_program import ShapeProgram
    from ...replay.batched_replay import Row
    from ...trace.tables import RunInfo
    from .blocks import Blocks
    from .format import Columns
    from .shapes import ShapeTable

MAX_ENDS = 1 << 22
"""Nodes times lanes replayed together: fewer cost more calls, more leave the core's cache.

Of AR's 868 nodes that makes rows of 4,800 lanes, and 34 MB.
"""


class Scenarios:
    """Runs every replay of the what-if, some steps at a time."""

    def __init__(
        self,
        blocks: Blocks,
        sheets: Sequence[ShapeTable],
        programs: Sequence[ShapeProgram],
        recorded: Sequence[NDArray[np.float64]],
        steps: NDArray[np.int64],
    ) -> None:
        self._trace = blocks
        self._sheets = sheets
        self._recorded = recorded
        self._steps = steps
        self._programs = programs
        by_type = ideal_durations(sheets, recorded)
        self._ideal = [[by_type[code : code + 1] for code in sheet.type] for sheet in sheets]

    def what_if(self) -> WhatIf:
        """Return T, T_ideal, and T with each kind, dp position, stage and worker put back."""
        by_kind, by_stage = self._kinds(), self._stages()
        everything = sum(by_stage.values())
        last_stage = max(by_stage)
        labels = {
            "all": everything,
            "but the last stage": everything & ~by_stage[last_stage],
            **{f"kind {kind}": bits for kind, bits in by_kind.items()},
            **{f"stage {stage}": bits for stage, bits in by_stage.items()},
        }
        together, alone = self._put_back(labels, ("all", *(f"stage {s}" for s in by_stage)))
        replicas = self._trace.replicas.tolist()
        traced = {replicas[k] for k in np.flatnonzero(self._trace.count.any(axis=(0, 2)))}
        result = WhatIf(
            steps=tuple(self._trace.steps[self._steps].tolist()),
            replayed_ns=together["all"],
            ideal_ns=together["ideal"],
            by_kind_ns={kind: together[f"kind {kind}"] for kind in by_kind},
            by_dp_ns={dp: alone["all"][k] for k, dp in enumerate(replicas) if dp in traced},
            by_stage_ns={stage: together[f"stage {stage}"] for stage in by_stage},
            by_worker_ns={
                (dp, stage): alone[f"stage {stage}"][k]
                for stage in by_stage
                for k, dp in enumerate(replicas)
                if dp in traced
            },
            m_w=None,
            m_s=None,
        )
        recorded, ideal = float(result.replayed_ns.mean()), float(result.ideal_ns.mean())
        without_worst = self._without(self._worst(result))
        without_last = together["but the last stage"]
        return replace(
            result,
            m_w=share_of_excess(recorded, float(without_worst.mean()), ideal),
            m_s=share_of_excess(recorded, float(without_last.mean()), ideal),
        )

    def _stages(self) -> dict[int, int]:
        """Return the labels of each stage."""
        labels = sorted({label for program in self._programs for label in program.label})
        found: dict[int, int] = {}
        for label in labels:
            stage = label // NUM_TYPES
            found[stage] = found.get(stage, 0) | 1 << label
        return found

    def _kinds(self) -> dict[str, int]:
        """Return the labels of each kind, both ways of a transfer in one."""
        labels = sorted(
            {label for program in self._programs for label in program.label},
            key=lambda label: label % NUM_TYPES,
        )
        found: dict[str, int] = {}
        for label in labels:
            name = TYPES[label % NUM_TYPES]
            kind = FOLDED.get(name, name)
            found[kind] = found.get(kind, 0) | 1 << label
        return found

    def _blocks(self) -> Iterator[tuple[slice, StepRange]]:
        """Cut the steps into blocks; yield each with its place among the steps."""
        num_ends = sum(
            len(sheet.step) * len(program.before)
            for sheet, program in zip(self._sheets, self._programs, strict=True)
        )
        at_once = max(1, MAX_ENDS * len(self._steps) // num_ends)
        for begin in range(0, len(self._steps), at_once):
            steps = self._steps[begin : begin + at_once]
            parts = (self._part(number, steps) for number in range(len(self._sheets)))
            block = StepRange(parts=[part for part in parts if part], num_steps=len(steps))
            yield slice(begin, begin + len(steps)), block

    def _part(self, number: int, steps: NDArray[np.int64]) -> ShapeColumns | None:
        """Return the lanes of one shape in some steps, if it has any."""
        sheet = self._sheets[number]
        first, last = np.searchsorted(sheet.step, [steps[0], steps[-1] + 1])
        if first == last:
            return None
        step = np.searchsorted(steps, sheet.step[first:last])
        return ShapeColumns(
            program=self._programs[number],
            recorded=list(self._recorded[number][:, first:last]),
            ideal=self._ideal[number],
            step=step,
            replica=sheet.replica[first:last],
            begins=np.flatnonzero(np.diff(step, prepend=-1)),
        )

    def _put_back(
        self, labels: dict[str, int], alone: tuple[str, ...]
    ) -> tuple[dict[str, NDArray[np.float64]], dict[str, NDArray[np.float64]]]:
        """Replay the ideal run with each set of labels put back.

        Args:
            labels: The sets.
            alone: Those to put back in one replica at a time, too.

        Returns:
            The step times with each set put back, shape (steps,), and those of
            the ``ideal`` run; and of ``alone``, shape (replicas, steps). A replica
            that a step lacks changes nothing there.
        """
        num_steps, num_replicas = len(self._steps), len(self._trace.replicas)
        together = {name: np.empty(num_steps) for name in ("ideal", *labels)}
        apart = {name: np.empty((num_replicas, num_steps)) for name in alone}
        for place, block in self._blocks():
            ideal = block.ideal()
            together["ideal"][place] = block.step_times(ideal)
            for name, bits in labels.items():
                ends = block.put_back(bits, ideal)
                together[name][place] = block.step_times(ends)
                if name in apart:
                    here = apart[name][:, place]
                    here[:] = together["ideal"][place]
                    for number, part in enumerate(block.parts):
                        last = block.alone(number, bits, ends[number], ideal)
                        here[part.replica, part.step] = last
        return together, apart

    def _worst(self, result: WhatIf) -> NDArray[np.bool_]:
        """Tell the worst workers by the paper's shortcut for S_w, shape (replicas, stages).

        Of equal ones, that with the lower rank.
        """
        ideal = result.ideal_ns.mean()
        replicas = self._trace.replicas.tolist()
        by_dp = np.array([result.by_dp_ns[dp].mean() if dp in result.by_dp_ns else -np.inf
                          for dp in replicas])  # fmt: skip
        slowdown = np.full((len(replicas), self._trace.num_stages), -np.inf)
        for stage, times in result.by_stage_ns.items():
            slowdown[:, stage] = np.minimum(by_dp, times.mean()) / ideal
        order = argsort_rows(-slowdown.ravel(), self._trace.lowest_rank.ravel())
        num_worst = math.ceil(WORST_SHARE * len(result.by_worker_ns))
        worst = np.zeros(slowdown.size, dtype=np.bool_)
        worst[order[:num_worst]] = True
        return worst.reshape(slowdown.shape)

    def _without(self, workers: NDArray[np.bool_]) -> NDArray[np.float64]:
        """Replay the recorded run with some workers made ideal. Shape (steps,), ns.

        Args:
            workers: Which, shape (replicas, stages).
        """
        times = np.empty(len(self._steps))
        stages = set(np.flatnonzero(workers.any(axis=0)).tolist())
        for place, block in self._blocks():
            durations: list[list[Row]] = []
            for part in block.parts:
                made_ideal = {stage: workers[part.replica, stage] for stage in stages}
                durations.append(
                    [
                        np.where(made_ideal[stage], ideal, recorded)
                        if (stage := label // NUM_TYPES) in stages
                        else recorded
                        for label, recorded, ideal in zip(
                            part.program.label, part.recorded, part.ideal, strict=True
                        )
                    ]
                )
            times[place] = block.step_times(block.replay(durations))
        return times


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceWhatIf:
    """A trace's what-if, and what a reader should know of it."""

    result: WhatIf
    actual_ns: NDArray[np.int64]
    """Shape (steps,): last end - first start, as recorded."""

    num_operations: int
    num_shapes: int
    num_clock_errors: int
    """Transfers that were negative by 10 ms or more, and count as 0."""

    left_out: dict[int, str]
    """Steps that cannot be replayed, and why."""

    warnings: tuple[str, ...]


def what_if_trace(run: RunInfo, columns: Columns) -> TraceWhatIf:
    """Replay a ByteDance trace in every way that the paper names.

    Args:
        run: Its layout and the (dp, stage) of each rank.
        columns: Its operations, in any order; a `analysis.trace.tables.SpanTable` will do.

    Raises:
        EmptyRunError: No whole step is left.
        CycleError: Operations wait for each other.
    """
    blocks = build_blocks(run, columns)
    sheets, left_out = _find_whole_steps(run, blocks)
    try:
        programs = compile_shapes([sheet.shape for sheet in sheets])
    except CycleError:
        circling = _find_cycles(sheets, blocks.steps)
        if not circling:
            raise
        left_out = left_out | circling
        sheets = _build_tables(run, blocks, left_out)
        programs = compile_shapes([sheet.shape for sheet in sheets])
    keep = ~np.isin(blocks.steps, list(left_out))
    recorded, num_clock_errors = recorded_durations(sheets, len(blocks.steps))
    scenarios = Scenarios(blocks, sheets, programs, recorded, np.flatnonzero(keep))
    return TraceWhatIf(
        result=scenarios.what_if(),
        actual_ns=_recorded_times(sheets, blocks, columns)[keep],
        num_operations=sum(durations.size for durations in recorded),
        num_shapes=len(sheets),
        num_clock_errors=num_clock_errors,
        left_out=left_out,
        warnings=blocks.warnings,
    )


def _find_whole_steps(run: RunInfo, blocks: Blocks) -> tuple[list[ShapeTable], dict[int, str]]:
    """Return the structures of the steps that can be replayed, and why the others cannot."""
    left_out = blocks.find_contradictions()
    sheets = _build_tables(run, blocks, left_out)
    alone = _find_unpaired(sheets, blocks.steps)
    if alone:
        left_out = left_out | alone
        sheets = _build_tables(run, blocks, left_out)
    return sheets, left_out


def _build_tables(run: RunInfo, blocks: Blocks, left_out: dict[int, str]) -> list[ShapeTable]:
    keep = ~np.isin(blocks.steps, list(left_out))
    if not keep.any():
        reason = next(iter(left_out.values()), "it holds no operation of a known type")
        raise EmptyRunError(f"run {run.run_id} has no whole step: {reason}")
    return build_shape_tables(blocks, run.layout, keep)


def _find_unpaired(sheets: Sequence[ShapeTable], steps: NDArray[np.int64]) -> dict[int, str]:
    """Name the steps with sends and receives that have no partner."""
    num = np.zeros(len(steps), dtype=np.int64)
    for sheet in sheets:
        np.add.at(num, sheet.step, sheet.num_unpaired)
    return describe_unpaired(dict(zip(steps.tolist(), num.tolist(), strict=True)))


def _find_cycles(sheets: Sequence[ShapeTable], steps: NDArray[np.int64]) -> dict[int, str]:
    """Name the steps with a replica whose operations wait for each other."""
    found: dict[int, str] = {}
    for sheet in sheets:
        try:
            compile_shapes([sheet.shape])
        except CycleError as error:
            why = f"{error.num_nodes} operations depend on each other in a circle"
            found |= dict.fromkeys(steps[sorted_unique(sheet.step)].tolist(), why)
    return found


def _recorded_times(
    sheets: Sequence[ShapeTable], blocks: Blocks, columns: Columns
) -> NDArray[np.int64]:
    """Return last end - first start of each step, over all operations, replayed or not."""
    num_steps = len(blocks.steps)
    first = np.full(num_steps, np.iinfo(np.int64).max)
    last = np.full(num_steps, np.iinfo(np.int64).min)
    for sheet in sheets:
        np.minimum.at(first, sheet.step, sheet.start_ns.min(axis=0))
        np.maximum.at(last, sheet.step, sheet.end_ns.max(axis=0))
    if blocks.taken is not None:
        rest = np.ones(len(columns.step), dtype=np.bool_)
        rest[blocks.taken] = False
        rest &= np.isin(columns.step, blocks.steps)
        step, start = find_positions(columns.step[rest], blocks.steps), columns.start_ns[rest]
        np.minimum.at(first, step, start)
        np.maximum.at(last, step, start + columns.duration_ns[rest])
    times: NDArray[np.int64] = last - first
    return times
