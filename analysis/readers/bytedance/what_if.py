"""The what-if analysis of a ByteDance trace as a whole, from columns to results.

It gives the results of `analysis.replay.what_if.what_if` for traces of any size: the graph of each
shape is inferred once, and all replicas of that shape are replayed as columns of one matrix.

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
"""Nodes times columns replayed together. Fewer mean more calls, more leave the core's cache. The
868 nodes of the published trace AR make rows of 4,800 columns, and 34 MB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceWhatIf:
    """The what-if of a trace, with its warnings."""

    result: WhatIf
    actual_ns: NDArray[np.int64]
    """Shape (steps,): last end - first start, as recorded."""

    num_operations: int
    num_shapes: int
    num_clock_errors: int
    """Transfers that were negative by 10 ms or more and count as 0."""

    left_out: dict[int, str]
    """Steps that cannot be replayed, and why."""

    warnings: tuple[str, ...]


def what_if_trace(run: RunInfo, trace: Columns) -> TraceWhatIf:
    """Replay a ByteDance trace in every way that the paper defines.

    Args:
        run: Its layout and the (dp, stage) of each rank.
        trace: Its operations, in any order; may be an `analysis.trace.tables.SpanTable`.

    Raises:
        EmptyRunError: No whole step is left.
        CycleError: Operations depend on each other.
    """
    blocks = build_blocks(run, trace)
    tables, left_out = _find_whole_steps(run, blocks)
    try:
        programs = compile_shapes([table.shape for table in tables])
    except CycleError:
        cyclic = _find_cycles(tables, blocks.steps)
        if not cyclic:
            raise
        left_out = left_out | cyclic
        tables = _build_tables(run, blocks, left_out)
        programs = compile_shapes([table.shape for table in tables])
    keep = ~np.isin(blocks.steps, list(left_out))
    recorded, num_clock_errors = recorded_durations(tables, len(blocks.steps))
    scenarios = Scenarios(blocks, tables, programs, recorded, np.flatnonzero(keep))
    return TraceWhatIf(
        result=scenarios.what_if(),
        actual_ns=_recorded_times(tables, blocks, trace)[keep],
        num_operations=sum(durations.size for durations in recorded),
        num_shapes=len(tables),
        num_clock_errors=num_clock_errors,
        left_out=left_out,
        warnings=blocks.warnings,
    )


def _find_whole_steps(run: RunInfo, blocks: Blocks) -> tuple[list[ShapeTable], dict[int, str]]:
    """Return the shapes of the steps that can be replayed, and why the others cannot."""
    left_out = blocks.find_contradictions()
    tables = _build_tables(run, blocks, left_out)
    unpaired = _find_unpaired(tables, blocks.steps)
    if unpaired:
        left_out = left_out | unpaired
        tables = _build_tables(run, blocks, left_out)
    return tables, left_out


def _build_tables(run: RunInfo, blocks: Blocks, left_out: dict[int, str]) -> list[ShapeTable]:
    keep = ~np.isin(blocks.steps, list(left_out))
    if not keep.any():
        reason = next(iter(left_out.values()), "it has no operation of a known type")
        raise EmptyRunError(f"run {run.run_id} has no whole step: {reason}")
    return build_shape_tables(blocks, run.layout, keep)


def _find_unpaired(tables: Sequence[ShapeTable], steps: NDArray[np.int64]) -> dict[int, str]:
    """Return the steps with unpaired sends and receives, and their number."""
    num = np.zeros(len(steps), dtype=np.int64)
    for table in tables:
        np.add.at(num, table.step, table.num_unpaired)
    return describe_unpaired(dict(zip(steps.tolist(), num.tolist(), strict=True)))


def _find_cycles(tables: Sequence[ShapeTable], steps: NDArray[np.int64]) -> dict[int, str]:
    """Return the steps with a replica whose operations depend on each other."""
    found: dict[int, str] = {}
    for table in tables:
        try:
            compile_shapes([table.shape])
        except CycleError as error:
            reason = f"{error.num_nodes} operations depend on each other in a cycle"
            found |= dict.fromkeys(steps[sorted_unique(table.step)].tolist(), reason)
    return found


def _recorded_times(
    tables: Sequence[ShapeTable], blocks: Blocks, trace: Columns
) -> NDArray[np.int64]:
    """Return the last end - first start of each step, over all operations, replayed or not."""
    num_steps = len(blocks.steps)
    first = np.full(num_steps, np.iinfo(np.int64).max)
    last = np.full(num_steps, np.iinfo(np.int64).min)
    for table in tables:
        np.minimum.at(first, table.step, table.start_ns.min(axis=0))
        np.maximum.at(last, table.step, table.end_ns.max(axis=0))
    if blocks.taken is not None:
        rest = np.ones(len(trace.step), dtype=np.bool_)
        rest[blocks.taken] = False
        rest &= np.isin(trace.step, blocks.steps)
        step, start = find_positions(trace.step[rest], blocks.steps), trace.start_ns[rest]
        np.minimum.at(first, step, start)
        np.maximum.at(last, step, start + trace.duration_ns[rest])
    times: NDArray[np.int64] = last - first
    return times


class Scenarios:
    """All replays of the what-if, some steps at a time.

    A kind or a stage is a set of labels, a label being (stage, type). The bits of one int say
    which labels are in the set.
    """

    def __init__(
        self,
        blocks: Blocks,
        tables: Sequence[ShapeTable],
        programs: Sequence[ShapeProgram],
        recorded: Sequence[NDArray[np.float64]],
        steps: NDArray[np.int64],
    ) -> None:
        self._blocks = blocks
        self._tables = tables
        self._recorded = recorded
        self._steps = steps
        self._programs = programs
        by_type = ideal_durations(tables, recorded)
        self._ideal = [[by_type[code : code + 1] for code in table.type] for table in tables]

    def what_if(self) -> WhatIf:
        """Return T, T_ideal, and T with each kind, dp position, stage and worker put back."""
        by_kind, by_stage = self._labels_by_kind(), self._labels_by_stage()
        everything = sum(by_stage.values())
        last_stage = max(by_stage)
        labels = {
            "all": everything,
            "but the last stage": everything & ~by_stage[last_stage],
            **{f"kind {kind}": bits for kind, bits in by_kind.items()},
            **{f"stage {stage}": bits for stage, bits in by_stage.items()},
        }
        together, alone = self._put_back(labels, ("all", *(f"stage {s}" for s in by_stage)))
        replicas = self._blocks.replicas.tolist()
        traced = {replicas[k] for k in np.flatnonzero(self._blocks.count.any(axis=(0, 2)))}
        result = WhatIf(
            steps=tuple(self._blocks.steps[self._steps].tolist()),
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
        without_worst = self._times_with_ideal(self._find_worst(result))
        without_last = together["but the last stage"]
        return replace(
            result,
            m_w=share_of_excess(recorded, float(without_worst.mean()), ideal),
            m_s=share_of_excess(recorded, float(without_last.mean()), ideal),
        )

    def _labels_by_stage(self) -> dict[int, int]:
        labels = sorted({label for program in self._programs for label in program.label})
        found: dict[int, int] = {}
        for label in labels:
            stage = label // NUM_TYPES
            found[stage] = found.get(stage, 0) | 1 << label
        return found

    def _labels_by_kind(self) -> dict[str, int]:
        """Return the labels of each kind; send and receive of one direction are one kind."""
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

    def _step_ranges(self) -> Iterator[tuple[slice, StepRange]]:
        """Divide the steps into ranges; yield each with its indices among the steps."""
        num_ends = sum(
            len(table.step) * len(program.predecessors)
            for table, program in zip(self._tables, self._programs, strict=True)
        )
        at_once = max(1, MAX_ENDS * len(self._steps) // num_ends)
        for begin in range(0, len(self._steps), at_once):
            steps = self._steps[begin : begin + at_once]
            shapes = (self._columns(number, steps) for number in range(len(self._tables)))
            chosen = StepRange(shapes=[shape for shape in shapes if shape], num_steps=len(steps))
            yield slice(begin, begin + len(steps)), chosen

    def _columns(self, number: int, steps: NDArray[np.int64]) -> ShapeColumns | None:
        """Return the columns of one shape in some steps; None if it has none."""
        table = self._tables[number]
        first, last = np.searchsorted(table.step, [steps[0], steps[-1] + 1])
        if first == last:
            return None
        step = np.searchsorted(steps, table.step[first:last])
        return ShapeColumns(
            program=self._programs[number],
            recorded=list(self._recorded[number][:, first:last]),
            ideal=self._ideal[number],
            step=step,
            replica=table.replica[first:last],
            begins=np.flatnonzero(np.diff(step, prepend=-1)),
        )

    def _put_back(
        self, labels: dict[str, int], alone: tuple[str, ...]
    ) -> tuple[dict[str, NDArray[np.float64]], dict[str, NDArray[np.float64]]]:
        """Replay the ideal run with each set of labels put back.

        Args:
            labels: The sets, by name.
            alone: Names of the sets that are also put back in one replica at a time.

        Returns:
            Step times with each set put back in all replicas, shape (steps,), and of the ``ideal``
            run; step times by replica with each set of ``alone`` put back, shape (replicas,
            steps). A replica that a step lacks does not change its time.
        """
        num_steps, num_replicas = len(self._steps), len(self._blocks.replicas)
        together = {name: np.empty(num_steps) for name in ("ideal", *labels)}
        one_by_one = {name: np.empty((num_replicas, num_steps)) for name in alone}
        for steps, chosen in self._step_ranges():
            ideal = chosen.ideal()
            together["ideal"][steps] = chosen.step_times(ideal)
            for name, bits in labels.items():
                ends = chosen.put_back(bits, ideal)
                together[name][steps] = chosen.step_times(ends)
                if name in one_by_one:
                    times = one_by_one[name][:, steps]
                    times[:] = together["ideal"][steps]
                    for number, shape in enumerate(chosen.shapes):
                        last = chosen.alone(number, bits, ends[number], ideal)
                        times[shape.replica, shape.step] = last
        return together, one_by_one

    def _find_worst(self, result: WhatIf) -> NDArray[np.bool_]:
        """Return the worst workers by the paper's shortcut for S_w, shape (replicas, stages).

        Among equal ones the lower rank is worse.
        """
        ideal = result.ideal_ns.mean()
        replicas = self._blocks.replicas.tolist()
        by_dp = np.array([result.by_dp_ns[dp].mean() if dp in result.by_dp_ns else -np.inf
                          for dp in replicas])  # fmt: skip
        slowdown = np.full((len(replicas), self._blocks.num_stages), -np.inf)
        for stage, times in result.by_stage_ns.items():
            slowdown[:, stage] = np.minimum(by_dp, times.mean()) / ideal
        order = argsort_rows(-slowdown.ravel(), self._blocks.lowest_rank.ravel())
        num_worst = math.ceil(WORST_SHARE * len(result.by_worker_ns))
        worst = np.zeros(slowdown.size, dtype=np.bool_)
        worst[order[:num_worst]] = True
        return worst.reshape(slowdown.shape)

    def _times_with_ideal(self, workers: NDArray[np.bool_]) -> NDArray[np.float64]:
        """Return the step times of the recorded run with some workers made ideal.

        Args:
            workers: Shape (replicas, stages): the workers.

        Returns:
            Shape (steps,), ns.
        """
        times = np.empty(len(self._steps))
        stages = set(np.flatnonzero(workers.any(axis=0)).tolist())
        for steps, chosen in self._step_ranges():
            durations: list[list[Row]] = []
            for shape in chosen.shapes:
                made_ideal = {stage: workers[shape.replica, stage] for stage in stages}
                durations.append(
                    [
                        np.where(made_ideal[stage], ideal, recorded)
                        if (stage := label // NUM_TYPES) in stages
                        else recorded
                        for label, recorded, ideal in zip(
                            shape.program.label, shape.recorded, shape.ideal, strict=True
                        )
                    ]
                )
            times[steps] = chosen.step_times(chosen.replay(durations))
        return times
