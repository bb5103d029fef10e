from __future__ import annotations

import random
import threading
import time
from typing import TYPE_CHECKING

import pytest

from rankscope.collector.agent.clock import (
    LEAD_NS,
    SLEW_NS,
    AgentClocks,
    ProbeThread,
    next_stretches,
)
from rankscope.collector.agent.errors import RetryLaterError
from rankscope.collector.agent.journal import Journal
from rankscope.collector.clock.fit import ClockFit
from rankscope.collector.clock.map import ClockMap
from rankscope.collector.clock.probe import ProbeReply
from rankscope.collector.clock.sync import ClockEstimate, ClockSync, ProbeConfig
from rankscope.collector.clock.watch import ClockEvent, ClockEventKind
from rankscope.tracer.span import MonotonicNs, UnixNs
from rankscope.tracer.spool import PROCESS_MAGIC, SpoolIdentity, read_header
from tests.faults.checker import Oracle
from tests.support.collector.agent_rig import Rig, write_spans
from tests.support.collector.fake_collector import FakeCollector
from tests.support.collector.spool_builder import BOOT_ID, ELSEWHERE, OFFSET_NS, SpoolBuilder
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.collector.conftest import FakeClock

MS, S = 1_000_000, 1_000_000_000


def estimate(
    offset_ns: int,
    *,
    at_ns: int = 0,
    drift_ppb: int = 0,
    error_ns: int = 100,
    num_probes: int = 500,
) -> ClockEstimate:
    """Return the estimate of probes with this offset at a time."""
    fit = ClockFit(
        at_ns=MonotonicNs(at_ns),
        offset_ns=offset_ns,
        drift_ppb=drift_ppb,
        drift_error_ppb=0,
        clock_error_ns=error_ns,
    )
    return ClockEstimate(fit=fit, reference_id="ref", delay_ns=1, num_probes=num_probes)


class Host:
    """A host whose estimate a test sets."""

    def __init__(self, folder: Path, clock: FakeClock) -> None:
        builder = SpoolBuilder(folder / "spool", run_id="run")
        header = (builder.folder / "process.rsp").read_bytes()[:4096]
        self.identity: SpoolIdentity = read_header(header, magic=PROCESS_MAGIC, path=builder.folder)
        self.clock = clock
        self.found: ClockEstimate | None = None
        self.events: list[ClockEvent] = []
        self.folder = folder
        self.journal = Journal(folder)
        self.clocks = self.start()

    def start(self) -> AgentClocks:
        return AgentClocks(
            self.journal,
            own=(ELSEWHERE, BOOT_ID),
            estimate=lambda: self.found,
            monotonic_ns=self.clock,
            watch=lambda: self.events,
        )

    def restart(self) -> AgentClocks:
        self.journal.close()
        self.journal = Journal(self.folder)
        return self.start()


@pytest.fixture
def host(tmp_path: Path, clock: FakeClock) -> Iterator[Host]:
    made = Host(tmp_path, clock)
    yield made
    made.journal.close()


def test_no_row_is_mapped_before_the_clock_is_aligned(host: Host) -> None:
    with pytest.raises(RetryLaterError, match="being aligned"):
        host.clocks.clock_map(host.identity)

    host.found = estimate(77 * S)
    mapped = host.clocks.clock_map(host.identity)

    assert mapped.unix_at(host.clock()) == host.clock() + 77 * S


def test_without_probes_the_anchor_is_used_with_an_unknown_error(host: Host) -> None:
    with pytest.raises(RetryLaterError):
        host.clocks.clock_map(host.identity)
    host.clock.advance_s(6)

    mapped = host.clocks.clock_map(host.identity)

    assert mapped.unix_at(5_000) == 5_000 + OFFSET_NS
    (row,) = host.clocks.take_rows()
    assert (row["offset_ns"], row["clock_error_ns"]) == (OFFSET_NS, -1)


def test_a_host_without_a_run_has_the_time_of_the_collector(
    host: Host, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    # GIVEN a wall clock that is an hour ahead, and no run
    monkeypatch.setattr("time.time_ns", lambda: OFFSET_NS + clock() + 3_600 * S)
    clock.now_ns = 5 * S

    # WHEN no probe was answered yet, THEN the time is that of the wall clock
    assert host.clocks.unix_now() == OFFSET_NS + 3_605 * S

    # WHEN one was answered, THEN samples have the same time as spans
    host.found = estimate(OFFSET_NS, num_probes=1)
    assert host.clocks.unix_now() == OFFSET_NS + 5 * S
    host.found = estimate(OFFSET_NS)
    assert host.clocks.clock_map(host.identity).unix_at(5 * S) == OFFSET_NS + 5 * S


def test_a_restarted_agent_maps_times_as_the_last_one_did(host: Host) -> None:
    host.found = estimate(77 * S, at_ns=host.clock(), drift_ppb=40_000)
    before = host.clocks.clock_map(host.identity)
    host.clock.advance_s(16)
    host.found = estimate(77 * S + 2 * MS, at_ns=host.clock(), drift_ppb=50_000)
    host.clocks.renew()

    after = host.restart().clock_map(host.identity)

    for seconds in (0, 1, 16, 17, 20, 30, 4000):
        at_ns = 10**12 + seconds * S
        assert after.unix_at(at_ns) == before.unix_at(at_ns)


def test_a_new_estimate_changes_no_time_that_may_have_been_sent(host: Host) -> None:
    host.found = estimate(77 * S)
    mapped = host.clocks.clock_map(host.identity)
    host.clock.advance_s(16)
    times = [10**12, host.clock() - 1, host.clock()]
    before = [mapped.unix_at(at_ns) for at_ns in times]

    host.found = estimate(77 * S + MS, at_ns=host.clock())
    host.clocks.renew()

    assert [mapped.unix_at(at_ns) for at_ns in times] == before
    # THEN it slews to the new one: 1 ms over 10 s, from one second later
    begin_ns = host.clock() + LEAD_NS
    assert mapped.unix_at(begin_ns + SLEW_NS // 2) == begin_ns + SLEW_NS // 2 + 77 * S + MS // 2
    assert mapped.unix_at(begin_ns + SLEW_NS) == begin_ns + SLEW_NS + 77 * S + MS


def test_an_estimate_with_few_probes_is_not_followed(host: Host) -> None:
    # GIVEN another collector's clock, a minute later, with 31 probes
    host.found = estimate(77 * S)
    mapped = host.clocks.clock_map(host.identity)
    host.clock.advance_s(61)
    host.found = estimate(78 * S, at_ns=host.clock(), num_probes=31)
    host.clocks.renew()
    host.clock.advance_s(5)
    assert mapped.unix_at(host.clock()) == host.clock() + 77 * S

    # WHEN there is one more
    host.found = estimate(78 * S, at_ns=host.clock(), num_probes=32)
    host.clocks.renew()

    # THEN it is followed at once, before the next regular renewal
    host.clock.advance_s(2)
    assert mapped.unix_at(host.clock()) == host.clock() + 78 * S


def test_the_reported_error_includes_the_remaining_slew(host: Host) -> None:
    host.found = estimate(77 * S)
    host.clocks.clock_map(host.identity)
    host.clock.advance_s(16)
    host.found = estimate(77 * S + MS, at_ns=host.clock(), error_ns=300)
    host.clocks.take_rows()
    host.clocks.renew()

    (row,) = host.clocks.take_rows()

    assert row["clock_error_ns"] == MS + 300 + 1
    assert row["offset_ns"] == 77 * S


@pytest.mark.parametrize(("shift_ns", "num_stretches"), [(4 * MS, 2), (-4 * MS, 2), (6 * MS, 1)])
def test_a_difference_beyond_measurement_error_is_a_step(shift_ns: int, num_stretches: int) -> None:
    known = ClockMap.fixed(10 * S)

    found = next_stretches(known, estimate(10 * S + shift_ns), 100 * S)

    assert len(found) == num_stretches
    assert found[-1].offset_ns == 10 * S + shift_ns


def test_time_never_runs_backwards_in_a_slew() -> None:
    known = ClockMap.fixed(10 * S)
    for stretch in next_stretches(known, estimate(10 * S - 4 * MS), 100 * S):
        known.add(stretch)

    times = [known.unix_at(99 * S + step * MS * 10) for step in range(1_500)]

    assert times == sorted(times)


@pytest.mark.slow
def test_a_drifting_clock_is_followed_within_fifty_microseconds(
    host: Host, clock: FakeClock
) -> None:
    # GIVEN a host that is off by 10 ms and 50 ppm, and 1 ms of jitter each way
    chooser = random.Random(3)
    begun_ns = clock()

    def truth(at_ns: int) -> int:
        return at_ns + 77 * S + 10 * MS + (at_ns - begun_ns) * 50 // 10**6

    def exchange() -> ProbeReply:
        clock.now_ns += round(chooser.expovariate(1 / MS)) + 200_000
        at = UnixNs(truth(clock()))
        clock.now_ns += round(chooser.expovariate(1 / MS)) + 200_000
        return ProbeReply(reference_id="ref", received_ns=at, replied_ns=at)

    sync = ClockSync(exchange, monotonic_ns=clock)
    mapped: ClockMap | None = None
    # WHEN it is probed for twenty minutes
    while clock() - begun_ns < 1_200 * S:
        sync.poll()
        host.found = sync.estimate() if (clock() - begun_ns) % S < 100 * MS else host.found
        if mapped is None and host.found is not None and host.found.num_probes >= 300:
            mapped = host.clocks.clock_map(host.identity)
        host.clocks.renew()
        clock.advance_s(0.05 if clock() - begun_ns < 30 * S else 0.5)

    # THEN each time after the first slew is within 50 us
    assert mapped is not None
    errors = [
        abs(mapped.unix_at(begun_ns + second * S) - truth(begun_ns + second * S))
        for second in range(90, 1_200, 10)
    ]
    assert max(errors) <= 50_000


def test_a_step_of_the_wall_clock_is_an_event_and_changes_no_time(
    tmp_path: Path, clock: FakeClock
) -> None:
    # GIVEN a run that trains, on a host whose wall clock is set back by an hour
    spool = tmp_path / "spool"
    with FakeCollector() as collector, Oracle(tmp_path / "oracle", is_synced=False) as oracle:
        builder = SpoolBuilder(spool, run_id="run", rank=1)
        write_spans(builder, oracle, 10)
        events = [
            ClockEvent(
                kind=ClockEventKind.WALL_STEP,
                at_ns=7_000,
                shift_ns=-3_600 * S,
                text="the wall clock was set back",
            )
        ]
        rig = Rig(spool, collector.url, own=(ELSEWHERE, BOOT_ID), watch=lambda: events)
        rig.turn_until(lambda: bool(collector.stored.rows))
        rig.turn()

        event = next(row for row in collector.stored.described["events"] if row["line"] == -4)
        assert (event["run_id"], event["rank"], event["kind"]) == ("run", 1, "wall-clock-step")
        assert event["at_ns"] == 7_000 + OFFSET_NS


def test_the_first_probes_give_an_estimate_at_once() -> None:
    # GIVEN a collector that answers two probes, and then blocks
    answers = iter(range(2))
    is_done = threading.Event()

    def exchange() -> ProbeReply:
        if next(answers, None) is None:
            is_done.wait()
            raise ConnectionResetError
        at = UnixNs(time.monotonic_ns())
        return ProbeReply(reference_id="r", received_ns=at, replied_ns=at)

    config = ProbeConfig(first_pause_ns=1, pause_ns=1)
    probes = ProbeThread(ClockSync(exchange, monotonic_ns=time.monotonic_ns, config=config))
    probes.start()

    # THEN both count, although a third is never answered
    def is_known() -> bool:
        latest = probes.latest()
        return latest is not None and latest.num_probes == 2

    try:
        wait_until(is_known)
    finally:
        probes.stop()
        is_done.set()
