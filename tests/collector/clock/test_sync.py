from __future__ import annotations

from itertools import pairwise

import pytest

from rankscope.collector.clock.probe import ProbeReply
from rankscope.collector.clock.sync import MAX_ASKED_NS, ClockSync, ProbeConfig, newest_agreeing
from rankscope.collector.clock.watch import ClockEventKind
from rankscope.tracer.span import MonotonicNs, UnixNs
from tests.support.collector.clock_network import (
    MS,
    START_NS,
    UNIX_NS,
    US,
    FakeNetwork,
    S,
    host_clock,
    probe_at,
    steady,
)


def test_a_constant_asymmetry_is_not_visible_but_within_the_bound() -> None:
    # GIVEN delays of 2 ms there and 100 us back, which no exchange of messages can show
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
    # At least the wander of 1 ppm over an hour.
    assert old_ns - fresh_ns >= 3_600 * US


def test_a_step_of_the_reference_is_an_event_and_drops_older_probes() -> None:
    # GIVEN a minute of probes
    network = FakeNetwork(delays=steady)
    clock = host_clock(network)
    network.run(clock, for_ns=60 * S)
    assert clock.estimate() is not None
    # WHEN the reference steps by 3 s, as after a suspend of its host, and one probe follows
    network.offset_ns += 3 * S
    assert clock.probe()

    # THEN the estimate has the new offset at once, and an event reports the step
    found = clock.estimate()
    assert found is not None
    assert (found.num_probes, found.fit.offset_ns) == (1, UNIX_NS + 3 * S)
    (event,) = clock.take_events()
    assert event.kind is ClockEventKind.OFFSET_STEP
    assert event.shift_ns == 3 * S
    assert clock.take_events() == ()


def test_another_reference_clock_starts_a_new_window() -> None:
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


def test_a_reply_whose_times_exceed_the_round_trip_is_rejected() -> None:
    def exchange() -> ProbeReply:
        network.now_ns += MS
        return ProbeReply(
            reference_id="r", received_ns=UnixNs(UNIX_NS), replied_ns=UnixNs(UNIX_NS + S)
        )

    network = FakeNetwork(delays=steady)
    clock = ClockSync(exchange, monotonic_ns=network.clock)

    assert not clock.probe()
    assert (clock.num_failed, clock.estimate()) == (1, None)


def test_after_a_suspend_the_estimate_is_unknown_until_the_next_probe() -> None:
    network = FakeNetwork(delays=steady)
    clock = host_clock(network)
    network.run(clock, for_ns=10 * S)
    # A suspend of 90 s, in which the monotonic clock stops.
    network.offset_ns += 90 * S
    clock.forget()

    assert clock.estimate() is None
    assert clock.poll()
    found = clock.estimate()
    assert found is not None
    assert found.fit.offset_ns == UNIX_NS + 90 * S
    assert clock.take_events() == ()


def test_probes_are_frequent_at_first_and_once_a_second_later() -> None:
    network = FakeNetwork(delays=lambda: (0, 0), turn_ns=0)
    sent = network.run(host_clock(network), for_ns=600 * S, poll_ns=10 * MS)

    pauses = [after - before for before, after in pairwise(sent)]
    assert pauses[0] == 50 * MS
    assert pauses[-1] == S
    # 256 at 20 a second, 256 ln(256 / 12.8) on the way to one a second, then 344.
    assert 1_300 <= len(sent) <= 1_400


def test_the_pause_that_a_collector_asks_for_is_kept() -> None:
    # GIVEN a collector that asks for 300 ms
    network = FakeNetwork(delays=lambda: (0, 0), turn_ns=0, pause_ns=300 * MS)
    clock = host_clock(network)
    sent = network.run(clock, for_ns=30 * S, poll_ns=10 * MS)

    # THEN no probe is sent earlier, even after a suspend of the host
    assert {after - before for before, after in pairwise(sent)} == {300 * MS}
    assert clock.probe()
    clock.forget()
    assert not clock.poll()
    network.now_ns += 300 * MS
    assert clock.poll()


def test_the_pause_that_a_collector_asks_for_is_at_most_a_minute() -> None:
    network = FakeNetwork(delays=steady, pause_ns=10**17)
    clock = host_clock(network)
    assert clock.poll()

    network.now_ns += MAX_ASKED_NS - MS
    assert not clock.poll()
    network.now_ns += MS
    assert clock.poll()


def test_a_collector_that_does_not_answer_is_probed_with_backoff() -> None:
    network = FakeNetwork(delays=steady, broken=True)
    clock = ClockSync(network.exchange, monotonic_ns=network.clock, uniform=lambda _, most: most)
    tried: list[int] = []
    for _ in range(600):
        before = clock.num_failed
        clock.poll()
        if clock.num_failed > before:
            tried.append(network.now_ns - START_NS)
        network.now_ns += 10 * MS

    # THEN each pause is twice the one before, up to a second
    assert tried == [
        0,
        100 * MS,
        300 * MS,
        700 * MS,
        1_500 * MS,
        2_500 * MS,
        3_500 * MS,
        4_500 * MS,
        5_500 * MS,
    ]

    # AND a reply ends the backoff
    network.broken = False
    network.now_ns += S
    assert clock.poll()
    network.now_ns += 50 * MS
    assert clock.poll()


def test_the_window_is_bounded_in_number_and_age() -> None:
    network = FakeNetwork(delays=steady)
    clock = host_clock(network, ProbeConfig(max_probes=8, window_ns=5 * S, first_pause_ns=S))
    network.run(clock, for_ns=60 * S)

    found = clock.estimate()

    assert found is not None
    assert found.num_probes in {5, 6}


def test_the_newest_probes_that_agree_are_kept() -> None:
    old = [probe_at(START_NS + i * S, offset_ns=0, there_ns=US, back_ns=US) for i in range(7)]
    new = [probe_at(START_NS + i * S, offset_ns=9 * S, there_ns=US, back_ns=US) for i in (7, 8, 9)]

    kept, fit = newest_agreeing([*old, *new])

    assert kept == new
    assert fit.offset_ns == 9 * S


@pytest.mark.parametrize(
    "name",
    ["first_probes", "first_pause_ns", "change_pause_ns", "pause_ns", "window_ns", "max_probes"],
)
def test_a_config_value_of_zero_is_an_error(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        ProbeConfig(**{name: 0})


def test_a_restarted_collector_is_probed_at_most_twice_as_often_as_before() -> None:
    # GIVEN a host that probes once a second
    network = FakeNetwork(delays=lambda: (0, 0), turn_ns=0)
    clock = host_clock(network)
    network.run(clock, for_ns=300 * S, poll_ns=10 * MS)
    assert len(network.run(clock, for_ns=10 * S, poll_ns=10 * MS)) == 10

    # WHEN its collector is restarted
    network.reference_id = "second"
    sent_ns = network.run(clock, for_ns=20 * S, poll_ns=10 * MS)

    # THEN there are at most two probes in any second, and the window is full after two minutes
    assert 38 <= len(sent_ns) <= 40
    for begin_ns in sent_ns:
        assert sum(begin_ns <= at_ns < begin_ns + S for at_ns in sent_ns) <= 2
    network.run(clock, for_ns=110 * S, poll_ns=10 * MS)
    found = clock.estimate()
    assert found is not None
    assert found.reference_id == "second"
    assert 250 <= found.num_probes <= 260

    # AND then one per second again
    network.run(clock, for_ns=130 * S, poll_ns=10 * MS)
    assert len(network.run(clock, for_ns=10 * S, poll_ns=10 * MS)) == 10


def test_a_suspended_host_probes_as_often_as_at_its_start() -> None:
    network = FakeNetwork(delays=lambda: (0, 0), turn_ns=0)
    clock = host_clock(network)
    network.run(clock, for_ns=300 * S)
    network.reference_id = "second"
    network.run(clock, for_ns=300 * S)

    clock.forget()

    assert len(network.run(clock, for_ns=S, poll_ns=10 * MS)) == 20
