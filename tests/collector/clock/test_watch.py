from __future__ import annotations

from dataclasses import dataclass, replace

from rankscope.collector.clock.watch import (
    ClockEvent,
    ClockEventKind,
    ClockWatch,
    HostReading,
    read_host,
)

MS = 1_000_000
S = 1_000_000_000
HOUR_S = 3_600
DAY_S = 86_400


START = HostReading(monotonic_ns=10**12, unix_ns=1_700_000_000 * S, boottime_ns=10**12)


@dataclass(kw_only=True)
class FakeHost:
    """Three clocks that agree until a test changes one."""

    reading: HostReading = START

    def __call__(self) -> HostReading:
        return self.reading

    def run(self, seconds: int, *, wall_ppm: int = 0) -> None:
        ns = seconds * S
        self.reading = HostReading(
            monotonic_ns=self.reading.monotonic_ns + ns,
            unix_ns=self.reading.unix_ns + ns + seconds * 1_000 * wall_ppm,
            boottime_ns=self.reading.boottime_ns + ns,
        )

    def set_wall(self, by_s: int) -> None:
        self.reading = replace(self.reading, unix_ns=self.reading.unix_ns + by_s * S)

    def suspend(self, seconds: int) -> None:
        self.reading = replace(
            self.reading,
            unix_ns=self.reading.unix_ns + seconds * S,
            boottime_ns=self.reading.boottime_ns + seconds * S,
        )


def watched(host: FakeHost) -> ClockWatch:
    watch = ClockWatch(host)
    assert watch.poll() == ()
    return watch


def test_a_wall_clock_set_back_an_hour_is_one_event() -> None:
    host = FakeHost()
    watch = watched(host)
    host.run(1)
    host.set_wall(-HOUR_S)

    (event,) = watch.poll()

    assert (event.kind, event.shift_ns) == (ClockEventKind.WALL_STEP, -HOUR_S * S)
    assert event.at_ns == 10**12 + S
    assert "set back by 3600.000 s" in event.text
    host.run(1)
    assert watch.poll() == ()


def test_a_leap_second_smeared_over_a_day_is_a_slew() -> None:
    # GIVEN a wall clock that is 11 ppm fast for a day: 0.95 s in all
    host = FakeHost()
    watch = watched(host)
    events: list[ClockEvent] = []
    for _ in range(DAY_S // 60):
        host.run(60, wall_ppm=11)
        events += watch.poll()

    # THEN each 100 ms is one event, at the first poll after it, and none is a step
    assert {event.kind for event in events} == {ClockEventKind.WALL_SLEW}
    assert len(events) == 9
    assert all(event.shift_ns == 152 * 660_000 for event in events)


def test_the_fastest_slew_of_ntp_is_no_step() -> None:
    host = FakeHost()
    watch = watched(host)
    host.run(60, wall_ppm=500)

    assert watch.poll() == ()


def test_a_suspend_is_an_event_with_its_length_and_no_step() -> None:
    host = FakeHost()
    watch = watched(host)
    host.run(1)
    host.suspend(90)

    (event,) = watch.poll()

    assert (event.kind, event.shift_ns) == (ClockEventKind.SUSPEND, 90 * S)
    assert "90.000 s" in event.text
    host.run(1)
    assert watch.poll() == ()


def test_a_suspend_with_a_step_of_the_wall_clock_is_two_events() -> None:
    host = FakeHost()
    watch = watched(host)
    host.suspend(90)
    host.set_wall(-HOUR_S)

    events = watch.poll()

    assert [(event.kind, event.shift_ns) for event in events] == [
        (ClockEventKind.SUSPEND, 90 * S),
        (ClockEventKind.WALL_STEP, -HOUR_S * S),
    ]


def test_the_clocks_of_this_host_can_be_read() -> None:
    first, second = read_host(), read_host()

    assert second.monotonic_ns >= first.monotonic_ns
    # The boot clock also counts suspends, so it is never behind.
    assert first.boottime_ns >= first.monotonic_ns - MS
