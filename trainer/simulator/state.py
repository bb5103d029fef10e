"""How far each rank is in a step, and what all parts of a step do with it.

Times are ns from the run's start, on the true clock.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from rankscope.tracer.span import SpanKind

from .chance import ItemNoise, Purpose, stream
from .placement import Axis
from .recorder import Recorder, SpanTemplate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from .cluster import Cluster
    from .effects import StepEffects

    Times = NDArray[np.int64]

SHARE_SLACK = 1e-9
"""What adding up shares may round away."""

MAIN = "main"
TRACKS = {axis: f"comm {axis.name.lower()}" for axis in Axis}
SPAN_AXES = {Axis.TP: (2,), Axis.CP: (1,), Axis.DP: (0, 1)}
"""Axes of a stage's (dp, cp, tp) times over which a group's members lie."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """A collective that was launched and not yet waited for."""

    template: SpanTemplate
    end: Times


@dataclass(frozen=True, slots=True)
class Stretch:
    """Compute of one slot between two places where it meets its partners."""

    first_share: float
    """Shares of the slot's compute that were done when it began ..."""

    last_share: float
    """... and when it ended."""

    start: Times
    end: Times


def time_at(stretches: Sequence[Stretch], share: float) -> Times:
    """Return when each rank had done a share of a slot's compute.

    Args:
        stretches: All of the slot, in order.
        share: From 0 to 1.
    """
    here = next(each for each in stretches if share <= each.last_share + SHARE_SLACK)
    part = (share - here.first_share) / (here.last_share - here.first_share)
    at: Times = here.start + np.rint((here.end - here.start) * min(max(part, 0.0), 1.0)).astype(
        np.int64
    )
    return at


class StepState:
    """One step under way.

    Args:
        cluster: What stays the same.
        step: Its number.
        start: Shape (pp, dp, cp, tp): when each rank begins it.
        effects: What the faults do in it.
        seqs: Sequence numbers, counted on over the steps.
    """

    def __init__(
        self,
        cluster: Cluster,
        step: int,
        *,
        start: Times,
        effects: StepEffects,
        seqs: SequenceNumbers,
    ) -> None:
        self.cluster = cluster
        self.scenario = cluster.scenario
        self.step = step
        self.effects = effects
        self.seqs = seqs
        self.noise = ItemNoise(
            cluster.scenario.noise, stream(cluster.scenario.seed, Purpose.ITEMS, step)
        )
        self.recorder = Recorder(cluster.placement, cluster.groups)
        self.now: list[Times] = list(start)
        """One array of shape (dp, cp, tp) a stage; replaced, never written into."""

        self.shape = start.shape[1:]
        self.scale = cluster.bias * effects.compute_factor * self._drift()
        """Shape (pp, dp, cp, tp): how many times as long compute takes."""

    def ready(self, stage: int) -> Times:
        """Return when each rank can begin a compute span: a launch gap after what came before."""
        after = self.now[stage] + self.effects.gap_ns[stage]
        begin: Times = after + self.noise.launch_gap_ns(self.shape)
        return begin

    def meet(self, axis: Axis, start: Times, mean_ns: NDArray[np.float64]) -> Times:
        """Return when each member leaves a collective that all of its group enter."""
        left: Times = self.last_gone(axis, start, mean_ns) + self.noise.end_ns(self.shape)
        return left

    def last_gone(self, axis: Axis, start: Times, mean_ns: NDArray[np.float64]) -> Times:
        """Return when each group's transfer ends: one after its last member entered."""
        transfer = self.noise.transfer_ns(mean_ns)
        if axis is not Axis.EP:
            gone: Times = start.max(axis=SPAN_AXES[axis], keepdims=True) + transfer
            return gone
        ep, (dp, cp, tp) = self.scenario.ep, self.shape
        arrival = start.reshape(dp // ep, ep, cp, tp).max(axis=1)
        done: Times = np.repeat(arrival + transfer, ep, axis=0)
        return done

    def collective_ns(
        self, stage: int, axis: Axis, *, num_bytes: int, passes: int
    ) -> NDArray[np.float64]:
        """Return how long a collective of a stage's groups takes in the mean."""
        if axis is Axis.EP:
            on_grid = self.effects.links.all_to_all_ns(num_bytes=num_bytes)
        else:
            on_grid = self.effects.links.collective_ns(axis, num_bytes=num_bytes, passes=passes)
        of_stage: NDArray[np.float64] = on_grid[stage]
        return of_stage

    def blocked(self, stage: int, template: SpanTemplate, start: Times, end: Times) -> None:
        """Record a communication that its rank waited for, and the wait."""
        self.recorder.add(stage, template, start, end)
        self.recorder.add(stage, wait_template(template), start, end)

    def wait(self, stage: int, bucket: Bucket, start: Times) -> Times:
        """Record a wait for what was launched earlier; return when it ends."""
        end: Times = np.maximum(start, bucket.end)
        self.recorder.add(stage, wait_template(bucket.template), start, end)
        return end

    def filled(self, value: float) -> NDArray[np.float64]:
        """Return the same mean for all ranks of a stage."""
        return np.full(self.shape, value)

    def _drift(self) -> float:
        noise = self.scenario.noise
        turn = 2 * np.pi * self.step / max(1, noise.drift_period_steps)
        return float(1 + noise.drift_ratio * np.sin(turn))


def wait_template(template: SpanTemplate) -> SpanTemplate:
    """Return the template of the wait for a communication."""
    return SpanTemplate(
        kind=SpanKind.WAIT,
        name=f"wait {template.name}",
        track=MAIN,
        axis=template.axis,
        seq=template.seq,
        src_stage=template.src_stage,
        dst_stage=template.dst_stage,
        microbatch=template.microbatch,
        chunk=template.chunk,
        depth=template.depth + 1,
    )


class SequenceNumbers:
    """Sequence numbers of an epoch. Alike groups of a stage do alike things, so they share one."""

    def __init__(self) -> None:
        self._groups: Counter[tuple[Axis, int]] = Counter()
        self._pairs: Counter[tuple[int, int]] = Counter()
        self._num_calls = 0

    def of_group(self, axis: Axis, stage: int) -> int:
        """Return the number of the next collective of a stage's groups on an axis, from 0."""
        number = self._groups[axis, stage]
        self._groups[axis, stage] += 1
        return number

    def of_pair(self, src_stage: int, dst_stage: int) -> int:
        """Return the number of the next message from one stage to another, from 0."""
        number = self._pairs[src_stage, dst_stage]
        self._pairs[src_stage, dst_stage] += 1
        return number

    def of_call(self) -> int:
        """Return the number of the next call that issues several operations, from 1."""
        self._num_calls += 1
        return self._num_calls
