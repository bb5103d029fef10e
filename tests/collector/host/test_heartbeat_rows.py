from __future__ import annotations

from typing import TYPE_CHECKING

from rankscope.collector.host.heartbeat import Heartbeat, beat_sink
from rankscope.collector.ingest.rows import ROW_TABLES

if TYPE_CHECKING:
    from rankscope.collector.identity import Row

BEAT = Heartbeat(
    at_ns=9,
    host="node\x1b7",
    address="10.0.0.7",
    pod="job-0",
    hardware="NVIDIA H200",
    run_id="run",
    epoch=1,
    rank=9,
    local_rank=1,
    pid=77,
    state="training",
    step=42,
    rdma_sent_bytes=700,
    rdma_received_bytes=None,
)


def test_a_heartbeat_becomes_a_row_that_a_screen_can_show() -> None:
    rows: list[Row] = []

    beat_sink(rows.extend)([BEAT])

    assert rows == [
        {
            "at_ns": 9, "host": "node\\x1b7", "address": "10.0.0.7", "pod": "job-0",
            "hardware": "NVIDIA H200", "run_id": "run", "epoch": 1, "rank": 9, "local_rank": 1,
            "pid": 77, "state": "training", "step": 42, "rdma_sent_bytes": 700,
            "rdma_received_bytes": None,
        }
    ]  # fmt: skip


def test_a_collector_takes_every_column_of_it() -> None:
    rows: list[Row] = []
    beat_sink(rows.extend)([BEAT])
    known = ROW_TABLES["heartbeats"]

    assert rows[0].keys() == known.identity.keys() | known.others.keys()
