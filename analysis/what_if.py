"""Replay of one step with changes: a part shortened, a finding fixed, hosts swapped, stages
balanced.

The prices are those of the report: a finding that is fixed saves what the report says, and a part
that is made healthy what `analysis.price.operation_sets.price_part` returns.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from .analyze import read_case
from .price.findings import Times, changes_of_fixes
from .price.operation_sets import Part, select_operations
from .replay.critical_path import StepPaths
from .replay.model import COMPUTE_KINDS, has_kind, select_step
from .replay.pipeline import measure_pipeline
from .replay.program import compile_program
from .replay.replayer import ratio
from .replay.step_graph import find_step
from .replay.step_overlap import StepOverlap
from .trace.errors import AnalysisError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from .causes.candidate import Candidate
    from .causes.detector import Case
    from .replay.critical_path import CriticalPath
    from .replay.model import ReplayModel
    from .replay.pipeline import Pipeline
    from .replay.program import Change, Program
    from .report.report import Finding
    from .trace.tables import RunInfo, SpanSource


class PlayError(AnalysisError):
    """A change that this run does not admit."""


def open_play(source: SpanSource, run_id: str, *, first: int | None = None) -> RunPlay:
    """Read and diagnose a run, so that its steps can be replayed with changes.

    Args:
        first: First step that is read; None: all are.

    Raises:
        UnknownRunError: The source has no such run.
        EmptyRunError: No step of it can be replayed.
    """
    run = source.run_info(run_id)
    case, candidates = read_case(source, run, first=first)
    return RunPlay(run, case, candidates)


class RunPlay:
    """A run whose steps can be replayed with changes. Safe to use from several threads."""

    def __init__(self, run: RunInfo, case: Case, candidates: list[Candidate]) -> None:
        model = case.reading.model
        self.run = run
        self.reading = case.reading
        self.replayer = case.replayer
        self.recorded = Times(model.operations.duration_ns, model.operations.gap_ns)
        self.faulty, changes = changes_of_fixes(candidates, model, case.workers)
        self.fix_of: dict[tuple[str, tuple[int, ...], tuple[int, int] | None], Change] = {
            (each.cause.name, each.ranks, each.steps): change
            for each, change in zip(candidates, changes, strict=True)
        }
        self._last_step: RecordedStep | None = None

    def step(self, number: int) -> StepPlay:
        """Return a step as recorded, to be changed. What the last one needs is kept.

        Raises:
            EmptyRunError: The step takes no part in the replay.
        """
        kept = self._last_step
        if kept is None or kept.number != number:
            model, rows = select_step(self.reading.model, find_step(self.reading.model, number))
            self._last_step = kept = RecordedStep(
                run_play=self,
                number=number,
                model=model,
                rows=rows,
                program=compile_program(model.operations),
                overlap=StepOverlap(model),
                recorded=Times(*(column[rows] for column in self.recorded)),
            )
        return StepPlay(recorded_step=kept, times=kept.recorded, is_fixed=False)

    def change_of(self, finding: Finding) -> Change | None:
        """Return what the fix of a finding changes; None if it is unknown."""
        return self.fix_of.get((finding.cause, finding.ranks, finding.steps))

    @cached_property
    def pipeline(self) -> Pipeline:
        """The run's pipeline, measured.

        Raises:
            ScheduleError: It is unknown.
        """
        return measure_pipeline(self.reading, float(self.replayer.full_recorded().mean()))

    @cached_property
    def speed_by_rank(self) -> dict[int, float]:
        """Ideal over recorded compute of each rank, over all steps: 0.5 takes twice as long."""
        model = self.reading.model
        compute = np.flatnonzero(has_kind(model, COMPUTE_KINDS) & model.on_device)
        rank = model.rank[compute]
        took = np.bincount(rank, weights=self.recorded.duration_ns[compute])
        expected = np.bincount(rank, weights=model.ideal_ns[compute])
        ranks = np.flatnonzero((took > 0) & (expected > 0))
        return dict(zip(ranks.tolist(), (expected[ranks] / took[ranks]).tolist(), strict=True))


@dataclass(frozen=True, kw_only=True)
class RecordedStep:
    """A step of a run as recorded: what all that is played of it has in common."""

    run_play: RunPlay
    number: int
    model: ReplayModel
    """Its operations."""

    rows: slice
    """Their rows in the run's operations."""

    program: Program
    overlap: StepOverlap
    recorded: Times
    """Shape (ops of the step,) each."""

    @cached_property
    def faulty(self) -> Times:
        """The step without what no finding explains."""
        return Times(*(column[self.rows] for column in self.run_play.faulty))

    @cached_property
    def recorded_ns(self) -> float:
        """Duration of the replayed step."""
        return self.replay(self.recorded)

    @cached_property
    def faulty_ns(self) -> float:
        """Its duration without what no finding explains."""
        return self.replay(self.faulty)

    @cached_property
    def paths(self) -> StepPaths:
        """Its critical paths with any times."""
        return StepPaths(self.model)

    @cached_property
    def recorded_path(self) -> CriticalPath:
        """Its critical path as recorded."""
        return self.find_path(self.recorded)

    @cached_property
    def compute_rows(self) -> NDArray[np.int64]:
        """Its operations that are compute of a device."""
        return np.flatnonzero(has_kind(self.model, COMPUTE_KINDS) & self.model.on_device)

    def replay(self, times: Times) -> float:
        """Return the duration of the step with other times."""
        gap_ns, shared_ns = self.overlap.shift(*times)
        return float(self.program.step_times(times.duration_ns, gap_ns)[0] - shared_ns[0])

    def find_path(self, times: Times) -> CriticalPath:
        """Return the critical path of the step with other times."""
        gap_ns, _ = self.overlap.shift(*times)
        return self.paths.find(times.duration_ns, gap_ns)


@dataclass(frozen=True, kw_only=True)
class StepPlay:
    """A step with changes. Each method returns another one, with one change more.

    Example:
        >>> run.play(12).scale(Part(rank=33), 0.7).played_ns
    """

    recorded_step: RecordedStep
    times: Times
    """Its times with the changes."""

    is_fixed: bool
    """Whether a finding was fixed: it is priced beside what no finding explains, not beside all
    that was recorded."""

    changes: tuple[str, ...] = ()
    """What was changed, in words."""

    @property
    def step(self) -> int:
        """Number of the step."""
        return self.recorded_step.number

    def fix(self, finding: Finding) -> StepPlay:
        """Fix a finding of the run's report: its price is that of the report, in this step.

        Raises:
            PlayError: The finding has no operation that could be fixed.
        """
        change = self.recorded_step.run_play.change_of(finding)
        if change is None or not len(change.rows):
            raise PlayError(f"{finding.cause} has no operation whose time a fix would change")
        play = self
        if not self.is_fixed:  # the same changes, on what no finding explains and their excess
            step = self.recorded_step
            columns = (
                np.where(now != before, now, base)
                for now, before, base in zip(self.times, step.recorded, step.faulty, strict=True)
            )
            play = replace(self, is_fixed=True, times=Times(*columns))
        first, end = np.searchsorted(
            change.rows, (self.recorded_step.rows.start, self.recorded_step.rows.stop)
        ).tolist()
        rows, own = change.rows[first:end] - self.recorded_step.rows.start, slice(first, end)
        duration_ns, gap_ns = (column.copy() for column in play.times)
        duration_ns[rows], gap_ns[rows] = change.duration_ns[own], change.gap_ns[own]
        return play._with(duration_ns, gap_ns, f"{finding.cause} fixed")

    def heal(self, part: Part) -> StepPlay:
        """Make a part as fast as its peers: durations and launch gaps become ideal.

        Raises:
            EmptyPartError: No operation meets the conditions.
        """
        rows, model = self._select(part), self.recorded_step.model
        duration_ns, gap_ns = (column.copy() for column in self.times)
        duration_ns[rows], gap_ns[rows] = model.ideal_ns[rows], model.ideal_gap_ns[rows]
        return self._with(duration_ns, gap_ns, f"{_describe(part)} as its peers")

    def scale(self, part: Part, factor: float) -> StepPlay:
        """Multiply the durations of a part: 0.5 is twice as fast.

        Raises:
            EmptyPartError: No operation meets the conditions.
            PlayError: The factor is negative or no number.
        """
        if not 0.0 <= factor < float("inf"):
            raise PlayError(f"a duration cannot be multiplied by {factor}")
        rows = self._select(part)
        duration_ns = self.times.duration_ns.copy()
        duration_ns[rows] *= factor
        return self._with(duration_ns, self.times.gap_ns, f"{_describe(part)} x {factor:g}")

    def swap_hosts(self, one: str, other: str) -> StepPlay:
        """Exchange two hosts: each rank computes as fast as its partner did over the run.

        The ranks of a host are paired in ascending order.

        Raises:
            PlayError: A host has no rank with compute, or the two have different numbers of ranks.
        """
        speed = self.recorded_step.run_play.speed_by_rank
        ranks_of: dict[str, list[int]] = defaultdict(list)
        for rank, info in sorted(self.recorded_step.run_play.run.ranks.items()):
            if info.host and rank in speed:
                ranks_of[info.host].append(rank)
        for host in (one, other):
            if host not in ranks_of:
                known = ", ".join(sorted(ranks_of)[:8])
                raise PlayError(f"no rank of host {host!r} has compute; hosts: {known}")
        if len(ranks_of[one]) != len(ranks_of[other]):
            counts = f"{len(ranks_of[one])} and {len(ranks_of[other])} ranks"
            raise PlayError(f"hosts {one} and {other} have {counts}: they cannot be swapped")
        factor = np.ones(int(self.recorded_step.model.rank.max()) + 1)
        for first, second in zip(ranks_of[one], ranks_of[other], strict=True):
            factor[first], factor[second] = (
                speed[first] / speed[second],
                speed[second] / speed[first],
            )
        compute = self.recorded_step.compute_rows
        duration_ns = self.times.duration_ns.copy()
        duration_ns[compute] *= factor[self.recorded_step.model.rank[compute]]
        return self._with(duration_ns, self.times.gap_ns, f"hosts {one} and {other} swapped")

    def balance_stages(self, shares: Mapping[int, float] | None = None) -> StepPlay:
        """Divide the compute among the pipeline's stages, with its sum unchanged.

        Args:
            shares: Share of the whole that each stage computes; None: equal shares.

        Raises:
            PlayError: The run has one stage, or the shares are not those of its stages.
        """
        model, compute = self.recorded_step.model, self.recorded_step.compute_rows
        stage = model.stage[compute]
        spent = np.bincount(stage, weights=self.times.duration_ns[compute])
        stages = np.flatnonzero(spent).tolist()
        if len(stages) == 1:
            raise PlayError("all compute is of one pipeline stage: there is nothing to balance")
        wanted = dict.fromkeys(stages, 1.0) if shares is None else dict(shares)
        if (
            set(wanted) != set(stages)
            or not all(0 <= share < float("inf") for share in wanted.values())
            or not sum(wanted.values()) > 0
        ):
            numbers = ", ".join(map(str, stages))
            raise PlayError(f"give the share of each stage ({numbers}), as numbers from 0")
        target = np.zeros(len(spent))
        for number, share in wanted.items():
            target[number] = share / sum(wanted.values())
        factor = np.divide(target * spent.sum(), spent, out=np.ones_like(spent), where=spent > 0)
        duration_ns = self.times.duration_ns.copy()
        duration_ns[compute] *= factor[stage]
        said = "equal stages" if shares is None else "stages by share"
        return self._with(duration_ns, self.times.gap_ns, said)

    @property
    def recorded_ns(self) -> float:
        """Duration of the replayed step as recorded."""
        return self.recorded_step.recorded_ns

    @property
    def played_ns(self) -> float:
        """Duration of the step with the changes."""
        return self.recorded_ns - self.saved_ns

    @cached_property
    def saved_ns(self) -> float:
        """Time that the changes save; negative if the step becomes longer."""
        before_ns = (
            self.recorded_step.faulty_ns if self.is_fixed else self.recorded_step.recorded_ns
        )
        return before_ns - self.recorded_step.replay(self.times)

    @property
    def speedup(self) -> float | None:
        """Recorded over changed duration, by which MFU and tokens per second grow as well."""
        return ratio(self.recorded_ns, self.played_ns)

    @property
    def overlap_ns(self) -> float:
        """Time from the first begin in which the step before still ran; no part of this step."""
        return float(self.recorded_step.overlap.shift(*self.times)[1][0])

    def critical_path(self) -> CriticalPath:
        """Return the chain of operations that decides the end of the changed step.

        Operations are numbered within the step. It begins ``overlap_ns`` before the step's time,
        with what still ran of the step before.
        """
        return (
            self.recorded_step.find_path(self.times)
            if self.changes
            else self.recorded_step.recorded_path
        )

    def _with(
        self, duration_ns: NDArray[np.float64], gap_ns: NDArray[np.float64], said: str
    ) -> StepPlay:
        return replace(self, times=Times(duration_ns, gap_ns), changes=(*self.changes, said))

    def _select(self, part: Part) -> NDArray[np.int64]:
        play = self.recorded_step.run_play
        return np.flatnonzero(
            select_operations(part, play.run, play.reading)[self.recorded_step.rows]
        )


def _describe(part: Part) -> str:
    values = ((name, getattr(part, name)) for name in part.__slots__)
    return " ".join(f"{name} {value}" for name, value in values if value is not None) or "all"
