"""Deletion of a run while a server holds the store and receives its rows."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from rankscope.analysis.trace.errors import UnknownRunError
from rankscope.collector.read.runs import read_run_names
from rankscope.collector.spool.tail import SpoolTail
from rankscope.collector.store.store import open_store
from rankscope.collector.store.writer import StoreWriter
from rankscope.commands.runs import delete_stored
from tests.integration.programs import serving
from tests.integration.test_serve import Job

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.multiproc


def runs_of(store: Path) -> tuple[str, ...]:
    """Return the runs in a store without a server."""
    with open_store(f"chdb://{store}", read_only=True) as opened:
        return read_run_names(opened)


def test_a_served_run_is_deleted_through_its_server_and_stays_deleted(tmp_path: Path) -> None:
    store, spool = tmp_path / "store", tmp_path / "spool"
    job, other = Job(spool, run_id="job"), Job(spool, run_id="other")
    for one in (job, other):
        one.record_steps(3)
    with serving("--spool", str(spool), store=store):
        done = delete_stored("job", as_json=True, store_url=f"chdb://{store}")
        assert json.loads(done)["num_rows"]["spans"] == 12
        with pytest.raises(UnknownRunError, match="no run 'jop'"):
            delete_stored("jop", as_json=False, store_url=f"chdb://{store}")
    assert runs_of(store) == ("other",)

    # WHEN the job continues and the whole spool is read again from its beginning
    for one in (job, other):
        one.record_steps(3)
        one.end()
    with open_store(f"chdb://{store}") as opened:
        SpoolTail(spool, StoreWriter(opened)).poll()

    assert runs_of(store) == ("other",)
