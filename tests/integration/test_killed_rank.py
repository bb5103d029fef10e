"""A rank that is killed with SIGKILL loses no written span."""

from __future__ import annotations

import json
import os
import signal
from typing import TYPE_CHECKING

import pytest

from rankscope.collector.spool.tail import SpoolTail
from rankscope.collector.store.store import open_store
from rankscope.collector.store.writer import StoreWriter
from rankscope.demo.plan import plan_demo
from rankscope.demo.training import Training, training_command
from rankscope.tracer.spool import MANIFEST_FILE, SEGMENT_GLOB, iter_committed
from rankscope.tracer.topology import Layout

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.multiproc, pytest.mark.slow]

TIMEOUT_S = 90.0
VICTIM = 1
STORED = """
SELECT sum(num_spans + num_steps + num_microbatches) AS num_stored, sum(num_bad) AS num_bad
FROM ledger FINAL WHERE rank = {rank:Int32} AND state = 'stored'
"""
SPANS = "SELECT count() AS num_spans FROM spans FINAL WHERE rank = {rank:Int32}"
STATE = "SELECT exit_state FROM ranks FINAL WHERE rank = {rank:Int32}"
FROM_LEDGER = "SELECT sum(num_spans) AS num_spans FROM ledger FINAL WHERE rank = {rank:Int32}"


def process_folder(spool: Path, rank: int) -> Path:
    (folder,) = spool.glob(f"*/e*-r{rank:05d}-*")
    return folder


def num_committed(folder: Path) -> int:
    """Count the complete records with a reader that the collector does not use."""
    segments = (path.read_bytes() for path in folder.glob(SEGMENT_GLOB))
    return sum(1 for data in segments for _ in iter_committed(data))


def test_all_complete_spans_of_a_killed_rank_are_stored(tmp_path: Path) -> None:
    spool = tmp_path / "spool"
    plan = plan_demo(layout=Layout(dp=2), num_steps=500, fault="none")
    command = training_command(plan, spool=spool)
    with (
        open_store(f"chdb://{tmp_path / 'store'}") as store,
        Training(command, run_id="killed", log=tmp_path / "log") as training,
    ):
        tail = SpoolTail(spool, StoreWriter(store))
        while (step := training.next_step(TIMEOUT_S)) is None or step.step < 2:
            assert training.status is None, training.last_error()
        tail.poll()  # So that it is killed between two reads.
        victim = process_folder(spool, VICTIM)
        os.kill(json.loads((victim / MANIFEST_FILE).read_text())["pid"], signal.SIGKILL)
        while training.status is None:
            training.next_step(1.0)
        while tail.poll().num_cuts:
            pass

        account = store.rows(STORED, {"rank": VICTIM})[0]
        num_spans = store.rows(SPANS, {"rank": VICTIM})[0]["num_spans"]
        from_ledger = store.rows(FROM_LEDGER, {"rank": VICTIM})[0]["num_spans"]
        (state,) = store.rows(STATE, {"rank": VICTIM})
        tail.close()

    assert num_committed(victim) > 50
    assert account == {"num_stored": num_committed(victim), "num_bad": 0}
    assert num_spans == from_ledger
    assert state["exit_state"] == "lost"
