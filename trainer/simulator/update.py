"""End a step: reduce the gradients, sum their norm, step the optimizer, gather the parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rankscope.tracer.span import SpanFlag, SpanKind

from .cluster import NS_PER_MS
from .groups import Axis
from .recorder import ON_DEVICE, ON_HOST, Label
from .state import MAIN, TRACKS, Bucket, time_at

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .schedule import Slot
    from .state import StepState, Stretch, Times

GRAD_NORM_BYTES = 4


class Update:
    """What follows the backwards of one step.

    Args:
        state: How far the ranks are.
    """

    def __init__(self, state: StepState) -> None:
        self._state = state
        self._shares_gradients = state.scenario.dp * state.scenario.cp > 1
        self._buckets: list[list[Bucket]] = [[] for _ in state.now]
        self._stream_free: list[Times] = list(state.now)
        """When the stream of gradients has done what was launched on it."""

    def launch(self, slot: Slot, stretches: Sequence[Stretch]) -> None:
        """Launch the reductions of a chunk's gradients while its last backward computes."""
        if not self._shares_gradients:
            return
        stage, num = slot.stage, self._state.scenario.num_buckets
        num_bytes = self._state.scenario.gradient_bytes // (num * self._state.scenario.vpp)
        mean_ns = self._state.collective_ns(stage, Axis.DP, num_bytes=num_bytes, passes=1)
        for number in range(num):
            label = Label(
                kind=SpanKind.DP_COMM,
                name="reduce_scatter_tensor",
                track=TRACKS[Axis.DP],
                axis=Axis.DP,
                seq=self._state.seqs.of_group(Axis.DP, stage),
                chunk=slot.chunk,
                num_bytes=num_bytes,
                flags=ON_DEVICE | SpanFlag.ASYNC,
            )
            launch = time_at(stretches, (number + 1) / num) + self._state.effects.skew_ns[stage]
            start = np.maximum(launch, self._stream_free[stage])
            done = self._state.meet(Axis.DP, start, mean_ns)
            self._state.recorder.add(stage, label, start, done, launch=launch)
            self._stream_free[stage] = done
            self._buckets[stage].append(Bucket(label, done))

    def finish(self) -> None:
        """Run everything after the last backward, on all stages."""
        stages = range(len(self._state.now))
        for stage in stages:
            self._reduce_gradients(stage)
        self._reduce_norm()
        for stage in stages:
            self._optimize(stage)
            if not self._state.scenario.prefetch:
                self._data_parallel(stage, "all_gather_into_tensor")
            self._checkpoint(stage)

    def _reduce_gradients(self, stage: int) -> None:
        self._state.now[stage] = self._state.now[stage] + self._state.effects.skew_ns[stage]
        if not self._state.scenario.overlap:
            self._data_parallel(stage, "reduce_scatter_tensor")
        for bucket in self._buckets[stage]:
            self._state.now[stage] = self._state.wait(stage, bucket, self._state.now[stage])

    def _data_parallel(self, stage: int, name: str) -> None:
        """Scatter the gradients or gather the parameters of a stage, and wait for it."""
        if not self._shares_gradients:
            return
        num_bytes = self._state.scenario.gradient_bytes
        label = Label(
            kind=SpanKind.DP_COMM,
            name=name,
            track=TRACKS[Axis.DP],
            axis=Axis.DP,
            seq=self._state.seqs.of_group(Axis.DP, stage),
            num_bytes=num_bytes,
        )
        mean_ns = self._state.collective_ns(stage, Axis.DP, num_bytes=num_bytes, passes=1)
        start = self._state.now[stage]
        end = self._state.meet(Axis.DP, start, mean_ns)
        self._state.blocked(stage, label, start, end)
        self._state.now[stage] = end

    def _reduce_norm(self) -> None:
        """Sum the gradients' norm over the whole job."""
        if self._state.scenario.world_size == 1:
            return
        label = Label(
            kind=SpanKind.OTHER,
            name="all_reduce",
            track=TRACKS[Axis.WORLD],
            axis=Axis.WORLD,
            seq=self._state.seqs.of_group(Axis.WORLD, 0),
            num_bytes=GRAD_NORM_BYTES,
        )
        mean_ns = self._state.effects.links.collective_ns(
            Axis.WORLD, num_bytes=GRAD_NORM_BYTES, passes=2
        )
        arrival = max(int(now.max()) for now in self._state.now)
        left = arrival + int(self._state.noise.transfer_ns(mean_ns).max())
        for stage, start in enumerate(self._state.now):
            end = left + self._state.noise.end_ns(self._state.shape)
            self._state.blocked(stage, label, start, end)
            self._state.now[stage] = end

    def _optimize(self, stage: int) -> None:
        begin = self._state.ready(stage)
        mean_ns = self._state.scenario.optimizer_ms * NS_PER_MS * self._state.scale[stage]
        end = begin + self._state.noise.compute_ns(mean_ns)
        label = Label(kind=SpanKind.OPTIMIZER, name="optimizer", track=MAIN)
        self._state.recorder.add(stage, label, begin, end)
        self._state.now[stage] = end

    def _checkpoint(self, stage: int) -> None:
        if not self._state.effects.checkpoint_ns:
            return
        begin = self._state.now[stage]
        end = begin + self._state.noise.compute_ns(
            self._state.filled(self._state.effects.checkpoint_ns)
        )
        if self._state.effects.checkpoint_has_spans:
            label = Label(kind=SpanKind.CHECKPOINT, name="checkpoint", track=MAIN, flags=ON_HOST)
            self._state.recorder.add(stage, label, begin, end)
        self._state.now[stage] = end
