"""Gathering of parameters and the end of a step: gradients, norm, optimizer, checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rankscope.tracer.span import SpanFlag, SpanKind

from .cluster import NS_PER_MS
from .placement import Axis
from .recorder import ON_DEVICE, ON_HOST, SpanTemplate
from .state import MAIN, Bucket, time_at

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .schedule import Slot
    from .state import Piece, StepState, Times

GRAD_NORM_BYTES = 4


class Update:
    """The end of a step, after its backwards."""

    def __init__(self, state: StepState) -> None:
        self._state = state
        self._shares_gradients = state.scenario.dp * state.scenario.cp > 1
        self._buckets: list[list[Bucket]] = [[] for _ in state.now]
        self._stream_free: list[Times] = list(state.now)
        """When the gradient stream of each rank is free."""

    def launch(self, slot: Slot, pieces: Sequence[Piece]) -> None:
        """Launch the reductions of a chunk's gradients during its last backward."""
        state = self._state
        if not self._shares_gradients:
            return
        stage, num = slot.stage, state.scenario.num_buckets
        num_bytes = state.scenario.gradient_bytes // (num * state.scenario.vpp)
        mean_ns = state.collective_ns(stage, Axis.DP, num_bytes=num_bytes, passes=1)
        for number in range(num):
            template = state.collective_template(
                Axis.DP,
                stage,
                "reduce_scatter_tensor",
                chunk=slot.chunk,
                num_bytes=num_bytes,
                flags=ON_DEVICE | SpanFlag.ASYNC,
            )
            launch = time_at(pieces, (number + 1) / num) + state.effects.skew_ns[stage]
            start = np.maximum(launch, self._stream_free[stage])
            done = state.collective_end(Axis.DP, start, mean_ns)
            state.recorder.add(stage, template, start, done, launch=launch)
            self._stream_free[stage] = done
            self._buckets[stage].append(Bucket(template, done))

    def finish(self) -> None:
        """Run the operations after the last backward, on all stages."""
        state = self._state
        stages = range(len(state.now))
        for stage in stages:
            state.now[stage] = state.now[stage] + state.effects.skew_ns[stage]
            if not state.scenario.overlap:
                self._data_parallel(stage, "reduce_scatter_tensor")
            for bucket in self._buckets[stage]:
                state.now[stage] = state.wait(stage, bucket, state.now[stage])
        self._reduce_norm()
        for stage in stages:
            begin = state.ready(stage)
            mean_ns = state.scenario.optimizer_ms * NS_PER_MS * state.scale[stage]
            end = begin + state.noise.compute_ns(mean_ns)
            template = SpanTemplate(kind=SpanKind.OPTIMIZER, name="optimizer", track=MAIN)
            state.recorder.add(stage, template, begin, end)
            state.now[stage] = end
            if not state.scenario.prefetch:
                self._data_parallel(stage, "all_gather_into_tensor")
            evaluation = SpanTemplate(kind=SpanKind.FORWARD, name="evaluation", track=MAIN)
            begin, end = state.now[stage], state.now[stage] + state.effects.evaluation_ns[stage]
            state.record_lost(stage, evaluation, begin, end)
            state.now[stage] = end
            self._checkpoint(stage)

    def _data_parallel(self, stage: int, name: str) -> None:
        """Reduce the gradients or gather the parameters of a stage, and wait."""
        state = self._state
        if not self._shares_gradients:
            return
        num_bytes = state.scenario.gradient_bytes
        template = state.collective_template(Axis.DP, stage, name, num_bytes=num_bytes)
        mean_ns = state.collective_ns(stage, Axis.DP, num_bytes=num_bytes, passes=1)
        start = state.now[stage]
        end = state.collective_end(Axis.DP, start, mean_ns)
        state.blocked(stage, template, start, end)
        state.now[stage] = end

    def _reduce_norm(self) -> None:
        state = self._state
        if state.scenario.world_size == 1:
            return
        template = state.collective_template(Axis.WORLD, 0, "all_reduce", num_bytes=GRAD_NORM_BYTES)
        mean_ns = state.effects.links.collective_ns(Axis.WORLD, num_bytes=GRAD_NORM_BYTES, passes=2)
        arrival = max(int(now.max()) for now in state.now)
        left = arrival + int(state.noise.transfer_ns(mean_ns).max())
        for stage, start in enumerate(state.now):
            end = left + state.noise.end_ns(state.shape)
            state.blocked(stage, template, start, end)
            state.now[stage] = end

    def _checkpoint(self, stage: int) -> None:
        state = self._state
        if not state.effects.checkpoint_ns:
            return
        begin = state.now[stage]
        end = begin + state.noise.compute_ns(state.filled(state.effects.checkpoint_ns))
        if state.effects.checkpoint_has_spans:
            template = SpanTemplate(
                kind=SpanKind.CHECKPOINT, name="checkpoint", track=MAIN, flags=ON_HOST
            )
            state.recorder.add(stage, template, begin, end)
        state.now[stage] = end


class Gathers:
    """Gathering of parameters ahead of the forwards that need them, as in FSDP and ZeRO."""

    def __init__(self, state: StepState) -> None:
        self._state = state
        self._buckets: dict[tuple[int, int], list[Bucket]] = {}

    def launch(self, stage: int) -> None:
        """Launch all gathers of a stage, one after the other on their stream."""
        state, scenario = self._state, self._state.scenario
        num = scenario.num_buckets
        num_bytes = scenario.gradient_bytes // (num * scenario.vpp)
        mean_ns = state.collective_ns(stage, Axis.DP, num_bytes=num_bytes, passes=1)
        free = launch = state.now[stage]
        for chunk in range(scenario.vpp):
            for _ in range(num):
                template = state.collective_template(
                    Axis.DP,
                    stage,
                    "all_gather_into_tensor",
                    chunk=chunk,
                    num_bytes=num_bytes,
                    flags=ON_DEVICE | SpanFlag.ASYNC,
                )
                start = np.maximum(launch, free)
                free = state.collective_end(Axis.DP, start, mean_ns)
                state.recorder.add(stage, template, start, free, launch=launch)
                self._buckets.setdefault((stage, chunk), []).append(Bucket(template, free))

    def needed_by(self, slot: Slot) -> list[Bucket]:
        """Return the buckets that a slot waits for: those of its chunk, for the first forward."""
        if not slot.is_forward:
            return []
        return self._buckets.pop((slot.stage, slot.chunk), [])
