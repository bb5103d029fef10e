"""Experts that get more tokens than others."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from rankscope.analysis.analyze import analyze_run
from rankscope.tracer.span import SpanKind
from rankscope.tracer.topology import Layout
from tests.support.analysis.cluster import (
    MS,
    Action,
    Begin,
    Cluster,
    Collective,
    Compute,
    End,
    Source,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankscope.analysis.report.report import Finding

EXPERTS = 7
NUM_RANKS, NUM_STEPS, NUM_MICROBATCHES = 8, 8, 2


def findings(*, outside: dict[int, float], experts: dict[int, float]) -> tuple[Finding, ...]:
    """Analyse 8 ranks: 10 ms outside and 10 ms in experts forward, twice that backward.

    Args:
        outside: By rank, the factor of its compute outside experts.
        experts: By rank, the factor of its compute in experts.
    """

    def script(rank: int, _: int) -> Iterator[Action]:
        for microbatch in range(NUM_MICROBATCHES):
            for kind, own in ((SpanKind.FORWARD, 10 * MS), (SpanKind.BACKWARD, 20 * MS)):
                yield Begin(kind, microbatch)
                yield Compute(round(own * outside.get(rank, 1.0)))
                yield Collective(EXPERTS, SpanKind.EP_COMM)
                yield Compute(round(own * experts.get(rank, 1.0)))
                yield Collective(EXPERTS, SpanKind.EP_COMM)
                yield End()

    members = tuple(range(NUM_RANKS))
    cluster = Cluster(Layout(dp=NUM_RANKS, ep=NUM_RANKS), {EXPERTS: (SpanKind.EP_COMM, members)})
    cluster.run(NUM_STEPS, script)
    source = Source(cluster.run_info(), cluster.span_table(), cluster.step_table())
    return analyze_run(source, source.info.run_id).findings


def test_a_rank_whose_experts_get_twice_the_tokens_is_named_and_priced() -> None:
    (found,) = findings(outside={}, experts={3: 2.0})

    assert (found.cause, found.ranks, found.steps) == ("sequence-imbalance", (3,), (0, 7))
    # A micro-batch takes 30 ms outside experts, 4 transfers of 0.5 ms, and 30 or 60 ms in them.
    assert found.slowdown == pytest.approx(92 / 62)
    assert "experts get more tokens" in found.evidence


def test_a_device_that_is_slow_outside_its_experts_too_is_slow_compute() -> None:
    (found,) = findings(outside={3: 1.5}, experts={3: 1.5})

    assert (found.cause, found.ranks) == ("slow-compute", (3,))


def test_more_tokens_that_cost_too_little_are_no_finding() -> None:
    # GIVEN 15 % more in experts: 4.5 of 62 ms, 7 %
    (found,) = findings(outside={}, experts={3: 1.15})

    assert found.cause == "healthy"
