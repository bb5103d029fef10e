"""Severity of findings, and the verdict if none matters."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rankscope.analysis.diagnose import combine_findings
from rankscope.analysis.report.report import Finding, Severity, StepTimes
from rankscope.analysis.severity import grade, grade_findings
from rankscope.analysis.verdict import verdict_sentence
from tests.support.dashboard.builders import report

STEPS = range(20)
REPORT = replace(
    report(slow_rank=None, num_steps=len(STEPS)),
    step_time_s=StepTimes(actual=1.1, replayed=1.1, ideal=1.0),
    actual_s_by_step=dict.fromkeys(STEPS, 1.1),
)
"""A run of 20 steps, which lost 2 of its 22 s."""


def finding(
    *,
    cause: str = "slow-compute",
    steps: tuple[int, int] | None = (5, 12),
    saved_s: float | None = 0.1,
    confidence: float = 0.9,
) -> Finding:
    return Finding(
        cause=cause,
        ranks=(3,),
        steps=steps,
        slowdown=1.1,
        saved_s=saved_s,
        confidence=confidence,
        evidence="longer than its peers",
    )


@pytest.mark.parametrize(
    ("saved_s", "severity"),
    [
        (0.12, Severity.CRITICAL),
        (0.1, Severity.WARNING),
        (0.006, Severity.WARNING),
        (0.005, Severity.MINOR),
        (0.0, Severity.MINOR),
        (-0.2, Severity.MINOR),
    ],
)
def test_a_finding_that_is_over_counts_by_its_share_of_all_steps(
    saved_s: float, severity: Severity
) -> None:
    assert grade(REPORT, finding(saved_s=saved_s)) is severity


def test_an_open_finding_counts_by_its_share_of_the_steps_that_show_it() -> None:
    # 0.4 s of the last two steps of 2.2 s, but 2 % of all.
    assert grade(REPORT, finding(steps=(18, 19), saved_s=0.02)) is Severity.CRITICAL
    assert grade(REPORT, finding(steps=(8, 9), saved_s=0.02)) is Severity.WARNING


@pytest.mark.parametrize(
    ("noise_s", "steps", "severity"),
    [
        (0.1, (5, 12), Severity.WARNING),
        (0.2, (5, 12), Severity.MINOR),
        (0.2, (2, 19), Severity.MINOR),
    ],
)
def test_a_saving_within_two_standard_errors_of_the_mean_step_is_minor(
    noise_s: float, steps: tuple[int, int], severity: Severity
) -> None:
    # GIVEN 0.05 s of each of 20 steps, whose mean has a standard error of 0.022 or 0.045 s
    made = replace(finding(steps=steps, saved_s=0.05), noise_s=noise_s)

    assert grade(REPORT, made) is severity


@pytest.mark.parametrize("steps", [(0, 0), (0, 1), (1, 1), (19, 19)])
def test_a_finding_of_the_ends_alone_is_minor(steps: tuple[int, int]) -> None:
    assert grade(REPORT, finding(steps=steps)) is Severity.MINOR


def test_a_finding_of_the_first_steps_of_a_window_is_not_of_the_jobs_begin() -> None:
    window = replace(REPORT, num_earlier_steps=100)

    assert grade(window, finding(steps=(0, 0))) is Severity.MINOR
    assert grade(window, finding(steps=(0, 1))) is Severity.WARNING


def test_a_run_of_two_steps_has_no_ends_to_leave_out() -> None:
    short = replace(REPORT, steps=(0, 1), actual_s_by_step={0: 1.1, 1: 1.1})

    assert grade(short, finding(steps=(1, 1))) is Severity.CRITICAL


@pytest.mark.parametrize(
    ("made", "severity"),
    [
        (finding(cause="healthy", saved_s=None), Severity.NONE),
        (finding(cause="insufficient-evidence", saved_s=None), Severity.NONE),
        (finding(cause="layout", saved_s=None), Severity.NONE),
        (finding(cause="crash", saved_s=None, steps=(19, 19)), Severity.CRITICAL),
        (finding(cause="hang", saved_s=None, steps=None), Severity.CRITICAL),
        (finding(cause="misconfiguration", saved_s=None), Severity.WARNING),
        (
            finding(cause="misconfiguration", saved_s=None, confidence=0.4),
            Severity.MINOR,
        ),
    ],
    ids=lambda value: value.cause if isinstance(value, Finding) else "",
)
def test_findings_without_a_price_count_by_their_cause(made: Finding, severity: Severity) -> None:
    assert grade(REPORT, made) is severity


def test_a_price_within_the_error_of_the_replay_is_minor() -> None:
    # The replay misses the recorded step time by 0.033 s of 1.1 s.
    inaccurate = replace(REPORT, replay_error_ratio=0.03)

    assert grade(inaccurate, finding(saved_s=0.032)) is Severity.MINOR
    assert grade(inaccurate, finding(saved_s=0.034)) is Severity.WARNING
    assert grade(inaccurate, finding(cause="crash", saved_s=None)) is Severity.CRITICAL


def test_a_minor_finding_is_never_the_headline() -> None:
    healthy = finding(cause="healthy", saved_s=None)
    small = finding(cause="gc-pause", saved_s=0.004)
    last = finding(cause="data-stall", steps=(19, 19))
    large = finding(saved_s=0.05)

    minor_only = grade_findings(replace(REPORT, findings=(healthy, small, last)))
    with_large = grade_findings(replace(REPORT, findings=(last, large)))

    assert verdict_sentence(minor_only) == (
        "Healthy: longer than its peers. Also found: data-stall (minor), gc-pause (minor)."
    )
    assert with_large.top_finding.cause == "slow-compute"
    assert verdict_sentence(with_large).startswith("Rank 3 (")


@pytest.mark.parametrize("cause", ["hang", "crash"])
def test_a_job_that_ended_is_not_healthy_however_uncertain_its_culprit(cause: str) -> None:
    healthy = finding(cause="healthy", saved_s=None)
    ended = finding(cause=cause, saved_s=None, confidence=0.1)

    assert combine_findings((healthy,), (ended,)) == (ended,)
