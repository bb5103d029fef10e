"""What hosts cost that launch late beside evaluations, or stop where nothing else does."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from analysis.analyze import analyze_run
from tests.analysis.cluster import (
    MS,
    WORLD,
    Begin,
    Cluster,
    Collective,
    Compute,
    End,
    source_of,
)
from tracer.span import SpanKind
from tracer.topology import Layout

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.analysis.cluster import Action


def script(rank: int, step: int) -> Iterator[Action]:
    """Compute 30 ms a step, rank 2's host 8 ms late from step 2 on; evaluate in steps 3 and 7."""
    yield Begin(SpanKind.FORWARD, 0)
    yield Compute(10 * MS)
    yield End()
    if rank == 2 and step >= 2:
        yield Compute(8 * MS)
    yield Begin(SpanKind.BACKWARD, 0)
    yield Compute(20 * MS)
    yield End()
    yield Collective(WORLD, SpanKind.DP_COMM)
    if step in (3, 7):
        yield Compute(300 * MS)
    yield Begin(SpanKind.OPTIMIZER)
    yield Compute(MS)
    yield End()


def test_a_late_host_is_not_charged_with_the_evaluations_that_all_ranks_wait_for() -> None:
    cluster = Cluster(Layout(dp=4), {WORLD: (SpanKind.DP_COMM, (0, 1, 2, 3))})
    cluster.run(10, script)

    late, evaluation = analyze_run(source_of(cluster), "run").findings

    # Ten steps of 31.5 ms are 315 without either; the host adds 8 x 8, the evaluations 2 x 300.
    assert (late.cause, late.ranks, late.steps) == ("host-stall", (2,), (2, 9))
    assert late.slowdown == pytest.approx((315 + 64) / 315)
    assert (evaluation.cause, evaluation.ranks) == ("checkpoint", (0, 1, 2, 3))
    assert evaluation.slowdown == pytest.approx((315 + 600) / 315)


def paused(rank: int, step: int) -> Iterator[Action]:
    """Compute 31 ms a step; in steps 2 to 5 one rank after the other stops for 100 ms."""
    yield Begin(SpanKind.FORWARD, 0)
    yield Compute(10 * MS)
    yield End()
    if step == rank + 2:
        yield Compute(100 * MS)
    yield Begin(SpanKind.BACKWARD, 0)
    yield Compute(20 * MS)
    yield End()
    yield Collective(WORLD, SpanKind.DP_COMM)
    yield Begin(SpanKind.OPTIMIZER)
    yield Compute(MS)
    yield End()


def test_pauses_are_no_usual_gap_though_there_is_no_other() -> None:
    cluster = Cluster(Layout(dp=4), {WORLD: (SpanKind.DP_COMM, (0, 1, 2, 3))})
    cluster.run(10, paused)

    (pauses,) = analyze_run(source_of(cluster), "run").findings

    assert (pauses.cause, pauses.ranks, pauses.steps) == ("gc-pause", (0, 1, 2, 3), (2, 5))
    assert pauses.slowdown == pytest.approx((315 + 400) / 315)
    assert pauses.recoverable_ratio == pytest.approx(1.0, abs=0.01)
