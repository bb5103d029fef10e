"""Events of a host that belong to no span: lines of its kernel's log and of its ranks' logs.

They are stored with the run, and where it is known the rank, of the process that they are about.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rankscope.tracer.span import NONE, NS_PER_S

from ..names import storable_name
from ..spool.descriptions import event_row

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from ..identity import Row
    from ..spool.process import ProcessFiles

KERNEL, LOG = "kernel", "log"
"""Kinds of these events in table ``events``."""

FIRST_LINE = -1_000
"""Line number of the first event; later ones count down. `spool.descriptions` has those above."""

MAX_WAITING = 1_000
"""Events that wait; beyond that, the oldest are dropped and counted."""

KEEP_NS = 120 * NS_PER_S
"""Time for which an ended process is still known, and an event waits for its run to appear."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostEvent:
    """Something that happened on this host."""

    at_ns: int
    """Unix time at which it was read: at most a second late."""

    kind: str
    """`KERNEL` or `LOG`."""

    text: str
    data: Mapping[str, Any] = field(default_factory=dict)
    pid: int | None = None
    rank: int | None = None
    local_rank: int | None = None
    """What is known of the process that it is about; all None: the host as a whole."""


class HostEventQueue:
    """Bounded queue of events that several threads fill and one empties."""

    def __init__(self) -> None:
        self._events: deque[HostEvent] = deque()
        self._lock = threading.Lock()
        self.num_dropped = 0

    def add(self, events: Iterable[HostEvent]) -> None:
        """Add events; the oldest are dropped beyond `MAX_WAITING`."""
        with self._lock:
            self._events.extend(events)
            while len(self._events) > MAX_WAITING:
                self._events.popleft()
                self.num_dropped += 1

    def take(self) -> list[HostEvent]:
        """Remove and return all events."""
        with self._lock:
            events, self._events = list(self._events), deque()
        return events


@dataclass(slots=True)
class _Known:
    files: ProcessFiles
    seen_ns: int


class HostEventRows:
    """Rows of table ``events``, for each event in the runs that it concerns.

    An event about a process belongs to that rank, any other to the host: it is stored once in each
    run that trains there, with rank -1. Without such a run it waits for `KEEP_NS`, and is dropped
    and counted then.

    Args:
        host: Name of this host, as in the headers of the spool.
    """

    def __init__(self, host: str, *, unix_ns: Callable[[], int]) -> None:
        self._host = host
        self._unix_ns = unix_ns
        self._known: dict[str, _Known] = {}
        self._waiting: deque[HostEvent] = deque(maxlen=MAX_WAITING)
        self._unsent: deque[Row] = deque(maxlen=MAX_WAITING)
        self._next_line = FIRST_LINE
        self.counts: Counter[str] = Counter()
        """Events by what became of them: "rank", "host", "dropped"."""

    def note_running(self, processes: Iterable[ProcessFiles]) -> None:
        """Note which processes run at the moment."""
        now_ns = self._unix_ns()
        for files in processes:
            if files.identity.host == self._host:
                self._known[files.process] = _Known(files, now_ns)
        gone = [key for key, known in self._known.items() if known.seen_ns < now_ns - KEEP_NS]
        for key in gone:
            del self._known[key]

    def send(self, events: Iterable[HostEvent], upsert: Callable[[str, list[Row]], None]) -> None:
        """Store the rows of events. If ``upsert`` raises, they are sent with the next ones."""
        self._unsent += self.take_rows(events)
        if self._unsent:
            upsert("events", list(self._unsent))
            self._unsent.clear()

    def take_rows(self, events: Iterable[HostEvent]) -> list[Row]:
        """Return the rows of events, and of those that waited for a run."""
        rows: list[Row] = []
        waiting, self._waiting = self._waiting, deque(maxlen=MAX_WAITING)
        for event in (*waiting, *events):
            if self._known:
                rows += self._rows_of(event)
            elif event.at_ns >= self._unix_ns() - KEEP_NS:
                self._waiting.append(event)
            else:
                self.counts["dropped"] += 1
        return rows

    def _rows_of(self, event: HostEvent) -> list[Row]:
        owner = self._owner(event)
        if owner is not None:
            self.counts["rank"] += 1
            return [self._row(event, owner)]
        self.counts["host"] += 1
        of_run: dict[str, ProcessFiles] = {}
        for known in sorted(self._known.values(), key=lambda known: known.files.epoch):
            of_run[known.files.run_id] = known.files
        return [self._row(event, files, rank=NONE) for files in of_run.values()]

    def _owner(self, event: HostEvent) -> ProcessFiles | None:
        """Return the newest process that an event is about; None if it is unknown."""
        newest = [
            known.files for known in sorted(self._known.values(), key=lambda one: -one.seen_ns)
        ]
        for wanted, own in (
            (event.pid, lambda files: files.identity.pid),
            (event.rank, lambda files: files.identity.rank),
            (event.local_rank, _local_rank),
        ):
            found = next(
                (files for files in newest if wanted is not None and own(files) == wanted), None
            )
            if found is not None:
                return found
        return None

    def _row(self, event: HostEvent, files: ProcessFiles, *, rank: int | None = None) -> Row:
        row = event_row(
            files,
            line=self._next_line,
            at_ns=event.at_ns,
            kind=event.kind,
            text=event.text,
            data={"host": storable_name(self._host), **event.data},
        )
        self._next_line -= 1
        return row if rank is None else {**row, "rank": rank}


def _local_rank(files: ProcessFiles) -> int:
    local_rank = files.manifest.get("local_rank")
    return local_rank if isinstance(local_rank, int) else files.identity.rank
