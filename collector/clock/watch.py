"""Watch on a host's clocks: steps and slews of the wall clock, suspends."""

from __future__ import annotations

import time
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from rankscope.tracer.span import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Callable


STEP_NS = 10_000_000
"""Least step of the wall clock that is reported. NTP daemons slew smaller differences."""

SLEW_PPM = 600
"""A faster change of the wall clock is a step. Source: adjtimex(2) slews by at most 500 ppm; the
rest is a margin for the pause between the readings."""

REPORTED_SLEW_NS = 100_000_000
"""Slews are reported in steps of this size. Source: a leap second smear slews 1 s in a day
(11.6 ppm), which gives ten events."""

NUM_READS = 8

SUSPEND_NS = 1_000_000
"""Least difference that counts as a suspend, in which `CLOCK_BOOTTIME` runs on and
`CLOCK_MONOTONIC` stops. A thread switch between two readings makes a smaller one."""


class ClockEventKind(StrEnum):
    """Kinds of clock events, as stored."""

    WALL_STEP = "wall-clock-step"
    WALL_SLEW = "wall-clock-slew"
    SUSPEND = "suspend"
    REFERENCE_CHANGE = "clock-reference-change"
    OFFSET_STEP = "clock-offset-step"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockEvent:
    """A change of a host's clocks, for table ``events``."""

    kind: ClockEventKind
    at_ns: int
    """Time on the host's monotonic clock."""

    shift_ns: int | None
    """Size of the change, positive if the clock jumped forward; None if unknown."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HostReading:
    """One reading of the three clocks of a host."""

    monotonic_ns: int
    unix_ns: int
    boottime_ns: int


def read_host() -> HostReading:
    """Return the tightest of several readings, so that no thread switch is in it."""
    return min((_read_once() for _ in range(NUM_READS)), key=lambda reading: reading[0])[1]


def _read_once() -> tuple[int, HostReading]:
    before = time.monotonic_ns()
    boottime_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    unix_ns = time.time_ns()
    after = time.monotonic_ns()
    reading = HostReading(
        monotonic_ns=(before + after) // 2, unix_ns=unix_ns, boottime_ns=boottime_ns
    )
    return after - before, reading


class ClockWatch:
    """Compares each reading of a host's clocks with the one before.

    Recorded times do not depend on the wall clock after the start. The events explain why they
    no longer match the logs of other programs.
    """

    def __init__(self, read: Callable[[], HostReading] = read_host) -> None:
        self._read = read
        self._last: HostReading | None = None
        self._offset_ns = 0  # Unix time - monotonic time when a change was last reported

    def poll(self) -> tuple[ClockEvent, ...]:
        """Read the clocks and return the changes since the last call."""
        now, last = self._read(), self._last
        self._last = now
        if last is None:
            self._offset_ns = now.unix_ns - now.monotonic_ns
            return ()
        suspended_ns = _difference(now, last, now.boottime_ns - last.boottime_ns)
        if suspended_ns < SUSPEND_NS:
            suspended_ns = 0
        events = [_suspend_event(now, suspended_ns)] if suspended_ns else []
        self._offset_ns += suspended_ns
        stepped_ns = _difference(now, last, now.unix_ns - last.unix_ns) - suspended_ns
        slewed_ns = now.unix_ns - now.monotonic_ns - self._offset_ns
        elapsed_ns = now.monotonic_ns - last.monotonic_ns
        if abs(stepped_ns) > STEP_NS + elapsed_ns * SLEW_PPM // 10**6:
            events.append(_wall_event(now, ClockEventKind.WALL_STEP, stepped_ns))
            self._offset_ns += slewed_ns
        elif abs(slewed_ns) >= REPORTED_SLEW_NS:
            events.append(_wall_event(now, ClockEventKind.WALL_SLEW, slewed_ns))
            self._offset_ns += slewed_ns
        return tuple(events)


def _difference(now: HostReading, last: HostReading, other_ns: int) -> int:
    return other_ns - (now.monotonic_ns - last.monotonic_ns)


def _suspend_event(now: HostReading, suspended_ns: int) -> ClockEvent:
    return ClockEvent(
        kind=ClockEventKind.SUSPEND,
        at_ns=now.monotonic_ns,
        shift_ns=suspended_ns,
        text=f"the host was suspended for {suspended_ns / NS_PER_S:.3f} s: spans that were open"
        " then are too short by this time",
    )


def _wall_event(now: HostReading, kind: ClockEventKind, shift_ns: int) -> ClockEvent:
    what = "was set" if kind is ClockEventKind.WALL_STEP else "was slewed"
    way = "forward" if shift_ns > 0 else "back"
    return ClockEvent(
        kind=kind,
        at_ns=now.monotonic_ns,
        shift_ns=shift_ns,
        text=f"the wall clock {what} {way} by {abs(shift_ns) / NS_PER_S:.3f} s:"
        " recorded times and durations do not change",
    )
