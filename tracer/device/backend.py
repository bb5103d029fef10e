"""The device as device timing sees it: streams, events, marks, and a pool of events.

`DeviceBackend` is a protocol, so that tests can replace CUDA.
"""

from __future__ import annotations

import itertools
from collections import deque
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


NUM_EVENTS = 8_192
"""Events of one device, enough for three steps of 1,000 spans that the device has not reached.

CUDA itself accepts some 1,000 launches per stream before it blocks the host."""


class DeviceStream(Protocol):
    """A stream of one device."""

    @property
    def cuda_stream(self) -> int:
        """The stream's handle; 0 is the device's default stream."""
        ...


class DeviceEvent(Protocol):
    """A position in a stream, whose time is known once the work before it is done."""

    def record(self, stream: Any) -> None:  # noqa: ANN401 - torch's own stream class
        """Put the event behind all work that ``stream`` has received. Never waits."""
        ...

    def query(self) -> bool:
        """Return whether the work before the event is done. Never waits."""
        ...

    def elapsed_time(self, end_event: Any) -> float:  # noqa: ANN401 - torch's own event class
        """Return the ms from this event to ``end_event``, a float32. Both must be done."""
        ...


class DeviceBackend(Protocol):
    """The operations of a device that device timing uses. None of them waits for the device."""

    @property
    def comm_backend(self) -> str:
        """Torch's name of the library whose works run on the device's own streams.

        They return before they are done, and a wait for them blocks a stream only.
        """
        ...

    def device_of(self, objects: Iterable[object]) -> int | None:
        """Return the device of the first tensor or device among ``objects``; None if there is no
        such.
        """
        ...

    def current_stream(self, device: int) -> DeviceStream:
        """Return the stream to which the calling thread issues work."""
        ...

    def is_capturing(self, device: int) -> bool:
        """Return whether that stream is being captured into a CUDA graph."""
        ...

    def private_stream(self, device: int) -> DeviceStream:
        """Return a stream that nothing else uses and that waits for no other stream."""
        ...

    def new_event(self) -> DeviceEvent:
        """Return an event that keeps its time."""
        ...

    def prepare_thread(self, device: int) -> None:
        """Let the calling thread query events while another thread captures a graph.

        Args:
            device: A device that the process uses; the thread must touch no other.
        """
        ...

    def device_uuid(self, device: int) -> str:
        """Return the device's UUID, "" if unknown."""
        ...


class Mark:
    """An event that was recorded on a stream and whose time may not be known yet."""

    __slots__ = ("device", "event", "launch_ns", "stream")

    def __init__(self, event: DeviceEvent, device: int) -> None:
        self.event = event
        self.device = device
        self.stream = 0
        """Handle of the stream."""

        self.launch_ns = 0
        """When the host recorded the event, monotonic."""


class MarkPool:
    """Reusable marks of one device. A mark is in use from `take` until `release`.

    Any thread may take; there is no lock. A mark may be released before the device has reached its
    event: recording it again moves it. Marks are reused and not made anew because Python's garbage
    collector counts new objects that stay: 1,000 of them in a step would make it run in the job.
    """

    def __init__(
        self, new_event: Callable[[], DeviceEvent], device: int, capacity: int = NUM_EVENTS
    ) -> None:
        self._new_event = new_event
        self._device = device
        self._capacity = capacity
        self._made = itertools.count()
        self._free: deque[Mark] = deque()

    def take(self) -> Mark | None:
        """Return a mark; None if all are in use."""
        try:
            # The mark that was released first is the likeliest to be done.
            return self._free.popleft()
        except IndexError:
            if next(self._made) >= self._capacity:
                return None
            return Mark(self._new_event(), self._device)

    def release(self, *marks: Mark) -> None:
        """Return marks to the pool."""
        self._free.extend(marks)
