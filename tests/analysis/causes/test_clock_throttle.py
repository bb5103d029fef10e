"""What a lower clock explains of a slow worker, and what it leaves."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from rankscope.analysis.analyze import analyze_run
from rankscope.analysis.trace.context import RunContext, SampleTable
from rankscope.tracer.span import SpanKind
from rankscope.tracer.topology import Layout
from tests.support.analysis.cluster import MS, Source, source_of
from tests.support.analysis.one_group import ALL_REDUCE, trained, work

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rankscope.analysis.report.report import Finding
    from tests.support.analysis.cluster import Action, Cluster

NUM_STEPS = 8
USUAL_HZ = 1.65e9


def findings_of(
    factor: Callable[[int, int], float], clock_hz: Callable[[int, int], float], *, tp: int
) -> dict[str, Finding]:
    """Analyse eight ranks that compute 30 ms a step, on one host, with a clock reading each step.

    Args:
        factor: Of (rank, step): by what a rank computes longer.
        clock_hz: Of (rank, step): what its device's clock reads.
        tp: Ranks of a worker, whose communication is not traced.
    """

    def script(rank: int, step: int) -> Iterator[Action]:
        for kind, ms in ((SpanKind.FORWARD, 10), (SpanKind.BACKWARD, 20)):
            yield from work(kind, ms * MS * factor(rank, step), microbatch=0)
        yield ALL_REDUCE

    cluster = trained(script, num_steps=NUM_STEPS, layout=Layout(dp=8 // tp, tp=tp))
    plain = source_of(cluster)
    (epoch,) = plain.info.epochs
    ranks = tuple(replace(each, host="a", local_rank=each.rank) for each in epoch.ranks)
    source = Source(
        replace(plain.info, epochs=(replace(epoch, ranks=ranks),)),
        plain.span_table,
        plain.step_table,
        RunContext(samples=_clock_samples(cluster, clock_hz)),
    )
    return {each.cause: each for each in analyze_run(source, "run").findings}


def _clock_samples(cluster: Cluster, clock_hz: Callable[[int, int], float]) -> SampleTable:
    rows = sorted(
        (rank, (start + end) // 2, clock_hz(rank, step)) for step, rank, start, end in cluster.steps
    )
    device, at_ns, value = zip(*rows, strict=True)
    return SampleTable(
        host=np.zeros(len(rows), np.int32),
        device=np.array(device, np.int32),
        at_ns=np.array(at_ns, np.int64),
        name=np.zeros(len(rows), np.int32),
        value=np.array(value),
        hosts=("a",),
        names=("gpu-clock-hz",),
    )


def test_a_clock_that_explains_a_part_leaves_the_rest_to_all_partners() -> None:
    # GIVEN ranks 4 and 5, which look alike: 4's clock is 10 % lower from step 2 to 7, and
    # something makes them 50 % slower until step 5
    def factor(rank: int, step: int) -> float:
        return (1.5 if step <= 5 else 1.1) if rank in (4, 5) and step >= 2 else 1.0

    def clock_hz(rank: int, step: int) -> float:
        return USUAL_HZ / 1.1 if rank == 4 and step >= 2 else USUAL_HZ

    # WHEN they are analysed
    found = findings_of(factor, clock_hz, tp=2)

    # THEN the throttle is told with its share, and the rest of nobody in particular
    assert set(found) == {"slow-compute", "clock-throttle"}
    slow, throttle = found["slow-compute"], found["clock-throttle"]
    assert (slow.ranks, slow.steps) == ((4, 5), (2, 5))
    assert (throttle.ranks, throttle.steps) == ((4,), (2, 7))
    assert "which explains 10 % of it at most" in slow.evidence
    # AND eight steps of 30.5 ms are 244: the worker adds 4 x 15, the throttle alone 6 x 3
    assert slow.slowdown == pytest.approx((244 + 60) / 244)
    assert throttle.slowdown == pytest.approx((244 + 18) / 244)
    # AND of the 4 x 15 + 2 x 3 ms that are lost the worker's mending leaves the throttle's 18,
    # the throttle's mending the worker's 60
    assert slow.recoverable_ratio == pytest.approx((66 - 18) / 66)
    assert throttle.recoverable_ratio == pytest.approx((66 - 60) / 66)


def test_a_clock_that_explains_nearly_all_tells_which_partner_it_is() -> None:
    def factor(rank: int, step: int) -> float:
        return 1.5 if rank in (4, 5) and step >= 2 else 1.0

    def clock_hz(rank: int, step: int) -> float:
        return USUAL_HZ / 1.4 if rank == 4 and step >= 2 else USUAL_HZ

    found = findings_of(factor, clock_hz, tp=2)

    # 1.5 / 1.4 is 7 %, for which no finding of its own would be due.
    assert [(each.cause, each.ranks) for each in found.values()] == [("clock-throttle", (4,))]


def test_a_clock_too_little_lower_to_be_told_leaves_all_to_the_partners() -> None:
    def factor(rank: int, step: int) -> float:
        return 1.5 if rank in (4, 5) and step >= 2 else 1.0

    def clock_hz(rank: int, step: int) -> float:
        return USUAL_HZ / 1.04 if rank == 4 and step >= 2 else USUAL_HZ

    found = findings_of(factor, clock_hz, tp=2)

    assert [(each.cause, each.ranks) for each in found.values()] == [("slow-compute", (4, 5))]


def test_a_rank_alone_is_throttled_and_the_sentence_says_how_much_that_explains() -> None:
    def factor(rank: int, step: int) -> float:
        return 1.5 if rank == 4 and step >= 2 else 1.0

    def clock_hz(rank: int, step: int) -> float:
        return USUAL_HZ / 1.1 if rank == 4 and step >= 2 else USUAL_HZ

    found = findings_of(factor, clock_hz, tp=1)

    assert [(each.cause, each.ranks) for each in found.values()] == [("clock-throttle", (4,))]
    assert "which explains 10 % of it at most" in found["clock-throttle"].evidence
