"""Events to be used again: a bounded number, handed out without waiting."""

from __future__ import annotations

import itertools
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from .backend import DeviceEvent

NUM_EVENTS = 8_192
"""Events of one device, enough for three steps of 1,000 spans that the device has not come to.

CUDA itself takes some 1,000 launches a stream before it makes the host wait."""


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
