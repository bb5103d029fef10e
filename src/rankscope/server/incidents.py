"""Data of the incident page, and its notes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rankscope.analysis.report.exchange import read_card
from rankscope.collector.read import findings as stored_findings
from rankscope.collector.spool.descriptions import RUNNING
from rankscope.dashboard.records.incident import Incident, IncidentView
from rankscope.tracer.span import NS_PER_S

from ..errors import BadInputError
from ..sources.incidents import (
    IncidentSource,
    number_findings,
    read_incident,
    read_incidents,
    read_shown_notes,
)
from ..sources.stored_findings import to_tracked
from .notes import add_note, make_note
from .page_alerts import NOT_ALLOWED, may_change, request_holder
from .shared_results import SharedResults

if TYPE_CHECKING:
    from rankscope.analysis.report.report import Finding, RunReport
    from rankscope.analysis.trace.tables import RunSummary
    from rankscope.collector.store.store import Store

    from .page_alerts import PageAlerts
    from .reports import Reports
    from .run_view import RunView

MAX_KEPT = 16
"""Incidents that are kept in memory: an open page asks for one again and again."""

LIVE_AGE_NS, ENDED_AGE_NS = 2 * NS_PER_S, 10 * NS_PER_S
"""Age of an incident of a running job and of an ended run, from which on it is read again."""


class PageIncidents:
    """Incidents of the runs of a store, as the page shows them.

    A run that the store does not hold is an `UnknownRunError`.

    Args:
        alerts: Alerts about them.
    """

    def __init__(
        self, runs: RunView, reports: Reports, *, store: Store, alerts: PageAlerts
    ) -> None:
        self._runs = runs
        self._reports = reports
        self._store = store
        self._alerts = alerts
        self._kept: SharedResults[tuple[str, int, int], Incident | None] = SharedResults(
            max_results=MAX_KEPT
        )
        self._lists: SharedResults[tuple[str, int], tuple[Incident, ...]] = SharedResults(
            max_results=MAX_KEPT
        )

    def incident(self, run_id: str, number: int) -> IncidentView | None:
        """Return an incident of a run; None if the run has none of this number."""
        run = self._runs.find(run_id)
        source = self._source(run)
        incident = self._kept.get(
            (run_id, number, self._reports.revision(run_id)),
            lambda: read_incident(source, number),
            max_age_ns=LIVE_AGE_NS if run.state == RUNNING else ENDED_AGE_NS,
        )
        if incident is None:
            return None
        # A note that was just written is shown at once.
        notes = read_shown_notes(self._store, run_id, number)
        return IncidentView(
            incident=replace(incident, notes=notes),
            finding=self._finding(incident, source.report),
            alert=self._alerts.of_finding(run_id, number),
            may_change=may_change(),
        )

    def incidents(self, run_id: str) -> tuple[Incident, ...]:
        """Return the incidents of a run, in the order in which they opened."""
        run = self._runs.find(run_id)
        source = self._source(run)
        return self._lists.get(
            (run_id, self._reports.revision(run_id)),
            lambda: read_incidents(source),
            max_age_ns=LIVE_AGE_NS if run.state == RUNNING else ENDED_AGE_NS,
        )

    def incident_numbers(self, report: RunReport) -> tuple[int | None, ...]:
        """Return the number of the incident of each finding of a report; None: it has none."""
        return number_findings(self._store, report)

    def add_note(self, run_id: str, number: int, text: str, *, by: str) -> str:
        """Store a note about an incident; return why it was not stored, "" if it was."""
        if not may_change():
            return NOT_ALLOWED
        # Who holds a token is known; who has the server's own says so.
        holder, named = request_holder(), by.strip()
        label = f"{named} ({holder})" if named and holder else named or holder
        try:
            add_note(self._store, make_note(run_id, number, text, by=label))
        except BadInputError as error:
            return str(error)
        return ""

    def _source(self, run: RunSummary) -> IncidentSource:
        return IncidentSource(
            store=self._store,
            run_id=run.run_id,
            num_ranks=run.world_size,
            state=run.state,
            report=self._reports.peek(run.run_id),
        )

    def _finding(self, incident: Incident, report: RunReport | None) -> Finding | None:
        """Return the finding of a report that an incident is about, or as it was when it closed."""
        if report is not None:
            numbers = number_findings(self._store, report)
            if incident.number in numbers:
                return report.findings[numbers.index(incident.number)]
        stored = next(
            (
                each
                for each in stored_findings.read_findings(self._store, incident.run)
                if each.number == incident.number
            ),
            None,
        )
        if stored is None:
            return None
        card = read_card(stored_findings.read_card(self._store, incident.run, incident.number))
        finding = to_tracked(stored).finding
        # Its price is that of other steps than the report's.
        return replace(finding, card=card, hosts=incident.hosts, saved_s=None, shown_saved_s=None)
