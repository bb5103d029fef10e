"""Findings that alert."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rankscope.analysis.alert_rules import find_conditions
from rankscope.analysis.report.report import Finding, Mfu, Severity
from rankscope.analysis.report.tracked_findings import FindingTracker
from tests.support.dashboard.builders import report


@pytest.mark.parametrize(
    ("cause", "ranks", "severity", "saved_s", "does_alert"),
    [
        ("slow-compute", (5,), Severity.WARNING, 0.02, True),
        ("slow-compute", (5,), Severity.MINOR, 0.02, False),
        ("network-degradation", (), Severity.WARNING, 0.02, True),
        # Unequal lengths are in all steps alike: nothing began, unless the job straggles for sure.
        # The mean of nine steps with a robust deviation of 3 % is known within 2 %.
        ("sequence-imbalance", (), Severity.WARNING, 0.09, False),
        ("sequence-imbalance", (), Severity.CRITICAL, 0.11, False),
        ("sequence-imbalance", (), Severity.CRITICAL, 0.15, True),
        ("sequence-imbalance", (5,), Severity.WARNING, 0.02, True),  # experts of one rank
    ],
)
def test_a_finding_alerts_if_something_began(
    cause: str, ranks: tuple[int, ...], severity: Severity, saved_s: float, *, does_alert: bool
) -> None:
    seconds = {step: 1.0 + 0.04 * (step % 3 - 1) for step in range(9)}
    base = replace(report(run="job"), mfu=None, actual_s_by_step=seconds)
    finding = Finding(
        cause=cause,
        ranks=ranks,
        steps=(0, 8),
        confidence=0.9,
        evidence="",
        severity=severity,
        saved_s=saved_s,
    )
    tracker = FindingTracker("job")
    tracker.update(replace(base, findings=(finding,)), at_ns=1)

    found = find_conditions(base, tracker.findings)

    assert [each.rule for each in found] == ["finding"] * does_alert


def test_a_smaller_batch_is_neither_a_drop_of_the_mfu_nor_a_rise_of_the_step_time() -> None:
    # Half of each step is fixed. The batch is halved from step 20 on, and doubled from 40 on.
    batch = [1.0] * 20 + [0.5] * 20 + [2.0] * 20
    seconds = {step: 0.5 + 0.5 * size for step, size in enumerate(batch)}
    tokens = {step: round(4096 * size) for step, size in enumerate(batch)}
    by_step = {step: 0.5 * batch[step] / seconds[step] for step in seconds}
    flops = {step: float(num) for step, num in tokens.items()}
    mfu = Mfu(convention="", mean=0.5, by_step=by_step, flops_by_step=flops)
    base = replace(report(run="job"), startup_s_by_step={}, actual_s_by_step=seconds, findings=())
    known = replace(base, mfu=mfu)
    unknown = replace(base, mfu=None, tokens_by_step=tokens)

    assert find_conditions(known, ()) == ()
    assert find_conditions(unknown, ()) == ()
    without = replace(known, mfu=replace(mfu, flops_by_step={}))
    assert [each.rule for each in find_conditions(without, ())] == ["mfu-drop"]
    assert [each.rule for each in find_conditions(replace(base, mfu=None), ())] == [
        "step-time-rise"
    ]


@pytest.mark.parametrize(
    ("step_s", "saved_s", "cause"),
    [
        (1.5, 0.45, "slow-compute"),
        (1.5, 0.2, None),  # less than half of the 0.5 s that each step loses
        (0.06, 0.018, "slow-compute"),  # 10 steps of 60 ms: long enough if it is explained
        (0.06, 0.008, "nothing"),  # and too short if not
        (0.015, 0.0045, "nothing"),
    ],
)
def test_a_drop_lasts_five_seconds_or_a_fifth_of_one_with_a_finding_that_explains_it(
    step_s: float, saved_s: float, cause: str | None
) -> None:
    seconds = {step: step_s if step >= 10 else step_s / 1.5 for step in range(20)}
    finding = Finding(
        cause="slow-compute",
        ranks=(5,),
        steps=(10, 19),
        confidence=0.9,
        evidence="",
        severity=Severity.WARNING,
        saved_s=saved_s,
        shown_saved_s=saved_s,
    )
    made = replace(
        report(run="job"),
        mfu=None,
        startup_s_by_step={},
        steps=tuple(seconds),
        actual_s_by_step=seconds,
        findings=(finding,),
    )

    rises = [each for each in find_conditions(made, ()) if each.rule == "step-time-rise"]

    causes = [each.finding.cause if each.finding else None for each in rises]
    assert causes == ([] if cause == "nothing" else [cause])
