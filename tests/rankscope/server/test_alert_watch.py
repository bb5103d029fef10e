"""The watch over live runs: what it reads from a store, and the route for changes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from fastapi import FastAPI

from rankscope.analysis.trace.tables import RunSummary
from rankscope.collector.spool.tail import SpoolTail
from rankscope.collector.store.writer import StoreWriter
from rankscope.server.alert_changes import alert_router
from rankscope.server.alert_watch import MIN_BUCKET_NS, NUM_BUCKETS, AlertWatch
from rankscope.server.alerting import Alerting
from rankscope.server.reports import Reports
from rankscope.server.run_metrics import read_live_runs
from rankscope.sources.store_source import StoreSource
from rankscope.tracer.topology import Layout
from tests.support.collector.asgi import Client
from tests.support.collector.spool_builder import SpoolBuilder

if TYPE_CHECKING:
    from pathlib import Path

    from rankscope.collector.store.store import Store

pytestmark = pytest.mark.slow

S = 1_000_000_000
NUM_STEPS = 9
RUN = RunSummary(
    run_id="job",
    source_format="rankscope",
    state="running",
    world_size=2,
    layout=Layout(),
    num_spans=0,
    num_steps=NUM_STEPS,
    started_ns=None,
)


def test_the_signals_of_a_live_run_are_read_and_alert(empty_store: Store, tmp_path: Path) -> None:
    # GIVEN a run whose rank 1 loses its loss in the last step, whose ranks have gone on for two
    # minutes since, and three hosts of which one sends nothing any more
    store = empty_store
    ended_ns = 0
    for rank in range(2):
        builder = SpoolBuilder(tmp_path, run_id="job", rank=rank)
        for step in range(NUM_STEPS):
            is_lost = rank == 1 and step == NUM_STEPS - 1
            builder.step(
                step,
                start_ns=step * S,
                duration_ns=S,
                loss=float("inf") if is_lost else 2.0,
            )
        builder.seal()
    SpoolTail(tmp_path, StoreWriter(store)).poll()
    (row,) = store.rows("SELECT max(end_ns) AS ended_ns FROM steps")
    ended_ns = row["ended_ns"]
    now_ns = ended_ns + 300 * S
    store.insert_rows(
        "heartbeats",
        [
            {
                "run_id": "job", "rank": rank, "host": "a", "pid": 7, "step": NUM_STEPS + 5,
                "at_ns": now_ns - S, "state": "training", "epoch": 0,
            }
            for rank in range(2)
        ],
    )  # fmt: skip
    store.insert_rows(
        "ranks",
        [
            {"run_id": "job", "epoch": 0, "rank": 10 + k, "process": host, "host": host}
            for k, host in enumerate("xyz")
        ],
    )
    first_ns = now_ns - 5 * S - NUM_BUCKETS * MIN_BUCKET_NS
    store.insert_rows(
        "samples",
        [
            {
                "run_id": "", "host": host, "device": -1, "at_ns": first_ns + second * S,
                "name": "rdma-sent-bytes",
                "value": 1e9 * (min(second, 250) if host == "y" else second),
            }
            for host in "xyz"
            for second in range(NUM_BUCKETS * 10)
        ],
    )  # fmt: skip

    # WHEN the watch reads them, a second time after 130 s
    source = StoreSource(store)
    alerting = Alerting(store, page_url=lambda *_: "", unix_ns=lambda: now_ns)
    reports = Reports(source)
    watch = AlertWatch(store, source, reports, alerting, unix_ns=lambda: now_ns)
    watch.read(RUN, now_ns - 130 * S)
    signals = watch.read(RUN, now_ns)
    alerting.evaluate_signals(signals)
    watch.signals = {"job": signals}

    # THEN all of it is an alert
    assert [each.num_infinite for each in signals.losses] == [0] * (NUM_STEPS - 1) + [1]
    assert signals.losses[0].mean == 2.0
    assert signals.traffic is not None
    assert signals.traffic.hosts == ("x", "y", "z")
    assert {alert.text for alert in alerting.alerts} == {
        "job: the loss of 1 of 2 ranks is no number since step 8",
        "job: the RDMA traffic of host y has stopped",
        "job: the newest stored step ended 300 s ago, though the ranks go on",
        "job: a step has waited for its analysis for 130 s",
    }
    gauges = {reading.name: reading.values for reading in read_live_runs(reports, watch, store)()}
    assert gauges["run_active_alerts"] == {"job": 4.0}
    assert gauges["run_mfu_ratio"] == {}
    assert gauges["run_goodput_ratio"] == {}


def test_the_route_silences_and_refuses_what_it_does_not_know(empty_store: Store) -> None:
    alerting = Alerting(empty_store, page_url=lambda *_: "")
    app = FastAPI()
    app.include_router(alert_router(alerting))
    client = Client(app)

    done = client.post("/v1/alerts", json={"what": "silence", "run_id": "job", "for_s": 60.0})
    unknown = client.post("/v1/alerts", json={"what": "acknowledge", "name": "0"})
    wrong = client.post("/v1/alerts", json={"what": "explode"})

    assert (done.status_code, unknown.status_code, wrong.status_code) == (200, 404, 422)
    assert [silence.run_id for silence in alerting.silences] == ["job"]
