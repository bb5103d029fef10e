"""Receiver of alerts: a queue and a thread of its own, so that no receiver delays another."""

from __future__ import annotations

import contextlib
import queue
import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..read.alerts import Delivery

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

TIMEOUT_S = 5.0
RETRY_DELAYS_S = (1.0, 5.0, 15.0)
CAPACITY = 100
"""Largest number of waiting messages. Beyond it, the newest is dropped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Outcome of one attempt to send a message."""

    is_delivered: bool
    is_final: bool
    """Whether another attempt is of no use: delivered, or refused for good."""

    text: str
    """The answer in a few words, without a secret."""


class Receiver(ABC):
    """Receiver of alerts.

    Args:
        name: Its name in the configuration. The store keeps what it got under this name.
    """

    is_alertmanager = False
    """Whether it forgets an alert that is not sent again."""

    def __init__(self, name: str, *, retry_delays_s: Sequence[float] = RETRY_DELAYS_S) -> None:
        self.name = name
        self._retry_delays_s = tuple(retry_delays_s)
        self._posts: queue.Queue[tuple[Mapping[str, Any], Callable[[Delivery], None]] | None] = (
            queue.Queue(CAPACITY)
        )
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"alerts-{name}", daemon=True)
        self._thread.start()

    @abstractmethod
    def send(self, document: Mapping[str, Any]) -> Answer:
        """Send a message once, in this thread.

        Args:
            document: Message from `rankscope.server.alerting`.
        """

    def post(self, document: Mapping[str, Any], *, on_done: Callable[[Delivery], None]) -> None:
        """Queue a message. Never blocks.

        Args:
            document: Message from `rankscope.server.alerting`.
            on_done: Called once with the result, from the receiver's thread, or from this one if
                the queue is full. Not called for a message that `close` interrupts.
        """
        try:
            self._posts.put_nowait((document, on_done))
        except queue.Full:
            on_done(Delivery.UNDELIVERED)

    def close(self, timeout_s: float = TIMEOUT_S) -> None:
        """Let the current attempt finish, start no more, and end the thread."""
        self._closing.set()
        with contextlib.suppress(queue.Full):  # then the thread sees `_closing` after the message
            self._posts.put_nowait(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while not self._closing.is_set():
            post = self._posts.get()
            if post is None:
                return
            document, on_done = post
            delivery = self._deliver(document)
            if delivery is not Delivery.PENDING:
                on_done(delivery)

    def _deliver(self, document: Mapping[str, Any]) -> Delivery:
        """Try until the message is delivered, refused for good, or the retries are used up."""
        for delay_s in (*self._retry_delays_s, None):
            answer = self.send(document)
            if answer.is_delivered:
                return Delivery.DELIVERED
            if answer.is_final or delay_s is None:
                return Delivery.UNDELIVERED
            if self._closing.wait(delay_s):
                return Delivery.PENDING
        return Delivery.UNDELIVERED
