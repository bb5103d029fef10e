"""The agent killed at every step, or on a full disk: all rows arrive once."""

from __future__ import annotations

import sqlite3
from typing import TYPE_CHECKING

import pytest

from rankscope.collector.spool.folder import used_bytes
from tests.faults.checker import Oracle, check
from tests.faults.proxy import FaultProxy, Faults
from tests.support.collector.agent_rig import (
    Rig,
    any_unanswered,
    assert_clean,
    faulty,
    write_ended,
    write_spans,
)
from tests.support.collector.fake_collector import FakeCollector
from tests.support.collector.spool_builder import SpoolBuilder
from tests.support.ports import fixed_port

if TYPE_CHECKING:
    from pathlib import Path


class CrashError(BaseException):
    """The process was killed."""


class Killer:
    """Raises `CrashError` before or after a change of the journal."""

    def __init__(self) -> None:
        self._num_left = 0

    def kill_at(self, point: int) -> None:
        """Raise at the n-th call from now on."""
        self._num_left = point

    def __call__(self) -> None:
        self._num_left -= 1
        if self._num_left == 0:
            raise CrashError


@pytest.mark.slow
def test_a_kill_at_every_change_of_the_journal_loses_and_duplicates_no_row(tmp_path: Path) -> None:
    point, has_crashed = 0, True
    while has_crashed:
        point += 1
        has_crashed = crash_once(tmp_path / str(point), point)

    assert point > 8


def crash_once(folder: Path, point: int) -> bool:
    """Send a run with one crash at ``point``; return whether it happened."""
    spool = folder / "spool"
    spool.mkdir(parents=True)
    with Oracle(folder / "oracle", is_synced=False) as oracle, FakeCollector() as collector:
        builder = SpoolBuilder(spool, run_id="run", capacity=16)
        write_spans(builder, oracle, 24)
        killer = Killer()
        rig = Rig(spool, collector.url, connect=faulty(killer))
        killer.kill_at(point)
        has_crashed = False
        try:
            rig.turn()
            rig.turn()
            write_spans(builder, oracle, 24)
            builder.end()
            for _ in range(3):
                rig.turn()
        except CrashError:
            has_crashed = True
        rig.close()
        if builder.next_row < 16 or builder.segment.name == "seg-000001.rsp":
            write_spans(builder, oracle, 5)
        builder.end()
        again = Rig(spool, collector.url)
        num_written = len((folder / "oracle").read_bytes().splitlines())
        again.turn_until(
            lambda: len(collector.stored.rows) >= num_written and not any_unanswered(again)
        )
        again.turn()
        verdict = check(folder / "oracle", collector.stored.rows)
        assert verdict.is_clean, (point, verdict)
        again.close()
    return has_crashed


def test_an_agent_killed_during_a_request_sends_no_row_in_another_cut(
    oracle: Oracle, spool: Path, tmp_path: Path
) -> None:
    # GIVEN a cut that is in the network when the agent is killed
    with FakeCollector() as collector, FaultProxy(collector.port) as proxy:
        builder = SpoolBuilder(spool, run_id="run")
        rig = Rig(spool, f"http://localhost:{proxy.port}")
        rig.turn_until(lambda: collector.num_requests("/v1/resume") > 0)
        write_spans(builder, oracle, 24)
        builder.seal()
        proxy.faults = Faults(is_blackholed=True)
        rig.shorten_deadlines()
        rig.turn()
        assert any_unanswered(rig)
        rig.close()

        # WHEN the next agent has sent all rows and more, and then the first request arrives
        builder.new_segment()
        write_spans(builder, oracle, 10)
        builder.end()
        again = Rig(spool, collector.url)
        again.turn_until(lambda: len(collector.stored.rows) >= 34)
        again.turn()
        num_before = collector.num_requests("/v1/spans")
        proxy.faults = Faults()
        again.turn_until(lambda: collector.num_requests("/v1/spans") > num_before)

        assert_clean(tmp_path, collector.stored)


def test_an_agent_killed_before_it_deletes_what_it_dropped_counts_it_once(
    oracle: Oracle, spool: Path, tmp_path: Path
) -> None:
    # GIVEN no collector, and two of three segments beyond the quota
    port = fixed_port()
    url = f"http://localhost:{port}"
    builder = SpoolBuilder(spool, run_id="run", capacity=32)
    write_spans(builder, oracle, 32 * 3)
    builder.end()
    segments = sorted(builder.folder.glob("seg-*"))
    num_bytes = segments[0].stat().st_blocks * 512
    Rig(spool, url).close()
    quota = used_bytes(spool) - num_bytes - 1

    # WHEN the agent is killed after the journal has the dropped rows
    killer = Killer()
    rig = Rig(spool, url, connect=faulty(killer), max_spool_bytes=quota)
    killer.kill_at(2)
    with pytest.raises(CrashError):
        rig.turn_until(lambda: False)
    rig.close()
    assert sorted(builder.folder.glob("seg-*")) == segments

    # THEN the next agent deletes these segments, and no other
    again = Rig(spool, url, max_spool_bytes=quota)
    again.turn_until(lambda: sorted(builder.folder.glob("seg-*")) == segments[:1])
    for _ in range(4):
        again.turn()
    with FakeCollector(port=port) as collector:
        again.turn_until(lambda: len(collector.stored.rows) >= 32)
        again.turn()
        newest = collector.stored.described["ranks"][-1]

        assert newest["dropped"] == {"agent-spool-full": 64}
        assert_clean(tmp_path, collector.stored, num_dropped=64)


def test_cuts_that_the_journal_can_not_record_are_not_sent(
    oracle: Oracle, spool: Path, tmp_path: Path
) -> None:
    is_full = False

    def fail() -> None:
        if is_full:
            raise sqlite3.OperationalError("database or disk is full")

    with FakeCollector() as collector:
        write_ended(spool, oracle, 20)
        rig = Rig(spool, collector.url, connect=faulty(fail))
        is_full = True
        for _ in range(5):
            rig.turn()
        assert collector.num_requests("/v1/spans") == 0
        is_full = False
        rig.turn_until(lambda: len(collector.stored.rows) >= 20)

        assert_clean(tmp_path, collector.stored)
        assert sum("can't be written" in line for line in rig.lines) == 1
