"""The background thread of a recording process, which does all its file work.

Alone in a module, because it is the only part that may block.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from typing import TYPE_CHECKING

from .exit_record import open_for_writing

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

TICK_S = 1.0
"""Longest time between two turns. A turn takes 0.2 ms of CPU time from the training."""

MAX_LINES = 4096
"""Largest number of queued lines; further ones are dropped and counted."""

STOP_TIMEOUT_S = 2.0
"""Longest time that the shutdown waits for the thread."""


class BackgroundThread:
    """A thread that writes queued lines and calls ``work``, once a second or when woken.

    The queue is a `queue.SimpleQueue`, whose ``put`` is reentrant: a signal handler or a
    ``__del__`` that records cannot deadlock on it.
    """

    def __init__(
        self, folder: Path, *, work: Callable[[], None], on_error: Callable[[], None]
    ) -> None:
        self._folder = folder
        self._work = work
        self._on_error = on_error
        self._orders: queue.SimpleQueue[tuple[str, str] | None] = queue.SimpleQueue()
        self._stopping = False
        self._next_s = TICK_S
        self._thread = threading.Thread(target=self._run, name="rankscope-spool", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def wake(self) -> None:
        """Request a turn now. Never blocks."""
        self._orders.put(None)

    def wake_within(self, within_s: float) -> None:
        """Request that the turn after this one begins within ``within_s``. Never blocks."""
        self._next_s = min(self._next_s, within_s)
        if threading.current_thread() is not self._thread:
            self.wake()

    def append_line(self, file_name: str, line: str) -> bool:
        """Queue one line for a file of the folder; return False if the queue is full."""
        if self._orders.qsize() >= MAX_LINES:
            return False
        self._orders.put((file_name, line))
        return True

    def stop(self) -> None:
        """Write the queued lines and end the thread; wait `STOP_TIMEOUT_S` at most."""
        self._stopping = True
        self.wake()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(STOP_TIMEOUT_S)

    def _run(self) -> None:
        while not self._stopping:
            timeout_s, self._next_s = self._next_s, TICK_S
            self._turn(timeout_s)
        self._turn(0.0)

    def _turn(self, timeout_s: float) -> None:
        try:
            self._write_lines(timeout_s)
            self._work()
        except Exception:  # noqa: BLE001 - one failed write must not end the recording
            self._on_error()

    def _write_lines(self, timeout_s: float) -> None:
        """Write lines until the queue is empty; wait up to ``timeout_s`` for the first."""
        try:
            order = self._orders.get(timeout=timeout_s)
            while True:
                if order is not None:
                    self._write_line(*order)
                order = self._orders.get_nowait()
        except queue.Empty:
            return

    def _write_line(self, file_name: str, line: str) -> None:
        path = self._folder / file_name
        with (
            contextlib.suppress(OSError),
            os.fdopen(open_for_writing(path, os.O_APPEND), "a", encoding="utf-8") as file,
        ):
            file.write(line + "\n")
