"""Slowness of all ranks alike: longer steps, and evaluations of which one rank has most."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from rankscope.tracer.span import SpanKind
from tests.support.analysis.cluster import MS
from tests.support.analysis.one_group import ALL_REDUCE, findings_of, work

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.analysis.cluster import Action

NUM_STEPS = 40
LONGER = "; but steps became longer on all ranks alike: "


def growing(
    factor: Callable[[int], float], number: Callable[[int], int] = lambda step: 1
) -> Callable[[int, int], Iterator[Action]]:
    """Return a job whose micro-batches take 30 ms times a factor on each rank."""

    def script(rank: int, step: int) -> Iterator[Action]:
        noise = 1 + 0.02 * np.random.default_rng((rank, step)).standard_normal()
        for microbatch in range(number(step)):
            length = factor(step) * noise
            yield from work(SpanKind.FORWARD, 10 * MS * length, microbatch=microbatch)
            yield from work(SpanKind.BACKWARD, 20 * MS * length, microbatch=microbatch)
        yield ALL_REDUCE

    return script


def test_a_job_whose_steps_grow_on_all_ranks_is_healthy_and_says_so() -> None:
    # A list of losses with their graphs, a log that is read again in each step.
    (found,) = findings_of(growing(lambda step: 1 + step / NUM_STEPS), num_steps=NUM_STEPS)

    assert found.cause == "healthy"
    # 30 ms x (1 + 5 / 40) in the middle of the first quarter, 30 ms x (1 + 35 / 40) in the last.
    first, last = found.evidence.partition(LONGER)[2].split(" in the first quarter, ")
    assert float(first.removesuffix(" ms")) == pytest.approx(34.0, rel=0.05)
    assert float(last.removesuffix(" ms in the last")) == pytest.approx(56.5, rel=0.05)


@pytest.mark.parametrize(
    "script",
    [
        growing(lambda step: 1.0),
        growing(lambda step: 2 - step / NUM_STEPS),
        growing(lambda step: 1.0, lambda step: 2 if step < NUM_STEPS // 2 else 4),
    ],
    ids=["constant", "faster", "more micro-batches"],
)
def test_other_jobs_do_not_become_longer(
    script: Callable[[int, int], Iterator[Action]],
) -> None:
    (found,) = findings_of(script, num_steps=NUM_STEPS)

    assert (found.cause, LONGER in found.evidence) == ("healthy", False)


def evaluating(num_long: int, slowness: float = 1.0) -> Callable[[int, int], Iterator[Action]]:
    """All evaluate in each tenth step, four times 20 ms, rank 3 ``num_long`` times."""

    def script(rank: int, step: int) -> Iterator[Action]:
        factor = slowness if rank == 3 else 1.0
        yield from work(SpanKind.FORWARD, 20 * MS * factor, microbatch=0)
        yield from work(SpanKind.BACKWARD, 40 * MS * factor, microbatch=0)
        yield ALL_REDUCE
        if step % 10 == 9:
            for _ in range(num_long if rank == 3 else 4):
                yield from work(SpanKind.FORWARD, 20 * MS * factor)
            yield ALL_REDUCE

    return script


def test_an_evaluation_of_all_ranks_is_no_alarm() -> None:
    healthy, found = findings_of(evaluating(4), num_steps=NUM_STEPS)

    assert (healthy.cause, found.cause, found.severity) == ("healthy", "evaluation", "none")
    assert "wait" not in found.evidence


def test_the_rank_with_the_largest_share_of_an_evaluation_is_unequal_work() -> None:
    unequal, found = findings_of(evaluating(12), num_steps=NUM_STEPS)

    assert (unequal.cause, unequal.ranks) == ("sequence-imbalance", ())
    longest = "rank 3 for 240 ms, the others for 80.0 ms and wait for it"
    assert longest in unequal.evidence
    assert longest in found.evidence
    # In each tenth step it takes 160 ms longer than the others; their 80 ms are planned.
    assert (unequal.saved_s, found.saved_s) == pytest.approx((0.016, 0.008), rel=0.05)


def test_a_slow_device_is_slow_in_evaluations_too() -> None:
    slow, found = findings_of(evaluating(4, slowness=1.5), num_steps=NUM_STEPS)

    assert (slow.cause, slow.ranks, found.cause) == ("slow-compute", (3,), "evaluation")
    # 30 ms a step, and in each tenth 40 ms; of these one whole forward of 30 ms is moved.
    assert (slow.saved_s, found.saved_s) == pytest.approx((0.033, 0.009), rel=0.05)
