"""`rankscope runs`, `alerts` and `findings`: what the store holds, in a list."""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from rankscope.analysis.report.text import EMPTY, UNKNOWN, format_ranges
from rankscope.collector.client.served_store import open_for_reading
from rankscope.collector.store.location import default_store_url
from rankscope.tracer.span import NS_PER_S

from ..terminal.lines import aligned

if TYPE_CHECKING:
    from rankscope.analysis.recurrence import Followed
    from rankscope.analysis.trace.tables import RunSummary
    from rankscope.collector.read.alerts import StoredAlert
    from rankscope.collector.read.findings import StoredFinding

NO_RUNS = "no runs yet: `rankscope demo` makes one, `rankscope import` stores a recorded one"
NO_ALERTS = "no alerts"
NO_FINDINGS = "no findings: `rankscope serve` notes them while runs train"


def list_runs(*, as_json: bool, store_url: str | None) -> str:
    """Return the runs of the store, the newest first, ready to print."""
    from ..sources.store_source import StoreSource

    with open_for_reading(store_url or default_store_url()) as store:
        found = StoreSource(store).runs()
    if as_json:
        return json.dumps({"runs": [_run_document(run) for run in found]})
    rows = [
        (
            run.run_id,
            run.source_format,
            run.state,
            str(run.world_size),
            str(run.num_steps),
            f"{run.num_spans:,}",
            _when(run.started_ns),
        )
        for run in found
    ]
    header = ("run", "format", "state", "ranks", "steps", "spans", "started (UTC)")
    return "\n".join(aligned(header, rows, right="lllrrrl")) if rows else NO_RUNS


def list_alerts(*, as_json: bool, store_url: str | None) -> str:
    """Return the alerts that have fired, the newest first, ready to print."""
    from rankscope.collector.read.alerts import read_alerts

    with open_for_reading(store_url or default_store_url()) as store:
        found = read_alerts(store)
    if as_json:
        told = [asdict(alert) for alert in found]
        for document in told:
            del document["post"]  # the same in other words
        return json.dumps({"alerts": told})
    rows = [
        (_when(alert.at_ns), alert.run_id, _steps(alert), str(alert.delivery), alert.text)
        for alert in found
    ]
    header = ("fired (UTC)", "run", "steps", "webhook", "alert")
    return "\n".join(aligned(header, rows)) if rows else NO_ALERTS


def list_findings(run_id: str | None, *, as_json: bool, store_url: str | None) -> str:
    """Return what was found in live runs, from onset to end, ready to print.

    Args:
        run_id: The run; None: of all runs, the newest first.
        as_json: Whether as one JSON document.
        store_url: URL of the store; None: the default one.
    """
    from rankscope.collector.read.findings import read_findings

    from ..sources.finding_history import History, follows_document

    with open_for_reading(store_url or default_store_url()) as store:
        found = read_findings(store, run_id)
        history = History(store)
        followed = [history.of_stored(finding) for finding in found]
    if as_json:
        documents = [
            {**asdict(finding), "follows": follows_document(one)}
            for finding, one in zip(found, followed, strict=True)
        ]
        return json.dumps({"findings": documents})
    rows = [
        (
            finding.run_id,
            finding.cause,
            format_ranges(finding.ranks),
            _finding_steps(finding),
            _when(finding.opened_ns),
            "stands" if finding.closed_ns is None else _when(finding.closed_ns),
            f"{finding.confidence:.2f}",
            _follows(one),
        )
        for finding, one in zip(found, followed, strict=True)
    ]
    header = ("run", "cause", "ranks", "steps", "opened (UTC)", "closed (UTC)", "confidence")
    table = aligned((*header, "follows"), rows, right="llllllrl")
    return "\n".join(table) if rows else NO_FINDINGS


def _run_document(run: RunSummary) -> dict[str, Any]:
    return {
        "run": run.run_id,
        "format": run.source_format,
        "state": run.state,
        "world_size": run.world_size,
        "layout": run.layout.to_dict(),
        "num_spans": run.num_spans,
        "num_steps": run.num_steps,
        "started_ns": run.started_ns,
    }


def _steps(alert: StoredAlert) -> str:
    return f"{alert.first_step}-{alert.last_step}"


def _follows(followed: Followed | None) -> str:
    if followed is None:
        return "-"
    return "cannot tell" if followed.what is None else f"the {followed.what}"


def _finding_steps(finding: StoredFinding) -> str:
    known = finding.onset_step is not None and finding.last_step is not None
    return f"{finding.onset_step}-{finding.last_step}" if known else EMPTY


def _when(at_ns: int | None) -> str:
    if at_ns is None:
        return UNKNOWN
    return datetime.fromtimestamp(at_ns / NS_PER_S, UTC).strftime("%Y-%m-%d %H:%M:%S")
