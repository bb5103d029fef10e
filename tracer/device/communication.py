"""Communications on a device: marks around launch and wait, and the times they imply.

NCCL's own stream is not accessible, so nothing is recorded on it. What is recorded is when the
launching stream reached the launch (the communication begins no earlier), and when the stream of a
wait was past it (the communication ends no later). These bounds are exact in three cases:

* a blocking call runs on the launching stream: both are exact;
* the communication stream was idle at the launch: the communication begins at the launch;
* a stream was stalled at the wait: the communication ends when the stream continues.

A job may call on a stream where nothing computes (FSDP does). Such a call stalls no compute; that
waits later, for an event behind the call (`PendingWait`).
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..record.device_timer import DeviceTimer
    from .backend import Mark
    from .clock import DeviceClock

MIN_STALL_NS = 20_000
"""A stream that takes longer from one side of a wait to the other was blocked by it."""

MAX_ENDS = 256


class Writer(Protocol):
    """Writes a communication's records once their times are known."""

    def span(self, bounds: Bounds) -> None:
        """Write the communication."""
        ...

    def wait(self, track_id: int, start_ns: int, duration_ns: int) -> None:
        """Write the wait, which began at ``start_ns`` (monotonic)."""
        ...

    def lose(self, num: int) -> None:
        """Count ``num`` records as lost; called instead of the others."""
        ...

    def note_side_stream(self, key: tuple[int, int]) -> None:
        """Note, before the others, that the call waited on a stream where nothing computes.

        Args:
            key: Device and handle of the stream.
        """
        ...


class DeviceComm:
    """Follows one communication by marks on the streams that the job itself uses.

    Nothing is recorded on the communication's own stream, and nothing waits for it except what the
    job makes wait: see docs/decisions/0004.
    """

    __slots__ = (
        "_alone", "_before_wait", "_chain", "_is_call", "_number", "has_wait", "launched", "timing",
    )  # fmt: skip

    def __init__(
        self, timing: DeviceTimer, launched: Mark, chain: CommStream, *, chained: bool
    ) -> None:
        """Follow what the current stream is about to launch.

        Args:
            timing: Takes the marks.
            launched: Mark of the launching stream.
            chain: The communicator's stream.
            chained: Whether the communication runs there, in the order of launches. A p2p, or one
                of several that are issued together, may run elsewhere.
        """
        self.timing = timing
        self.launched = launched
        self._number = chain.launch()
        # Without a chain, the begin is only a bound.
        self._chain = chain if chained else CommStream()
        self._before_wait: Mark | None = None
        self._alone = True
        self._is_call = False
        """Whether it runs on the stream that launched it, as a kernel does."""

        self.has_wait = True
        """Whether the wait can be recorded; if not, it is counted already."""

    def reach_wait(self, *, alone: bool) -> None:
        """Mark that the current stream reaches a wait.

        Args:
            alone: Whether it waits for nothing else there.
        """
        if self._before_wait is not None:
            self.timing.release(self._before_wait)
        self._before_wait = self.timing.mark(self.launched.device)
        self.has_wait = self._before_wait is not None
        self._alone = alone

    def share_wait(self) -> None:
        """Note that the stream reaches a wait that another communication has marked."""
        self._alone = False

    def pass_wait(self, writer: Writer) -> None:
        """Mark that the current stream is past the wait; the records follow."""
        end = self.timing.mark(self.launched.device)
        if end is None:
            self.release()
            writer.lose(int(self.has_wait))
            return
        if not self.timing.computes_on(end.device, end.stream):
            self.has_wait = False
            writer.note_side_stream((end.device, end.stream))
        self.timing.push(PendingComm(self, end, writer))

    def returned(self, writer: Writer) -> None:
        """Mark that a call that ran on the current stream itself was issued.

        If that stream computes, it has a wait of equal length: nothing else ran there.
        """
        self._is_call = True
        self.pass_wait(writer)

    def release(self) -> None:
        """Release the marks."""
        self.timing.release(self.launched)
        if self._before_wait is not None:
            self.timing.release(self._before_wait)

    def bounds(self, clock: DeviceClock, after_wait: Mark) -> tuple[Bounds, int]:
        """Return the bounds, and the time for which the wait blocked the stream, in ns."""
        launched_ns = clock.reached_ns(self.launched)
        if self._is_call:
            duration_ns = max(clock.elapsed_ns(self.launched, after_wait), 0)
            end_ns = launched_ns + duration_ns
            return Bounds(launched_ns, end_ns, begin_known=True, end_known=True), duration_ns
        before_wait = self._before_wait
        if before_wait is None:
            after_ns = clock.reached_ns(after_wait)
            return self._chain.bound(self._number, launched_ns, (after_ns, after_ns)), 0
        before_ns = clock.reached_ns(before_wait)
        stalled_ns = max(clock.elapsed_ns(before_wait, after_wait), 0)
        after_ns = before_ns + stalled_ns
        seen_ns = (before_ns if self._alone else after_ns, after_ns)
        return self._chain.bound(self._number, launched_ns, seen_ns), stalled_ns


class PendingComm:
    """A communication whose wait, or end on its own stream, the device has not reached yet."""

    __slots__ = ("_comm", "_writer", "last")

    def __init__(self, comm: DeviceComm, end: Mark, writer: Writer) -> None:
        self._comm = comm
        self.last = end
        self._writer = writer

    def is_done(self) -> bool:
        """Return whether it is reached; the launch came before."""
        return self.last.event.query()

    def resolve(self, clock: DeviceClock) -> None:
        """Write the communication, and the wait if a computing stream waited."""
        bounds, stalled_ns = self._comm.bounds(clock, self.last)
        track_id = self._comm.timing.track_id(self.last)
        self._comm.release()
        self._comm.timing.release(self.last)
        self._writer.span(bounds)
        if self._comm.has_wait:
            self._writer.wait(track_id, bounds.end_ns - stalled_ns, stalled_ns)

    def lose(self) -> None:
        """Count the records as lost."""
        self._writer.lose(1 + self._comm.has_wait)


class PendingWait:
    """A computing stream's wait for a communication on another stream of the job, by an event."""

    __slots__ = ("_before", "_timing", "_writer", "last")

    def __init__(self, timing: DeviceTimer, before: Mark, after: Mark, writer: Writer) -> None:
        self._timing = timing
        self._before = before
        self.last = after
        self._writer = writer

    def is_done(self) -> bool:
        """Return whether the wait is passed."""
        return self.last.event.query()

    def resolve(self, clock: DeviceClock) -> None:
        """Write the wait."""
        start_ns = clock.reached_ns(self._before)
        stalled_ns = max(clock.elapsed_ns(self._before, self.last), 0)
        track_id = self._timing.track_id(self.last)
        self._timing.release(self._before)
        self._timing.release(self.last)
        self._writer.wait(track_id, start_ns, stalled_ns)

    def lose(self) -> None:
        """Count the wait as lost."""
        self._writer.lose(1)


class Bounds(NamedTuple):
    """Begin and end of a communication, monotonic; each exact or a bound."""

    begin_ns: int
    """No later than the true begin."""

    end_ns: int
    """No earlier than the true end."""

    begin_known: bool
    end_known: bool


class CommStream:
    """The stream of one communicator, which runs launches in their order."""

    def __init__(self) -> None:
        self._numbers: Callable[[], int] = itertools.count().__next__
        self._ends: dict[int, tuple[int, bool]] = {}

    def launch(self) -> int:
        """Return the number of a new launch."""
        return self._numbers()

    def bound(self, number: int, launched_ns: int, wait_ns: tuple[int, int]) -> Bounds:
        """Return the bounds of a launch. Called by one thread.

        Args:
            number: From `launch`.
            launched_ns: When the launching stream reached it, monotonic.
            wait_ns: When a stream reached the wait for it alone, and when it was past the wait. The
                latter twice if the stream waited for several at once.
        """
        begin_ns, begin_known = self._begin(number, launched_ns)
        before_ns, after_ns = wait_ns
        end_known = after_ns - before_ns > MIN_STALL_NS
        if after_ns < begin_ns:
            # The bounds contradict each other by the error of the clock mapping: keep the weaker
            # one.
            begin_ns, begin_known = min(launched_ns, after_ns), False
        self._ends[number] = (after_ns, end_known)
        if len(self._ends) > MAX_ENDS:
            self._ends.pop(next(iter(self._ends)))
        return Bounds(begin_ns, after_ns, begin_known, end_known)

    def _begin(self, number: int, launched_ns: int) -> tuple[int, bool]:
        """Return when a launch begins: at its launch, or at the end of the one before it."""
        before = self._ends.get(number - 1)
        if before is None:
            return launched_ns, False
        end_ns, end_known = before
        if end_ns <= launched_ns:
            return launched_ns, True
        return (end_ns, True) if end_known else (launched_ns, False)
