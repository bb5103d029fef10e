from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope.analysis.report.report import Finding, Severity, Starved, StepTimes, WaitsOn
from tests.support.dashboard.builders import report

if TYPE_CHECKING:
    from rankscope.analysis.report.report import RunReport


def found(cause: str, saved: float, severity: Severity = Severity.CRITICAL) -> Finding:
    return Finding(cause=cause, confidence=0.9, evidence="", saved_s=saved, severity=severity)


def timed(actual_s: dict[int, float], ideal_s: dict[int, float], *findings: Finding) -> RunReport:
    """Return a report with these times by step."""
    num = len(actual_s)
    times = StepTimes(
        actual=sum(actual_s.values()) / num, replayed=None, ideal=sum(ideal_s.values()) / num
    )
    return replace(
        report(),
        step_time_s=times,
        actual_s_by_step=actual_s,
        ideal_s_by_step=ideal_s,
        findings=findings,
    )


def test_a_step_is_its_ideal_the_loss_by_each_finding_and_the_rest() -> None:
    made = timed({0: 1.2, 1: 1.2}, {0: 0.4, 1: 0.4}, found("gc-pause", 0.72), found("slow", 0.04))

    parts = {part.name: part.seconds for part in made.step_parts}

    assert parts == pytest.approx({"ideal": 0.4, "gc-pause": 0.72, "slow": 0.04, "other": 0.04})


def test_findings_that_delay_the_same_moment_are_counted_once() -> None:
    made = timed({0: 1.0}, {0: 0.5}, found("one", 0.4), found("two", 0.4))

    parts = {part.name: part.seconds for part in made.step_parts}

    assert parts == pytest.approx({"ideal": 0.5, "one": 0.4, "two": 0.1, "other": 0.0})


def test_what_is_no_problem_is_no_part() -> None:
    made = timed({0: 1.0}, {0: 0.5}, found("layout", 0.8, Severity.NONE))

    assert [part.name for part in made.step_parts] == ["ideal", "other"]


def test_the_ideal_is_never_above_what_a_quarter_of_the_steps_with_as_much_work_took() -> None:
    # Steps 0 and 1 are healthy. Most steps are slow, and so the ideal of all is 0.6 s.
    alike = dict.fromkeys(range(5), 0.6)
    slow = timed({0: 0.5, 1: 0.52, 2: 0.9, 3: 0.9, 4: 0.9}, alike)
    assert slow.reachable_step_s == pytest.approx(0.52)
    assert slow.reachable_s_by_step == dict.fromkeys(range(5), 0.52)
    # Step 0 has half the work of step 1: its time says nothing of step 1.
    assert timed({0: 0.31, 1: 0.9}, {0: 0.3, 1: 0.6}).reachable_step_s == pytest.approx(0.45)


TIMES = st.lists(st.tuples(st.floats(0.1, 10), st.floats(0.1, 10)), min_size=1, max_size=6)


@given(TIMES, st.lists(st.floats(-1, 2), max_size=4))
def test_the_parts_sum_to_the_step_time_and_none_is_negative(
    times: list[tuple[float, float]], saved: list[float]
) -> None:
    actual = {step: one for step, (one, _) in enumerate(times)}
    ideal = {step: one for step, (_, one) in enumerate(times)}
    made = timed(actual, ideal, *(found("cause", ratio) for ratio in saved))

    seconds = [part.seconds for part in made.step_parts]

    assert sum(seconds) == pytest.approx(made.step_time_s.actual)
    assert min(seconds) >= -1e-9


def test_the_ranks_that_wait_longest_for_the_culprit_come_first() -> None:
    waits = [(0, 0.5, {6: 0.4, 5: 0.1}), (1, 0.3, {5: 0.3}), (2, 0.2, {5: 0.1}), (5, 0.6, {6: 0.6})]
    starved = tuple(
        Starved(
            rank=rank,
            wait_ratio=ratio,
            waits_on=tuple(WaitsOn(rank=on, ratio=part) for on, part in parts.items()),
        )
        for rank, ratio, parts in waits
    )
    slow = replace(found("slow-compute", 0.1), ranks=(5,))
    healthy = replace(slow, cause="healthy", severity=Severity.NONE)

    def order(finding: Finding) -> list[int]:
        made = replace(report(), starved=starved, findings=(finding,))
        return [one.rank for one in made.longest_waits]

    assert order(slow) == [1, 0, 2, 5]
    assert order(healthy) == [5, 0, 1, 2]
    assert order(replace(slow, ranks=(0, 1, 2, 5))) == [5, 0, 1, 2]
