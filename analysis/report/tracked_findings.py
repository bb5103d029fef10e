"""Tracked findings: when each of them opened and closed, over the analyses of a live run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from .report import GRACE_STEPS, Severity, epoch_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from .report import Finding, RunReport

GONE_S = 3.0
"""Time for which analyses must lack an open finding before it is closed. Source: choice, more than
one analysis of a running job, which follow each other every 2 s."""

NO_PROBLEM = frozenset({"healthy", "insufficient-evidence"})


class Change(StrEnum):
    """Change of a tracked finding."""

    OPENED = "opened"
    UPDATED = "updated"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedFinding:
    """A finding of a run with its history. All times are Unix time."""

    run_id: str
    number: int
    """Number of the finding in the run, from 0 in the order of opening."""

    epoch: int
    """Epoch of its last step."""

    onset_step: int | None
    """First step that ever showed it; None if no step does."""

    last_step: int | None
    """Last step that has shown it so far."""

    opened_ns: int
    updated_ns: int
    closed_ns: int | None
    """None while it is open."""

    finding: Finding
    """As in the last analysis that had it."""

    checked_step: int
    """Last step of that analysis."""


class FindingTracker:
    """The findings of one run, matched between analyses by cause and ranks.

    A finding opens if it matters and `GRACE_STEPS` steps show it (`may_open`): of one analysis, or
    of several that follow each other, if the window of each holds fewer. It is open while one of
    the last `GRACE_STEPS` steps of the analysis shows it; without steps of its own, while the
    analysis has it. If it comes back within as many steps, it is the same finding and opens again.
    A finding that had ended before the first analysis is opened and closed at once. Steps between
    two windows, which a server behind its job does not look at, are evidence of nothing.

    What one analysis calls a slow device and the next one a throttled clock, or blames on one rank
    and then on two, is one fault: a finding that shares ranks and steps with an open one that the
    analysis lacks continues that one.
    """

    def __init__(self, run_id: str, tracked: Iterable[TrackedFinding] = ()) -> None:
        self._run_id = run_id
        self._tracked = {finding.number: finding for finding in tracked}
        self._numbers: dict[int, int] = {}
        """Number of the tracked finding of each finding of the last report, by its place there."""

        self._shown: dict[tuple[str, tuple[int, ...]], tuple[int, ...]] = {}
        """Steps that showed the findings of the last report that are not tracked, by cause and
        ranks: those of its window, and of the windows before it that had them too."""

        self._missed: dict[int, set[int]] = {}
        """Analysed steps since the last analysis that had an open finding, by its number."""

    @property
    def findings(self) -> tuple[TrackedFinding, ...]:
        """All findings of the run so far, in the order of opening."""
        return tuple(self._tracked.values())

    @property
    def open_findings(self) -> tuple[TrackedFinding, ...]:
        """The findings that are open."""
        return tuple(tracked for tracked in self._tracked.values() if tracked.closed_ns is None)

    def update(
        self, report: RunReport, *, at_ns: int, is_over: bool = False
    ) -> tuple[tuple[Change, TrackedFinding], ...]:
        """Update the findings from an analysis; return the changes.

        Args:
            at_ns: Time of the analysis, Unix time.
            is_over: Whether the run has ended. A finding of the last steps is then left open: its
                end was not observed.
        """
        is_whole = is_over and not report.num_earlier_steps
        changes: list[tuple[Change, TrackedFinding]] = []
        self._numbers = self.match(report)
        shown, self._shown = self._shown, {}
        for index, reported in enumerate(report.findings):
            before = self._tracked.get(self._numbers.get(index, -1))
            finding = reported if before is not None else self._since_shown(reported, report, shown)
            if finding.cause in NO_PROBLEM or (before is None and not may_open(finding)):
                continue
            now = self._updated(finding, before, report, at_ns=at_ns)
            if is_whole and now is not before:  # it knows better than the windows before it
                onset_step = finding.steps[0] if finding.steps else None
                now = replace(now, finding=finding, onset_step=onset_step)
            self._numbers[index] = now.number
            change = _change(before, now)
            if change is not None:
                changes.append((change, now))
                self._tracked[now.number] = now
        present = set(self._numbers.values())
        missed, self._missed = self._missed, {}
        for tracked in self.open_findings:
            if tracked.number in present:
                continue
            steps = missed.get(tracked.number, set()).union(report.steps)
            self._missed[tracked.number] = {step for step in steps if step > tracked.checked_step}
            if is_over or _is_gone(len(self._missed[tracked.number]), report):
                closed = replace(tracked, updated_ns=at_ns, closed_ns=at_ns)
                self._tracked[tracked.number] = closed
                changes.append((Change.CLOSED, closed))
        return tuple(changes)

    def merged(self, report: RunReport) -> RunReport:
        """Return the last report with what is known of its findings from earlier ones.

        Those that are open have their onset and their price since then, and an open finding that
        this one analysis lacks is among them.
        """
        opened = {tracked.number: tracked.finding for tracked in self.open_findings}
        findings = [
            opened.get(self._numbers.get(index, -1), finding)
            for index, finding in enumerate(report.findings)
        ]
        present = set(self._numbers.values())
        missed = [finding for number, finding in opened.items() if number not in present]
        if missed:
            findings = [finding for finding in findings if finding.cause not in NO_PROBLEM]
        return replace(report, findings=(*findings, *missed))

    def match(self, report: RunReport) -> dict[int, int]:
        """Return the number of the tracked finding that each finding continues, by its place.

        Of several that it may continue it is the open one, else the newest.
        """
        numbers: dict[int, int] = {}
        for continues in (_is_near, _is_renamed):
            for index, finding in enumerate(report.findings):
                matching = [
                    (tracked.closed_ns is None, tracked.number)
                    for tracked in self._tracked.values()
                    if tracked.number not in numbers.values()
                    and continues(tracked, finding, report)
                ]
                if index not in numbers and matching:
                    numbers[index] = max(matching)[1]
        return numbers

    def _since_shown(
        self,
        finding: Finding,
        report: RunReport,
        shown: Mapping[tuple[str, tuple[int, ...]], tuple[int, ...]],
    ) -> Finding:
        """Return a finding with the steps of earlier windows that showed it, once they are enough.

        The window of a large job holds one step or two. A step that has left it counts if each
        analysis since then had the finding.

        Args:
            shown: Steps by cause and ranks, as of the analysis before (`_shown`).
        """
        if finding.steps is None or not report.is_open(finding):
            return finding
        key = (finding.cause, finding.ranks)
        first, last = finding.steps
        left = [step for step in shown.get(key, ()) if step < report.steps[0]]
        own = [step for step in report.steps if first <= step <= last]
        self._shown[key] = (*left, *own)
        is_long = bool(left) and len(left) + len(own) >= GRACE_STEPS
        return replace(finding, steps=(left[0], last)) if is_long else finding

    def _updated(
        self, finding: Finding, before: TrackedFinding | None, report: RunReport, *, at_ns: int
    ) -> TrackedFinding:
        checked = report.steps[-1] if report.steps else -1
        if before is not None:
            finding = _since_onset(finding, before, report)
        closed_ns = None if report.is_open(finding) else at_ns
        onset, until = finding.steps or (None, None)
        epoch = epoch_of(finding, report.placements, newest=max(report.epochs, default=-1))
        if before is None:
            return TrackedFinding(
                run_id=self._run_id,
                number=len(self._tracked),
                epoch=epoch,
                onset_step=onset,
                last_step=until,
                opened_ns=at_ns,
                updated_ns=at_ns,
                closed_ns=closed_ns,
                finding=finding,
                checked_step=checked,
            )
        if closed_ns is not None and before.closed_ns is not None:
            return before  # It was closed by an earlier analysis.
        return replace(
            before,
            epoch=epoch,
            onset_step=onset,
            last_step=until,
            updated_ns=at_ns,
            closed_ns=closed_ns,
            finding=finding,
            checked_step=checked,
        )


def may_open(finding: Finding) -> bool:
    """Return whether a person would act on a finding, so that it is tracked from now on.

    It is critical or a warning. What was measured on steps, and so has a price, shows in
    `GRACE_STEPS` steps: a shorter one is over before it is read, and in a run without a fault
    noise looks like it.
    """
    if finding.severity in (Severity.MINOR, Severity.NONE):
        return False
    if finding.slowdown is None or finding.steps is None:
        return True
    first, last = finding.steps
    return last - first + 1 >= GRACE_STEPS


def _change(before: TrackedFinding | None, now: TrackedFinding) -> Change | None:
    if before is None or (before.closed_ns is not None and now.closed_ns is None):
        return Change.OPENED
    if before.closed_ns is None and now.closed_ns is not None:
        return Change.CLOSED
    same = (before.finding, before.checked_step) == (now.finding, now.checked_step)
    return None if same else Change.UPDATED


def _since_onset(finding: Finding, before: TrackedFinding, report: RunReport) -> Finding:
    """Return a finding of a window with its onset and its price since then.

    The steps since the onset that have left the window cost what they cost when they were in it::

        price = (price before * steps before the window + lost in the window) / steps since onset
    """
    if finding.steps is None or before.onset_step is None:
        return finding
    onset, first, last = min(before.onset_step, finding.steps[0]), report.steps[0], report.steps[-1]
    finding = replace(finding, steps=(onset, finding.steps[1]))
    num_shown = len(report.shown_steps(finding))
    if finding.saved_s is None or not num_shown:
        return finding
    # Not every step need be recorded.
    num_before = max(first - onset, 0) * len(report.steps) / (last - first + 1)
    if before.finding.shown_saved_s is None:
        num_before = 0.0
    lost_s = finding.saved_s * len(report.steps)
    lost_s += num_before * (before.finding.shown_saved_s or 0.0)
    price_s = lost_s / (num_before + num_shown)
    # One price: all steps of the window show it if it began before.
    saved_s = price_s if num_before else finding.saved_s
    return replace(finding, shown_saved_s=price_s, saved_s=saved_s)


def _is_gone(num_missed: int, report: RunReport) -> bool:
    """Return whether an open finding that analyses lack has been missing for long enough.

    Noise hides a finding in one analysis now and then; the next one follows `GONE_S` later at most.

    Args:
        num_missed: Analysed steps since the last analysis that had it.
        report: The last analysis.
    """
    seconds = [report.actual_s_by_step.get(step, 0.0) for step in report.steps]
    is_long = num_missed > GRACE_STEPS
    return is_long and bool(seconds) and num_missed * sum(seconds) / len(seconds) > GONE_S


def _is_renamed(tracked: TrackedFinding, finding: Finding, report: RunReport) -> bool:
    """Return whether a finding is an open tracked one by another cause, or of other ranks."""
    if tracked.closed_ns is not None or tracked.last_step is None or finding.steps is None:
        return False
    # What has no price was not measured on steps: a crash is no slow rank.
    is_priced = tracked.finding.saved_s is not None and finding.saved_s is not None
    shares = bool({*tracked.finding.ranks} & {*finding.ranks})
    overlaps = finding.steps[0] <= _last_unseen(tracked, report) and may_open(finding)
    return is_priced and shares and overlaps


def _is_near(tracked: TrackedFinding, finding: Finding, report: RunReport) -> bool:
    """Return whether a finding has cause and ranks of a tracked one, and steps that are near."""
    if (tracked.finding.cause, tracked.finding.ranks) != (finding.cause, finding.ranks):
        return False
    if finding.steps is None or tracked.onset_step is None or tracked.last_step is None:
        return finding.steps is None and tracked.onset_step is None
    first, last = finding.steps
    nearest = max(tracked.last_step + GRACE_STEPS, _last_unseen(tracked, report))
    return first <= nearest and last >= tracked.onset_step - GRACE_STEPS


def _last_unseen(tracked: TrackedFinding, report: RunReport) -> int:
    """Return up to which step a finding would have lasted if the steps that no analysis saw had it.

    It is the first step of the window if that begins after all that an open finding was seen in.
    """
    last = tracked.last_step if tracked.last_step is not None else -1
    if tracked.closed_ns is None and report.steps:
        return max(last, report.steps[0])
    return last
