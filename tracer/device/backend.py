"""What the device timing asks of a device, so that a test may put another in its place."""

from __future__ import annotations

import itertools
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


NUM_EVENTS = 8_192
"""Events of one device, enough for three steps of 1,000 spans that the device has not come to.

CUDA itself takes some 1,000 launches a stream before it makes the host wait."""


class DeviceStream(Protocol):
    """A stream of one device."""

    @property
    def cuda_stream(self) -> int:
        """The stream's handle; 0 is the device's default stream."""
        ...


class DeviceEvent(Protocol):
    """A moment in a stream's work, known once the work before it is done."""

    def record(self, stream: Any) -> None:  # noqa: ANN401 - torch's own stream class
        """Put the event behind all work that ``stream`` has been given. Never waits."""
        ...

    def query(self) -> bool:
        """Return whether the work before the event is done. Never waits."""
        ...

    def elapsed_time(self, end_event: Any) -> float:  # noqa: ANN401 - torch's own event class
        """Return the ms from this event to ``end_event``, a float32; both must be done."""
        ...


class DeviceBackend(Protocol):
    """The few things that device timing does with a device. None of them waits for it."""

    @property
    def comm_backend(self) -> str:
        """What torch calls the library whose works run on the device's own streams.

        They return before they are done, and waiting for them holds up a stream only.
        """
        ...

    def device_of(self, objects: Iterable[object]) -> int | None:
        """Return the device of the first tensor or device among ``objects``; None where none is."""
        ...

    def current_stream(self, device: int) -> DeviceStream:
        """Return the stream that the calling thread issues work to."""
        ...

    def is_capturing(self, device: int) -> bool:
        """Return whether that stream is being captured into a graph."""
        ...

    def private_stream(self, device: int) -> DeviceStream:
        """Return a stream that nobody else uses and that waits for no other."""
        ...

    def new_event(self) -> DeviceEvent:
        """Return an event that keeps its time."""
        ...

    def prepare_thread(self, device: int) -> None:
        """Let the calling thread query events while another thread captures a graph.

        Args:
            device: One that the process uses; the thread must touch no other.
        """
        ...

    def device_uuid(self, device: int) -> str:
        """Return the device's own name, "" where unknown."""
        ...


class Mark(NamedTuple):
    """An event that was recorded on a stream."""

    event: DeviceEvent
    device: int
    stream: int
    """Handle of the stream."""

    launch_ns: int
    """When the host recorded it, monotonic."""


class EventPool:
    """Events of one device. An event is in use from `take` until `release`.

    Any thread may take; nothing locks. An event may be given back before the
    device has come to it: recording it anew moves it.
    """

    def __init__(self, new_event: Callable[[], DeviceEvent], capacity: int = NUM_EVENTS) -> None:
        self._new_event = new_event
        self._capacity = capacity
        self._made = itertools.count()
        self._free: deque[DeviceEvent] = deque()

    def take(self) -> DeviceEvent | None:
        """Return an event; None where all are in use."""
        try:
            # The one that was given back first: the likeliest to be done.
            return self._free.popleft()
        except IndexError:
            return self._new_event() if next(self._made) < self._capacity else None

    def release(self, *events: DeviceEvent) -> None:
        """Take events back."""
        self._free.extend(events)
