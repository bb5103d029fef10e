"""Forwards without gradients: generations of unequal length, and evaluations."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.cases.reports import analyze_job

if TYPE_CHECKING:
    from pathlib import Path

    from rankscope.analysis.report.report import Finding, RunReport

pytestmark = pytest.mark.slow


def share(report: RunReport, finding: Finding) -> float:
    """Return what fixing a finding saves, as a share of the step time."""
    assert finding.saved_s is not None
    assert report.step_time_s.actual is not None
    return finding.saved_s / report.step_time_s.actual


def test_a_rank_that_generates_twice_the_tokens_is_not_slow(tmp_path: Path) -> None:
    report = analyze_job(tmp_path, "h_grpo.py", run="h-grpo")

    (found,) = report.findings
    assert (found.cause, found.ranks) == ("sequence-imbalance", ())
    # The work of a step is 398 ms if it is shared equally, of 564 ms.
    assert share(report, found) == pytest.approx(0.29, abs=0.02)
    # The other ranks wait 37 % of it.
    assert max(each.wait_ratio for each in report.starved) == pytest.approx(0.37, abs=0.02)


def test_rank_0_that_evaluates_alone_is_said_without_an_alarm(tmp_path: Path) -> None:
    report = analyze_job(tmp_path, "h_compute4.py", "4", run="h-eval0-w4")

    healthy, found = report.findings
    assert healthy.cause == "healthy"
    assert (found.cause, found.ranks, found.severity) == ("evaluation", (0,), "none")
    # 180 ms in every tenth step, of 119 ms a step; step 0 is start-up.
    assert share(report, found) == pytest.approx(0.15, abs=0.025)
    assert "every 10 steps" in found.evidence
    assert found.card is not None
    rank_0, others = found.card.strips[0].groups
    assert (rank_0.label, rank_0.num) == ("rank 0, 5 of 41 steps", 5)
    assert rank_0.median == pytest.approx(180e6, rel=0.02)
    assert others.high == 0


@pytest.mark.parametrize(
    ("mode", "world", "saved_s"),
    [
        # (240 ms more) x 28 of 40 steps, less the share that rank 1 keeps.
        pytest.param("twice", 2, 0.168 / 2, marks=pytest.mark.nightly),
        ("twice", 4, 0.168 * 3 / 4),
        pytest.param("twice", 8, 0.168 * 7 / 8, marks=pytest.mark.nightly),
        ("batch", 4, 0.168 * 3 / 4),
        # 12 x 10 + 66 ms of 12 calls, 24 x 10 + 276 ms of 24: 330 ms more.
        ("cache", 4, 0.330 * 28 / 40 * 3 / 4),
    ],
)
def test_unequal_generations_are_work_and_no_slow_device(
    tmp_path: Path, mode: str, world: int, saved_s: float
) -> None:
    report = analyze_job(tmp_path, "unequal_work.py", mode, str(world), run=mode)

    (found,) = report.findings
    assert (found.cause, found.ranks) == ("sequence-imbalance", ())
    assert found.saved_s == pytest.approx(saved_s, rel=0.03)


def test_generations_that_are_long_on_random_ranks_are_work(tmp_path: Path) -> None:
    report = analyze_job(tmp_path, "unequal_work.py", "turns", "8", run="turns")

    assert [(each.cause, each.ranks) for each in report.findings] == [("sequence-imbalance", ())]


@pytest.mark.parametrize(
    ("mode", "world", "saved_s"),
    [
        # 30 % of 348 ms in 28 of 40 steps, optimizer not included.
        ("device", 2, 0.0731),
        pytest.param("device", 8, 0.0731, marks=pytest.mark.nightly),
        # 30 % of 138 ms.
        ("teacher", 4, 0.0290),
    ],
)
def test_a_device_that_is_slow_in_all_that_it_does_is_slow(
    tmp_path: Path, mode: str, world: int, saved_s: float
) -> None:
    report = analyze_job(tmp_path, "unequal_work.py", mode, str(world), run=mode)

    (found,) = report.findings
    assert (found.cause, found.ranks, found.steps) == ("slow-compute", (1,), (12, 39))
    assert found.saved_s == pytest.approx(saved_s, rel=0.05)


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.nightly)])
def test_of_two_or_three_ranks_it_is_unknown_whether_one_is_slow(
    tmp_path: Path, world: int
) -> None:
    report = analyze_job(tmp_path, "unequal_work.py", "always", str(world), run="always")

    (found,) = report.findings
    assert found.cause == "insufficient-evidence"
    assert "rank 1 computes more than 10 % longer" in found.evidence


def test_more_calls_are_work_also_if_their_rank_may_be_slow(tmp_path: Path) -> None:
    report = analyze_job(tmp_path, "unequal_work.py", "always-more", "2", run="always-more")

    (found,) = report.findings
    assert (found.cause, found.ranks) == ("sequence-imbalance", ())
    # With 18 calls each, 6 calls of 26 ms less on rank 1.
    assert found.saved_s == pytest.approx(0.156, rel=0.03)


@pytest.mark.parametrize(
    ("mode", "world", "every", "ranks"),
    [
        ("all", 4, 10, (0, 1, 2, 3)),
        ("one", 2, 5, (0,)),
        pytest.param("one", 8, 4, (0,), marks=pytest.mark.nightly),
        pytest.param("one", 4, 2, (0,), marks=pytest.mark.nightly),
    ],
)
def test_an_evaluation_costs_its_time_and_is_no_alarm(
    tmp_path: Path, mode: str, world: int, every: int, ranks: tuple[int, ...]
) -> None:
    report = analyze_job(tmp_path, "unequal_work.py", mode, str(world), str(every), run=mode)

    healthy, found = report.findings
    assert healthy.cause == "healthy"
    assert (found.cause, found.ranks) == ("evaluation", ranks)
    evaluated = [step for step in report.steps if step % every == 0]
    assert found.saved_s == pytest.approx(0.180 * len(evaluated) / len(report.steps), rel=0.03)
    assert [part.name for part in report.step_parts][:2] == ["ideal", "evaluation"]
