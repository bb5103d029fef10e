"""Deletion of a run while a server holds the store and receives its rows."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from rankscope.collector.read.runs import read_run_names
from rankscope.collector.store.store import open_store
from tests.integration.programs import rankscope, serving
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
        done = rankscope("runs", "--delete", "job", "--json", store=store)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["num_rows"]["spans"] == 12
        missing = rankscope("runs", "--delete", "jop", store=store)
        assert (missing.returncode, missing.stdout) == (2, "")
        assert "no run 'jop'" in missing.stderr
    assert runs_of(store) == ("other",)

    # WHEN the job continues and another server reads the whole spool from its beginning
    for one in (job, other):
        one.record_steps(3)
        one.end()
    with serving("--spool", str(spool), store=store):
        pass  # It reads once before it prints its address.

    assert runs_of(store) == ("other",)
