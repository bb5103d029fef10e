"""Slow compute that a lower clock explains, in whole or in part."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from rankscope.analysis.analyze import analyze_run
from rankscope.analysis.causes.clock_throttle import find_clock_drop
from rankscope.analysis.trace.context import RunContext, SampleTable, empty_samples
from rankscope.tracer.span import SpanKind
from rankscope.tracer.topology import Layout
from tests.support.analysis.cluster import MS, Source, source_of
from tests.support.analysis.one_group import ALL_REDUCE, trained, work
from tests.support.analysis.sample_builders import S, join, samples

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rankscope.analysis.report.report import Finding
    from tests.support.analysis.cluster import Action, Cluster

HOSTS = ("a", "b", "c", "d")
NUM_STEPS = 8
USUAL_HZ = 1.65e9
PHASE = (3 * S, 6 * S)


def findings_of(
    drop: float,
    *,
    slow: tuple[int, ...] = (4, 5),
    steps: range = range(2, NUM_STEPS),
    tp: int = 2,
    host_size: int = 8,
) -> dict[str, Finding]:
    """Analyse eight ranks that compute for 30 ms per step, with one clock reading each.

    Args:
        drop: Ratio of the usual clock to that of rank 4 in its slow steps.
        slow: Ranks that take 50 % longer in these steps.
        steps: The slow steps.
        tp: Ranks of a worker, whose communication is not traced.
        host_size: Ranks of a host.
    """

    def factor(rank: int, step: int) -> float:
        return 1.5 if rank in slow and step in steps else 1.0

    def clock_hz(rank: int, step: int) -> float:
        return USUAL_HZ / drop if rank == 4 and step in steps else USUAL_HZ

    def script(rank: int, step: int) -> Iterator[Action]:
        for kind, ms in ((SpanKind.FORWARD, 10), (SpanKind.BACKWARD, 20)):
            yield from work(kind, ms * MS * factor(rank, step), microbatch=0)
        yield ALL_REDUCE

    cluster = trained(script, num_steps=NUM_STEPS, layout=Layout(dp=8 // tp, tp=tp))
    plain = source_of(cluster)
    (epoch,) = plain.info.epochs
    ranks = tuple(
        replace(each, host=HOSTS[each.rank // host_size], local_rank=each.rank % host_size)
        for each in epoch.ranks
    )
    source = Source(
        replace(plain.info, epochs=(replace(epoch, ranks=ranks),)),
        plain.span_table,
        plain.step_table,
        RunContext(samples=_clock_samples(cluster, clock_hz, host_size)),
    )
    return {each.cause: each for each in analyze_run(source, "run").findings}


def _clock_samples(
    cluster: Cluster, clock_hz: Callable[[int, int], float], host_size: int
) -> SampleTable:
    rows = sorted(
        (rank, (start + end) // 2, clock_hz(rank, step)) for step, rank, start, end in cluster.steps
    )
    rank, at_ns, value = zip(*rows, strict=True)
    return SampleTable(
        host=np.array(rank, np.int32) // host_size,
        device=np.array(rank, np.int32) % host_size,
        at_ns=np.array(at_ns, np.int64),
        name=np.zeros(len(rows), np.int32),
        value=np.array(value),
        hosts=HOSTS,
        names=("gpu-clock-hz",),
    )


def test_a_clock_that_explains_a_part_leaves_the_rest_to_all_partners() -> None:
    # GIVEN partners 4 and 5, which look the same: from step 2 to step 5 both are 50 % slower, and
    # the clock of 4 is 10 % lower
    found = findings_of(1.1, steps=range(2, 6))

    # THEN the throttle is reported with its share, and the rest for both
    assert set(found) == {"slow-compute", "clock-throttle"}
    slow, throttle = found["slow-compute"], found["clock-throttle"]
    assert (slow.ranks, slow.steps) == ((4, 5), (2, 5))
    assert (throttle.ranks, throttle.steps) == ((4,), (2, 5))
    assert slow.evidence.endswith(
        "; rank 4: GPU clock 1.5 GHz, peers 1.65 GHz, which explains at most 10 %;"
        " which of its ranks causes the rest is unknown"
    )
    assert throttle.evidence == (
        "rank 4: GPU clock 1.5 GHz, peers 1.65 GHz, which makes compute 10 % longer;"
        " the worker's is 50 % longer, and which of its ranks causes the rest is unknown"
    )
    # AND eight steps of 30.5 ms are 244 ms: the worker adds 4 x 15, the throttle alone 4 x 3
    assert slow.slowdown == pytest.approx((244 + 60) / 244)
    assert throttle.slowdown == pytest.approx((244 + 12) / 244)
    # AND of 4 x 15 lost ms, fixing the worker leaves 12, and fixing the throttle all: 5 is as slow
    assert slow.recoverable_ratio == pytest.approx((60 - 12) / 60)
    assert throttle.recoverable_ratio == pytest.approx(0.0)


@pytest.mark.parametrize(
    ("drop", "host_size", "named"),
    [
        # The rest, 1.5 / 1.4, is 7 %: too little for a finding of its own.
        (1.4, 8, ("clock-throttle", (4,))),
        (1.4, 2, ("clock-throttle", (4,))),
        # A drop of 4 % is too little for a finding.
        (1.04, 8, ("slow-compute", (4, 5))),
    ],
)
def test_a_clock_that_explains_nearly_all_or_nearly_nothing_leaves_one_finding(
    drop: float, host_size: int, named: tuple[str, tuple[int, ...]]
) -> None:
    found = findings_of(drop, host_size=host_size)

    assert [(each.cause, each.ranks) for each in found.values()] == [named]


def test_of_a_rank_without_partners_the_evidence_says_how_much_the_clock_explains() -> None:
    found = findings_of(1.1, slow=(4,), tp=1)

    assert [(each.cause, each.ranks) for each in found.values()] == [("clock-throttle", (4,))]
    assert "GPU clock 1.5 GHz, peers 1.65 GHz, which explains at most 10 %" in (
        found["clock-throttle"].evidence
    )


STEADY = {("a", 1): [2e9] * 10}
DROPPED = [2e9, 2e9, 2e9, 1.5e9, 1.5e9, 1.5e9, 1.5e9]
WATTS = {("a", 0): [600.0, 600, 600, 500, 500, 500, 500], ("a", 1): [600.0] * 7}
REASONS = {("a", 0): [0.0, 0, 0, 4, 4, 4, 4], ("a", 1): [0.0] * 7}
CLOCK, POWER = "gpu-clock-hz", samples("gpu-power-w", WATTS)


@pytest.mark.parametrize(
    ("readings", "end_s", "explained_ratio", "text"),
    [
        pytest.param(
            samples(CLOCK, {("a", 0): DROPPED, **STEADY}),
            6, 2 / 1.5 - 1, "GPU clock 1.5 GHz, peers 2 GHz", id="a clock",
        ),
        pytest.param(
            samples(CLOCK, {("a", 0): DROPPED}),
            6, 2 / 1.5 - 1, "GPU clock 1.5 GHz, in other steps 2 GHz", id="a clock without peers",
        ),
        # Of six readings, two are of the time after the phase.
        pytest.param(
            samples(CLOCK, {("a", 0): [2e9] * 3 + [1.6e9] * 4 + [2e9] * 3, **STEADY}),
            8, 0.25, "GPU clock 1.6 GHz, peers 2 GHz", id="readings beside the phase",
        ),
        # Power and throttle reasons do not say how much they explain.
        pytest.param(POWER, 6, np.inf, "GPU power 500 W, peers 600 W", id="power"),
        pytest.param(
            samples("gpu-throttle-reasons", REASONS),
            6, np.inf, "GPU throttle reasons 4, peers 0", id="throttle reasons",
        ),
    ],
)  # fmt: skip
def test_a_drop_in_the_slow_phase_explains_it(
    readings: SampleTable, end_s: int, explained_ratio: float, text: str
) -> None:
    drop = find_clock_drop(readings, "a", 0, (3 * S, end_s * S))

    assert drop is not None
    assert drop.explained_ratio == pytest.approx(explained_ratio)
    assert str(drop) == text


@pytest.mark.parametrize(
    "readings",
    [
        pytest.param(samples(CLOCK, {("a", 0): [1.99e9] * 7, **STEADY}), id="as its peers"),
        pytest.param(empty_samples(), id="no readings"),
        # A device that waits draws less power as well.
        pytest.param(
            join(samples(CLOCK, {("a", 0): [2e9] * 7, **STEADY}), POWER), id="power beside a clock"
        ),
        pytest.param(
            samples(
                "process-cpu-cores:clockd",
                {("a", 0): [9.0, 9, 9, 0, 0, 0, 9], ("a", 1): [9.0] * 7},
            ),
            id="a process named after a clock",
        ),
    ],
)
def test_a_clock_that_did_not_drop_explains_nothing(readings: SampleTable) -> None:
    assert find_clock_drop(readings, "a", 0, PHASE) is None
