"""Catch one moment on both clocks: an event of an idle stream, and when the host saw it done."""

from __future__ import annotations

import time
from time import monotonic_ns
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    from .backend import DeviceEvent, DeviceStream

SPIN_NS = 100_000
"""How long a fresh event is asked without a pause: an idle device takes some 10 us."""

NAP_S = 50e-6
VISIBLE_NS = 5_000
"""How long the device's "done" may be on its way to the host."""

EVENT_RESOLUTION_NS = 500
"""Resolution of an event's time. Source: CUDA Runtime API, ``cudaEventElapsedTime``."""


class Bracket(NamedTuple):
    """Two moments of the host, monotonic, between which the device came to an event."""

    lower_ns: int
    upper_ns: int

    @property
    def error_ns(self) -> int:
        """Half of the bracket."""
        return (self.upper_ns - self.lower_ns + 1) // 2


class Probe:
    """An event on a private stream, watched until it is done.

    The lower end of the bracket is the moment before the event was recorded, or
    the latest moment at which it was seen not done, whichever is later: behind
    a deep queue (``CUDA_DEVICE_MAX_CONNECTIONS=1``) the device comes to the event
    long after it was recorded, and the bracket is as tight all the same.
    """

    def __init__(
        self,
        event: DeviceEvent,
        stream: DeviceStream,
        *,
        clock: Callable[[], int] = monotonic_ns,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.event = event
        self._clock = clock
        self._sleep = sleep
        self._lower_ns = self._begun_ns = clock()
        event.record(stream)

    def watch(self, budget_ns: int) -> Bracket | None:
        """Return the bracket; None where the device has not come to the event in time.

        Args:
            budget_ns: How long to look; naps lie between looks after `SPIN_NS`.
        """
        until_ns = self._clock() + budget_ns
        while True:
            asked_ns = self._clock()
            if self.event.query():
                upper_ns = self._clock() + EVENT_RESOLUTION_NS
                return Bracket(self._lower_ns - EVENT_RESOLUTION_NS, upper_ns)
            self._lower_ns = max(self._lower_ns, asked_ns - VISIBLE_NS)
            if asked_ns >= until_ns:
                return None
            if asked_ns - self._begun_ns > SPIN_NS:
                self._sleep(NAP_S)
