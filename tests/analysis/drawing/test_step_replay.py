"""The replay of one step for the timeline, on simulated steps with a known culprit."""

from __future__ import annotations

import numpy as np
import pytest

from rankscope.analysis.analyze import analyze_run, read_operations
from rankscope.analysis.drawing.step_replay import StepReplay, replay_step
from rankscope.analysis.drawing.timeline import read_timeline
from rankscope.analysis.replay.replayer import Replayer
from rankscope.analysis.trace.errors import EmptyRunError
from rankscope.tracer.span import KIND_CODES, NONE, SpanKind
from tests.support.rankscope.simulated_source import SimulatedSource
from tests.support.trainer.recorded import preset_scenario

RUN, STEP, SLOW_RANK = "simulated", 10, 9
FORWARD = KIND_CODES[SpanKind.FORWARD]


@pytest.fixture(scope="module")
def source() -> SimulatedSource:
    return SimulatedSource(preset_scenario("slow-compute", num_steps=12))


def replayed(source: SimulatedSource) -> StepReplay:
    recorded = read_timeline(source, RUN, epoch=0, step=STEP)
    reading = read_operations(source.run_info(RUN), source.spans(RUN), source.steps(RUN))
    return replay_step(reading, recorded)


def test_the_ideal_step_is_that_of_the_device_replay(source: SimulatedSource) -> None:
    found, report = replayed(source), analyze_run(source, RUN)
    reading = read_operations(source.run_info(RUN), source.spans(RUN), source.steps(RUN))
    device_ns = Replayer(reading.model).ideal()[reading.steps.index(STEP)]

    assert found.ideal_ns == pytest.approx(device_ns, abs=1)
    # The report's has the usual delays of the hosts, too, of which this run has none.
    assert found.ideal_ns == pytest.approx(1e9 * report.ideal_s_by_step[STEP], rel=0.01)
    assert found.actual_ns == pytest.approx(1e9 * report.actual_s_by_step[STEP], abs=1)
    ideal = found.ideal
    ends_ns = ideal.spans.start_ns + ideal.spans.duration_ns
    assert ends_ns.max() == found.ideal_ns
    is_comm = ideal.wait_ns != NONE
    parts_ns = ideal.wait_ns[is_comm] + ideal.transfer_ns[is_comm]
    assert (parts_ns == ideal.spans.duration_ns[is_comm]).all()


def test_the_critical_path_goes_through_the_slow_rank_as_recorded(source: SimulatedSource) -> None:
    path = replayed(source).path
    length_ns = path.end_ns - path.start_ns

    assert (length_ns >= 0).all()
    assert (np.diff(path.start_ns) >= 0).all()
    # It covers the step, and the slow rank's part is the larger one.
    assert length_ns.sum() == pytest.approx(path.end_ns[-1] - path.start_ns[0], rel=0.02)
    assert length_ns[path.rank == SLOW_RANK].sum() > 0.7 * length_ns.sum()


def test_a_span_on_the_path_has_no_slack_and_another_has_some(source: SimulatedSource) -> None:
    found = replayed(source)
    timeline = read_timeline(source, RUN, epoch=0, step=STEP)
    spans = timeline.spans

    def slack_of_forwards(rank: int) -> list[float | None]:
        rows = np.flatnonzero((spans.rank == rank) & (spans.kind == FORWARD))
        begins = (spans.start_ns[rows] - timeline.begin_ns).tolist()
        lengths = spans.duration_ns[rows].tolist()
        return [
            found.slack_of(rank=rank, kind=FORWARD, begin_ns=begin, end_ns=begin + length)
            for begin, length in zip(begins, lengths, strict=True)
        ]

    assert slack_of_forwards(SLOW_RANK) == pytest.approx([0.0] * 8, abs=1)
    # Its replica of the stage waits for it at the end of the step only.
    assert all(slack is not None and slack > 1e6 for slack in slack_of_forwards(11))
    assert found.slack_of(rank=SLOW_RANK, kind=FORWARD, begin_ns=1, end_ns=2) is None


def test_a_step_that_is_not_replayed_is_an_error(source: SimulatedSource) -> None:
    recorded = read_timeline(source, RUN, epoch=0, step=STEP)
    spans, steps = source.spans(RUN, first=0, last=4), source.steps(RUN, first=0, last=4)
    reading = read_operations(source.run_info(RUN), spans, steps)

    with pytest.raises(EmptyRunError, match="step 10 is not part of the replay"):
        replay_step(reading, recorded)
