"""Readings of one source every few milliseconds, for a few seconds, and what they cost."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..errors import CollectorError

if TYPE_CHECKING:
    from collections.abc import Callable

    from .sample import Sample, Source

MS = 1_000_000
MIN_PERIOD_NS = 1 * MS
MAX_PERIOD_NS = 10 * MS
MAX_DURATION_NS = 10_000 * MS
MAX_SAMPLES = 1_000_000
"""Of one burst: about 150 MB."""


class BurstError(CollectorError):
    """A burst was asked for that is quicker, slower or longer than one may be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Burst:
    """What one burst brought, and what it cost the host."""

    samples: list[Sample]
    num_rounds: int
    """Readings taken."""

    num_missed: int
    """Readings left out, because the one before took longer than the period."""

    num_dropped: int
    """Samples beyond `MAX_SAMPLES`."""

    cpu_ns: int
    """Processor time of the burst's thread."""

    duration_ns: int

    @property
    def cpu_ratio(self) -> float:
        """Share of one processor that the burst took while it lasted."""
        return self.cpu_ns / self.duration_ns if self.duration_ns else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BurstClocks:
    """What a burst is timed by."""

    monotonic_ns: Callable[[], int] = field(default=time.monotonic_ns)
    """Readings are due by this."""

    unix_ns: Callable[[], int] = field(default=time.time_ns)
    """Samples bear this; it is read once, so a step of it moves no reading."""

    cpu_ns: Callable[[], int] = field(default=time.thread_time_ns)
    """Processor time of this thread."""

    sleep: Callable[[float], None] = field(default=time.sleep)
    """Waits so many seconds."""


REAL_CLOCKS = BurstClocks()


def take_burst(
    source: Source, *, period_ns: int, duration_ns: int, clocks: BurstClocks = REAL_CLOCKS
) -> Burst:
    """Read ``source`` every ``period_ns`` in this thread, and return all of it at the end.

    Readings keep to the grid of the period: one that comes late does not push
    those after it, and those that it overran are counted and not made up for.

    Args:
        source: What to read; it must be this thread's own.
        period_ns: 1 to 10 ms.
        duration_ns: At most 10 s.
        clocks: What it is timed by.

    Raises:
        BurstError: The period or the duration is out of range.
        SourceAbsentError: The source is not there.
    """
    if not MIN_PERIOD_NS <= period_ns <= MAX_PERIOD_NS:
        raise BurstError(f"a burst reads every 1 to 10 ms, not every {period_ns} ns")
    if not 0 < duration_ns <= MAX_DURATION_NS:
        raise BurstError(f"a burst lasts at most {MAX_DURATION_NS // MS} ms, not {duration_ns} ns")
    monotonic_ns = clocks.monotonic_ns
    began_cpu_ns = clocks.cpu_ns()
    began_ns = monotonic_ns()
    offset_ns = clocks.unix_ns() - began_ns
    samples: list[Sample] = []
    num_rounds = num_missed = num_dropped = 0
    due_ns = began_ns
    while due_ns < began_ns + duration_ns:
        now_ns = monotonic_ns()
        if now_ns < due_ns:
            clocks.sleep((due_ns - now_ns) / 1e9)
            continue
        found = source.read(now_ns + offset_ns)
        kept = found[: MAX_SAMPLES - len(samples)]
        samples += kept
        num_dropped += len(found) - len(kept)
        num_rounds += 1
        overrun = max(monotonic_ns() - due_ns, 0) // period_ns
        remaining = -(-(began_ns + duration_ns - due_ns) // period_ns) - 1
        num_missed += min(overrun, remaining)
        due_ns += (1 + overrun) * period_ns
    return Burst(
        samples=samples,
        num_rounds=num_rounds,
        num_missed=num_missed,
        num_dropped=num_dropped,
        cpu_ns=clocks.cpu_ns() - began_cpu_ns,
        duration_ns=monotonic_ns() - began_ns,
    )
