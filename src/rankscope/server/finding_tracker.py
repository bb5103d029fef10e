"""Tracked findings of live runs: stored, and logged when one opens or closes."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from rankscope.analysis.report.text import format_count, format_ranks
from rankscope.analysis.report.tracked_findings import Change, FindingTracker, TrackedFinding
from rankscope.collector.read.findings import read_findings, write_findings

from ..sources.finding_history import FindingHistory, format_recurrence
from ..sources.stored_findings import to_stored, to_tracked
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
        self._changes: dict[str, list[tuple[Change, TrackedFinding]]] = {}
        self._pending: dict[str, dict[int, TrackedFinding]] = {}

    def update(self, report: RunReport, *, is_over: bool, cost: TurnCost | None) -> None:
        """Track a report, and record the changes; see `track` and `record`."""
        if is_over:
            self._read_again(report.run)
        self.track(report, is_over=is_over)
        self.record(report.run, cost=cost)

    def _read_again(self, run_id: str) -> None:
        """Continue with the findings that were stored with the report of the whole run."""
        if run_id not in self._trackers or run_id in self._pending:
            return
        known = {tracked.number for tracked in self._trackers.pop(run_id).findings}
        self._changes.setdefault(run_id, []).extend(
            (Change.OPENED, tracked)
            for tracked in self._tracker(run_id).findings
            if tracked.number not in known
        )

    def track(self, report: RunReport, *, is_over: bool) -> RunReport:
        """Update the findings of a run, and return the report with their onsets and prices.

        Raises:
            StoreError: The findings of an earlier server cannot be read.
        """
        tracker = self._tracker(report.run)
        changes = tracker.update(report, at_ns=self._unix_ns(), is_over=is_over)
        self._changes.setdefault(report.run, []).extend(changes)
        return tracker.merged(report)

    def record(self, run_id: str, *, cost: TurnCost | None) -> None:
        """Store the changes of a run's findings, and log those that opened or closed.

        Raises:
            StoreError: The changes could not be stored. The next call stores them too.
        """
        changes = self._changes.pop(run_id, [])
        pending = self._pending.setdefault(run_id, {})
        for change, tracked in changes:
            pending[tracked.number] = tracked
            if change is not Change.UPDATED:
                self._say(_format_change(tracked, cost))
        if pending:
            write_findings(self._store, map(to_stored, pending.values()))
        del self._pending[run_id]
        opened = [tracked for change, tracked in changes if change is Change.OPENED]
        if opened:
            self._log_recurrences(opened)

    def of_run(self, run_id: str) -> tuple[TrackedFinding, ...]:
        """Return the findings of a run, open and closed.

        Raises:
            StoreError: The findings of an earlier server cannot be read.
        """
        return self._tracker(run_id).findings

    def forget(self, run_id: str) -> None:
        """Forget a run, because it is no longer in the store."""
        for by_run in (self._trackers, self._changes, self._pending):
            by_run.pop(run_id, None)

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
