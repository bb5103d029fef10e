"""Notice what happens to a host's clocks: a wall clock that is set or slewed, a suspend."""

from __future__ import annotations

import time
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from rankscope.tracer.span import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Callable


STEP_NS = 10_000_000
"""A jump of the wall clock from here on is told. NTP daemons slew away less than that."""

SLEW_PPM = 600
"""Faster than this the wall clock did not run, it was set. Source: adjtimex(2) corrects by
at most 500 ppm; the rest is for the pause between the readings."""

TOLD_SLEW_NS = 100_000_000
"""A wall clock that crept away by this much is told. Source: leap second smear, 1 s over a
day (11.6 ppm), so a smear is told ten times."""

NUM_READS = 8

SUSPEND_NS = 1_000_000
"""`CLOCK_BOOTTIME` runs on in a suspend and `CLOCK_MONOTONIC` stops; two readings around a
thread switch differ by less than this."""


class ClockEventKind(StrEnum):
    """What happened to a clock."""

    WALL_STEP = "wall-clock-step"
    WALL_SLEW = "wall-clock-slew"
    SUSPEND = "suspend"
    REFERENCE_CHANGE = "clock-reference-change"
    OFFSET_STEP = "clock-offset-step"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockEvent:
    """One thing that happened to a host's clocks, for the table ``events``."""

    kind: ClockEventKind
    at_ns: int
    """On the host's monotonic clock."""

    shift_ns: int | None
    """By how much, positive where the clock named jumped forward; None where unknown."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HostReading:
    """The three clocks of a host, read one after the other."""

    monotonic_ns: int
    unix_ns: int
    boottime_ns: int


def read_host() -> HostReading:
    """Read the clocks; the tightest of several tries, so that no thread switch lies between."""
    return min((_read_once() for _ in range(NUM_READS)), key=lambda found: found[0])[1]


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

    No time of ours depends on the wall clock after the start; these events say why the
    times in other programs' logs no longer match.
    """

    def __init__(self, read: Callable[[], HostReading] = read_host) -> None:
        self._read = read
        self._last: HostReading | None = None
        self._told_wall_ns = 0

    def look(self) -> tuple[ClockEvent, ...]:
        """Read the clocks and return what happened since the last look."""
        now, last = self._read(), self._last
        self._last = now
        if last is None:
            self._told_wall_ns = now.unix_ns - now.monotonic_ns
            return ()
        suspended_ns = _difference(now, last, now.boottime_ns - last.boottime_ns)
        events = [] if suspended_ns < SUSPEND_NS else [_suspend(now, suspended_ns)]
        slept_ns = suspended_ns if events else 0
        self._told_wall_ns += slept_ns
        jumped_ns = _difference(now, last, now.unix_ns - last.unix_ns) - slept_ns
        crept_ns = now.unix_ns - now.monotonic_ns - self._told_wall_ns
        elapsed_ns = now.monotonic_ns - last.monotonic_ns
        if abs(jumped_ns) > STEP_NS + elapsed_ns * SLEW_PPM // 10**6:
            events.append(_wall_event(now, ClockEventKind.WALL_STEP, jumped_ns))
            self._told_wall_ns += crept_ns
        elif abs(crept_ns) >= TOLD_SLEW_NS:
            events.append(_wall_event(now, ClockEventKind.WALL_SLEW, crept_ns))
            self._told_wall_ns += crept_ns
        return tuple(events)


def _difference(now: HostReading, last: HostReading, other_ns: int) -> int:
    return other_ns - (now.monotonic_ns - last.monotonic_ns)


def _suspend(now: HostReading, suspended_ns: int) -> ClockEvent:
    return ClockEvent(
        kind=ClockEventKind.SUSPEND,
        at_ns=now.monotonic_ns,
        shift_ns=suspended_ns,
        text=f"the host was suspended for {suspended_ns / NS_PER_S:.3f} s: spans that were open"
        " then are that much too short",
    )


def _wall_event(now: HostReading, kind: ClockEventKind, shift_ns: int) -> ClockEvent:
    what = "was set" if kind is ClockEventKind.WALL_STEP else "was slewed"
    way = "forward" if shift_ns > 0 else "back"
    return ClockEvent(
        kind=kind,
        at_ns=now.monotonic_ns,
        shift_ns=shift_ns,
        text=f"the wall clock {what} {way} by {abs(shift_ns) / NS_PER_S:.3f} s:"
        " no time or duration here changes",
    )
