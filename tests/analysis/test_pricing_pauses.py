"""What a slow rank costs beside a pause that all ranks take."""

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
    """Compute 30 ms a step, rank 2 from step 2 on 45; save for 500 ms in steps 4 and 9."""
    factor = 1.5 if rank == 2 and step >= 2 else 1.0
    for kind, length in ((SpanKind.FORWARD, 10 * MS), (SpanKind.BACKWARD, 20 * MS)):
        yield Begin(kind, 0)
        yield Compute(round(length * factor))
        yield End()
    yield Collective(WORLD, SpanKind.DP_COMM)
    if step in (4, 9):
        yield Begin(SpanKind.CHECKPOINT)
        yield Compute(500 * MS)
        yield End()


def test_a_slow_rank_is_not_charged_with_the_checkpoints_that_it_writes() -> None:
    cluster = Cluster(Layout(dp=4), {WORLD: (SpanKind.DP_COMM, (0, 1, 2, 3))})
    cluster.run(10, script)

    slow, checkpoint = analyze_run(source_of(cluster), "run").findings

    # Ten steps of 30.5 ms are 305 without either; the rank adds 8 x 15, the checkpoints 2 x 500.
    assert (slow.cause, slow.ranks) == ("slow-compute", (2,))
    assert slow.slowdown == pytest.approx((305 + 120) / 305)
    assert slow.recoverable_ratio == pytest.approx(120 / 1120)
    assert (checkpoint.cause, checkpoint.ranks) == ("checkpoint", (0, 1, 2, 3))
    assert checkpoint.slowdown == pytest.approx((305 + 1000) / 305)
    assert checkpoint.recoverable_ratio == pytest.approx(1000 / 1120)
