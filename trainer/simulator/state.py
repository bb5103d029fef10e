"""State of a running step: current time of each rank, noise, recorder, sequence numbers.

Times are ns from the start of the run, on the true clock.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from rankscope.tracer.span import SpanKind

from .chance import ItemNoise, Purpose, stream
from .placement import KIND_OF_AXIS, Axis
from .recorder import Recorder, SpanTemplate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from .cluster import Cluster
    from .effects import StepEffects

    Times = NDArray[np.int64]

SHARE_SLACK = 1e-9
"""Tolerance for rounding in sums of shares."""

MAIN = "main"
TRACKS = {axis: f"comm {axis.name.lower()}" for axis in Axis}
SPAN_AXES = {Axis.TP: (2,), Axis.CP: (1,), Axis.DP: (0, 1)}
"""Axes of a stage's (dp, cp, tp) times that a group spans."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """A collective that was launched and not yet waited for."""

    template: SpanTemplate
    end: Times


@dataclass(frozen=True, slots=True)
class Piece:
    """Compute of a slot between two communications."""

    first_share: float
    """Share of the slot's compute that was done at the start of this piece."""

    last_share: float
    """Share that was done at its end."""

    start: Times
    end: Times


def time_at(pieces: Sequence[Piece], share: float) -> Times:
    """Return when each rank had done a share, from 0 to 1, of a slot's compute."""
    here = next(each for each in pieces if share <= each.last_share + SHARE_SLACK)
    part = (share - here.first_share) / (here.last_share - here.first_share)
    at: Times = here.start + np.rint((here.end - here.start) * min(max(part, 0.0), 1.0)).astype(
        np.int64
    )
    return at


class StepState:
    """State of a running step, which each rank of the (pp, dp, cp, tp) grid begins at ``start``."""

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
        """Current time of each rank: one array of shape (dp, cp, tp) per stage. Arrays are
        replaced, never changed."""

        self.shape = start.shape[1:]
        turn = 2 * np.pi * step / max(1, self.scenario.noise.drift_period_steps)
        drift = float(1 + self.scenario.noise.drift_ratio * np.sin(turn))
        self.scale = cluster.bias * effects.compute_factor * drift
        """Shape (pp, dp, cp, tp): factor on the duration of compute."""

    def ready(self, stage: int) -> Times:
        """Return when each rank can begin a compute span, after a launch gap."""
        after = self.now[stage] + self.effects.gap_ns[stage]
        begin: Times = after + self.noise.launch_gap_ns(self.shape)
        return begin

    def collective_end(self, axis: Axis, start: Times, mean_ns: NDArray[np.float64]) -> Times:
        """Return the end of a collective on each member, by their starts."""
        left: Times = self.transfer_end(axis, start, mean_ns) + self.noise.end_ns(self.shape)
        return left

    def transfer_end(self, axis: Axis, start: Times, mean_ns: NDArray[np.float64]) -> Times:
        """Return the end of each group's transfer, which begins with the arrival."""
        transfer = self.noise.transfer_ns(mean_ns)
        if axis is not Axis.EP:
            ended: Times = start.max(axis=SPAN_AXES[axis], keepdims=True) + transfer
            return ended
        ep, (dp, cp, tp) = self.scenario.ep, self.shape
        arrival = start.reshape(dp // ep, ep, cp, tp).max(axis=1)
        done: Times = np.repeat(arrival + transfer, ep, axis=0)
        return done

    def collective_ns(
        self, stage: int, axis: Axis, *, num_bytes: int, passes: int
    ) -> NDArray[np.float64]:
        """Return the mean transfer time of a collective of a stage's groups."""
        if axis is Axis.EP:
            on_grid = self.effects.links.all_to_all_ns(num_bytes=num_bytes)
        else:
            on_grid = self.effects.links.collective_ns(axis, num_bytes=num_bytes, passes=passes)
        of_stage: NDArray[np.float64] = on_grid[stage]
        return of_stage

    def blocked(self, stage: int, template: SpanTemplate, start: Times, end: Times) -> None:
        """Record a communication that blocks its rank, and the wait for it."""
        self.recorder.add(stage, template, start, end)
        self.recorder.add(stage, wait_template(template), start, end)

    def collective_template(
        self,
        axis: Axis,
        stage: int,
        name: str,
        **more: Any,  # noqa: ANN401  # fields
    ) -> SpanTemplate:
        """Return the template of the next collective of a stage's groups on an axis."""
        return SpanTemplate(
            kind=KIND_OF_AXIS[axis],
            name=name,
            track=TRACKS[axis],
            axis=axis,
            seq=self.seqs.next_of_group(axis, stage),
            **more,
        )

    def record_lost(self, stage: int, template: SpanTemplate, begin: Times, end: Times) -> None:
        """Record a span on those ranks of a stage on which it has a duration."""
        hit = end > begin
        if hit.any():
            rank = self.cluster.placement.rank[stage][hit]
            self.recorder.add_some(template, rank, begin[hit], end[hit])

    def wait(self, stage: int, bucket: Bucket, start: Times) -> Times:
        """Record the wait for a bucket and return its end."""
        end: Times = np.maximum(start, bucket.end)
        self.recorder.add(stage, wait_template(bucket.template), start, end)
        return end

    def filled(self, value: float) -> NDArray[np.float64]:
        """Return an array with the same value for all ranks of a stage."""
        return np.full(self.shape, value)


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
    """Sequence numbers of an epoch: per group, and per ordered pair, as on each rank of a real job.

    The groups of an axis on one stage communicate equally, so they share a counter.
    """

    def __init__(self) -> None:
        self._groups: Counter[tuple[Axis, int]] = Counter()
        self._pairs: Counter[tuple[int, int]] = Counter()
        self._num_calls = 0

    def next_of_group(self, axis: Axis, stage: int) -> int:
        """Return the number of the next collective of a stage's groups on an axis, from 0."""
        number = self._groups[axis, stage]
        self._groups[axis, stage] += 1
        return number

    def next_of_pair(self, src_stage: int, dst_stage: int) -> int:
        """Return the number of the next message from one stage to another, from 0."""
        number = self._pairs[src_stage, dst_stage]
        self._pairs[src_stage, dst_stage] += 1
        return number

    def next_call(self) -> int:
        """Return the number of the next call that issues several operations, from 1."""
        self._num_calls += 1
        return self._num_calls
