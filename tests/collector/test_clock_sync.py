from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collector.clock_fit import Bound, fit_clock, lower_hull, upper_hull, widest_line
from collector.clock_probe import Probe, ProbeReply
from collector.clock_sync import HostClock, ProbeConfig, newest_agreeing
from collector.clock_watch import ClockEventKind
from collector.errors import ClockReplyError
from tracer.span import MonotonicNs, UnixNs

if TYPE_CHECKING:
    from collections.abc import Callable

US = 1_000
MS = 1_000_000
S = 1_000_000_000
UNIX_NS = 1_700_000_000 * S
START_NS = 5_000 * S
Delays = tuple[float, float]


def probe_at(at_ns: int, *, offset_ns: int, there_ns: int, back_ns: int, turn_ns: int = 0) -> Probe:
    """A probe of a reference that is ``offset_ns`` ahead and does not drift."""
    received_ns = at_ns + there_ns + offset_ns
    return Probe(
        sent_ns=MonotonicNs(at_ns),
        received_ns=UnixNs(received_ns),
        replied_ns=UnixNs(received_ns + turn_ns),
        returned_ns=MonotonicNs(at_ns + there_ns + turn_ns + back_ns),
    )


@dataclass(kw_only=True)
class FakeNetwork:
    """A host, a collector and the way between them; time passes only on the way and when told."""

    delays: Callable[[], Delays]
    offset_ns: int = UNIX_NS
    drift_ppb: int = 0
    now_ns: int = START_NS
    reference_id: str = "first"
    broken: bool = False
    turn_ns: int = 20 * US

    def clock(self) -> int:
        return self.now_ns

    def true_offset_ns(self, at_ns: int) -> int:
        return self.offset_ns + (at_ns - START_NS) * self.drift_ppb // S

    def exchange(self) -> ProbeReply:
        if self.broken:
            raise ConnectionRefusedError
        there_ns, back_ns = self.delays()
        self.now_ns += round(there_ns)
        received_ns = self.now_ns + self.true_offset_ns(self.now_ns)
        self.now_ns += self.turn_ns
        replied_ns = self.now_ns + self.true_offset_ns(self.now_ns)
        self.now_ns += round(back_ns)
        return ProbeReply(
            reference_id=self.reference_id,
            received_ns=UnixNs(received_ns),
            replied_ns=UnixNs(replied_ns),
        )

    def run(self, clock: HostClock, *, for_ns: int, look_ns: int = 50 * MS) -> None:
        end_ns = self.now_ns + for_ns
        while self.now_ns < end_ns:
            clock.poll()
            self.now_ns += look_ns


def steady() -> Delays:
    return 100 * US, 100 * US


def host_clock(network: FakeNetwork, config: ProbeConfig | None = None) -> HostClock:
    return HostClock(network.exchange, monotonic_ns=network.clock, config=config)


def test_one_probe_gives_the_middle_and_half_the_round_trip_as_error() -> None:
    # GIVEN one probe: 300 us there, 100 us back, 50 us at the collector
    probe = probe_at(START_NS, offset_ns=7 * S, there_ns=300 * US, back_ns=100 * US, turn_ns=50_000)

    # WHEN it is fitted
    fit = fit_clock([probe], max_drift_ppb=0, wander_ppb=0)

    # THEN the offset is off by half the difference of both ways, and the error covers it
    assert fit is not None
    assert probe.delay_ns == 400 * US
    assert fit.offset_ns == 7 * S + 100 * US
    assert 200 * US <= fit.clock_error_ns <= 200 * US + 10
    assert fit.at_ns == START_NS + 450 * US


def test_each_ways_lowest_delay_counts_even_from_different_probes() -> None:
    # GIVEN one probe quick there and another quick back; no probe is quick both ways
    probes = [
        probe_at(START_NS, offset_ns=S, there_ns=10 * US, back_ns=5 * MS),
        probe_at(START_NS + S, offset_ns=S, there_ns=5 * MS, back_ns=10 * US),
    ]

    fit = fit_clock(probes, max_drift_ppb=0, wander_ppb=0)

    # THEN together they bound the offset to 10 us, where half a round trip is 2.5 ms
    assert fit is not None
    assert fit.offset_ns == S
    assert fit.clock_error_ns <= 10 * US + 10


def test_hulls_keep_only_what_a_line_can_touch() -> None:
    bounds = [Bound(0.0, 1.0), Bound(1.0, 9.0), Bound(2.0, 1.0), Bound(3.0, 5.0)]

    assert lower_hull(bounds) == [Bound(0.0, 1.0), Bound(2.0, 1.0), Bound(3.0, 5.0)]
    assert upper_hull(bounds) == [Bound(0.0, 1.0), Bound(1.0, 9.0), Bound(3.0, 5.0)]


def test_the_line_lies_halfway_where_the_bounds_leave_most_room() -> None:
    # Upper bounds rise by 10 ns/s, lower ones too, 4 ns below.
    uppers = [Bound(-2.0, -18.0), Bound(0.0, 2.0)]
    lowers = [Bound(-2.0, -22.0), Bound(0.0, -2.0)]

    line = widest_line(uppers, lowers, max_drift_ppb=100)

    assert (line.offset_ns, line.drift_ppb, line.room_ns) == (0.0, 10.0, 4.0)


def jitter(kind: str, randomness: random.Random) -> Callable[[], Delays]:
    """Return delays: 200 us each way and a queue of 1 ms (its mean, width or deviation)."""
    base_ns = 200 * US
    queues: dict[str, Callable[[], Delays]] = {
        "exponential": lambda: (randomness.expovariate(1 / MS), randomness.expovariate(1 / MS)),
        "uniform": lambda: (randomness.uniform(0, MS), randomness.uniform(0, MS)),
        "half-normal": lambda: (abs(randomness.gauss(0, MS)), abs(randomness.gauss(0, MS))),
        # Ten times as long a queue there as back: 3 ms and 0.3 ms.
        "asymmetric": lambda: (
            randomness.expovariate(1 / (3 * MS)),
            randomness.expovariate(1 / (0.3 * MS)),
        ),
    }

    def delays() -> Delays:
        there_ns, back_ns = queues[kind]()
        return base_ns + there_ns, base_ns + back_ns

    return delays


@pytest.mark.slow
@pytest.mark.parametrize(("age_s", "look_ns"), [(60, 50 * MS), (600, 200 * MS)])
@pytest.mark.parametrize("kind", ["exponential", "uniform", "half-normal", "asymmetric"])
def test_skew_and_drift_behind_jitter_are_recovered_within_50_us_at_p99(
    kind: str, age_s: int, look_ns: int
) -> None:
    # GIVEN 200 pairs of clocks, 10 ms and 50 ppm apart either way, probed for a while
    errors_ns, drifts_ppb = [], []
    for seed in range(200):
        randomness = random.Random(seed)
        network = FakeNetwork(
            delays=jitter(kind, randomness),
            offset_ns=UNIX_NS + randomness.choice((-10, 10)) * MS,
            drift_ppb=randomness.choice((-50_000, 50_000)),
        )
        clock = host_clock(network)
        network.run(clock, for_ns=age_s * S, look_ns=look_ns)

        # WHEN the last probe is taken
        found = clock.estimate()
        assert found is not None
        now_ns = MonotonicNs(network.now_ns)
        error_ns = abs(found.unix_ns(now_ns) - now_ns - network.true_offset_ns(now_ns))

        # THEN each error is within its bound
        assert error_ns <= found.error_ns(now_ns)
        errors_ns.append(error_ns)
        drifts_ppb.append(abs(found.fit.drift_ppb - network.drift_ppb))

    # AND 198 of 200 are within 50 us, and 1 ppm
    assert sorted(errors_ns)[197] <= 50 * US
    assert sorted(drifts_ppb)[197] <= 1_000


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_the_true_offset_lies_within_the_bound_whatever_the_delays(data: st.DataObject) -> None:
    # GIVEN any offset, any rate, any delays, one way always slower if it likes
    offset_ns = data.draw(st.integers(-(10**18), 10**18), label="offset_ns")
    drift_ppb = data.draw(st.integers(-400_000, 400_000), label="drift_ppb")
    slower_ns = data.draw(st.integers(0, 50 * MS), label="always slower there")
    way = st.tuples(st.integers(0, 10 * MS), st.integers(0, 10 * MS), st.integers(0, 30 * S))
    ways = data.draw(st.lists(way, min_size=1, max_size=40), label="there, back, pause")
    later_ns = data.draw(st.integers(0, 3_600 * S), label="asked later")
    left = [(there_ns + slower_ns, back_ns) for there_ns, back_ns, _ in ways]
    network = FakeNetwork(
        delays=lambda: left.pop(0), offset_ns=3 * 10**18 + offset_ns, drift_ppb=drift_ppb
    )
    clock = host_clock(network, ProbeConfig(window_ns=10**15))
    for _, _, pause_ns in ways:
        assert clock.probe()
        network.now_ns += pause_ns

    # WHEN the offset is asked for then, or up to an hour later
    found = clock.estimate()
    assert found is not None
    assert found.num_probes == len(ways)
    for at_ns in (found.fit.at_ns, MonotonicNs(found.fit.at_ns + later_ns)):
        off_ns = found.unix_ns(at_ns) - at_ns - network.true_offset_ns(at_ns)
        # THEN the truth is inside
        assert abs(off_ns) <= found.error_ns(at_ns)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_the_bound_holds_while_the_rate_wanders_within_1_ppm(data: st.DataObject) -> None:
    # GIVEN a rate that is anything within 1 ppm of 50 ppm between two probes
    rate = st.integers(49_000, 51_000)
    legs = data.draw(
        st.lists(st.tuples(rate, st.integers(0, MS), st.integers(0, MS)), min_size=2, max_size=40)
    )
    at_ns, offset_ns, end_offset_ns = START_NS, UNIX_NS, UNIX_NS
    probes: list[Probe] = []
    for rate_ppb, there_ns, back_ns in legs:
        received_ns = at_ns + there_ns
        returned_ns = received_ns + back_ns
        reference_ns = received_ns + offset_ns + there_ns * rate_ppb // S
        probes.append(
            Probe(
                sent_ns=MonotonicNs(at_ns),
                received_ns=UnixNs(reference_ns),
                replied_ns=UnixNs(reference_ns),
                returned_ns=MonotonicNs(returned_ns),
            )
        )
        end_offset_ns = offset_ns + (returned_ns - at_ns) * rate_ppb // S
        offset_ns += (returned_ns - at_ns + S) * rate_ppb // S
        at_ns = returned_ns + S
    fit = fit_clock(probes, wander_ppb=1_000)

    # THEN the offset at the last probe is inside
    assert fit is not None
    assert abs(fit.offset_ns - end_offset_ns) <= fit.clock_error_ns


def test_a_constant_difference_between_both_ways_is_not_seen_but_covered() -> None:
    # GIVEN 2 ms there and 100 us back, always: no exchange of messages can tell
    network = FakeNetwork(delays=lambda: (2 * MS, 100 * US))
    clock = host_clock(network)
    network.run(clock, for_ns=60 * S)

    found = clock.estimate()

    # THEN the offset is off by half the difference, 950 us, and the bound says at least that
    assert found is not None
    now_ns = MonotonicNs(network.now_ns)
    error_ns = abs(found.unix_ns(now_ns) - now_ns - UNIX_NS)
    assert 900 * US <= error_ns <= 1_000 * US
    assert error_ns <= found.error_ns(now_ns)


def test_the_bound_grows_with_age() -> None:
    network = FakeNetwork(delays=steady)
    clock = host_clock(network)
    network.run(clock, for_ns=600 * S)
    found = clock.estimate()
    assert found is not None

    fresh_ns = found.error_ns(found.fit.at_ns)
    old_ns = found.error_ns(MonotonicNs(found.fit.at_ns + 3_600 * S))

    assert fresh_ns < 200 * US
    # At least what 1 ppm of wander adds in an hour.
    assert old_ns - fresh_ns >= 3_600 * US


def test_two_moments_lie_as_far_apart_in_unix_time_as_the_reference_counts() -> None:
    # GIVEN clocks 50 ppm apart
    network = FakeNetwork(delays=steady, drift_ppb=50_000)
    clock = host_clock(network)
    network.run(clock, for_ns=60 * S)
    found = clock.estimate()
    assert found is not None
    start_ns, end_ns = network.now_ns, network.now_ns + 10 * S

    between_ns = found.unix_ns(MonotonicNs(end_ns)) - found.unix_ns(MonotonicNs(start_ns))

    # THEN they lie apart as the reference counts: 10 s and 500 us, to 1 ppm
    assert abs(between_ns - (10 * S + 500 * US)) <= 10 * US


def test_the_row_of_a_batch_holds_offset_drift_and_aged_error() -> None:
    network = FakeNetwork(delays=steady)
    clock = host_clock(network)
    clock.probe()
    found = clock.estimate()
    assert found is not None
    at_ns = MonotonicNs(found.fit.at_ns + 10 * S)

    row = found.row("node-3", "ab" * 16, at_ns=at_ns)

    assert row == {
        "host": "node-3",
        "boot_id": "ab" * 16,
        "at_ns": at_ns + UNIX_NS,
        "offset_ns": UNIX_NS,
        "drift_ppb": 0,
        "clock_error_ns": found.error_ns(at_ns),
    }


def test_a_step_of_the_reference_is_told_and_older_probes_are_left_out() -> None:
    # GIVEN a minute of probes
    network = FakeNetwork(delays=steady)
    clock = host_clock(network)
    network.run(clock, for_ns=60 * S)
    assert clock.estimate() is not None
    # WHEN the reference jumps by 3 s (its host slept) and one probe follows
    network.offset_ns += 3 * S
    assert clock.probe()

    # THEN the estimate is the new offset at once, and an event names the step
    found = clock.estimate()
    assert found is not None
    assert (found.num_probes, found.fit.offset_ns) == (1, UNIX_NS + 3 * S)
    (event,) = clock.take_events()
    assert event.kind is ClockEventKind.OFFSET_STEP
    assert event.shift_ns == 3 * S
    assert clock.take_events() == ()


def test_another_collectors_clock_begins_a_new_window() -> None:
    network = FakeNetwork(delays=steady)
    clock = host_clock(network)
    network.run(clock, for_ns=10 * S)
    network.reference_id = "second"
    network.offset_ns += 40 * US
    assert clock.probe()

    found = clock.estimate()

    assert found is not None
    assert (found.reference_id, found.num_probes) == ("second", 1)
    assert [event.kind for event in clock.take_events()] == [ClockEventKind.REFERENCE_CHANGE]


def test_probes_that_fail_are_counted_and_change_nothing() -> None:
    network = FakeNetwork(delays=steady)
    clock = host_clock(network)
    assert clock.estimate() is None
    clock.probe()
    before = clock.estimate()

    network.broken = True
    assert not clock.probe()

    assert clock.num_failed == 1
    assert clock.estimate() == before


def test_a_reply_that_took_longer_to_make_than_to_get_is_refused() -> None:
    def exchange() -> ProbeReply:
        network.now_ns += MS
        return ProbeReply(
            reference_id="r", received_ns=UnixNs(UNIX_NS), replied_ns=UnixNs(UNIX_NS + S)
        )

    network = FakeNetwork(delays=steady)
    clock = HostClock(exchange, monotonic_ns=network.clock)

    assert not clock.probe()
    assert (clock.num_failed, clock.estimate()) == (1, None)


def test_an_answer_that_is_no_reply_is_counted() -> None:
    def exchange() -> ProbeReply:
        raise ClockReplyError("it is no object")

    clock = HostClock(exchange, monotonic_ns=lambda: START_NS)

    assert not clock.probe()
    assert clock.num_failed == 1


def test_after_a_suspend_nothing_is_known_until_the_next_probe() -> None:
    network = FakeNetwork(delays=steady)
    clock = host_clock(network)
    network.run(clock, for_ns=10 * S)
    # The host slept for 90 s: its monotonic clock stood still.
    network.offset_ns += 90 * S
    clock.forget()

    assert clock.estimate() is None
    assert clock.poll()
    found = clock.estimate()
    assert found is not None
    assert found.fit.offset_ns == UNIX_NS + 90 * S
    assert clock.take_events() == ()


def test_probes_come_often_at_first_and_once_a_second_later() -> None:
    network = FakeNetwork(delays=lambda: (0, 0), turn_ns=0)
    clock = host_clock(network)
    sent: list[int] = []
    while network.now_ns < START_NS + 600 * S:
        if clock.poll():
            sent.append(network.now_ns)
        network.now_ns += 10 * MS

    pauses = [after - before for before, after in pairwise(sent)]
    assert pauses[0] == 50 * MS
    assert pauses[-1] == S
    # 256 at 20 a second, 256 ln(256 / 12.8) on the way to one a second, then 344.
    assert 1_300 <= len(sent) <= 1_400


def test_the_window_keeps_no_more_and_no_older_than_it_says() -> None:
    network = FakeNetwork(delays=steady)
    clock = host_clock(network, ProbeConfig(max_probes=8, window_ns=5 * S, first_pause_ns=S))
    network.run(clock, for_ns=60 * S)

    found = clock.estimate()

    assert found is not None
    assert found.num_probes in {5, 6}


def test_the_newest_probes_that_agree_are_found() -> None:
    old = [probe_at(START_NS + i * S, offset_ns=0, there_ns=US, back_ns=US) for i in range(7)]
    new = [probe_at(START_NS + i * S, offset_ns=9 * S, there_ns=US, back_ns=US) for i in (7, 8, 9)]

    kept, fit = newest_agreeing([*old, *new])

    assert kept == new
    assert fit.offset_ns == 9 * S


@pytest.mark.parametrize(
    "name",
    ["first_probes", "first_pause_ns", "change_pause_ns", "pause_ns", "window_ns", "max_probes"],
)
def test_a_config_of_nothing_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        ProbeConfig(**{name: 0})
