"""Jobs of two or three ranks, in which few or no peers say what is usual."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from rankscope.analysis.analyze import analyze_run
from rankscope.tracer.span import SpanKind
from rankscope.tracer.topology import Layout
from tests.support.analysis.cluster import MS, source_of
from tests.support.analysis.one_group import ALL_REDUCE, trained, work

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rankscope.analysis.report.report import RunReport
    from tests.support.analysis.cluster import Action


def analyze(factor: Callable[[int, int], float], *, num_ranks: int, num_steps: int) -> RunReport:
    """Analyse a job whose steps take 30 ms times a factor of rank and step."""

    def script(rank: int, step: int) -> Iterator[Action]:
        yield from work(SpanKind.FORWARD, 10 * MS * factor(rank, step), microbatch=0)
        yield from work(SpanKind.BACKWARD, 20 * MS * factor(rank, step), microbatch=0)
        yield ALL_REDUCE

    cluster = trained(script, num_steps=num_steps, layout=Layout(dp=num_ranks))
    return analyze_run(source_of(cluster), "run")


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("seed", range(3))
def test_a_few_noisy_steps_prove_no_difference(num_ranks: int, seed: int) -> None:
    # GIVEN four steps of a busy host: each rank loses up to half of a step, at random
    noise = 1 + 0.5 * np.random.default_rng(seed).random((num_ranks, 4))

    report = analyze(lambda rank, step: float(noise[rank, step]), num_ranks=num_ranks, num_steps=4)

    assert all("longer than the one or two" not in each.evidence for each in report.findings)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_constant_difference_is_said_without_a_culprit(num_ranks: int) -> None:
    noise = 1 + 0.1 * np.random.default_rng(1).random((num_ranks, 12))

    report = analyze(
        lambda rank, step: float(noise[rank, step]) * (1.5 if rank == 1 else 1.0),
        num_ranks=num_ranks,
        num_steps=12,
    )

    (found,) = report.findings
    assert (found.cause, found.ranks) == ("insufficient-evidence", ())
    assert "rank 1 computes more than 10 % longer" in found.evidence


def test_a_slow_step_does_not_hide_that_ranks_wait_in_all_others() -> None:
    # GIVEN a rank that takes 1.5 times as long as both others, and in one step 3 times
    report = analyze(
        lambda rank, step: (3.0 if step == 9 else 1.5) if rank == 1 else 1.0,
        num_ranks=3,
        num_steps=20,
    )

    alarm, unexplained = report.findings
    assert (alarm.cause, alarm.ranks, alarm.steps) == ("slow-compute", (1,), (9, 9))
    assert (unexplained.cause, unexplained.severity) == ("insufficient-evidence", "none")
    assert unexplained.evidence.startswith("the other 2 ranks wait for rank 1 for 3")
    assert unexplained.evidence.endswith("no finding explains half of it")
