"""The observer beside a job: what it passes on to the ranks."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from rankscope.collector.client.served_writer import run_writer
from rankscope.collector.read.control import ControlRequests
from rankscope.collector.spool.control import ControlRequest
from rankscope.collector.spool.tail import SpoolTail
from rankscope.collector.store.store import open_store
from rankscope.job.observer import HostSide
from rankscope.server.host_sampling import HostSampling
from tests.support.collector.spool_builder import SpoolBuilder

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow


def test_a_request_in_the_store_reaches_its_rank(tmp_path: Path) -> None:
    spool = tmp_path / "spool"
    builder = SpoolBuilder(spool, run_id="job", rank=1)
    request = ControlRequest(
        run_id="job", name="a1", level="full", steps=2, ranks=(1,), by="the page"
    )
    with (
        open_store(f"chdb://{tmp_path / 'store'}") as store,
        closing(run_writer(store)) as writer,
        closing(SpoolTail(spool, writer)) as tail,
        closing(HostSampling(spool)) as sampling,
        ThreadPoolExecutor(1) as as_job,
    ):
        host = HostSide(sampling, as_job, store=store, writer=writer, tail=tail)
        tail.poll()
        ControlRequests(store).add(request)
        host.pass_requests()

    control = json.loads((builder.folder / "control.json").read_text())
    assert control == {"full": {"steps": 2, "request": "a1"}}
