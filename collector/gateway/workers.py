"""Threads for statements that need not end before the process does.

The engine looks at a statement's time only between two blocks of rows, so a function that works
for an hour on one block can't be ended. The interpreter waits for the threads of an executor
when it ends; these it leaves.
"""

from __future__ import annotations

import queue
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class _Work:
    future: Future[Any]
    call: Callable[[], Any]

    def do(self) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            found = self.call()
        except BaseException as error:  # noqa: BLE001  # told to whoever waits
            self.future.set_exception(error)
        else:
            self.future.set_result(found)


class _Worker(threading.Thread):
    """A thread of these, to be told from others."""


def left_behind() -> list[str]:
    """Return the names of the worker threads that live: once all workers are closed, stuck ones.

    While one of them is in the engine the process may not end in the ordinary way: the engine's
    own end waits for it at times.
    """
    return [thread.name for thread in threading.enumerate() if isinstance(thread, _Worker)]


class Workers:
    """Threads that do one thing after another; they begin when they are needed.

    Args:
        num_threads: At most.
        name: What the threads are called.
    """

    def __init__(self, num_threads: int, *, name: str) -> None:
        self._num_threads = num_threads
        self._name = name
        self._waiting: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads: list[_Worker] = []
        self._is_closed = False

    def submit(self, call: Callable[[], Result]) -> Future[Result]:
        """Return what will hold the call's result.

        Raises:
            RuntimeError: The workers were closed.
        """
        future: Future[Result] = Future()
        with self._lock:
            if self._is_closed:
                raise RuntimeError("closed workers take no work")
            self._waiting.put(_Work(future, call))
            if len(self._threads) < self._num_threads:
                name = f"{self._name}-{len(self._threads)}"
                thread = _Worker(target=self._run, name=name, daemon=True)
                self._threads.append(thread)
                thread.start()
        return future

    def close(self, *, patience_s: float) -> bool:
        """Cancel what waits and wait for what runs. Safe to repeat.

        Returns:
            Whether every thread has ended.
        """
        with self._lock:
            self._is_closed = True
            threads = list(self._threads)
        while not self._waiting.empty():
            work = self._waiting.get()
            if work is not None:
                work.future.cancel()
        for _ in threads:
            self._waiting.put(None)
        deadline_s = time.monotonic() + patience_s
        for thread in threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)

    def _run(self) -> None:
        while True:
            work = self._waiting.get()
            if work is None:
                return
            work.do()
            del work  # else a result would live until the next one
