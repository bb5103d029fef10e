"""The agent over permanently bad networks, and with a frozen collector.

Times are a tenth of real ones, deadlines included: a round trip of 2 s is 0.2 s here.
"""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import httpx
import pytest

from rankscope.collector.agent.link import DEADLINES, Deadlines
from rankscope.collector.store.deduplicated_reads import read_stored_spans
from rankscope.collector.store.store import open_store
from tests.faults.checker import Oracle, check
from tests.faults.cycles import SELECT_ROWS, seen_row
from tests.faults.proxy import FaultProxy, Faults
from tests.integration.programs import TIMEOUT_S, serving
from tests.support.collector.agent_rig import Rig, any_settled, write_spans
from tests.support.collector.fake_collector import FakeCollector, Stored
from tests.support.collector.spool_builder import SpoolBuilder

if TYPE_CHECKING:
    from pathlib import Path

TENTH = Deadlines(
    connect_s=DEADLINES.connect_s / 10,
    stall_s=DEADLINES.stall_s / 10,
    answer_s=DEADLINES.answer_s / 10,
)
SHORT = Deadlines(connect_s=0.3, stall_s=0.3, answer_s=0.3)
NUM_ROWS = 400


def write_job(spool: Path, oracle: Oracle, num_rows: int = NUM_ROWS) -> list[SpoolBuilder]:
    """Write the spools of four ranks that end."""
    builders = [SpoolBuilder(spool, run_id="run", rank=rank) for rank in range(4)]
    for builder in builders:
        write_spans(builder, oracle, num_rows // 4)
        builder.end()
    return builders


@pytest.mark.slow
@pytest.mark.parametrize(
    "faults",
    [
        Faults(bytes_per_s=10 * 64_000 / 8, slice_bytes=1_000),
        pytest.param(Faults(latency_s=0.1), marks=pytest.mark.nightly),
        pytest.param(Faults(lost_ratio=0.05, slice_bytes=1_400), marks=pytest.mark.nightly),
        Faults(lost_ratio=0.05, latency_s=0.1, slice_bytes=4_000),
    ],
    ids=["64-kbit", "2-s-round-trip", "5-percent-lost", "lost-and-far"],
)
def test_a_permanently_bad_network_delivers_all_rows_once(
    faults: Faults, oracle: Oracle, spool: Path, tmp_path: Path
) -> None:
    with FakeCollector() as collector, FaultProxy(collector.port) as proxy:
        proxy.faults = faults
        write_job(spool, oracle)
        rig = Rig(spool, f"http://localhost:{proxy.port}", deadlines=TENTH)

        rig.turn_until(
            lambda: len(collector.stored.rows) >= NUM_ROWS and not rig.journal.unanswered("run")
        )

        verdict = check(tmp_path / "oracle", collector.stored.rows)
        assert verdict.is_clean, verdict
        rig.close()


@pytest.mark.slow
def test_without_a_network_rows_wait_on_disk_and_no_rank_waits(
    oracle: Oracle, spool: Path, tmp_path: Path
) -> None:
    # GIVEN a network that drops everything
    with FakeCollector() as collector, FaultProxy(collector.port) as proxy:
        proxy.faults = Faults(is_blackholed=True)
        rig = Rig(spool, f"http://localhost:{proxy.port}", deadlines=SHORT)
        builders = write_job(spool, oracle)
        written = {path: path.stat().st_size for path in spool.glob("run/*/seg-*")}

        # WHEN the agent retries with a doubling backoff
        rig.turn_until(lambda: proxy.traffic.num_connections >= 4)

        # THEN all rows are still in the spool, and none was given up
        assert {path: path.stat().st_size for path in spool.glob("run/*/seg-*")} == written
        assert not any_settled(rig)
        assert not (rig.state / "dead").exists()
        assert sum(line.startswith("the collector") for line in rig.lines) == 1

        # AND all rows are sent when the network is back
        proxy.faults = Faults()
        rig.turn_until(lambda: len(collector.stored.rows) >= NUM_ROWS)
        rig.turn()
        verdict = check(tmp_path / "oracle", collector.stored.rows)
        assert verdict.is_clean, verdict
        assert not list(spool.glob("run/*/seg-*"))
        assert len(builders) == 4
        rig.close()


def test_a_request_blocked_at_one_collector_is_sent_to_another_and_stored_once(
    oracle: Oracle, spool: Path, tmp_path: Path
) -> None:
    # GIVEN two collectors of one store, the first of which freezes with open requests
    stored = Stored()
    with (
        FakeCollector(stored) as first,
        FakeCollector(stored) as second,
        FaultProxy(first.port) as proxy,
    ):
        urls = [f"http://localhost:{proxy.port}", second.url]
        rig = Rig(spool, urls)
        builder = SpoolBuilder(spool, run_id="run")
        write_spans(builder, oracle, 10)
        rig.turn_until(lambda: first.num_requests("/v1/spans") > 0)
        proxy.faults = Faults(is_blackholed=True)
        rig.shorten_deadlines()
        write_spans(builder, oracle, 40)
        builder.end()

        # WHEN the agent gives it up
        rig.turn_until(lambda: len(stored.rows) >= 50 and not rig.journal.unanswered("run"))
        assert second.num_requests("/v1/spans") > 0

        # AND the blocked request is stored later
        num_before = first.num_requests("/v1/spans")
        proxy.faults = Faults()
        rig.turn_until(lambda: first.num_requests("/v1/spans") > num_before)

        verdict = check(tmp_path / "oracle", stored.rows)
        assert verdict.is_clean, verdict
        rig.close()


@pytest.mark.multiproc
def test_a_frozen_collector_stores_repeated_requests_once(
    oracle: Oracle, spool: Path, tmp_path: Path
) -> None:
    # GIVEN a real collector with some rows
    store_path = tmp_path / "store"
    with serving("--only", "collector", store=store_path) as server:
        environment = {"RANKSCOPE_TOKEN": server.token}
        with_timeout = Deadlines(connect_s=2, stall_s=2, answer_s=1)
        rig = Rig(spool, server.url, deadlines=with_timeout, environment=environment)
        builder = SpoolBuilder(spool, run_id="run")
        write_spans(builder, oracle, 10)
        rig.turn_until(lambda: any_settled(rig))

        # WHEN it is frozen beyond every deadline, and rows are sent to it meanwhile
        os.kill(server.process.pid, signal.SIGSTOP)
        try:
            write_spans(builder, oracle, 90)
            rig.turn_until(lambda: bool(rig.journal.unanswered("run")))
            rig.turn()
            assert rig.journal.unanswered("run")
        finally:
            os.kill(server.process.pid, signal.SIGCONT)
        builder.end()
        rig.turn_until(lambda: _num_rows(server.url, server.token) >= 100)
        rig.turn_until(lambda: not rig.journal.unanswered("run"))
        rig.close()

    with open_store(f"chdb://{store_path}") as store:
        final = " FINAL" if read_stored_spans(store, "run").has_repeated else ""
        rows = store.rows(SELECT_ROWS.format(final=final))
    verdict = check(tmp_path / "oracle", [seen_row(row) for row in rows])
    assert verdict.is_clean, verdict


def _num_rows(url: str, token: str) -> int:
    asked = "SELECT count() FROM (SELECT DISTINCT rank, segment, row FROM spans)"
    answer = httpx.post(url, content=asked, auth=("any", token), timeout=TIMEOUT_S)
    return int(answer.text)
