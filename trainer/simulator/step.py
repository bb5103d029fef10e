"""Run one step: read the data, run the pipeline, update the parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from rankscope.tracer.span import SpanKind

from .cluster import NS_PER_MS
from .gather import Gathers
from .pipeline import Pipeline
from .recorder import ON_HOST, Label
from .schedule import Finished, Posted, Slot
from .state import MAIN
from .update import Update

if TYPE_CHECKING:
    from .lengths import Lengths
    from .recorder import SpanColumns
    from .state import StepState, Times


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """One step that ran; times are true ns from the run's start."""

    end: Times
    """Shape (pp, dp, cp, tp): when each rank ended it."""

    spans: SpanColumns
    stopped_at: int
    """When the rank of a crash or hang stopped; `NEVER` without one."""


def run_step(state: StepState, lengths: Lengths) -> StepResult:
    """Run a step to its end.

    Args:
        state: The step, at its begin.
        lengths: What its micro-batches hold.
    """
    gathers = Gathers(state)
    pipeline, update = Pipeline(state, lengths, gathers), Update(state)
    for stage in range(len(state.now)):
        _read_data(state, stage)
        if state.scenario.prefetch and state.scenario.dp * state.scenario.cp > 1:
            gathers.launch(stage)
    launching = _last_backwards(state) if state.scenario.overlap else frozenset()
    for action in state.cluster.order:
        match action:
            case Posted(exchange):
                pipeline.post(exchange)
            case Finished(exchange):
                pipeline.finish(exchange)
            case Slot() as slot:
                stretches = pipeline.run(slot)
                if slot in launching:
                    update.launch(slot, stretches)
    update.finish()
    return StepResult(
        end=np.stack(state.now),
        spans=state.recorder.columns(),
        stopped_at=pipeline.stopped_at,
    )


def _read_data(state: StepState, stage: int) -> None:
    start = state.now[stage]
    mean_ns = state.filled(state.scenario.data_ms * NS_PER_MS)
    end = start + state.noise.compute_ns(mean_ns) + state.effects.data_span_ns[stage]
    if (end > start).any():
        label = Label(kind=SpanKind.DATA, name="data", track=MAIN, flags=ON_HOST)
        state.recorder.add(stage, label, start, end)
    state.now[stage] = end + state.effects.data_gap_ns[stage]


def _last_backwards(state: StepState) -> frozenset[Slot]:
    """Return the last backward of each chunk, after which its gradients are complete."""
    slots = (action for action in state.cluster.order if isinstance(action, Slot))
    last = {(slot.stage, slot.chunk): slot for slot in slots if not slot.is_forward}
    return frozenset(last.values())
