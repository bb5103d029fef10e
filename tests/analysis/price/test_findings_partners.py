"""What a slow worker costs whose ranks wait for each other's pauses inside their compute."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from rankscope.tracer.span import SpanKind
from rankscope.tracer.topology import Layout
from tests.support.analysis.cluster import MS, Compute
from tests.support.analysis.one_group import ALL_REDUCE, findings_of, work

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.analysis.cluster import Action

PAUSED = {(3, 1): 100, (5, 5): 100}
"""Step and rank: ms before its backward."""


def script(rank: int, step: int) -> Iterator[Action]:
    """Compute 30 ms a step; ranks 4 and 5, one worker, 45 from step 2 on.

    The partner of a rank that pauses waits for it inside its backward.
    """
    factor = 1.5 if rank in (4, 5) and step >= 2 else 1.0
    yield from work(SpanKind.FORWARD, 10 * MS * factor, microbatch=0)
    own, partner = (PAUSED.get((step, number), 0) * MS for number in (rank, rank ^ 1))
    if own:
        yield Compute(own)
    yield from work(SpanKind.BACKWARD, partner + 20 * MS * factor, microbatch=0)
    yield ALL_REDUCE


def test_a_slow_worker_is_not_charged_with_its_partners_pause() -> None:
    told = findings_of(script, num_steps=8, layout=Layout(dp=4, tp=2))
    found = {each.cause: each for each in told}

    # Eight steps of 30.5 ms are 244; the worker adds 6 x 15.
    slow = found["slow-compute"]
    assert (slow.ranks, slow.steps) == ((4, 5), (2, 7))
    assert slow.slowdown == pytest.approx((244 + 90) / 244)
    assert found["gc-pause"].ranks == (1, 5)
    assert found["gc-pause"].slowdown == pytest.approx((244 + 200) / 244)
