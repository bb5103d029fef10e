"""Pipeline schedules: their bubbles by formula, and jobs with other numbers of micro-batches."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from rankscope.analysis.analyze import read_operations
from rankscope.analysis.replay.pipeline import (
    Pipeline,
    Schedule,
    ScheduleError,
    measure_pipeline,
    plan,
)
from rankscope.analysis.replay.replayer import Replayer
from rankscope.trainer.simulator.scenario import Scenario
from tests.support.rankscope.simulated_source import SimulatedSource

if TYPE_CHECKING:
    from rankscope.analysis.replay.model import Reading

CLUSTER = Scenario(dp=2, pp=4, tp=2, num_steps=4, num_microbatches=8, ranks_per_host=4, seed=5)


def equal_stages(stages: int, chunks: int, microbatches: int) -> Pipeline:
    """Return a pipeline of 10 ms forward and 20 ms backward a stage, with free transfers."""
    passes = np.array([[[10e6 / chunks] * stages] * chunks, [[20e6 / chunks] * stages] * chunks])
    return Pipeline(
        compute_ns=passes, send_ns=0.0, num_microbatches=microbatches, step_ns=1e9, rest_ns=0.0
    )


def reading_of(scenario: Scenario) -> Reading:
    source = SimulatedSource(scenario)
    run = source.run_info("simulated")
    return read_operations(run, source.spans("simulated"), source.steps("simulated"))


def measured(scenario: Scenario) -> Pipeline:
    reading = reading_of(scenario)
    return measure_pipeline(reading, float(Replayer(reading.model).full_recorded().mean()))


@pytest.mark.parametrize(
    ("stages", "chunks", "microbatches"),
    [(1, 1, 4), (4, 1, 8), (4, 1, 2), (8, 1, 32), (4, 2, 8), (8, 4, 32)],
)
def test_the_bubble_is_that_of_the_formula(stages: int, chunks: int, microbatches: int) -> None:
    pipeline = equal_stages(stages, chunks, microbatches)
    planned = plan(pipeline, stages=stages, chunks=chunks, microbatches=microbatches)
    assert planned.bubble_ratio == pytest.approx((stages - 1) / (chunks * microbatches))


def test_all_forwards_first_have_the_same_bubble_as_one_forward_one_backward() -> None:
    pipeline = equal_stages(4, 1, 8)
    planned = plan(pipeline, stages=4, chunks=1, microbatches=8, schedule=Schedule.GPIPE)
    assert planned.bubble_ratio == pytest.approx(3 / 8)


@pytest.mark.parametrize(
    "other",
    [
        replace(CLUSTER, num_microbatches=16),
        replace(CLUSTER, num_microbatches=4),
        replace(CLUSTER, vpp=2),
    ],
    ids=["more", "fewer", "interleaved"],
)
def test_the_plan_is_the_step_of_the_job_with_that_pipeline(other: Scenario) -> None:
    predicted = plan(
        measured(CLUSTER), stages=4, chunks=other.vpp, microbatches=other.num_microbatches
    )
    assert predicted.step_ns == pytest.approx(measured(other).step_ns, rel=0.03)


def test_the_speedup_is_of_tokens_per_device() -> None:
    pipeline = measured(CLUSTER)
    same = plan(pipeline, stages=4, chunks=1, microbatches=8)
    more = plan(pipeline, stages=4, chunks=1, microbatches=16)

    assert same.speedup == pytest.approx(1.0)
    assert more.speedup == pytest.approx(2 * same.step_ns / more.step_ns)


def test_pipelines_that_do_not_exist_are_refused() -> None:
    pipeline = equal_stages(4, 1, 8)
    with pytest.raises(ScheduleError, match="multiples"):
        plan(pipeline, stages=4, chunks=2, microbatches=6)
    with pytest.raises(ScheduleError, match="from 1"):
        plan(pipeline, stages=0, chunks=1, microbatches=8)
    with pytest.raises(ScheduleError, match="one stage"):
        plan(replace(pipeline, send_ns=None), stages=4, chunks=1, microbatches=8)


def test_a_job_with_another_schedule_is_refused() -> None:
    reading = reading_of(CLUSTER)
    with pytest.raises(ScheduleError, match="another schedule"):
        measure_pipeline(reading, 100e6)
