"""How long a local compute segment takes: as long as it takes, a set device time, or stretched.

A local segment is the compute of one rank between two communications. Where
segments begin and end in the model is `trainer.segments`' business.
"""

from __future__ import annotations

import time
from typing import Protocol

from .errors import SegmentOrderError

OVERRUN_RATIO = 1.1
"""A paced segment longer than this many targets is an overrun.

Source: design.md, "Paced mode": more than 5 % overruns make a run insufficient evidence.
"""


SEGMENTS_PER_LAYER = 2
"""Local segments of one block and direction: attention, MLP."""

FORWARD_PACES = 1
"""Length of a forward segment, in paces."""

BACKWARD_PACES = 2
"""Length of a backward segment: it computes two gradients where forward computes one product."""

OPTIMIZER_PACES = 1
"""Length of the optimizer's update, which is one local segment a step."""


class PaceClock(Protocol):
    """A monotonic clock that can also let time pass."""

    def now_ns(self) -> int:
        """Return the present reading."""
        ...

    def sleep_ns(self, duration_ns: int) -> None:
        """Return no earlier than ``duration_ns`` from now, leaving the core to others."""
        ...


class MonotonicPaceClock:
    """The kernel's monotonic clock."""

    def now_ns(self) -> int:
        """Return the present reading."""
        return time.monotonic_ns()

    def sleep_ns(self, duration_ns: int) -> None:
        """Sleep in the kernel."""
        time.sleep(duration_ns / 1e9)


class SegmentTimer(Protocol):
    """Is told when each local segment begins and ends, and may hold its end back."""

    slowdown: float
    """How many times as long segments take from now on: the planted faults' product."""

    num_segments: int
    """Segments ended since the last `reset_counts`."""

    num_overruns: int
    """Of those, the ones that missed their target."""

    def begin(self) -> None:
        """Note the begin; one that was noted before and not ended is forgotten."""
        ...

    def end(self, paces: int) -> None:
        """Return when the segment has taken its time.

        Args:
            paces: Its length in paces, where paced.

        Raises:
            SegmentOrderError: No segment has begun.
        """
        ...

    def reset_counts(self) -> None:
        """Forget what was counted so far (the warm-up)."""
        ...


class _CountedSegments:
    """What both timers share: the begin, the counts, the slowdown."""

    def __init__(self, clock: PaceClock) -> None:
        self.slowdown = 1.0
        self.num_segments = 0
        self.num_overruns = 0
        self._clock = clock
        self._begin_ns: int | None = None

    def begin(self) -> None:
        self._begin_ns = self._clock.now_ns()

    def reset_counts(self) -> None:
        self.num_segments = 0
        self.num_overruns = 0

    def _take_begin_ns(self) -> int:
        if self._begin_ns is None:
            raise SegmentOrderError("a local segment ended that had not begun")
        begin_ns, self._begin_ns = self._begin_ns, None
        self.num_segments += 1
        return begin_ns


class PacedSegments(_CountedSegments):
    """Holds each segment until ``begin + paces * pace_ns * slowdown``, asleep.

    A segment whose own work outlasts that (its rank did not get a core in time)
    ends late; beyond `OVERRUN_RATIO` it counts as an overrun.
    """

    def __init__(self, *, pace_ns: int, clock: PaceClock) -> None:
        super().__init__(clock)
        self._pace_ns = pace_ns

    def end(self, paces: int) -> None:
        """Sleep until the segment's deadline, then judge whether it was met."""
        begin_ns = self._take_begin_ns()
        target_ns = round(self._pace_ns * paces * self.slowdown)
        remaining_ns = begin_ns + target_ns - self._clock.now_ns()
        if remaining_ns > 0:
            self._clock.sleep_ns(remaining_ns)
        if self._clock.now_ns() - begin_ns > OVERRUN_RATIO * target_ns:
            self.num_overruns += 1


class StretchedSegments(_CountedSegments):
    """Makes each segment ``slowdown`` times as long as it was, by busy waiting at its end.

    Unpaced: there is no target, so there are no overruns.
    """

    def __init__(self, *, clock: PaceClock) -> None:
        super().__init__(clock)

    def end(self, paces: int) -> None:
        """Keep the core busy for ``(slowdown - 1)`` times the segment's length."""
        begin_ns = self._take_begin_ns()
        now_ns = self._clock.now_ns()
        until_ns = now_ns + round((now_ns - begin_ns) * (self.slowdown - 1))
        while self._clock.now_ns() < until_ns:
            pass
