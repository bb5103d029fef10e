"""Findings over time: when each began to show, and when it no longer did."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .report import Finding, RunReport

GRACE_STEPS = 3
"""Newest steps in which a finding must show to stand: as many as a verdict may take to be due.
Source: design.md section 5, a verdict stands within 3 steps of the onset."""

NO_PROBLEM = frozenset({"healthy", "insufficient-evidence"})


class Change(StrEnum):
    """What became of a finding."""

    OPENED = "opened"
    UPDATED = "updated"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedFinding:
    """One finding of one run, from its onset on."""

    run_id: str
    number: int
    """Of the run's findings, from 0 in the order in which they opened."""

    epoch: int
    """Newest epoch of the run as it opened."""

    onset_step: int | None
    """First step that ever showed it; None where no step does."""

    last_step: int | None
    """Last step that showed it so far."""

    opened_ns: int
    """Unix time, as all times here."""

    updated_ns: int
    closed_ns: int | None
    finding: Finding
    """As the last analysis told it that had it."""

    checked_step: int
    """Last step of that analysis."""


class FindingTracker:
    """The findings of one run, matched from analysis to analysis by (cause, ranks).

    A finding *stands* while one of the analysis' last `GRACE_STEPS` steps shows it
    (one that no step shows, while it is told at all). It opens when it is first
    told, and closes once it no longer stands; told again within as many steps, it is
    the same one and opens again. One that ended before anybody looked is
    opened and closed at once.

    Args:
        run_id: The run.
        known: What was tracked before a restart.
    """

    def __init__(self, run_id: str, known: Iterable[TrackedFinding] = ()) -> None:
        self._run_id = run_id
        self._tracked = {one.number: one for one in known}

    @property
    def findings(self) -> tuple[TrackedFinding, ...]:
        """All findings of the run so far, in the order in which they opened."""
        return tuple(self._tracked.values())

    @property
    def standing(self) -> tuple[TrackedFinding, ...]:
        """Those that are open."""
        return tuple(one for one in self._tracked.values() if one.closed_ns is None)

    def update(
        self, report: RunReport, *, at_ns: int, is_over: bool = False
    ) -> tuple[tuple[Change, TrackedFinding], ...]:
        """Take in an analysis; return what changed.

        Args:
            report: Of the run's newest steps.
            at_ns: When it was made, Unix time.
            is_over: Whether the run has ended: what stands then is left open, for it
                was never seen to end.
        """
        last = report.steps[-1] if report.steps else -1
        changes: list[tuple[Change, TrackedFinding]] = []
        told: set[int] = set()
        for finding in report.findings:
            if finding.cause in NO_PROBLEM:
                continue
            before = self._match(finding)
            now = self._taken(finding, before, report, last=last, at_ns=at_ns)
            told.add(now.number)
            change = _change(before, now)
            if change is not None:
                changes.append((change, now))
                self._tracked[now.number] = now
        for one in self.standing:
            gone = is_over or last - one.checked_step > GRACE_STEPS
            if one.number not in told and gone:
                changes.append((Change.CLOSED, self._close(one, at_ns)))
        return tuple(changes)

    def _match(self, finding: Finding) -> TrackedFinding | None:
        """Return what was tracked of this finding: the open one, else the newest."""
        meeting = [
            one
            for one in self._tracked.values()
            if (one.finding.cause, one.finding.ranks) == (finding.cause, finding.ranks)
            and _meets(one, finding)
        ]
        opened = [one for one in meeting if one.closed_ns is None]
        return next(iter(opened[-1:] or meeting[-1:]), None)

    def _taken(
        self,
        finding: Finding,
        before: TrackedFinding | None,
        report: RunReport,
        *,
        last: int,
        at_ns: int,
    ) -> TrackedFinding:
        onset, until = finding.steps or (None, None)
        stands = until is None or until > last - GRACE_STEPS
        closed_ns = None if stands else at_ns
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
            return before  # told already that it had ended
        return replace(
            before,
            onset_step=_least(before.onset_step, onset),
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


def _change(before: TrackedFinding | None, now: TrackedFinding) -> Change | None:
    if before is None or (before.closed_ns is not None and now.closed_ns is None):
        return Change.OPENED
    if before.closed_ns is None and now.closed_ns is not None:
        return Change.CLOSED
    same = (before.finding, before.checked_step) == (now.finding, now.checked_step)
    return None if same else Change.UPDATED


def _meets(one: TrackedFinding, finding: Finding) -> bool:
    """Return whether a finding's steps meet, or nearly, those of one that was tracked."""
    if finding.steps is None or one.onset_step is None or one.last_step is None:
        return finding.steps is None and one.onset_step is None
    first, last = finding.steps
    return first <= one.last_step + GRACE_STEPS and last >= one.onset_step - GRACE_STEPS


def _least(first: int | None, second: int | None) -> int | None:
    known = [step for step in (first, second) if step is not None]
    return min(known, default=None)
