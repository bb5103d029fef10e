"""Gather the parameters of a step ahead of the forwards that need them, as FSDP and ZeRO do."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rankscope.tracer.span import SpanFlag, SpanKind

from .groups import Axis
from .recorder import ON_DEVICE, Label
from .state import TRACKS, Bucket

if TYPE_CHECKING:
    from .schedule import Slot
    from .state import StepState


class Gathers:
    """Parameters of each chunk on their way, in as many pieces as gradients are reduced in.

    Args:
        state: The step. Its stages launch theirs by `launch`.
    """

    def __init__(self, state: StepState) -> None:
        self._state = state
        self._buckets: dict[tuple[int, int], list[Bucket]] = {}

    def launch(self, stage: int) -> None:
        """Launch all of a stage's gathers, one behind the other on their stream."""
        state, scenario = self._state, self._state.scenario
        num = scenario.num_buckets
        num_bytes = scenario.gradient_bytes // (num * scenario.vpp)
        mean_ns = state.collective_ns(stage, Axis.DP, num_bytes=num_bytes, passes=1)
        free = launch = state.now[stage]
        for chunk in range(scenario.vpp):
            for _ in range(num):
                label = Label(
                    kind=SpanKind.DP_COMM,
                    name="all_gather_into_tensor",
                    track=TRACKS[Axis.DP],
                    axis=Axis.DP,
                    seq=state.seqs.of_group(Axis.DP, stage),
                    chunk=chunk,
                    num_bytes=num_bytes,
                    flags=ON_DEVICE | SpanFlag.ASYNC,
                )
                start = np.maximum(launch, free)
                free = state.meet(Axis.DP, start, mean_ns)
                state.recorder.add(stage, label, start, free, launch=launch)
                self._buckets.setdefault((stage, chunk), []).append(Bucket(label, free))

    def needed_by(self, slot: Slot) -> list[Bucket]:
        """Return what a slot must wait for: a chunk's first forward, piece by piece."""
        if not slot.is_forward:
            return []
        return self._buckets.pop((slot.stage, slot.chunk), [])
