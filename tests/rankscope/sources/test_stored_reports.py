from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from rankscope.collector.read.findings import read_findings
from rankscope.collector.store.store import open_store
from rankscope.commands.simulate import simulate_run
from rankscope.server.reports import Reports, find_run
from rankscope.simulation import SimulateOptions
from rankscope.sources.store_source import StoreSource
from rankscope.sources.stored_reports import StoredReports, read_run_lines

if TYPE_CHECKING:
    from pathlib import Path

    from rankscope.analysis.trace.tables import SpanTable

pytestmark = pytest.mark.slow


class CountingSource(StoreSource):
    """A source that counts the reads of spans."""

    num_reads = 0

    def spans(self, run_id: str, *, first: int | None = None, last: int | None = None) -> SpanTable:
        self.num_reads += 1
        return super().spans(run_id, first=first, last=last)


def simulated(folder: Path) -> str:
    """Simulate run ``r`` of four steps on eight ranks; return the URL of its store."""
    url = f"chdb://{folder}/store"
    simulate_run(
        SimulateOptions(
            scenario="slow-compute", run_id="r", num_steps=4, num_ranks=8, store_url=url
        )
    )
    return url


def test_a_report_is_made_once_and_again_when_its_run_has_new_rows(tmp_path: Path) -> None:
    # GIVEN an ended run whose report one server has made
    url = simulated(tmp_path)
    with open_store(url) as store:
        first = CountingSource(store)
        summary = find_run(first, "r")
        reports = Reports(first, stored=StoredReports(store))
        assert reports.without_stored([summary]) == [summary]
        made = reports.get("r")
        assert made is not None
        assert first.num_reads > 0

        # WHEN the next server starts, nothing is analysed
        second = CountingSource(store)
        again = Reports(second, stored=StoredReports(store))
        assert again.without_stored([summary]) == []
        found = again.find_made(summary)

        assert found is not None
        assert found is again.get("r")
        assert second.num_reads == 0
        assert found.findings == made.findings
        (line,) = read_run_lines(store)
        assert (line.cause, line.run.run_id) == (made.top_finding.cause, "r")
        assert (line.duration_ns or 0) > 0

        # Its findings are in SQL too, once, though no server followed the run.
        (row,) = read_findings(store, "r")
        top = made.top_finding
        assert (row.cause, row.ranks, row.severity) == (top.cause, top.ranks, str(top.severity))
        first_step, last_step = top.steps or (0, -1)
        assert (row.onset_step, row.saved_s) == (first_step, top.shown_saved_s)
        lost_s = (top.shown_saved_s or 0.0) * (last_step - first_step + 1)
        assert line.lost_device_h == pytest.approx(lost_s * 8 / 3600)
        StoredReports(store).keep(summary, made)
        assert len(read_findings(store)) == 1

        # A report of other rows, or of another version, counts for nothing.
        assert StoredReports(store).has(summary)
        grown = replace(summary, num_rows=summary.num_rows + 1)
        assert StoredReports(store).find(grown) is None
        assert not StoredReports(store).has(grown)
        store.insert_rows("reports", [{"run_id": "r", "version": "0.0.0", "at_ns": 2**62}])
        assert StoredReports(store).find(summary) is None
        assert not StoredReports(store).has(summary)
        assert read_run_lines(store)[0].verdict == ""


def test_a_report_outlives_an_upgrade_once_its_spans_have_expired(tmp_path: Path) -> None:
    # GIVEN an ended run whose report an older version has made
    url = simulated(tmp_path)
    with open_store(url) as store:
        source, stored = StoreSource(store), StoredReports(store)
        summary, reports = find_run(source, "r"), Reports(source, stored=stored)
        made = reports.get("r")
        assert made is not None
        (row,) = store.rows("SELECT * FROM reports FINAL")
        store.insert_rows("reports", [{**row, "version": "0.0.0", "at_ns": row["at_ns"] + 1}])

        # THEN it is to be made again, and the list shows it until then
        assert stored.find(summary) is None
        assert reports.without_stored([summary]) == [summary]
        (line,) = read_run_lines(store)
        assert (line.verdict, line.severity) == (row["verdict"], row["severity"])

        # WHEN its spans have expired THEN it stays, and no report of what is left replaces it
        store.insert_rows("expired", [{"run_id": "r", "last_step": 3}])
        store.command("TRUNCATE TABLE spans")
        summary = find_run(source, "r")
        assert reports.without_stored([summary]) == []
        found = Reports(source, stored=stored).find_made(summary)
        assert found is not None
        assert found.findings == made.findings
        stored.keep(summary, replace(made, findings=()))
        assert [line.verdict for line in read_run_lines(store)] == [row["verdict"]]
        # AND one that this version cannot read is shown in the list.
        store.insert_rows("reports", [{**row, "version": "0.0.1", "body": "[]", "at_ns": 2**62}])
        assert not stored.has(summary)
        assert [line.verdict for line in read_run_lines(store)] == [row["verdict"]]
