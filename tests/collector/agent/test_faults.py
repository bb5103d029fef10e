"""The agent behind a bad network, on a bad disk, killed at every step: all arrives, once."""

from __future__ import annotations

import errno
import os
import random
import threading
from typing import TYPE_CHECKING

import pytest

from collector.agent.journal_file import Disk
from collector.agent.link import Deadlines
from collector.agent.pace import LONGEST_ASKED_S, Backoff
from tests.collector.agent.fake_collector import TOKEN, FakeCollector, Reply, Stored
from tests.collector.agent.rig import Rig, write_spans
from tests.collector.spool_builder import SpoolBuilder
from tests.faults.checker import Oracle, check
from tests.faults.proxy import FaultProxy, Faults
from tests.ports import fixed_port
from tracer.spool import DropReason

if TYPE_CHECKING:
    from pathlib import Path

IMPATIENT = Deadlines(connect_s=0.3, stall_s=0.3, answer_s=0.3)


def assert_clean(tmp_path: Path, stored: Stored, **account: int) -> None:
    verdict = check(tmp_path / "oracle", stored.rows, **account)
    assert verdict.is_clean, verdict


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
        Faults(latency_s=0.5),
    ],
    ids=["cut", "blackhole", "no-answer", "half-answer", "half-head", "half-body", "too-slow"],
)
def test_a_network_that_fails_and_heals_costs_no_row_and_doubles_none(
    faults: Faults, oracle: Oracle, spool: Path, tmp_path: Path
) -> None:
    with FakeCollector() as collector, FaultProxy(collector.port) as proxy:
        rig = Rig(spool, f"http://localhost:{proxy.port}", deadlines=IMPATIENT)
        builder = SpoolBuilder(spool, run_id="run")
        write_spans(builder, oracle, 10)
        rig.turn_until(lambda: len(collector.stored.rows) >= 8)
        proxy.faults = faults
        write_spans(builder, oracle, 100)
        builder.end()
        for _ in range(4):
            rig.turn()
        proxy.faults = Faults()
        rig.turn_until(lambda: len(collector.stored.rows) >= 110 and not any_unanswered(rig))

        assert_clean(tmp_path, collector.stored)
        rig.close()


def any_unanswered(rig: Rig) -> bool:
    return bool(rig.journal.unanswered("run"))


def test_a_slow_network_gets_through_with_smaller_requests(
    oracle: Oracle, spool: Path, tmp_path: Path
) -> None:
    # GIVEN 64 kbit/s, so that the whole does not fit into a deadline
    with FakeCollector() as collector, FaultProxy(collector.port) as proxy:
        proxy.faults = Faults(bytes_per_s=64_000 / 8, slice_bytes=1_000)
        for rank in range(8):
            builder = SpoolBuilder(spool, run_id="run", rank=rank)
            write_spans(builder, oracle, 10)
            builder.end()
        slow = Deadlines(connect_s=2, stall_s=2, answer_s=0.4)
        rig = Rig(spool, f"http://localhost:{proxy.port}", deadlines=slow)
        rig.turn_until(lambda: len(collector.stored.rows) >= 80 and not any_unanswered(rig))

        assert_clean(tmp_path, collector.stored)
        rig.close()


def test_what_was_stuck_in_the_network_and_arrives_late_is_stored_once(
    oracle: Oracle, spool: Path, tmp_path: Path
) -> None:
    # GIVEN a request that stands in the network when the agent has given it up
    with FakeCollector() as collector, FaultProxy(collector.port) as proxy:
        rig = Rig(spool, f"http://localhost:{proxy.port}", deadlines=IMPATIENT)
        builder = SpoolBuilder(spool, run_id="run")
        rig.turn_until(lambda: collector.num_requests("/v1/resume") > 0)
        write_spans(builder, oracle, 30)
        builder.end()
        proxy.faults = Faults(is_blackholed=True)
        rig.turn()
        rig.turn()
        # WHEN everything goes on
        proxy.faults = Faults()
        rig.turn_until(lambda: len(collector.stored.rows) >= 30 and not any_unanswered(rig))

        assert_clean(tmp_path, collector.stored)
        rig.close()


# Collectors


@pytest.mark.parametrize(
    "reply",
    [
        Reply(status=500, body=b"<html>oops</html>"),
        Reply(status=200, body=b"<html>welcome</html>"),
        Reply(status=200, document={"cuts": []}),
        Reply(status=200, document={"cuts": [{"segment": 1, "first_row": 0, "state": "stored"}]}),
        Reply(status=200, document=[1, 2]),
        Reply(status=204, body=b""),
        Reply(status=302, headers={"location": "http://169.254.169.254/"}),
        Reply(status=404),
        Reply(status=429, headers={"retry-after": "1"}),
        Reply(status=503, headers={"retry-after": "Wed, 21 Oct 2015 07:28:00 GMT"}),
        Reply(status=503, headers={"retry-after": "never"}),
        Reply(status=200, body=b"[" * 100_000),
    ],
)
def test_no_answer_but_the_right_one_counts_as_an_acknowledgement(
    reply: Reply, oracle: Oracle, spool: Path, tmp_path: Path
) -> None:
    with FakeCollector() as collector:
        collector.misbehave = lambda path, _: reply if path == "/v1/spans" else None
        builder = SpoolBuilder(spool, run_id="run")
        write_spans(builder, oracle, 20)
        builder.end()
        rig = Rig(spool, collector.url)
        for _ in range(4):
            rig.turn()
        assert rig.outbox.num_rows_settled == 0
        assert list(spool.glob("run/*/seg-*"))
        assert not (rig.state / "dead").exists()

        collector.misbehave = lambda _path, _body: None
        rig.turn_until(lambda: len(collector.stored.rows) >= 20)

        assert_clean(tmp_path, collector.stored)
        rig.close()


def test_a_pause_that_was_asked_for_is_kept_and_no_request_falls_into_it(
    oracle: Oracle, spool: Path
) -> None:
    with FakeCollector() as collector:
        busy = Reply(status=503, headers={"retry-after": "20"})
        collector.misbehave = lambda path, _: busy if path == "/v1/spans" else None
        builder = SpoolBuilder(spool, run_id="run")
        write_spans(builder, oracle, 4)
        rig = Rig(spool, collector.url)
        rig.turn_until(lambda: collector.num_requests("/v1/spans") == 1)
        asked_s = rig.pauses.now_s
        rig.turn_until(lambda: collector.num_requests("/v1/spans") == 2)

        assert 20 <= rig.pauses.now_s - asked_s <= 27
        rig.close()


def test_a_token_that_is_replaced_is_taken_up_and_nothing_is_lost(
    oracle: Oracle, spool: Path, tmp_path: Path
) -> None:
    # GIVEN a token that has expired
    file = tmp_path / "token"
    file.write_text("expired\n")
    file.chmod(0o600)
    with FakeCollector() as collector:
        builder = SpoolBuilder(spool, run_id="run")
        write_spans(builder, oracle, 20)
        builder.end()
        rig = Rig(spool, collector.url, environment={"RANKSCOPE_TOKEN_FILE": str(file)})
        begun_s = rig.pauses.now_s
        rig.turn()
        while rig.pauses.now_s - begun_s < 59:
            rig.turn()
        # THEN the collector is asked once a minute
        assert len(collector.requests) == 1

        # WHEN it is replaced, nobody waits for the minute to end
        file.write_text(TOKEN)
        before_s = rig.pauses.now_s
        rig.turn_until(lambda: len(collector.stored.rows) >= 20)

        assert rig.pauses.now_s - before_s < 10
        assert_clean(tmp_path, collector.stored)
        assert [line.partition(":")[0] for line in rig.lines] == ["the collector"] * 2
        assert TOKEN not in "".join(rig.lines)
        rig.close()


@pytest.mark.parametrize("content", ["", "two words", "\x00\xff", "x" * 10_000])
def test_a_token_file_that_holds_none_is_waited_for(
    content: str, oracle: Oracle, spool: Path, tmp_path: Path
) -> None:
    file = tmp_path / "token"
    file.write_text(content)
    file.chmod(0o600)
    with FakeCollector() as collector:
        builder = SpoolBuilder(spool, run_id="run")
        write_spans(builder, oracle, 5)
        builder.end()
        rig = Rig(spool, collector.url, environment={"RANKSCOPE_TOKEN_FILE": str(file)})
        rig.turn()
        assert collector.requests == []
        file.write_text(TOKEN)
        rig.turn_until(lambda: len(collector.stored.rows) >= 5)

        assert_clean(tmp_path, collector.stored)
        rig.close()


def test_sixty_four_agents_do_not_come_back_together() -> None:
    # GIVEN 64 agents that lose their collector at once and try for two minutes
    chooser = random.Random(5)
    tries = [0] * 121
    for _ in range(64):
        backoff, now_s = Backoff(uniform=chooser.uniform), 0.0
        while now_s <= 120:
            tries[int(now_s)] += 1
            now_s += backoff.failed()

    # THEN after the first seconds no second sees more than half of them, and each of them
    # tries once in five seconds
    assert max(tries[20:]) <= 32
    assert sum(tries[60:]) / 64 <= 14


def test_agents_that_were_told_the_same_time_come_back_apart() -> None:
    chooser = random.Random(5)
    pauses_s = [Backoff(uniform=chooser.uniform).failed(20.0) for _ in range(64)]

    assert min(pauses_s) >= 20
    assert max(pauses_s) - min(pauses_s) >= 4
    assert Backoff(uniform=lambda low, _: low).failed(1e9) == LONGEST_ASKED_S


# Outages


def test_an_outage_beyond_all_limits_is_accounted_for_to_the_row(
    oracle: Oracle, spool: Path, tmp_path: Path
) -> None:
    # GIVEN no collector, and ranks that write ten times what the spool may hold
    port = fixed_port()
    builders = []
    for rank in range(4):
        builder = SpoolBuilder(spool, run_id="run", rank=rank, capacity=32)
        write_spans(builder, oracle, 32 * 10)
        builders.append(builder)
    rig = Rig(spool, f"http://localhost:{port}", max_spool_bytes=12 * 12_288)
    for _ in range(30):
        rig.turn()

    # WHEN the collector comes back
    for builder in builders:
        builder.end()
    with FakeCollector(port=port) as back:
        rig.turn_until(lambda: len(back.stored.rows) > 0)
        for _ in range(5):
            rig.turn()
        newest = {row["rank"]: row for row in back.stored.described["ranks"]}
        num_dropped = sum(row["dropped"].get("agent-spool-full", 0) for row in newest.values())

        # THEN each row is stored or counted as dropped, and the oldest were kept
        assert num_dropped > 0
        assert back.stored.rows
        assert_clean(tmp_path, back.stored, num_dropped=num_dropped)
        assert any("dropped, the newest first" in line for line in rig.lines)
    rig.close()


def test_a_backlog_is_freed_while_it_is_shipped_and_not_only_at_its_end(
    oracle: Oracle, spool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("collector.agent.agent.BATCH_ROWS", 128)
    monkeypatch.setattr("collector.tail.FEW_ROWS", 1)
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
    rig.close()


def test_what_the_ranks_dropped_stands_beside_what_the_agent_dropped(
    oracle: Oracle, spool: Path
) -> None:
    builder = SpoolBuilder(spool, run_id="run")
    write_spans(builder, oracle, 4)
    builder.drop(DropReason.SPOOL_FULL, 7)
    builder.end()
    with FakeCollector() as collector:
        collector.misbehave = lambda path, _: Reply(status=400) if path == "/v1/spans" else None
        rig = Rig(spool, collector.url)
        rig.turn_until((rig.state / "dead").exists)
        for _ in range(3):
            rig.turn()
        newest = collector.stored.described["ranks"][-1]

    assert newest["dropped"] == {"spool-full": 7, "refused": 4}
    rig.close()


# Kills


class CrashError(BaseException):
    """The process is gone."""


class CrashingDisk(Disk):
    """Ends the process at the n-th thing asked of it, before, in the middle of or after it.

    The machine lives on, so nothing needs to be synced.
    """

    def __init__(self, point: int) -> None:
        self.point = point
        self.num_asked = 0

    def append(self, descriptor: int, data: bytes) -> None:
        self._crash_if_due()
        if self._is_due():
            super().append(descriptor, data[: len(data) // 2])
            raise CrashError
        super().append(descriptor, data)
        self._crash_if_due()

    def sync(self, descriptor: int) -> None:
        self._crash_if_due()

    def _is_due(self) -> bool:
        self.num_asked += 1
        return self.num_asked == self.point

    def _crash_if_due(self) -> None:
        if self._is_due():
            raise CrashError


def test_a_kill_at_every_durable_step_costs_no_row_and_doubles_none(tmp_path: Path) -> None:
    point, has_crashed = 0, True
    while has_crashed:
        point += 1
        has_crashed = crash_once(tmp_path / str(point), point)

    assert point > 12


def crash_once(folder: Path, point: int) -> bool:
    """Ship a run with one crash on the way, check it, and return whether there was one."""
    spool = folder / "spool"
    spool.mkdir(parents=True)
    with Oracle(folder / "oracle", is_synced=False) as oracle, FakeCollector() as collector:
        builder = SpoolBuilder(spool, run_id="run", capacity=16)
        write_spans(builder, oracle, 24)
        rig = Rig(spool, collector.url, storage=CrashingDisk(point))
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
        again = Rig(spool, collector.url, storage=CrashingDisk(0))
        num_written = len((folder / "oracle").read_bytes().splitlines())
        again.turn_until(
            lambda: len(collector.stored.rows) >= num_written and not any_unanswered(again)
        )
        again.turn()
        verdict = check(folder / "oracle", collector.stored.rows)
        assert verdict.is_clean, (point, verdict)
        again.close()
    return has_crashed


def test_a_kill_between_storing_and_confirming_doubles_nothing(
    oracle: Oracle, spool: Path, tmp_path: Path
) -> None:
    # GIVEN an agent that is killed when its cut is stored and before it could note that
    with FakeCollector() as collector:
        builder = SpoolBuilder(spool, run_id="run")
        write_spans(builder, oracle, 24)
        disk = CrashingDisk(0)
        rig = Rig(spool, collector.url, storage=disk)

        def die_next() -> None:
            disk.point = disk.num_asked + 1

        collector.after_storing = die_next
        with pytest.raises(CrashError):
            rig.turn_until(lambda: False)
        rig.close()
        collector.after_storing = lambda: None
        builder.end()
        again = Rig(spool, collector.url)
        again.turn_until(lambda: not any_unanswered(again))
        for _ in range(2):
            again.turn()

        assert_clean(tmp_path, collector.stored)
        again.close()


def test_an_agent_killed_while_its_request_stood_in_the_network_cuts_no_row_anew(
    oracle: Oracle, spool: Path, tmp_path: Path
) -> None:
    # GIVEN a cut that is under way, neither here nor there, when the agent is killed
    with FakeCollector() as collector, FaultProxy(collector.port) as proxy:
        builder = SpoolBuilder(spool, run_id="run")
        rig = Rig(spool, f"http://localhost:{proxy.port}", deadlines=IMPATIENT)
        rig.turn_until(lambda: collector.num_requests("/v1/resume") > 0)
        write_spans(builder, oracle, 24)
        builder.seal()
        proxy.faults = Faults(is_blackholed=True)
        rig.turn()
        assert any_unanswered(rig)
        rig.close()

        # WHEN the next one, with more rows to ship, has shipped all, and then the first arrives
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
        again.close()


# Disks


class FullDisk(Disk):
    """Has no room while it is told so."""

    def __init__(self) -> None:
        self.is_full = True

    def append(self, descriptor: int, data: bytes) -> None:
        if self.is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().append(descriptor, data)


def test_what_can_not_be_noted_is_not_sent(oracle: Oracle, spool: Path, tmp_path: Path) -> None:
    disk = FullDisk()
    with FakeCollector() as collector:
        builder = SpoolBuilder(spool, run_id="run")
        write_spans(builder, oracle, 20)
        builder.end()
        rig = Rig(spool, collector.url, storage=disk)
        for _ in range(5):
            rig.turn()
        assert collector.num_requests("/v1/spans") == 0
        disk.is_full = False
        rig.turn_until(lambda: len(collector.stored.rows) >= 20)

        assert_clean(tmp_path, collector.stored)
        assert sum("can't be written" in line for line in rig.lines) == 1
        rig.close()


def test_two_agents_at_one_collector_do_not_disturb_each_other(
    oracle: Oracle, tmp_path: Path
) -> None:
    with FakeCollector() as collector:
        rigs = []
        for rank in range(2):
            spool = tmp_path / f"spool-{rank}"
            builder = SpoolBuilder(spool, run_id="run", rank=rank)
            write_spans(builder, oracle, 50)
            builder.end()
            rigs.append(Rig(spool, collector.url))
        threads = [
            threading.Thread(target=lambda rig=rig: [rig.turn() for _ in range(4)]) for rig in rigs
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

        assert_clean(tmp_path, collector.stored)
        for rig in rigs:
            rig.close()
