"""Unequal micro-batches in a run that checkpoints often, and beside a rank that is slow."""

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
    """Compute 28.8 ms a step, one rank after the other 33.6; save for 200 ms in steps 3 and 7."""
    length = 1.12 if rank == step % 4 else 0.96
    for kind, ms in ((SpanKind.FORWARD, 10), (SpanKind.BACKWARD, 20)):
        yield Begin(kind, 0)
        yield Compute(round(ms * MS * length))
        yield End()
    yield Collective(WORLD, SpanKind.DP_COMM)
    if step % 4 == 3:
        yield Begin(SpanKind.CHECKPOINT)
        yield Compute(200 * MS)
        yield End()


def test_checkpoints_do_not_hide_what_unequal_micro_batches_cost() -> None:
    cluster = Cluster(Layout(dp=4), {WORLD: (SpanKind.DP_COMM, (0, 1, 2, 3))})
    cluster.run(8, script)

    found = {each.cause: each for each in analyze_run(source_of(cluster), "run").findings}

    # The mean micro-batch is (1.12 + 3 x 0.96) / 4 = 1: steps of 34.1 ms would take 30.5, 12 % of
    # a usual step, but 4 % of the mean step of 80.5.
    assert set(found) == {"sequence-imbalance", "checkpoint"}
    assert found["sequence-imbalance"].slowdown == pytest.approx(34.1 / 30.5)


def slow_script(rank: int, step: int) -> Iterator[Action]:
    """Compute 28.5 ms, one rank after the other 34.5; rank 3 twice as long from step 9 on."""
    length = 1.15 if rank == step % 4 else 0.95
    factor = 2.0 if rank == 3 and step >= 9 else 1.0
    for kind, ms in ((SpanKind.FORWARD, 10), (SpanKind.BACKWARD, 20)):
        yield Begin(kind, 0)
        yield Compute(round(ms * MS * length * factor))
        yield End()
    yield Collective(WORLD, SpanKind.DP_COMM)


def test_a_rank_that_is_slow_for_a_while_has_unequal_micro_batches_in_its_other_steps() -> None:
    cluster = Cluster(Layout(dp=4), {WORLD: (SpanKind.DP_COMM, (0, 1, 2, 3))})
    cluster.run(12, slow_script)

    found = {each.cause: each for each in analyze_run(source_of(cluster), "run").findings}

    # Eleven steps take 35 ms; in the last one the long micro-batch is the slow rank's, and without
    # slowness it would be 30 ms of compute as the mean of the others', 9 x 1.15 + 27 x 0.95 of 36.
    # The mean of what is evened is 11 x 1.15 + 34 x 0.95 of 45: steps of 30 x 0.9989 and 0.5 ms,
    # but for the three in which rank 3 is slow.
    evened = 30 * (11 * 1.15 + 34 * 0.95) / 45 + 0.5
    assert set(found) == {"sequence-imbalance", "slow-compute"}
    assert found["slow-compute"].ranks == (3,)
    assert found["sequence-imbalance"].slowdown == pytest.approx(
        (11 * 35 + 30.5) / (9 * evened + 3 * 30.5)
    )
