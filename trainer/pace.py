"""Timers of local compute segments: padded to a set time (paced), or stretched by a factor.

A local segment is the compute of one rank between two communications; `segments` marks its begin
and end in the model.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

from .errors import SegmentOrderError

if TYPE_CHECKING:
    from collections.abc import Callable

OVERRUN_RATIO = 1.1
"""A paced segment longer than its target times this is an overrun.

Source: choice. A run in which more than 5 % of the segments overrun is insufficient evidence.
"""


SEGMENTS_PER_LAYER = 2
"""Local segments of one block in one direction: attention and MLP."""

FORWARD_PACES = 1
"""Length of a forward segment, in paces."""

BACKWARD_PACES = 2
"""Length of a backward segment: it computes two gradients where forward computes one product."""

INPUT_PACES = 1
"""Length of a backward segment that computes the gradient of its input alone."""

WEIGHT_PACES = BACKWARD_PACES - INPUT_PACES
"""Length of the gradients of a segment's weights, computed later."""

OPTIMIZER_PACES = 1
"""Length of the optimizer's update, one local segment per step."""


class PaceClock(Protocol):
    """A monotonic clock with a sleep."""

    def now_ns(self) -> int:
        """Return the current time."""

    def sleep_ns(self, duration_ns: int) -> None:
        """Sleep for at least ``duration_ns``."""


class MonotonicPaceClock:
    """The kernel's monotonic clock."""

    def now_ns(self) -> int:
        """Return the current time."""
        return time.monotonic_ns()

    def sleep_ns(self, duration_ns: int) -> None:
        """Sleep in the kernel."""
        time.sleep(duration_ns / 1e9)


class SegmentTimer(Protocol):
    """Times local segments and may delay their end."""

    slowdown: float
    """Factor on the duration of the next segments: the product of the active faults."""

    num_segments: int
    """Segments since the last `reset_counts`."""

    num_overruns: int
    """Those of them that missed their target."""

    def begin(self) -> None:
        """Begin a segment. One that began before and has not ended is discarded."""

    def reach(self, paces: float) -> None:
        """Return after a part of the segment's time; at once if not paced."""

    def exclude(self, wait: Callable[[], object]) -> None:
        """Wait for communication inside of a segment, without counting the time."""

    def end(self, paces: float) -> None:
        """End the segment, and return after its full time.

        Args:
            paces: Length in paces; ignored if not paced.

        Raises:
            SegmentOrderError: No segment has begun.
        """

    def reset_counts(self) -> None:
        """Reset the counts, after the warm-up."""


class _CountedSegments:
    """Begin, counts and slowdown, which both timers share."""

    def __init__(self, clock: PaceClock) -> None:
        self.slowdown = 1.0
        self.num_segments = 0
        self.num_overruns = 0
        self._clock = clock
        self._begin_ns: int | None = None

    def begin(self) -> None:
        self._begin_ns = self._clock.now_ns()

    def reach(self, paces: float) -> None:
        pass

    def exclude(self, wait: Callable[[], object]) -> None:
        before_ns = self._clock.now_ns()
        wait()
        if self._begin_ns is not None:
            self._begin_ns += self._clock.now_ns() - before_ns

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
    """Pads each segment by sleeping until ``begin + paces * pace_ns * slowdown``.

    A segment whose work takes longer, because its rank got no core in time, ends late; beyond
    `OVERRUN_RATIO` it counts as an overrun.
    """

    def __init__(self, *, pace_ns: int, clock: PaceClock) -> None:
        super().__init__(clock)
        self._pace_ns = pace_ns

    def reach(self, paces: float) -> None:
        """Sleep until a part of the segment has passed."""
        if self._begin_ns is not None:
            self._sleep_until_ns(self._begin_ns + self._target_ns(paces))

    def end(self, paces: float) -> None:
        """Sleep until the segment's deadline and count an overrun if it was missed."""
        begin_ns = self._take_begin_ns()
        target_ns = self._target_ns(paces)
        self._sleep_until_ns(begin_ns + target_ns)
        if self._clock.now_ns() - begin_ns > OVERRUN_RATIO * target_ns:
            self.num_overruns += 1

    def _target_ns(self, paces: float) -> int:
        return round(self._pace_ns * paces * self.slowdown)

    def _sleep_until_ns(self, deadline_ns: int) -> None:
        remaining_ns = deadline_ns - self._clock.now_ns()
        if remaining_ns > 0:
            self._clock.sleep_ns(remaining_ns)


class StretchedSegments(_CountedSegments):
    """Stretches each segment to ``slowdown`` times its duration by busy waiting.

    There is no target, so there are no overruns.
    """

    def end(self, paces: float) -> None:
        """Keep the core busy for ``(slowdown - 1)`` times the duration of the segment."""
        begin_ns = self._take_begin_ns()
        now_ns = self._clock.now_ns()
        until_ns = now_ns + round((now_ns - begin_ns) * (self.slowdown - 1))
        while self._clock.now_ns() < until_ns:
            pass
