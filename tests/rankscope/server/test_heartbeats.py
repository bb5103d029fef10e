from __future__ import annotations

import time
from typing import TYPE_CHECKING

from rankscope.collector.agent.buffer import RowBuffer
from rankscope.collector.retention.deletion import Deletions
from rankscope.collector.store.store import open_store
from rankscope.server.heartbeats import beat_loop

if TYPE_CHECKING:
    from pathlib import Path

PATIENCE_S = 60


def test_heartbeats_are_stored_but_those_of_a_deleted_run(tmp_path: Path) -> None:
    with open_store(f"chdb://{tmp_path / 'store'}") as store:
        deletions = Deletions(store)
        deletions.delete("deleted")
        buffer = RowBuffer()
        at_ns = time.time_ns()
        beat = {"rank": 3, "at_ns": at_ns, "state": "training"}
        buffer.add([{**beat, "run_id": run_id} for run_id in ("deleted", "kept")])

        loop = beat_loop(store, buffer, deletions)
        loop.start()
        give_up_s = time.monotonic() + PATIENCE_S
        while not loop.num_turns and time.monotonic() < give_up_s:
            time.sleep(0.05)
        loop.stop()

        assert (loop.num_failures, len(buffer)) == (0, 0)
        found = store.rows("SELECT run_id, rank, at_ns FROM heartbeats")
        assert found == [{"run_id": "kept", "rank": 3, "at_ns": at_ns}]
