"""The list of runs: what is known without an analysis."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from rankscope.analysis.verdict import verdict_sentence
from rankscope.server.provider import StoreProvider
from rankscope.server.reports import Reports
from rankscope.sources.store_source import StoreSource
from tests.support.rankscope.rollup_runs import describe, new_number, put, span_rows

if TYPE_CHECKING:
    from rankscope.collector.store.store import Store
    from rankscope.dashboard.records.page_results import RunLine


def test_a_running_job_has_its_newest_loss_and_the_step_time_of_its_diagnosis(
    store: Store,
) -> None:
    run_id = f"line-{new_number()}"
    describe(store, run_id)
    put(store, run_id, span_rows(run_id))
    source = StoreSource(store)
    reports = Reports(source)
    made = reports.get(run_id)
    goes_on = {"run_id": run_id, "state": "running", "created_ns": time.time_ns(), "revision": 3}
    losses = {0: 3.0, 40: 1.5}  # the newest is of a step after those of the diagnosis
    store.insert_rows(
        "steps",
        [
            {"run_id": run_id, "step": step, "rank": rank, "loss": loss + rank}
            for step, loss in losses.items()
            for rank in (0, 1)
        ],
    )
    store.insert_rows("runs", [goes_on | {"source_format": "rankscope", "world_size": 2}])

    def line(reports: Reports) -> RunLine:
        lines = StoreProvider(source, reports, store=store).run_lines()
        return next(line for line in lines if line.run.run_id == run_id)

    assert made is not None
    assert line(reports).run.state == "running"
    assert line(reports).step_s == pytest.approx(made.step_time_s.actual)
    assert line(reports).loss == 2.0
    assert line(reports).cause == made.top_finding.cause
    assert line(reports).verdict == verdict_sentence(made)
    assert line(Reports(source)).cause == ""
    assert line(Reports(source)).step_s is None
