"""Signals that end a server: SIGTERM and SIGINT."""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """Raise KeyboardInterrupt on SIGTERM until the block ends. Main thread only.

    Uvicorn ends by raising the signal that stopped it once more. The default action of SIGTERM
    would then end the process before its own cleanup.
    """
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def stop_event() -> Iterator[threading.Event]:
    """Set an event on SIGTERM or SIGINT until the block ends. Main thread only."""
    stopping = threading.Event()
    signals = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(number, lambda *_: stopping.set()) for number in signals]
    try:
        yield stopping
    finally:
        for number, handler in zip(signals, before, strict=True):
            signal.signal(number, handler)
