"""Put what many requests bring into one insert a table: each waits for the insert, none for long.

While one insert is under way the next ones gather, so that the busier the server is, the
larger the inserts are. An acknowledgement follows the insert; nothing is acknowledged before.
"""

from __future__ import annotations

import queue
import threading
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..errors import StoreQueryError
from .retryable import ENDING_S, TOO_MANY_PARTS, BusyError, refuse

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ..store.writer import CutState
    from ..wire.codec import CutBatch
    from .retryable import StoreTrouble

    Write = Callable[[Sequence[CutBatch]], list[list[CutState]]]

MAX_ROWS = 81_920
"""Of one group, but for its last batch. An insert holds its rows several times over (as they came,
as the engine's blocks, sorted, compressed), some 1.1 KB a row: 262,144 took 280 MB, 131,072 took
180, 65,536 took 75."""

MAX_BATCHES = 1_024
MIN_GATHER_S = 0.005
MAX_GATHER_S = 2.0
CLOSE_S = 10.0


@dataclass(frozen=True, slots=True)
class _Parcel:
    batch: CutBatch
    done: Future[list[CutState]] = field(default_factory=Future)


class GroupCommit:
    """One thread that stores what was submitted, in groups.

    Args:
        write: Stores batches and returns what became of each cut; all or nothing.
        trouble: Is told how it went.
    """

    def __init__(self, write: Write, *, trouble: StoreTrouble) -> None:
        self._write = write
        self._trouble = trouble
        self._queue: queue.SimpleQueue[_Parcel | None] = queue.SimpleQueue()
        self.gather_s = MIN_GATHER_S
        """How long a group waits for one batch more."""

        self._closing = threading.Lock()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="ingest", daemon=True)
        self.num_groups = 0
        """Inserts of one group each; far fewer than requests, when there are many."""

        self.num_rows = 0

    @property
    def is_running(self) -> bool:
        """Whether the thread lives."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def submit(self, batch: CutBatch) -> Future[list[CutState]]:
        """Return what will become of a batch's cuts: their states, a `BusyError`, a `WireError`.

        Raises:
            BusyError: It was closed.
        """
        parcel = _Parcel(batch)
        with self._closing:
            if self._is_closed:
                raise BusyError("the collector is ending", retry_after_s=ENDING_S)
            self._queue.put(parcel)
        return parcel.done

    def close(self) -> None:
        """Store what waits, and end the thread."""
        with self._closing:
            self._is_closed = True
            self._queue.put(None)  # behind all that was submitted
        if self._thread.is_alive():
            self._thread.join(CLOSE_S)

    def _run(self) -> None:
        is_over = False
        while not is_over and (first := self._queue.get()) is not None:
            group, is_over = self._gathered(first)
            self._commit(group)

    def _gathered(self, first: _Parcel) -> tuple[list[_Parcel], bool]:
        """Return what goes in together, and whether nothing comes after."""
        group, num_rows = [first], first.batch.num_rows
        while num_rows < MAX_ROWS and len(group) < MAX_BATCHES:
            try:
                parcel = self._queue.get(timeout=self.gather_s)
            except queue.Empty:
                break
            if parcel is None:
                return group, True
            group.append(parcel)
            num_rows += parcel.batch.num_rows
        return group, False

    def _commit(self, group: list[_Parcel]) -> None:
        try:
            states = self._write([parcel.batch for parcel in group])
        except Exception as error:  # noqa: BLE001  # whatever it is, the others must go on
            self._failed(group, error)
            return
        self._trouble.succeeded()
        self.gather_s = max(MIN_GATHER_S, self.gather_s / 2)
        self.num_groups += 1
        self.num_rows += sum(parcel.batch.num_rows for parcel in group)
        for parcel, of_batch in zip(group, states, strict=True):
            parcel.done.set_result(of_batch)

    def _failed(self, group: list[_Parcel], error: Exception) -> None:
        if isinstance(error, StoreQueryError) and error.code == TOO_MANY_PARTS:
            # Fewer, larger inserts are what the engine asks for.
            self.gather_s = min(MAX_GATHER_S, self.gather_s * 4)

        def one_by_one() -> None:
            for parcel in group:
                self._commit([parcel])

        answers = [parcel.done for parcel in group]
        refuse(error, answers, trouble=self._trouble, one_by_one=one_by_one)
