from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version

import pytest
from fastapi import FastAPI

from rankscope.analysis.report.exchange import read_report
from rankscope.analysis.trace.tables import RunSummary
from rankscope.server.reports import Reports
from rankscope.server.served_report import report_router
from rankscope.tracer.topology import Layout
from tests.support.analysis.cluster import MS, Source, gpt_cluster
from tests.support.collector.asgi import Client

LAYOUT = Layout(pp=2, dp=2, tp=2)
VERSION = version("rankscope")


@dataclass(frozen=True)
class OneRun(Source):
    """A source of one run in a state."""

    state: str = "ended"

    def runs(self) -> tuple[RunSummary, ...]:
        summary = RunSummary(
            run_id="tiny",
            source_format="rankscope",
            state=self.state,
            world_size=8,
            layout=LAYOUT,
            num_spans=len(self.span_table),
            num_steps=4,
            started_ns=None,
        )
        return (summary,)


def reports_of(state: str) -> tuple[Reports, Client]:
    """Return the reports of a server with one run, and a client of their route."""
    cluster = gpt_cluster(LAYOUT, num_steps=4, forward_ns=lambda *_: 10 * MS)
    source = OneRun(cluster.run_info(), cluster.span_table(), cluster.step_table(), state=state)
    reports = Reports(source)
    app = FastAPI()
    app.include_router(report_router(reports, source))
    return reports, Client(app)


@pytest.mark.parametrize("state", ["ended", "running"])
def test_the_report_that_the_pages_show_is_served(state: str) -> None:
    reports, client = reports_of(state)

    answer = client.get(f"/v1/report?run_id=tiny&version={VERSION}")

    shown = reports.get("tiny")
    assert shown is not None
    assert answer.status_code == 200
    assert read_report(answer.text).findings == shown.findings
    assert reports.revision("tiny") == 1


@pytest.mark.parametrize(
    ("query", "status"),
    [(f"run_id=other&version={VERSION}", 404), ("run_id=tiny&version=0.0.0", 409)],
    ids=["an unknown run", "another version"],
)
def test_no_report_is_served_of(query: str, status: int) -> None:
    reports, client = reports_of("ended")

    assert client.get(f"/v1/report?{query}").status_code == status
    assert not reports.has_report("tiny")
