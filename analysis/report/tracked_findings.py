"""Tracked findings: when each of them opened and closed, over the analyses of a live run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from .report import Severity

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .report import Finding, RunReport

GRACE_STEPS = 3
"""A finding is open while one of this many newest steps shows it. Source: design.md section 5, a
verdict is due within 3 steps of the onset."""

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
    """Newest epoch of the run when it opened."""

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
    """The findings of one run, matched between analyses by (cause, ranks).

    A finding opens if it matters (`may_open`). It is open while one of the last `GRACE_STEPS` steps
    of the analysis shows it; without steps of its own, while the analysis has it. If it comes back
    within as many steps, it is the same finding and opens again. A finding that had ended before
    the first analysis is opened and closed at once.

    Args:
        run_id: The run.
        known: Findings that were tracked before a restart.
    """

    def __init__(self, run_id: str, known: Iterable[TrackedFinding] = ()) -> None:
        self._run_id = run_id
        self._tracked = {one.number: one for one in known}

    @property
    def findings(self) -> tuple[TrackedFinding, ...]:
        """All findings of the run so far, in the order of opening."""
        return tuple(self._tracked.values())

    @property
    def open_findings(self) -> tuple[TrackedFinding, ...]:
        """The findings that are open."""
        return tuple(one for one in self._tracked.values() if one.closed_ns is None)

    def update(
        self, report: RunReport, *, at_ns: int, is_over: bool = False
    ) -> tuple[tuple[Change, TrackedFinding], ...]:
        """Update the findings from an analysis; return the changes.

        Args:
            report: Analysis of the newest steps.
            at_ns: Time of the analysis, Unix time.
            is_over: Whether the run has ended. A finding of the last steps is then left open: its
                end was not observed.
        """
        last = report.steps[-1] if report.steps else -1
        changes: list[tuple[Change, TrackedFinding]] = []
        present: set[int] = set()
        for finding in report.findings:
            if finding.cause in NO_PROBLEM:
                continue
            before = self._match(finding)
            if before is None and not may_open(finding):
                continue
            now = self._updated(finding, before, report, last=last, at_ns=at_ns)
            present.add(now.number)
            change = _change(before, now)
            if change is not None:
                changes.append((change, now))
                self._tracked[now.number] = now
        for one in self.open_findings:
            is_gone = is_over or last - one.checked_step > GRACE_STEPS
            if one.number not in present and is_gone:
                changes.append((Change.CLOSED, self._close(one, at_ns)))
        return tuple(changes)

    def _match(self, finding: Finding) -> TrackedFinding | None:
        """Return the tracked finding that this one continues: the open one, else the newest."""
        matching = [
            one
            for one in self._tracked.values()
            if (one.finding.cause, one.finding.ranks) == (finding.cause, finding.ranks)
            and _is_near(one, finding)
        ]
        opened = [one for one in matching if one.closed_ns is None]
        return next(iter(opened[-1:] or matching[-1:]), None)

    def _updated(
        self,
        finding: Finding,
        before: TrackedFinding | None,
        report: RunReport,
        *,
        last: int,
        at_ns: int,
    ) -> TrackedFinding:
        onset, until = finding.steps or (None, None)
        is_open = until is None or until > last - GRACE_STEPS
        closed_ns = None if is_open else at_ns
        if before is None:
            return TrackedFinding(
                run_id=self._run_id,
                number=len(self._tracked),
                epoch=max(report.epochs, default=-1),
                onset_step=onset,
                last_step=until,
                opened_ns=at_ns,
                updated_ns=at_ns,
                closed_ns=closed_ns,
                finding=finding,
                checked_step=last,
            )
        if closed_ns is not None and before.closed_ns is not None:
            return before  # It was closed by an earlier analysis.
        return replace(
            before,
            onset_step=_min_known(before.onset_step, onset),
            last_step=until,
            updated_ns=at_ns,
            closed_ns=closed_ns,
            finding=finding,
            checked_step=last,
        )

    def _close(self, one: TrackedFinding, at_ns: int) -> TrackedFinding:
        closed = replace(one, updated_ns=at_ns, closed_ns=at_ns)
        self._tracked[one.number] = closed
        return closed


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


def _is_near(one: TrackedFinding, finding: Finding) -> bool:
    """Return whether the steps of a finding are within `GRACE_STEPS` of a tracked one's."""
    if finding.steps is None or one.onset_step is None or one.last_step is None:
        return finding.steps is None and one.onset_step is None
    first, last = finding.steps
    return first <= one.last_step + GRACE_STEPS and last >= one.onset_step - GRACE_STEPS


def _min_known(first: int | None, second: int | None) -> int | None:
    known = [step for step in (first, second) if step is not None]
    return min(known, default=None)
