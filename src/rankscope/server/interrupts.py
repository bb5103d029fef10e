"""SIGTERM ends a command as Ctrl-C does, so that it tidies up."""

from __future__ import annotations

import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def terminated_like_interrupted() -> Iterator[None]:
    """Raise KeyboardInterrupt on SIGTERM until the block ends; main thread only.

    Uvicorn, for one, ends by raising the signal that stopped it again: the
    default action of SIGTERM would end us before our own clean-up.
    """
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
