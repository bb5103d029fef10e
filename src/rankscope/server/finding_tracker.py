"""Follows the findings of live runs: keeps them in the store, tells when one opens or closes."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from rankscope.analysis.report.report import Finding
from rankscope.analysis.report.text import format_count, format_ranks
from rankscope.analysis.report.tracked_findings import Change, FindingTracker, TrackedFinding
from rankscope.collector.read.findings import StoredFinding, read_findings, write_findings

from ..sources.finding_history import History, follows_text
from ..terminal import lines as terminal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from rankscope.analysis.report.report import RunReport
    from rankscope.collector.store.store import Store

    from .reports import TurnCost


class Tracking:
    """The findings of the runs of one store.

    Args:
        store: Where findings are kept; those of a run are read back when it is first seen.
        say: Tells a line to the person at the terminal.
        unix_ns: Clock for when findings open and close.
    """

    def __init__(
        self,
        store: Store,
        *,
        say: Callable[[str], None] | None = None,
        unix_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._store = store
        self._say = say or terminal.say
        self._unix_ns = unix_ns
        self._trackers: dict[str, FindingTracker] = {}
        self._unwritten: dict[tuple[str, int], TrackedFinding] = {}

    def update(self, report: RunReport, *, is_over: bool, cost: TurnCost | None) -> None:
        """Take in an analysis: store what changed of the run's findings, tell what began or ended.

        Args:
            report: The analysis.
            is_over: Whether the run has ended.
            cost: What the analysis took.

        Raises:
            StoreError: They could not be stored; the next call writes them with its own.
        """
        tracker = self._tracker(report.run)
        changes = tracker.update(report, at_ns=self._unix_ns(), is_over=is_over)
        for change, tracked in changes:
            self._unwritten[tracked.run_id, tracked.number] = tracked
            if change is not Change.UPDATED:
                self._say(_line(tracked, cost))
        if self._unwritten:
            write_findings(self._store, map(stored_finding, self._unwritten.values()))
            self._unwritten.clear()
        opened = [tracked for change, tracked in changes if change is Change.OPENED]
        if opened:
            self._tell_following(opened)

    def _tell_following(self, opened: Iterable[TrackedFinding]) -> None:
        """Tell of new findings that follow their host or their position."""
        history = History(self._store)
        for tracked in opened:
            followed = history.of_stored(stored_finding(tracked))
            if followed is not None and followed.what is not None:
                self._say(f"{_line(tracked, None)}: {follows_text(followed)}")

    def _tracker(self, run_id: str) -> FindingTracker:
        if run_id not in self._trackers:
            known = map(tracked_finding, read_findings(self._store, run_id))
            self._trackers[run_id] = FindingTracker(run_id, known)
        return self._trackers[run_id]


def stored_finding(tracked: TrackedFinding) -> StoredFinding:
    """Return a tracked finding in the form that the store keeps."""
    finding = tracked.finding
    return StoredFinding(
        run_id=tracked.run_id,
        number=tracked.number,
        epoch=tracked.epoch,
        cause=finding.cause,
        ranks=finding.ranks,
        onset_step=tracked.onset_step,
        last_step=tracked.last_step,
        checked_step=tracked.checked_step,
        slowdown=finding.slowdown,
        recoverable_ratio=finding.recoverable_ratio,
        confidence=finding.confidence,
        evidence=finding.evidence,
        opened_ns=tracked.opened_ns,
        updated_ns=tracked.updated_ns,
        closed_ns=tracked.closed_ns,
    )


def tracked_finding(stored: StoredFinding) -> TrackedFinding:
    """Return a stored finding in the form that the tracker goes on with."""
    first, last = stored.onset_step, stored.last_step
    return TrackedFinding(
        run_id=stored.run_id,
        number=stored.number,
        epoch=stored.epoch,
        onset_step=stored.onset_step,
        last_step=stored.last_step,
        opened_ns=stored.opened_ns,
        updated_ns=stored.updated_ns,
        closed_ns=stored.closed_ns,
        checked_step=stored.checked_step,
        finding=Finding(
            cause=stored.cause,
            ranks=stored.ranks,
            steps=None if first is None or last is None else (first, last),
            slowdown=stored.slowdown,
            recoverable_ratio=stored.recoverable_ratio,
            confidence=stored.confidence,
            evidence=stored.evidence,
        ),
    )


def _line(tracked: TrackedFinding, cost: TurnCost | None) -> str:
    finding = tracked.finding
    who = f" on {format_ranks(finding.ranks)}" if finding.ranks else ""
    text = f"{tracked.run_id}: {finding.cause}{who}"
    if tracked.closed_ns is not None:
        text += (
            f" ended with step {tracked.last_step}" if tracked.last_step is not None else " ended"
        )
    elif tracked.onset_step is not None:
        text += f" since step {tracked.onset_step}"
    if cost is not None:
        text += (
            f" ({format_count(cost.num_new_steps, 'new step')}, window of {cost.num_steps},"
            f" analysed in {cost.seconds:.2f} s)"
        )
    return text
