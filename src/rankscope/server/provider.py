"""Data of the dashboard's pages, from the runs and diagnoses of a store."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from rankscope.analysis.verdict import verdict_sentence

from ..sources.excluded_hosts import describe_excluded_hosts
from .annotations import PageAnnotations
from .control import request_of_rank
from .health import HealthReader
from .incidents import PageIncidents
from .page_alerts import PageAlerts
from .rank_view import RankView
from .run_view import JobQueues, RunView
from .step_view import StepView

if TYPE_CHECKING:
    from rankscope.analysis.trace.tables import SpanSource
    from rankscope.collector.http.metrics import Metrics
    from rankscope.collector.store.store import Store
    from rankscope.dashboard.records.page_results import Health

    from .alerting import Alerting
    from .reports import Reports
    from .run_failures import RunFailures

TIMEOUT_S = 0.4
"""Time that a page waits for a background job. The analysis of a small run is done by then, and so
is the timeline of one of its steps."""


class StoreProvider:
    """`dashboard.provider.ReportProvider` of one store: what pages ask of runs, steps and ranks.

    Args:
        failures: What could not be done for single runs, shown on their pages. None: nothing.
        alerting: Alerts. None: there are none.
        metrics: Metrics of the server, for the page of its state. None: it is not shown.
        timeout_s: Time that a page waits for a background job.
    """

    def __init__(  # noqa: PLR0913  # what it shows
        self,
        source: SpanSource,
        reports: Reports,
        *,
        store: Store,
        failures: RunFailures | None = None,
        alerting: Alerting | None = None,
        metrics: Metrics | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        queues = JobQueues()
        ranks = RankView(source, store)
        runs = RunView(
            source,
            reports,
            store=store,
            failures=failures,
            queues=queues,
            read_liveness=ranks.liveness,
            timeout_s=timeout_s,
        )
        steps = StepView(
            source, reports, runs=runs, store=store, queues=queues, timeout_s=timeout_s
        )
        alerts = PageAlerts(alerting)
        incidents = PageIncidents(runs, reports, store=store, alerts=alerts)
        self.verdict = verdict_sentence
        self.revision = runs.revision

        self.runs = runs.runs
        self.report = runs.report
        self.run_lines = runs.run_lines
        self.strip = runs.strip
        self.startup = runs.startup
        self.history = runs.history
        self.goodput = runs.goodput
        self.kind_times = runs.kind_times
        self.silence = runs.silence
        self.comparison = runs.comparison

        self.timeline = steps.timeline
        self.picture = steps.picture
        self.step_trace = steps.step_trace
        self.viewport_spans = steps.viewport_spans
        self.rank_spans = steps.rank_spans
        self.ranks_of_step = steps.ranks_of_step
        self.alike_spans = steps.alike_spans
        self.step_replay = steps.step_replay
        self.play = steps.play
        self.picture_revision = steps.picture_revision

        self.liveness = ranks.liveness
        self.rank_details = ranks.rank_details
        self.rank_values = ranks.rank_values

        self.request_of_rank = partial(request_of_rank, store)
        self.excluded_hosts = partial(describe_excluded_hosts, store)

        self.alerts = alerts.alerts
        self.acknowledge_alert = alerts.acknowledge_alert
        self.silence_alert = alerts.silence_alert

        self.incident = incidents.incident
        self.incidents = incidents.incidents
        self.incident_numbers = incidents.incident_numbers
        self.add_note = incidents.add_note
        annotations = PageAnnotations(store)
        self.annotations = annotations.of_run
        self.annotate = annotations.annotate

        self._health = None
        if metrics is not None:
            self._health = HealthReader(
                store,
                metrics,
                read_account=reports.running_account,
                read_queue=queues.num_unfinished,
            )

    def health(self) -> Health | None:
        """Return the state of the server; None if it is unknown."""
        return None if self._health is None else self._health.read()
