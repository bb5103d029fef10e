"""What hosts cost that launch late beside evaluations, or stop where nothing else does."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from rankscope.tracer.span import SpanKind
from tests.support.analysis.cluster import MS, Compute
from tests.support.analysis.one_group import ALL_REDUCE, findings_of, work

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.analysis.cluster import Action


def script(rank: int, step: int) -> Iterator[Action]:
    """Compute 30 ms a step, rank 2's host 8 ms late from step 2 on; evaluate in steps 3 and 7."""
    yield from work(SpanKind.FORWARD, 10 * MS, microbatch=0)
    if rank == 2 and step >= 2:
        yield Compute(8 * MS)
    yield from work(SpanKind.BACKWARD, 20 * MS, microbatch=0)
    yield ALL_REDUCE
    if step in (3, 7):
        yield Compute(300 * MS)
    yield from work(SpanKind.OPTIMIZER, MS)


def test_a_late_host_is_not_charged_with_the_evaluations_that_all_ranks_wait_for() -> None:
    late, evaluation = findings_of(script, num_steps=10)

    # Ten steps of 31.5 ms are 315 without either; the host adds 8 x 8, the evaluations 2 x 300.
    assert (late.cause, late.ranks, late.steps) == ("host-stall", (2,), (2, 9))
    assert late.slowdown == pytest.approx((315 + 64) / 315)
    assert (evaluation.cause, evaluation.ranks) == ("checkpoint", (0, 1, 2, 3))
    assert evaluation.slowdown == pytest.approx((315 + 600) / 315)


def paused(rank: int, step: int) -> Iterator[Action]:
    """Compute 31 ms a step; in steps 2 to 5 one rank after the other stops for 100 ms."""
    yield from work(SpanKind.FORWARD, 10 * MS, microbatch=0)
    if step == rank + 2:
        yield Compute(100 * MS)
    yield from work(SpanKind.BACKWARD, 20 * MS, microbatch=0)
    yield ALL_REDUCE
    yield from work(SpanKind.OPTIMIZER, MS)


def test_pauses_are_no_usual_gap_though_there_is_no_other() -> None:
    (pauses,) = findings_of(paused, num_steps=10)

    assert (pauses.cause, pauses.ranks, pauses.steps) == ("gc-pause", (0, 1, 2, 3), (2, 5))
    assert pauses.slowdown == pytest.approx((315 + 400) / 315)
    assert pauses.recoverable_ratio == pytest.approx(1.0, abs=0.01)
