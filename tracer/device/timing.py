"""Device timing of this process: marks on the job's threads, resolved on the background thread."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from time import monotonic_ns
from typing import TYPE_CHECKING, Protocol

from ..errors import is_tracer_error
from ..record.device_timer import NO_DEVICE_TIMING, DeviceTimer
from ..record.steps import TIMED_KINDS
from ..spool import DEVICE_CLOCK_FILE, DropReason
from .backend import NUM_EVENTS, MarkPool
from .clock import DeviceClock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ..record.recorder import Recorder
    from .backend import DeviceBackend, DeviceStream, Mark
    from .clock import Anchor

BUSY_S = 0.02
"""Time to the next turn while something is pending."""

MAX_PER_TURN = 2_048

DRAIN_S = 0.5
"""Longest wait of a shutdown for the device to reach the last marks."""

PPB = 1e9


class DeviceTiming(DeviceTimer):
    """Takes marks, and writes spans once the device has reached them.

    `mark` and `push` run on the job's threads: they record an event and append to a queue.
    Everything else runs on the recorder's background thread, which queries events and never waits.
    The first CUDA error turns device timing off for the process. Errors of a device are sticky, so
    the job meets the same one at its own next call.
    """

    def __init__(
        self,
        recorder: Recorder,
        backend: DeviceBackend,
        *,
        capacity: int = NUM_EVENTS,
        clock: Callable[[], int] = monotonic_ns,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__()
        self.active = True
        self.num_resolved = 0
        self.comm_backend = backend.comm_backend
        self._recorder = recorder
        self._backend = backend
        self._capacity = capacity
        self._clock = clock
        self._sleep = sleep
        self._pools: dict[int, MarkPool] = {}
        self._clocks: dict[int, DeviceClock] = {}
        self._queues: dict[tuple[int, int], StreamQueue] = {}
        self._tracks: dict[tuple[int, int], int] = {}
        self._open: dict[tuple[int, int], int] = {}
        """Open spans of compute, by device and handle of the stream on which they began."""

        self._error: BaseException | None = None
        self._has_reported_capture = False
        self._prepared = False
        self._turn = threading.Lock()

    # -- on the job's threads ------------------------------------------------

    def device_of(self, objects: Iterable[object]) -> int | None:
        """Return the device of the first tensor among ``objects`` if its work is timed."""
        if not self.active:
            return None
        try:
            return self._backend.device_of(objects)
        except Exception as problem:  # noqa: BLE001 - promise 1: harmless
            self._fail(problem)
            return None

    def mark(self, device: int, stream: DeviceStream | None = None) -> Mark | None:
        """Mark the position of a stream; return None, counted, if that is not possible.

        Nothing is recorded into a stream that is being captured: the event would become part of the
        graph, and its time could not be read.

        Args:
            stream: One of its streams; None for the current one.
        """
        try:
            if self.active:
                return self._mark(device, stream)
        except Exception as problem:  # noqa: BLE001 - promise 1: harmless
            self._fail(problem)
        self._recorder.drop(DropReason.DEVICE_ERROR)
        return None

    def push(self, pending: Pending) -> None:
        """Queue a record that is written once the device has reached its marks."""
        mark = pending.last
        if not self.active:
            pending.lose()
            return
        key = (mark.device, mark.stream)
        queue = self._queues.get(key)
        if queue is None:
            queue = self._queues.setdefault(key, StreamQueue())
        queue.push(pending)

    def begin_compute(self, mark: Mark) -> None:
        """Note that a span of compute has begun at ``mark``."""
        key = (mark.device, mark.stream)
        self._open[key] = self._open.get(key, 0) + 1

    def end_compute(self, mark: Mark) -> None:
        """Note that the span of compute that began at ``mark`` is left."""
        self._open[mark.device, mark.stream] -= 1

    def computes_on(self, device: int, stream: int) -> bool:
        """Return whether compute has begun on the stream with this handle, or nowhere yet."""
        return not self._open or (device, stream) in self._open

    def num_open(self, device: int) -> int:
        """Return the number of spans of compute that are open on the device."""
        return sum(num for key, num in self._open.items() if key[0] == device)

    def release(self, mark: Mark) -> None:
        """Release a mark that is no longer needed."""
        self._pools[mark.device].release(mark)

    def track_id(self, mark: Mark) -> int:
        """Return the track of a mark's stream. Streams are numbered as they are first seen."""
        key = (mark.device, mark.stream)
        track = self._tracks.get(key)
        if track is not None:
            return track
        met = sum(device == mark.device and stream != 0 for device, stream in list(self._tracks))
        number = 0 if mark.stream == 0 else met + 1
        name = f"cuda:{mark.device} stream {number}"
        return self._tracks.setdefault(key, self._recorder.name_id(name))

    def lose(self) -> None:
        """Count a span whose times on the device will not be known."""
        self._recorder.drop(DropReason.DEVICE_ERROR)

    # -- on the background thread --------------------------------------------

    def turn(self) -> None:
        """Write what the device has reached; request another turn soon while more is pending."""
        with self._turn:
            if self._error is not None:
                self._turn_off()
            if not self.active:
                return
            try:
                if self._resolve():
                    self._recorder.wake_within(BUSY_S)
                now_ns = self._clock()
                ages_ns = (queue.age_ns(now_ns) for queue in list(self._queues.values()))
                self._recorder.resolver_lag_ns = max(ages_ns, default=0)
            except Exception as problem:  # noqa: BLE001 - promise 1: harmless
                # No signal handler runs on this thread: the error is the tracer's.
                self._error = problem
                self._turn_off()

    # -- shutdown ------------------------------------------------------------

    def close(self) -> None:
        """Let the device reach the last marks for a moment, then count the rest as lost."""
        until_s = time.monotonic() + DRAIN_S
        while self.active and self._num_pending() and time.monotonic() < until_s:
            self._recorder.wake_within(0.0)
            time.sleep(BUSY_S / 4)
        self.active = False
        if self._turn.acquire(timeout=DRAIN_S):
            self._lose_all()
            self._turn.release()

    # -- internal ------------------------------------------------------------

    def _mark(self, device: int, stream: DeviceStream | None) -> Mark | None:
        if self._backend.is_capturing(device):
            self._recorder.drop(DropReason.CAPTURING)
            if not self._has_reported_capture:
                self._has_reported_capture = True
                text = "work that is captured into a CUDA graph is not timed, nor are its parts"
                self._recorder.event("tracer", text, {})
            return None
        mark = self._pool(device).take()
        if mark is None:
            self._recorder.drop(DropReason.NO_EVENT)
            return None
        if stream is None:
            stream = self._backend.current_stream(device)
        mark.stream = stream.cuda_stream
        mark.launch_ns = self._clock()
        mark.event.record(stream)
        return mark

    def _pool(self, device: int) -> MarkPool:
        pool = self._pools.get(device)
        if pool is None:
            fresh = MarkPool(self._backend.new_event, device, self._capacity)
            pool = self._pools.setdefault(device, fresh)
        return pool

    def _resolve(self) -> bool:
        """Return whether more is pending."""
        if not self._pools:
            return False
        if not self._prepared:
            self._backend.prepare_thread(next(iter(self._pools)))
            self._prepared = True
        busy = False
        for device in list(self._pools):
            clock = self._clocks.get(device)
            if clock is None:
                clock = self._clocks[device] = DeviceClock(
                    self._pools[device],
                    self._backend.private_stream(device),
                    clock=self._clock,
                    sleep=self._sleep,
                )
            anchor = clock.renew_if_due()
            if anchor is not None:
                self._write_anchor(device, anchor)
            busy = busy or clock.renewing
        for (device, _), queue in list(self._queues.items()):
            clock = self._clocks[device]
            if clock.ready:
                self.num_resolved += queue.resolve(clock, MAX_PER_TURN)
        return busy or self._num_pending() > 0

    def _write_anchor(self, device: int, anchor: Anchor) -> None:
        self._recorder.append_line(
            DEVICE_CLOCK_FILE,
            {
                "device": device,
                "uuid": self._backend.device_uuid(device),
                "monotonic_ns": anchor.monotonic_ns,
                "error_ns": anchor.error_ns,
                "drift_ppb": round(anchor.drift.ratio * PPB),
                "drift_error_ppb": round(anchor.drift.error_ratio * PPB),
            },
        )

    def _num_pending(self) -> int:
        return sum(map(len, list(self._queues.values())))

    def _fail(self, problem: BaseException) -> None:
        """Take no further marks; the background thread does the rest. Raise an error of the job."""
        if not is_tracer_error(problem):
            raise problem
        self.active = False
        if self._error is None:
            self._error = problem

    def _turn_off(self) -> None:
        problem, self._error = self._error, None
        if problem is None:
            return
        self.active = False
        # The host's clock would only say when the device received its work.
        self._recorder.missing_kinds.add_permanent(TIMED_KINDS)
        num_lost = self._lose_all()
        self._recorder.event(
            "tracer",
            "device timing turned itself off",
            {"error": repr(problem)[:500], "num_lost": num_lost},
        )

    def _lose_all(self) -> int:
        return sum(queue.lose_all() for queue in list(self._queues.values()))


class Pending(Protocol):
    """A record that can be written once the device has reached its last mark."""

    @property
    def last(self) -> Mark:
        """The mark that the device reaches last."""
        ...

    def is_done(self) -> bool:
        """Return whether the device has reached all marks."""
        ...

    def resolve(self, clock: DeviceClock) -> None:
        """Write the record."""
        ...

    def lose(self) -> None:
        """Count the record as lost: its times will not be known."""
        ...


class StreamQueue:
    """Pending records of one stream.

    A stream works in order, so only the oldest record is checked: until that one is done, no other
    can be. Any thread may push; one thread resolves.
    """

    def __init__(self) -> None:
        self._pending: deque[Pending] = deque()

    def __len__(self) -> int:
        return len(self._pending)

    def age_ns(self, now_ns: int) -> int:
        """Return the age of the oldest record's last mark, 0 if there is none."""
        try:
            return now_ns - self._pending[0].last.launch_ns
        except IndexError:
            return 0

    def push(self, pending: Pending) -> None:
        """Add the newest record of the stream."""
        self._pending.append(pending)

    def resolve(self, clock: DeviceClock, limit: int) -> int:
        """Write the records that are done, ``limit`` at most; return their number."""
        for number in range(limit):
            if not self._pending or not self._pending[0].is_done():
                return number
            # Removed last: if this raises, it can still be counted as lost.
            self._pending[0].resolve(clock)
            self._pending.popleft()
        return limit

    def lose_all(self) -> int:
        """Count all records as lost; return their number."""
        for number in range(len(self._pending) + 1):
            if not self._pending:
                return number
            self._pending.popleft().lose()
        return 0


class LazyCudaTiming(DeviceTimer):
    """Times nothing until it sees the first tensor on a CUDA device.

    A query whether CUDA exists would initialise it, and a process that has done so can no longer
    fork.
    """

    __slots__ = ("_cuda_device_of", "_recorder")

    def __init__(self, recorder: Recorder) -> None:
        from .cuda import cuda_device_of  # imports torch

        super().__init__()
        self._recorder = recorder
        self._cuda_device_of = cuda_device_of

    def device_of(self, objects: Iterable[object]) -> int | None:
        """Return the device of the first tensor if it is a CUDA device, which starts timing."""
        try:
            device = self._cuda_device_of(objects)
        except Exception as problem:  # noqa: BLE001 - promise 1: harmless
            self._recorder.swallow(problem)
            return None
        if device is None:
            return None
        start_device_timing(self._recorder, _cuda)
        return device if self._recorder.device_timing.active else None


def watch_for_cuda(recorder: Recorder) -> None:
    """Time the work of CUDA devices from the moment at which the job first uses one."""
    if sys.modules["torch"].version.cuda is not None:
        recorder.device_timing = LazyCudaTiming(recorder)


def start_device_timing(recorder: Recorder, make: Callable[[], DeviceBackend]) -> None:
    """Time the work of a device from now on; if that is not possible, write one event."""
    try:
        timing = DeviceTiming(recorder, make())
    except Exception as problem:  # noqa: BLE001 - promise 1: harmless
        recorder.device_timing = NO_DEVICE_TIMING
        recorder.event("tracer", "no device timing", {"error": repr(problem)[:500]})
        return
    recorder.device_timing = timing
    recorder.on_tick(timing.turn)
    recorder.on_shutdown(timing.close)


def _cuda() -> DeviceBackend:
    from .cuda import CudaBackend

    return CudaBackend()
