"""Reports of ended runs in the store: made once, shown by pages and commands."""

from __future__ import annotations

import time
from collections import defaultdict
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import version as installed_version
from typing import TYPE_CHECKING

from rankscope.analysis.report.exchange import read_report, report_form, write_report
from rankscope.analysis.severity import MATTERS
from rankscope.analysis.verdict import verdict_sentence
from rankscope.collector.errors import StoreError
from rankscope.collector.read.annotations import AnnotationKind, read_annotations
from rankscope.collector.read.findings import read_findings
from rankscope.collector.read.reports import (
    read_last_loss,
    read_report_body,
    read_report_head,
    read_report_lines,
)
from rankscope.collector.read.runs import read_configurations
from rankscope.collector.read.steps import read_step_bounds
from rankscope.collector.spool.descriptions import RUNNING
from rankscope.dashboard.records.page_results import RunLine

from .store_source import StoreSource
from .stored_findings import record_findings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankscope.analysis.report.report import RunReport
    from rankscope.analysis.trace.tables import RunSummary
    from rankscope.collector.identity import Row
    from rankscope.collector.read.findings import StoredFinding
    from rankscope.collector.store.store import Store

MAX_BODY_BYTES = 32 * 2**20
"""Longest text of a report that is stored; 12,288 ranks and 20 steps take 8 MB. Of a longer one
only the verdict is stored."""

_SHOWN = (
    "cause", "severity", "verdict", "step_s", "mfu", "loss", "duration_ns", "num_dropped",
)  # fmt: skip

S_PER_H = 3_600

MAX_RANKS = 512
"""Ranks of a verdict that are stored for the list of runs."""


class StoredReports:
    """The reports of ended runs in one store.

    A report counts only for the data and the version of rankscope that it was made of and by. If
    spans of the run have expired, it counts for later versions too, and no other replaces it: what
    it says could not be found again.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    def find(self, summary: RunSummary) -> RunReport | None:
        """Return the stored report of a run as it is now; None if there is none."""
        if summary.state == RUNNING:
            return None
        row = read_report_body(self._store, summary.run_id)
        if row is None or not row["body"] or not is_of(row, summary):
            return None
        try:
            return read_report(row["body"])
        except ValueError:  # of another build of the same version: it is made again
            return None

    def has(self, summary: RunSummary) -> bool:
        """Return whether the report of a run as it is now is stored, without reading it."""
        row = read_report_head(self._store, summary.run_id)
        if row is None or not row["has_body"] or not is_of(row, summary):
            return False
        return is_of_version(row) or self.find(summary) is not None

    def keep(self, summary: RunSummary, report: RunReport) -> None:
        """Store the report of an ended run, and its findings.

        A store that cannot be written is no failure: the report is made again next time.
        """
        if summary.state == RUNNING:
            return
        before = read_report_head(self._store, summary.run_id)
        if before is not None and before["has_expired"] and is_of(before, summary):
            return
        body = write_report(report)
        top = report.top_finding
        bounds = read_step_bounds(self._store, summary.run_id)
        row = {
            "run_id": summary.run_id,
            "version": _version(),
            **_revision(summary),
            "at_ns": time.time_ns(),
            "cause": top.cause,
            "severity": top.severity or "",
            "ranks": list(top.ranks[:MAX_RANKS]),
            "verdict": verdict_sentence(report),
            "step_s": report.step_time_s.actual,
            "mfu": None if report.mfu is None else report.mfu.mean,
            "loss": read_last_loss(self._store, summary.run_id),
            "duration_ns": None if bounds is None else bounds[1] - bounds[0],
            "num_dropped": report.quality.account.num_dropped,
            "body": body if len(body) <= MAX_BODY_BYTES else "",
        }
        with suppress(StoreError):
            self._store.insert_rows("reports", [row])
            record_findings(self._store, report)

    def lines(self) -> dict[str, Row]:
        """Return what a list of runs shows of each stored report, by run."""
        return read_report_lines(self._store)


def read_run_lines(store: Store) -> tuple[RunLine, ...]:
    """Return the list of runs, the newest first, from stored results alone."""
    reports = read_report_lines(store)
    findings: dict[str, list[StoredFinding]] = defaultdict(list)
    for finding in sorted(read_findings(store), key=_weight):
        findings[finding.run_id].append(finding)
    tags: dict[str, tuple[str, ...]] = defaultdict(tuple)
    for annotation in read_annotations(store):
        if annotation.kind is AnnotationKind.TAG:
            tags[annotation.run_id] += (annotation.text,)
    configurations = read_configurations(store)
    lines = []
    for run in StoreSource(store).runs():
        name = run.run_id
        line = _line(run, reports.get(name), findings[name])
        declared = configurations.get(name, {})
        lines.append(
            replace(
                line,
                tags=tags[name],
                model=declared.get("model", ""),
                commit=declared.get("commit", ""),
                num_microbatches=declared.get("num_microbatches") or None,
            )
        )
    return tuple(lines)


def lost_device_h(finding: StoredFinding, num_ranks: int) -> float | None:
    """Return the price of a finding over its steps and all ranks, in hours of devices.

    None if it has no price, or no step shows it.
    """
    onset, last, saved_s = finding.onset_step, finding.last_step, finding.saved_s
    if not saved_s or onset is None or last is None:
        return None
    return saved_s * (last - onset + 1) * num_ranks / S_PER_H


def _line(run: RunSummary, row: Row | None, findings: Sequence[StoredFinding]) -> RunLine:
    """Return the line of a run; the worst of its findings is the last."""
    costs = [
        cost
        for finding in findings
        if finding.severity in MATTERS
        and (cost := lost_device_h(finding, run.world_size)) is not None
    ]
    line = RunLine(run=run, lost_device_h=sum(costs) if costs else None)
    if row is not None and is_of_data(row, run):
        ranks = tuple(row["ranks"])
        alike = [
            finding.number
            for finding in findings
            if (finding.cause, finding.ranks[:MAX_RANKS]) == (row["cause"], ranks)
        ]
        return replace(
            line,
            ranks=ranks,
            incident=alike[-1] if alike else None,
            **{name: row[name] for name in _SHOWN},
        )
    if run.state == RUNNING and run.started_ns:
        line = replace(line, duration_ns=time.time_ns() - run.started_ns)
    if not findings:
        return line
    worst = findings[-1]
    return replace(
        line,
        cause=worst.cause,
        ranks=worst.ranks,
        is_closed=worst.closed_ns is not None,
        incident=worst.number,
    )


def _weight(finding: StoredFinding) -> tuple[bool, float]:
    """Return the order of a run's findings: open ones count most, then what fixing them saves."""
    return finding.closed_ns is None, finding.recoverable_ratio or 0.0


def is_of(row: Row, summary: RunSummary) -> bool:
    """Return whether a row of table ``reports`` counts for a run as it is now.

    It is of the same data, and by this version unless spans have expired since.
    """
    return is_of_data(row, summary) and (is_of_version(row) or bool(row["has_expired"]))


def is_of_version(row: Row) -> bool:
    """Return whether a row of table ``reports`` was written by this version."""
    return bool(row["version"] == _version())


def is_of_data(row: Row, summary: RunSummary) -> bool:
    """Return whether a row of table ``reports`` is of a run as it is now, by any version."""
    wanted = _revision(summary)
    return {name: row[name] for name in wanted} == wanted


def _version() -> str:
    return f"{installed_version('rankscope')}+{report_form()}"


def _revision(summary: RunSummary) -> dict[str, str | int]:
    return {
        "num_spans": summary.num_spans,
        "num_steps": summary.num_steps,
        "num_rows": summary.num_rows,
        "state": summary.state,
    }
