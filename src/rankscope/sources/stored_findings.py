"""Tracked findings as rows of the store, written with each report."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from rankscope.analysis.report.exchange import write_card
from rankscope.analysis.report.report import Finding, Severity
from rankscope.analysis.report.tracked_findings import FindingTracker, TrackedFinding
from rankscope.collector.read.findings import StoredFinding, read_findings, write_findings

if TYPE_CHECKING:
    from rankscope.analysis.report.report import RunReport
    from rankscope.collector.store.store import Store


OF_TRACKED = (
    "run_id", "number", "epoch", "onset_step", "last_step", "checked_step", "opened_ns",
    "updated_ns", "closed_ns",
)  # fmt: skip
OF_FINDING = ("cause", "ranks", "slowdown", "recoverable_ratio", "confidence", "evidence")
"""Fields that a stored finding has of a tracked one, and of the finding itself."""


def record_findings(store: Store, report: RunReport) -> None:
    """Store the findings of an ended run; those that a server tracked keep their number and onset.

    Raises:
        StoreError: The store could not be read or written.
    """
    tracker = FindingTracker(report.run, map(to_tracked, read_findings(store, report.run)))
    changes = tracker.update(report, at_ns=time.time_ns(), is_over=True)
    if changes:
        write_findings(store, (to_stored(tracked) for _, tracked in changes))


def to_stored(tracked: TrackedFinding) -> StoredFinding:
    """Return a tracked finding as the store holds it."""
    finding = tracked.finding
    return StoredFinding(
        **{name: getattr(tracked, name) for name in OF_TRACKED},
        **{name: getattr(finding, name) for name in OF_FINDING},
        severity=str(finding.severity or ""),
        saved_s=finding.shown_saved_s,
        card="" if tracked.closed_ns is None or finding.card is None else write_card(finding.card),
    )


def to_tracked(stored: StoredFinding) -> TrackedFinding:
    """Return a stored finding as the tracker continues it."""
    first, last = stored.onset_step, stored.last_step
    return TrackedFinding(
        **{name: getattr(stored, name) for name in OF_TRACKED},
        finding=Finding(
            **{name: getattr(stored, name) for name in OF_FINDING},
            steps=None if first is None or last is None else (first, last),
            severity=Severity(stored.severity) if stored.severity else None,
            saved_s=stored.saved_s,
            shown_saved_s=stored.saved_s,
        ),
    )
