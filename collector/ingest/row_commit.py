"""Put the descriptions of many requests into few inserts, a bounded number a second for each table.

Thousands of hosts post some sixty rows a second each. An insert for each would leave more parts
than the engine can merge. So a table takes a few inserts at once and then one every quarter of a
second, and what comes meanwhile goes into the next. Who is alone waits for nobody.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..errors import StoreQueryError
from .retryable import ENDING_S, TOO_MANY_PARTS, BusyError, refuse

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ..identity import Row
    from .retryable import StoreTrouble

    Write = Callable[[str, Sequence[Row]], None]

GAP_S = 0.25
"""Between two inserts into one table, in the long run; as long a request may wait for its turn."""

MAX_GAP_S = 2.0
"""Where the engine says that it has too many parts."""

NUM_AT_ONCE = 4
"""Inserts into a table that was quiet before the gap is kept: an agent that starts sends a few
descriptions one after the other."""

MAX_ROWS = 50_000
"""Of one insert, but for its last request. So many wait for no gap: an insert of that size is what
the engine wants."""

CLOSE_S = 10.0


@dataclass(frozen=True, slots=True)
class _Parcel:
    rows: Sequence[Row]
    done: Future[int] = field(default_factory=Future)


@dataclass(slots=True)
class _Lane:
    """What waits for one table."""

    parcels: list[_Parcel] = field(default_factory=list)
    num_rows: int = 0
    full_s: float = 0.0
    """When the table may take `NUM_AT_ONCE` inserts at once again."""

    def due_s(self, gap_s: float) -> float:
        """Return when the next insert may begin."""
        return 0.0 if self.num_rows >= MAX_ROWS else self.full_s - (NUM_AT_ONCE - 1) * gap_s

    def take(self) -> list[_Parcel]:
        """Return what goes in together: the first, and what fits beside it."""
        num_rows = num_parcels = 0
        while num_parcels < len(self.parcels) and num_rows < MAX_ROWS:
            num_rows += len(self.parcels[num_parcels].rows)
            num_parcels += 1
        taken, self.parcels = self.parcels[:num_parcels], self.parcels[num_parcels:]
        self.num_rows -= num_rows
        return taken


class RowCommit:
    """One thread that stores what was submitted, in groups of one table each.

    Args:
        write: Stores rows of a table; all or nothing.
        trouble: Is told how it went.
        monotonic_s: Clock for the gaps.
    """

    def __init__(
        self,
        write: Write,
        *,
        trouble: StoreTrouble,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._write = write
        self._trouble = trouble
        self._monotonic_s = monotonic_s
        self._lanes: dict[str, _Lane] = {}
        self._changed = threading.Condition()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="ingest-rows", daemon=True)
        self.gap_s = GAP_S
        self.num_groups = 0
        """Inserts; far fewer than requests, when there are many."""

        self.num_rows = 0

    @property
    def is_running(self) -> bool:
        """Whether the thread lives."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def submit(self, table: str, rows: Sequence[Row]) -> Future[int]:
        """Return how many rows will have been stored, or a `BusyError`, or a `WireError`.

        Raises:
            BusyError: It was closed.
        """
        parcel = _Parcel(rows)
        with self._changed:
            if self._is_closed:
                raise BusyError("the collector is ending", retry_after_s=ENDING_S)
            lane = self._lanes.setdefault(table, _Lane())
            lane.parcels.append(parcel)
            lane.num_rows += len(rows)
            self._changed.notify()
        return parcel.done

    def close(self) -> None:
        """Store what waits, and end the thread."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join(CLOSE_S)

    def _run(self) -> None:
        while (found := self._next_group()) is not None:
            self._commit(*found)

    def _next_group(self) -> tuple[str, list[_Parcel]] | None:
        """Wait for the table that is due first; None once it was closed and nothing waits."""
        with self._changed:
            while True:
                waiting = [name for name, lane in self._lanes.items() if lane.parcels]
                if not waiting:
                    if self._is_closed:
                        return None
                    self._changed.wait()
                    continue
                table = min(waiting, key=lambda name: self._lanes[name].due_s(self.gap_s))
                lane = self._lanes[table]
                now_s = self._monotonic_s()
                wait_s = lane.due_s(self.gap_s) - now_s
                if wait_s <= 0 or self._is_closed:
                    lane.full_s = max(lane.full_s, now_s) + self.gap_s
                    return table, lane.take()
                self._changed.wait(wait_s)

    def _commit(self, table: str, group: list[_Parcel]) -> None:
        try:
            self._write(table, [row for parcel in group for row in parcel.rows])
        except Exception as error:  # noqa: BLE001  # whatever it is, the others must go on
            self._failed(table, group, error)
            return
        self._trouble.succeeded()
        self.gap_s = max(GAP_S, self.gap_s / 2)
        self.num_groups += 1
        for parcel in group:
            self.num_rows += len(parcel.rows)
            parcel.done.set_result(len(parcel.rows))

    def _failed(self, table: str, group: list[_Parcel], error: Exception) -> None:
        if isinstance(error, StoreQueryError) and error.code == TOO_MANY_PARTS:
            self.gap_s = min(MAX_GAP_S, self.gap_s * 4)

        def one_by_one() -> None:
            for parcel in group:
                self._commit(table, [parcel])

        answers = [parcel.done for parcel in group]
        refuse(error, answers, trouble=self._trouble, one_by_one=one_by_one)
