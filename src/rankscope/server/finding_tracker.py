"""Tracked findings of live runs: stored, and logged when one opens or closes."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from rankscope.analysis.report.report import Finding
from rankscope.analysis.report.text import format_count, format_ranks
from rankscope.analysis.report.tracked_findings import Change, FindingTracker, TrackedFinding
from rankscope.collector.read.findings import StoredFinding, read_findings, write_findings

from ..sources.finding_history import FindingHistory, format_recurrence
from ..terminal import lines as terminal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from rankscope.analysis.report.report import RunReport
    from rankscope.collector.store.store import Store

    from .reports import TurnCost


class LiveFindings:
    """Tracked findings of the live runs of a store.

    Args:
        store: The store. The findings of a run are read from it at the run's first update.
        say: Logs a line. None: `terminal.lines.say`.
        unix_ns: Clock for the times at which findings open and close.
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
        self._pending: dict[tuple[str, int], TrackedFinding] = {}

    def update(self, report: RunReport, *, is_over: bool, cost: TurnCost | None) -> None:
        """Update the findings of a run: store changes, log those that opened or closed.

        Args:
            report: The new diagnosis.
            is_over: Whether the run has ended.
            cost: Cost of the analysis.

        Raises:
            StoreError: The changes could not be stored. The next call stores them too.
        """
        tracker = self._tracker(report.run)
        changes = tracker.update(report, at_ns=self._unix_ns(), is_over=is_over)
        for change, tracked in changes:
            self._pending[tracked.run_id, tracked.number] = tracked
            if change is not Change.UPDATED:
                self._say(_format_change(tracked, cost))
        if self._pending:
            write_findings(self._store, map(to_stored, self._pending.values()))
            self._pending.clear()
        opened = [tracked for change, tracked in changes if change is Change.OPENED]
        if opened:
            self._log_recurrences(opened)

    def of_run(self, run_id: str) -> tuple[TrackedFinding, ...]:
        """Return the findings of a run, open and closed.

        Raises:
            StoreError: The findings of an earlier server cannot be read.
        """
        return self._tracker(run_id).findings

    def _log_recurrences(self, opened: Iterable[TrackedFinding]) -> None:
        """Log which of the new findings follow their host or their position."""
        history = FindingHistory(self._store)
        for tracked in opened:
            recurrence = history.follow_stored(to_stored(tracked))
            if recurrence is not None and recurrence.what is not None:
                self._say(f"{_format_change(tracked, None)}: {format_recurrence(recurrence)}")

    def _tracker(self, run_id: str) -> FindingTracker:
        if run_id not in self._trackers:
            known = map(to_tracked, read_findings(self._store, run_id))
            self._trackers[run_id] = FindingTracker(run_id, known)
        return self._trackers[run_id]


def to_stored(tracked: TrackedFinding) -> StoredFinding:
    """Return a tracked finding as the store holds it."""
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


def to_tracked(stored: StoredFinding) -> TrackedFinding:
    """Return a stored finding as the tracker continues it."""
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


def _format_change(tracked: TrackedFinding, cost: TurnCost | None) -> str:
    finding = tracked.finding
    ranks = f" on {format_ranks(finding.ranks)}" if finding.ranks else ""
    text = f"{tracked.run_id}: {finding.cause}{ranks}"
    if tracked.closed_ns is not None:
        text += " ended" if tracked.last_step is None else f" ended after step {tracked.last_step}"
    elif tracked.onset_step is not None:
        text += f" since step {tracked.onset_step}"
    if cost is not None:
        text += (
            f" ({format_count(cost.num_new_steps, 'new step')}, window of {cost.num_steps},"
            f" analysed in {cost.seconds:.2f} s)"
        )
    return text
