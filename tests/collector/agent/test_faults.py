"""The agent with a bad network, and in an outage: all rows arrive once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from rankscope.collector.agent.link import Deadlines
from rankscope.collector.spool.folder import used_bytes
from rankscope.tracer.spool import DropReason
from tests.faults.proxy import FaultProxy, Faults
from tests.support.collector.agent_rig import (
    Rig,
    any_unanswered,
    assert_clean,
    write_ended,
    write_spans,
)
from tests.support.collector.fake_collector import FakeCollector, rejection
from tests.support.collector.spool_builder import SpoolBuilder
from tests.support.ports import fixed_port

if TYPE_CHECKING:
    from pathlib import Path

    from tests.faults.checker import Oracle

pytestmark = pytest.mark.slow

# Networks


@pytest.mark.parametrize(
    "faults",
    [
        Faults(is_cut=True),
        Faults(is_blackholed=True),
        Faults(reset_after_reply_bytes=0),
        Faults(reset_after_reply_bytes=20),
        Faults(reset_after_request_bytes=300),
        Faults(reset_after_request_bytes=4_000),
        pytest.param(Faults(latency_s=0.5), marks=pytest.mark.nightly),
    ],
    ids=["cut", "blackhole", "no-answer", "half-answer", "half-head", "half-body", "too-slow"],
)
def test_a_network_failure_loses_and_duplicates_no_row(
    faults: Faults, oracle: Oracle, spool: Path, tmp_path: Path
) -> None:
    with FakeCollector() as collector, FaultProxy(collector.port) as proxy:
        rig = Rig(spool, f"http://localhost:{proxy.port}")
        builder = SpoolBuilder(spool, run_id="run")
        write_spans(builder, oracle, 10)
        rig.turn_until(lambda: len(collector.stored.rows) >= 8)
        rig.shorten_deadlines()
        proxy.faults = faults
        write_spans(builder, oracle, 100)
        builder.end()
        for _ in range(4):
            rig.turn()
        proxy.faults = Faults()
        rig.turn_until(lambda: len(collector.stored.rows) >= 110 and not any_unanswered(rig))

        assert_clean(tmp_path, collector.stored)


def test_a_slow_network_succeeds_with_smaller_requests(
    oracle: Oracle, spool: Path, tmp_path: Path
) -> None:
    # GIVEN 64 kbit/s, so that a whole request does not fit into a deadline
    with FakeCollector() as collector, FaultProxy(collector.port) as proxy:
        proxy.faults = Faults(bytes_per_s=64_000 / 8, slice_bytes=1_000)
        for rank in range(8):
            write_ended(spool, oracle, 10, rank=rank)
        slow = Deadlines(connect_s=2, stall_s=2, answer_s=0.4)
        rig = Rig(spool, f"http://localhost:{proxy.port}", deadlines=slow)
        rig.turn_until(lambda: len(collector.stored.rows) >= 80 and not any_unanswered(rig))

        assert_clean(tmp_path, collector.stored)


def test_a_request_that_arrives_late_is_stored_once(
    oracle: Oracle, spool: Path, tmp_path: Path
) -> None:
    # GIVEN a request that is still in the network after the agent's timeout
    with FakeCollector() as collector, FaultProxy(collector.port) as proxy:
        rig = Rig(spool, f"http://localhost:{proxy.port}")
        builder = SpoolBuilder(spool, run_id="run")
        rig.turn_until(lambda: collector.num_requests("/v1/resume") > 0)
        write_spans(builder, oracle, 30)
        builder.end()
        proxy.faults = Faults(is_blackholed=True)
        rig.shorten_deadlines()
        rig.turn()
        rig.turn()
        assert any_unanswered(rig)
        # WHEN the network works again
        proxy.faults = Faults()
        rig.turn_until(lambda: len(collector.stored.rows) >= 30 and not any_unanswered(rig))

        assert_clean(tmp_path, collector.stored)


# Outages


def test_an_outage_beyond_the_quota_is_accounted_for_to_the_row(
    oracle: Oracle, spool: Path, tmp_path: Path
) -> None:
    # GIVEN no collector, and ranks that write twice the quota of the spool
    port = fixed_port()
    builders = []
    for rank in range(4):
        builder = SpoolBuilder(spool, run_id="run", rank=rank, capacity=32)
        write_spans(builder, oracle, 32 * 10)
        builders.append(builder)
    quota = used_bytes(spool) // 2
    rig = Rig(spool, f"http://localhost:{port}", max_spool_bytes=quota)
    for _ in range(30):
        rig.turn()

    # WHEN the collector is back
    for builder in builders:
        builder.end()
    with FakeCollector(port=port) as back:
        rig.turn_until(lambda: len(back.stored.rows) > 0)
        for _ in range(5):
            rig.turn()
        newest = {row["rank"]: row for row in back.stored.described["ranks"]}
        num_dropped = sum(row["dropped"].get("agent-spool-full", 0) for row in newest.values())

        # THEN each row is stored or counted as dropped, and the oldest are kept
        assert num_dropped > 0
        assert back.stored.rows
        assert_clean(tmp_path, back.stored, num_dropped=num_dropped)
        assert any("dropped, the newest first" in line for line in rig.lines)


def test_segments_of_a_backlog_are_deleted_while_it_is_sent(
    oracle: Oracle, spool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rankscope.collector.agent.agent.BATCH_ROWS", 128)
    monkeypatch.setattr("rankscope.collector.spool.tail.FEW_ROWS", 1)
    with FakeCollector() as collector:
        for rank in range(4):
            builder = SpoolBuilder(spool, run_id="run", rank=rank, capacity=32)
            write_spans(builder, oracle, 32 * 4)
            builder.end()
        present: list[int] = []
        rig = Rig(spool, collector.url)

        def count() -> None:
            present.append(len(list(spool.glob("run/*/seg-*"))))

        collector.after_storing = count
        rig.turn()

    assert present[0] == 16
    assert min(present) < 16


def test_rows_dropped_by_the_ranks_and_by_the_agent_are_both_counted(
    oracle: Oracle, spool: Path
) -> None:
    builder = SpoolBuilder(spool, run_id="run")
    write_spans(builder, oracle, 4)
    builder.drop(DropReason.SPOOL_FULL, 7)
    builder.end()
    with FakeCollector() as collector:
        collector.misbehave = lambda path, _: rejection(400) if path == "/v1/spans" else None
        rig = Rig(spool, collector.url)
        rig.turn_until((rig.state / "dead").exists)
        for _ in range(3):
            rig.turn()
        newest = collector.stored.described["ranks"][-1]

    assert newest["dropped"] == {"spool-full": 7, "refused": 4}
