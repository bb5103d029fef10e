from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pytest

from rankscope.analysis.analyze import analyze_run
from rankscope.analysis.report import tracked_findings
from rankscope.analysis.report.report import Finding, Severity
from rankscope.analysis.report.tracked_findings import Change, FindingTracker
from rankscope.analysis.severity import grade_findings
from rankscope.analysis.window import RunWindow
from rankscope.tracer.topology import Layout
from tests.analysis.test_analyze import jitter
from tests.support.analysis.cluster import MS, Source, gpt_cluster
from tests.support.analysis.training import Training
from tests.support.dashboard.builders import report as built_report

if TYPE_CHECKING:
    from rankscope.analysis.report.report import RunReport
    from rankscope.analysis.report.tracked_findings import TrackedFinding

ONSET, RECOVERY, NUM_STEPS = 8, 14, 20


@dataclass(frozen=True)
class Update:
    """Changes that the tracker returned after a step."""

    step: int
    changes: tuple[tuple[Change, TrackedFinding], ...]


def analyze_online(
    slow_factor: float, *, window_steps: int = 256
) -> tuple[list[Update], FindingTracker]:
    """Analyse a job online, step by step; rank 5 is slow from `ONSET` to before `RECOVERY`."""
    noise = jitter()

    def forward_ns(rank: int, step: int, microbatch: int) -> int:
        factor = slow_factor if rank == 5 and ONSET <= step < RECOVERY else 1.0
        return int(10 * MS * factor * noise(rank, step, microbatch))

    cluster = gpt_cluster(Layout(pp=2, dp=2, tp=2), num_steps=NUM_STEPS, forward_ns=forward_ns)
    whole = Source(cluster.run_info(), cluster.span_table(), cluster.step_table())
    source = Training(whole)
    window = RunWindow(source, "tiny", max_spans=4_000_000, max_steps=window_steps)
    tracker = FindingTracker("tiny")
    updates = []
    for step in range(NUM_STEPS):
        source.newest = step
        assert window.advance() == 1
        report = analyze_run(window, "tiny")
        updates.append(Update(step, tracker.update(report, at_ns=1_000 + step)))
    return updates, tracker


def steps_with(updates: list[Update], change: Change) -> list[int]:
    """Return the steps after which slow-compute of rank 5 had this change."""
    return [
        one.step
        for one in updates
        for found, tracked in one.changes
        if found is change and is_rank_5(tracked)
    ]


def is_rank_5(tracked: TrackedFinding) -> bool:
    return (tracked.finding.cause, tracked.finding.ranks) == ("slow-compute", (5,))


@pytest.mark.parametrize(
    "slow_factor",
    [pytest.param(1.2, marks=pytest.mark.slow), 1.8, pytest.param(3.0, marks=pytest.mark.slow)],
)
def test_a_finding_opens_soon_after_its_onset_and_closes_after_its_last_step(
    slow_factor: float,
) -> None:
    updates, tracker = analyze_online(slow_factor)

    (opened,) = steps_with(updates, Change.OPENED)
    assert ONSET <= opened <= ONSET + 3
    (finding,) = filter(is_rank_5, tracker.findings)
    assert finding.onset_step == ONSET
    assert finding.last_step == RECOVERY - 1
    assert finding.opened_ns == 1_000 + opened
    assert steps_with(updates, Change.CLOSED) == [RECOVERY + 2]
    assert not any(map(is_rank_5, tracker.open_findings))


@pytest.mark.slow
def test_a_window_shorter_than_the_run_keeps_the_onset() -> None:
    _, tracker = analyze_online(1.8, window_steps=8)

    assert next(filter(is_rank_5, tracker.findings)).onset_step == ONSET


def with_findings(*findings: Finding, num_steps: int) -> RunReport:
    made = built_report(num_steps=num_steps)
    object.__setattr__(made, "findings", findings)  # instead of the builder's
    return made


def slow(first: int, last: int, *, rank: int = 5) -> Finding:
    return Finding(
        cause="slow-compute",
        ranks=(rank,),
        steps=(first, last),
        slowdown=1.5,
        recoverable_ratio=0.9,
        confidence=0.9,
        evidence="",
    )


def changes_of(tracker: FindingTracker, report: RunReport, at_ns: int) -> list[tuple[str, int]]:
    return [(change.value, one.number) for change, one in tracker.update(report, at_ns=at_ns)]


@pytest.mark.parametrize("window_steps", [1, 2])
def test_a_window_that_holds_too_few_steps_opens_a_finding_all_the_same(
    window_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracked_findings, "GONE_S", 0.0)  # steps take 0.3 s
    updates, tracker = analyze_online(1.8, window_steps=window_steps)

    assert steps_with(updates, Change.OPENED) == [ONSET + 2]
    (found,) = filter(is_rank_5, tracker.findings)
    assert (found.onset_step, found.last_step) == (ONSET, RECOVERY - 1)
    assert found.closed_ns is not None
    assert [
        one.step for one in updates for change, _ in one.changes if change is Change.OPENED
    ] == [ONSET + 2]


def test_a_finding_that_comes_back_soon_is_the_same_one() -> None:
    tracker = FindingTracker("r")

    assert changes_of(tracker, with_findings(slow(3, 9), num_steps=10), 1) == [("opened", 0)]
    assert changes_of(tracker, with_findings(num_steps=12), 2) == []
    assert changes_of(tracker, with_findings(slow(3, 12), num_steps=13), 3) == [("updated", 0)]
    assert changes_of(tracker, with_findings(num_steps=17), 4) == []  # noise of one analysis
    assert changes_of(tracker, with_findings(num_steps=30), 5) == [("closed", 0)]
    assert changes_of(tracker, with_findings(slow(4, 30), num_steps=31), 6) == [("opened", 0)]
    assert tracker.findings[0].onset_step == 3


def test_a_finding_that_lasts_over_a_restart_has_the_epoch_of_its_last_step() -> None:
    tracker = FindingTracker("r")
    tracker.update(with_findings(slow(3, 9), num_steps=10), at_ns=1)
    later = with_findings(slow(3, 12), num_steps=13)
    object.__setattr__(later, "epochs", (0, 1))

    tracker.update(later, at_ns=2)

    (finding,) = tracker.findings
    assert (finding.epoch, finding.onset_step) == (1, 3)


def test_an_unchanged_analysis_changes_nothing() -> None:
    tracker = FindingTracker("r")
    made = with_findings(slow(3, 9), num_steps=10)

    tracker.update(made, at_ns=1)

    assert tracker.update(made, at_ns=2) == ()


def test_a_finding_that_ended_before_the_first_analysis_is_closed_at_once() -> None:
    tracker = FindingTracker("r")
    made = with_findings(slow(3, 9), slow(15, 19), num_steps=20)

    assert changes_of(tracker, made, 1) == [("opened", 0), ("opened", 1)]
    assert [one.closed_ns for one in tracker.findings] == [1, None]
    assert changes_of(tracker, with_findings(slow(3, 9), slow(15, 20), num_steps=21), 2) == [
        ("updated", 1)
    ]


def test_a_finding_of_the_last_steps_stays_open_when_the_run_ends() -> None:
    tracker = FindingTracker("r")
    tracker.update(with_findings(slow(3, 9), slow(4, 9, rank=2), num_steps=10), at_ns=1)

    tracker.update(with_findings(slow(3, 10), num_steps=11), at_ns=2, is_over=True)

    assert [(one.finding.ranks, one.closed_ns) for one in tracker.findings] == [
        ((5,), None),
        ((2,), 2),
    ]


def test_a_tracker_continues_where_another_one_stopped() -> None:
    before = FindingTracker("r")
    before.update(with_findings(slow(3, 9), num_steps=10), at_ns=1)
    after = FindingTracker("r", before.findings)

    assert changes_of(after, with_findings(slow(5, 12), num_steps=13), 2) == [("updated", 0)]
    assert after.findings[0].onset_step == 3


@pytest.mark.parametrize(
    ("finding", "opens"),
    [
        (slow(7, 9), True),
        (slow(8, 9), False),
        (replace(slow(2, 9), severity=Severity.WARNING), True),
        (replace(slow(2, 9), severity=Severity.MINOR), False),
        (replace(slow(2, 9), cause="common-pause", severity=Severity.NONE), False),
        (replace(slow(9, 9), cause="hang", slowdown=None), True),
    ],
)
def test_a_finding_opens_if_it_matters_and_lasts(finding: Finding, *, opens: bool) -> None:
    tracker = FindingTracker("r")

    tracker.update(with_findings(finding, num_steps=10), at_ns=1)

    assert bool(tracker.open_findings) is opens


def test_an_open_finding_that_becomes_minor_stays_the_same() -> None:
    tracker = FindingTracker("r")
    tracker.update(with_findings(slow(3, 9), num_steps=10), at_ns=1)

    minor = replace(slow(3, 10), severity=Severity.MINOR)

    assert changes_of(tracker, with_findings(minor, num_steps=11), 2) == [("updated", 0)]


def window(first: int, last: int, *findings: Finding) -> RunReport:
    """Return the graded report of a window of steps of one second each."""
    made = replace(
        built_report(),
        steps=tuple(range(first, last + 1)),
        actual_s_by_step=dict.fromkeys(range(first, last + 1), 1.0),
        num_earlier_steps=first,
        findings=findings,
    )
    return grade_findings(made)


def test_the_price_is_a_mean_over_the_steps_since_the_onset_and_does_not_climb() -> None:
    # Each step from 20 on loses 0.3 s; from step 40 on, 0.6 s.
    windows = [
        window(16, 25, replace(slow(20, 25), saved_s=0.18)),
        window(21, 30, replace(slow(21, 30), saved_s=0.3)),
        window(30, 39, replace(slow(30, 39), saved_s=0.3)),
        window(40, 49, replace(slow(40, 49), saved_s=0.6)),
    ]
    tracker = FindingTracker("r")
    shown = []
    for at_ns, report in enumerate(windows):
        tracker.update(report, at_ns=at_ns)
        (finding,) = (merged := tracker.merged(report)).findings
        shown.append((finding.steps, merged.price(finding)))

    assert [(steps, round(price.seconds, 9)) for steps, price in shown if price is not None] == [
        ((20, 25), 0.3),
        ((20, 30), 0.3),
        ((20, 39), 0.3),
        ((20, 49), 0.4),  # (20 x 0.3 + 10 x 0.6) / 30
    ]
    (last,) = tracker.open_findings
    assert last.finding.saved_s == last.finding.shown_saved_s


def test_one_fault_under_another_cause_or_with_another_rank_is_one_finding() -> None:
    tracker = FindingTracker("r")
    first = replace(slow(3, 9), saved_s=0.2)
    throttled = replace(first, cause="clock-throttle", steps=(3, 12))
    both = replace(throttled, ranks=(5, 6), steps=(3, 15))
    crash = replace(first, cause="crash", steps=(19, 19), slowdown=None, saved_s=None)

    for last, finding in ((9, first), (12, throttled), (15, both)):
        tracker.update(window(0, last, finding), at_ns=last)
    (one,) = tracker.findings
    tracker.update(window(0, 18, replace(both, steps=(3, 18)), crash), at_ns=20)

    assert (one.finding.cause, one.finding.ranks, one.onset_step) == ("clock-throttle", (5, 6), 3)
    assert [each.finding.cause for each in tracker.findings] == ["clock-throttle", "crash"]


def test_steps_that_no_analysis_saw_end_no_finding() -> None:
    # GIVEN a server behind its job, whose windows of a step or three come each nine steps
    tracker = FindingTracker("r")
    fault = replace(slow(3, 9), saved_s=0.2)
    tracker.update(window(0, 9, fault), at_ns=9)

    again = tracker.update(window(18, 18, replace(fault, steps=(18, 18))), at_ns=18)
    renamed = replace(fault, cause="clock-throttle", steps=(25, 27))
    tracker.update(window(25, 27, renamed), at_ns=27)
    healthy = [window(at, at, replace(slow(at, at), cause="healthy")) for at in range(36, 73, 9)]
    closed = [bool(tracker.update(report, at_ns=at)) for at, report in enumerate(healthy, 36)]

    assert [change for change, _ in again] == [Change.UPDATED]
    (one,) = tracker.findings
    assert (one.onset_step, one.last_step, one.finding.cause) == (3, 27, "clock-throttle")
    assert closed == [False, False, False, True, False]


def test_an_open_finding_that_an_analysis_misses_is_in_its_report() -> None:
    tracker = FindingTracker("r")
    tracker.update(window(0, 9, replace(slow(3, 9), saved_s=0.2)), at_ns=1)
    healthy = window(0, 11, replace(slow(0, 11), cause="healthy"))

    assert tracker.update(healthy, at_ns=2) == ()
    assert [each.cause for each in tracker.merged(healthy).findings] == ["slow-compute"]
    later = window(0, 30, replace(slow(0, 30), cause="healthy"))
    assert [change for change, _ in tracker.update(later, at_ns=3)] == [Change.CLOSED]


def test_the_report_of_the_whole_run_is_what_a_finding_ends_with() -> None:
    tracker = FindingTracker("r")
    tracker.update(window(10, 29, replace(slow(10, 29), saved_s=0.2)), at_ns=1)

    whole = replace(slow(12, 39), saved_s=0.14)
    tracker.update(window(0, 39, whole), at_ns=2, is_over=True)

    (one,) = tracker.findings
    assert one.onset_step == 12
    assert one.finding.shown_saved_s == pytest.approx(0.14 * 40 / 28)
