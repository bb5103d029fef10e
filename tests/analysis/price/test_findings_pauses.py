"""What a slow rank costs beside a pause that all ranks take."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from rankscope.tracer.span import SpanKind
from tests.support.analysis.cluster import MS
from tests.support.analysis.one_group import ALL_REDUCE, findings_of, work

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.analysis.cluster import Action


def script(rank: int, step: int) -> Iterator[Action]:
    """Compute 30 ms a step, rank 2 from step 2 on 45; save for 500 ms in steps 4 and 9."""
    factor = 1.5 if rank == 2 and step >= 2 else 1.0
    for kind, length in ((SpanKind.FORWARD, 10 * MS), (SpanKind.BACKWARD, 20 * MS)):
        yield from work(kind, length * factor, microbatch=0)
    yield ALL_REDUCE
    if step in (4, 9):
        yield from work(SpanKind.CHECKPOINT, 500 * MS)


def test_a_slow_rank_is_not_charged_with_the_checkpoints_that_it_writes() -> None:
    slow, checkpoint = findings_of(script, num_steps=10)

    # Ten steps of 30.5 ms are 305 without either; the rank adds 8 x 15, the checkpoints 2 x 500.
    assert (slow.cause, slow.ranks) == ("slow-compute", (2,))
    assert slow.slowdown == pytest.approx((305 + 120) / 305)
    assert slow.recoverable_ratio == pytest.approx(120 / 1120)
    assert (checkpoint.cause, checkpoint.ranks) == ("checkpoint", (0, 1, 2, 3))
    assert checkpoint.slowdown == pytest.approx((305 + 1000) / 305)
    assert checkpoint.recoverable_ratio == pytest.approx(1000 / 1120)
