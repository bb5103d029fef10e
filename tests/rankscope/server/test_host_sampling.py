"""Samples of this host, read by one code for the agent, the server and the observer of a job."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest

from rankscope.collector.errors import StoreError
from rankscope.collector.read.host_checks import FINDING
from rankscope.collector.retention.deletion import DeletedRunFilter, Deletions
from rankscope.collector.store.store import open_store
from rankscope.collector.store.writer import StoreWriter
from rankscope.server.host_sampling import HostSampling
from tests.support.collector.spool_builder import SpoolBuilder, this_host

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path


@pytest.fixture
def sampling(tmp_path: Path) -> Iterator[HostSampling]:
    SpoolBuilder(tmp_path, run_id="kept", rank=3, **this_host()).span(step=4)
    made = HostSampling(tmp_path, occasions=(FINDING,))
    yield made
    made.close()


def test_samples_heartbeats_and_checks_of_this_host_are_stored(
    sampling: HostSampling, tmp_path: Path
) -> None:
    with open_store(f"chdb://{tmp_path / 'store'}") as store:
        deletions = Deletions(store)
        deletions.delete("deleted")
        beat = {"run_id": "deleted", "rank": 3, "at_ns": time.time_ns(), "state": "training"}
        sampling.heartbeats.add([beat])
        sampling.sampler.turn()
        sampling.watch.turn()  # no occasion yet
        assert not len(sampling.checks)
        sampling.watch.examine_for_finding()

        sampling.store(DeletedRunFilter(StoreWriter(store), deletions).upsert, placed=list)

        assert store.rows("SELECT run_id, rank, step FROM heartbeats") == [
            {"run_id": "kept", "rank": 3, "step": 4}
        ]
        names = {row["name"] for row in store.rows("SELECT DISTINCT name FROM samples")}
        assert {"training-step", "memory-available-bytes"} <= names
        (checks,) = store.rows("SELECT DISTINCT occasion, run_id, epoch FROM host_checks")
        assert checks == {"occasion": "finding", "run_id": "kept", "epoch": 0}


def test_rows_wait_for_a_store_that_fails(sampling: HostSampling) -> None:
    sampling.sampler.turn()
    num_rows = len(sampling.samples)

    def fail(_table: str, _rows: Sequence[Any]) -> None:
        raise StoreError("no answer")

    with pytest.raises(StoreError):
        sampling.store(fail, placed=list)
    assert len(sampling.samples) == num_rows > 0
