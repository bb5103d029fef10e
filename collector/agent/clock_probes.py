"""Ask a collector's clock again and again, beside everything else."""

from __future__ import annotations

import json
import threading
from collections import deque
from typing import TYPE_CHECKING

from ..clock.probe import ProbeReply, parse_reply
from ..errors import ClockReplyError
from .answers import OK
from .errors import HeldError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..clock.sync import ClockEstimate, HostClock
    from ..clock.watch import ClockEvent
    from .link import Link

LOOK_S = 0.02
PROBES_A_FIT = 5
MAX_EVENTS = 64


def exchange_over(link: Link) -> Callable[[], ProbeReply]:
    """Return what sends one probe and returns the reply.

    It raises `OSError` where none came and `ClockReplyError` where it is none, as
    `collector.clock.sync.HostClock` has it.
    """

    def exchange() -> ProbeReply:
        try:
            answer = link.post("/v1/clock", b"", content_type="application/json")
        except HeldError as error:
            raise OSError(error.reason) from error
        if answer.status != OK:
            raise OSError(f"the collector answers {answer.status}")
        try:
            return parse_reply(json.loads(answer.body))
        except (ValueError, RecursionError) as error:
            raise ClockReplyError("it is no JSON") from error

    return exchange


class ProbeThread:
    """Probes the collector beside everything else, so that no transfer delays a probe.

    Args:
        clock: What to poll; this thread's alone.
    """

    def __init__(self, clock: HostClock) -> None:
        self._clock = clock
        self._latest: ClockEstimate | None = None
        self._events: deque[ClockEvent] = deque(maxlen=MAX_EVENTS)
        self._is_stopping = threading.Event()
        self._is_suspended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="clock-probes", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End; a probe under way is not waited for."""
        self._is_stopping.set()

    def latest(self) -> ClockEstimate | None:
        """Return the newest estimate; None before there is one."""
        return self._latest

    def take_events(self) -> list[ClockEvent]:
        """Return what the probes showed since the last call."""
        return [self._events.popleft() for _ in range(len(self._events))]

    def forget(self) -> None:
        """Begin anew, for the host was suspended."""
        self._is_suspended.set()

    def _run(self) -> None:
        num_since = 0
        while not self._is_stopping.wait(LOOK_S):
            if self._is_suspended.is_set():
                self._is_suspended.clear()
                self._clock.forget()
            if not self._clock.poll():
                continue
            num_since += 1
            if num_since >= _probes_a_fit(self._latest):
                self._latest, num_since = self._clock.estimate(), 0
                self._events.extend(self._clock.take_events())


def _probes_a_fit(latest: ClockEstimate | None) -> int:
    """Return after how many probes to fit again: a fit of all costs some ms, one of few does not.

    A collector whom many ask is asked so seldom that five probes take seconds.
    """
    return 1 if latest is None else min(PROBES_A_FIT, 1 + latest.num_probes // 8)
