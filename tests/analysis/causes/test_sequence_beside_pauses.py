"""Unequal micro-batches in a run that checkpoints often, and beside a rank that is slow."""

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
    """Compute 28.8 ms a step, one rank after the other 33.6; save for 200 ms in steps 3 and 7."""
    length = 1.12 if rank == step % 4 else 0.96
    for kind, ms in ((SpanKind.FORWARD, 10), (SpanKind.BACKWARD, 20)):
        yield from work(kind, ms * MS * length, microbatch=0)
    yield ALL_REDUCE
    if step % 4 == 3:
        yield from work(SpanKind.CHECKPOINT, 200 * MS)


def test_checkpoints_do_not_hide_what_unequal_micro_batches_cost() -> None:
    found = {each.cause: each for each in findings_of(script, num_steps=8)}

    # The mean micro-batch is (1.12 + 3 x 0.96) / 4 = 1: steps of 34.1 ms would take 30.5, 12 % of
    # a usual step, but 4 % of the mean step of 80.5.
    assert set(found) == {"sequence-imbalance", "checkpoint"}
    assert found["sequence-imbalance"].slowdown == pytest.approx(34.1 / 30.5)


def slow_script(rank: int, step: int) -> Iterator[Action]:
    """Compute 28.5 ms, one rank after the other 34.5; rank 3 twice as long from step 9 on."""
    length = 1.15 if rank == step % 4 else 0.95
    factor = 2.0 if rank == 3 and step >= 9 else 1.0
    for kind, ms in ((SpanKind.FORWARD, 10), (SpanKind.BACKWARD, 20)):
        yield from work(kind, ms * MS * length * factor, microbatch=0)
    yield ALL_REDUCE


def test_a_rank_that_is_slow_for_a_while_has_unequal_micro_batches_in_its_other_steps() -> None:
    found = {each.cause: each for each in findings_of(slow_script, num_steps=12)}

    # Eleven steps take 35 ms; in the last one the long micro-batch is the slow rank's, and without
    # slowness it would be 30 ms of compute as the mean of the others', 9 x 1.15 + 27 x 0.95 of 36.
    # The mean of what is evened is 11 x 1.15 + 34 x 0.95 of 45: steps of 30 x 0.9989 and 0.5 ms,
    # but for the three in which rank 3 is slow.
    equalized = 30 * (11 * 1.15 + 34 * 0.95) / 45 + 0.5
    assert set(found) == {"sequence-imbalance", "slow-compute"}
    assert found["slow-compute"].ranks == (3,)
    assert found["sequence-imbalance"].slowdown == pytest.approx(
        (11 * 35 + 30.5) / (9 * equalized + 3 * 30.5)
    )
