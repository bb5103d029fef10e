"""Ship what all ranks of this host write, one run beside the other, for as long as it takes."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..errors import CollectorError
from ..spool.descriptions import CLOCK_LINE, event_row
from ..spool.process import ProcessFiles
from ..spool.tail import SegmentPolicy, SpoolTail, run_folders
from .errors import RetryLaterError
from .outbox import HEARTBEAT_PERIOD_S, HEARTBEATS_PER_REQUEST, MAX_SAMPLES
from .retry import Backoff

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from ..identity import Row
    from .buffer import RowBuffer
    from .clock import AgentClocks
    from .outbox import HeartbeatSender, Outbox
    from .quota import SpoolQuota

TURN_S = 1.0
"""Between two looks at the spool: many small requests cost the collector more than few large."""

BATCH_ROWS = 81_920
"""Rows that are decoded and held at once, some 17 MB, and sent in one request. What waits beyond
stays in the segments: an outage, and the backlog after it, take little more memory than a busy
second. Smaller requests drain slower: by row those of 98,304 took 1.1 to 1.2 x the CPU time of
131,072, and 188 MiB where a second of 64,000 took 150."""

DEFECT_PAUSE_S = 60.0
COLLECTOR = "the collector"

MAX_REASONS = 8
"""Of one trouble that are told; later ones are not."""


@dataclass(slots=True)
class _Run:
    """One run of the spool and until when it is left alone."""

    tail: SpoolTail
    held_until_s: float = 0.0
    backoff: Backoff = field(default_factory=Backoff)


class NodeAgent:
    """Follows a spool and ships it.

    Each run has a tail of its own, so that one that the collector refuses keeps no other
    waiting. A collector that does not answer is left alone for all of them.

    Args:
        spool: Folder that holds one folder a run.
        outbox: Where cuts and descriptions go.
        clocks: Place the rows in time.
        say: Tells a line to whoever watches.
        room: Bounds the spool; None: only the ranks' own limits do.
        monotonic_s: For the pauses.
    """

    def __init__(
        self,
        spool: Path,
        outbox: Outbox,
        clocks: AgentClocks,
        *,
        say: Callable[[str], None],
        room: SpoolQuota | None = None,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._spool = spool
        self._outbox = outbox
        self._clocks = clocks
        self._say = say
        self._room = room
        self._monotonic_s = monotonic_s
        self._runs: dict[str, _Run] = {}
        self._clock_rows: list[Row] = []
        self._clock_events: list[Row] = []
        self._buffers: list[tuple[str, RowBuffer]] = []
        self._beats: tuple[RowBuffer, HeartbeatSender] | None = None
        self._beats_due_s = 0.0
        self._held_until_s = 0.0
        self._is_held_by_token = False
        self._held_token: str | None = None
        self._backoff = Backoff()
        self._troubles = TroubleLog(say, monotonic_s=monotonic_s)

    def send_rows(self, table: str, buffer: RowBuffer) -> None:
        """Ship what comes into a buffer too, as rows of ``table``."""
        self._buffers.append((table, buffer))

    def send_heartbeats(self, buffer: RowBuffer, shipper: HeartbeatSender) -> None:
        """Ship the heartbeats that come into a buffer too."""
        self._beats = (buffer, shipper)

    def run(self, stopping: threading.Event) -> None:
        """Take turns until told to stop; what is under way then is finished or kept."""
        pause_s = 0.0
        while not stopping.wait(pause_s):
            pause_s = self.turn()
        self._beats_due_s = 0.0
        self.turn()  # ranks of the same pod end with us: what they wrote last
        self.close()

    def turn(self) -> float:
        """Look at everything once and ship what is new; return the pause until the next turn."""
        if self._room is not None:
            self._keep_room(self._room)
        now_s = self._monotonic_s()
        if now_s < self._held_until_s and not self._has_new_token():
            return min(self._held_until_s - now_s, TURN_S)
        try:
            self._discover()
            for name, run in self._runs.items():
                self._poll(name, run)
            self._ship_sides()
        except RetryLaterError as error:
            self._hold_all(error)
            return min(max(self._held_until_s - self._monotonic_s(), 0.0), TURN_S)
        self._backoff.succeeded()
        self._troubles.end(COLLECTOR)
        waits = [run.held_until_s - self._monotonic_s() for run in self._runs.values()]
        return min([wait for wait in waits if wait > 0] + [TURN_S])

    def close(self) -> None:
        """Let go of the spool's files."""
        for run in self._runs.values():
            run.tail.close()

    def _discover(self) -> None:
        try:
            folders = run_folders(self._spool)
        except FileNotFoundError:
            return
        for folder in folders:
            if folder.name not in self._runs:
                tail = SpoolTail(
                    self._spool,
                    self._outbox,
                    only_run=folder.name,
                    clocks=self._clocks,
                    batch_rows=BATCH_ROWS,
                    segment_policy=SegmentPolicy.DELETE,
                )
                self._runs[folder.name] = _Run(tail=tail)

    def _poll(self, name: str, run: _Run) -> None:
        if self._monotonic_s() < run.held_until_s and not self._has_new_token():
            return
        try:
            progress = run.tail.poll()
        except RetryLaterError as error:
            if not error.is_of_run:
                raise
            self._hold(name, run, error)
        except Exception as error:  # noqa: BLE001  # another run must go on
            told = f"{type(error).__name__}: {error}"
            self._hold(name, run, RetryLaterError(told, pause_s=DEFECT_PAUSE_S))
        else:
            run.backoff.succeeded()
            self._troubles.end(f"run {name}")
            for problem in progress.problems:
                self._say(problem)

    def _ship_sides(self) -> None:
        """Ship what is of no run: clocks, and what the host's sources said."""
        self._clocks.renew()
        self._ship_clock_events()
        self._clock_rows += self._clocks.take_rows()
        if self._clock_rows:
            self._outbox.upsert("clock", self._clock_rows)
            self._clock_rows = []
        for table, buffer in self._buffers:

            def send(rows: Sequence[Row], table: str = table) -> None:
                self._outbox.upsert(table, rows)

            buffer.ship(send, num_at_once=MAX_SAMPLES)
        self._ship_beats()

    def _ship_beats(self) -> None:
        if self._beats is None or self._monotonic_s() < self._beats_due_s:
            return
        buffer, shipper = self._beats
        if not len(buffer):
            return
        buffer.ship(shipper.send, num_at_once=HEARTBEATS_PER_REQUEST)
        self._beats_due_s = self._monotonic_s() + HEARTBEAT_PERIOD_S

    def _ship_clock_events(self) -> None:
        """Tell each run that trains here what happened to this host's clocks."""
        for at_ns, event in self._clocks.take_events():
            for run in self._runs.values():
                ranks = sorted(run.tail.running, key=lambda files: files.identity.rank)
                self._clock_events += [
                    event_row(
                        files,
                        line=CLOCK_LINE,
                        at_ns=at_ns,
                        kind=event.kind,
                        text=event.text,
                        data={"shift_ns": event.shift_ns, "host": files.identity.host},
                    )
                    for files in ranks[:1]
                ]
        if self._clock_events:
            self._outbox.upsert("events", self._clock_events)
            self._clock_events = []

    def _keep_room(self, room: SpoolQuota) -> None:
        try:
            runs = self._runs.values()
            line = room.keep(folder for run in runs for folder in run.tail.stored)
        except (OSError, RetryLaterError) as error:
            self._troubles.begin("the spool's limit", str(error))
        else:
            if line is not None:
                self._say(line)
            self._troubles.end("the spool's limit")

    def _hold_all(self, error: RetryLaterError) -> None:
        self._held_until_s = self._monotonic_s() + self._backoff.failed(error.pause_s)
        self._is_held_by_token = error.is_token
        self._held_token = self._outbox.sent_token_text()
        self._troubles.begin(COLLECTOR, error.reason)

    def _hold(self, name: str, run: _Run, error: RetryLaterError) -> None:
        run.held_until_s = self._monotonic_s() + run.backoff.failed(error.pause_s)
        if error.is_token:
            self._is_held_by_token = True
            self._held_token = self._outbox.sent_token_text()
        if (error.pause_s or 0.0) >= 1.0:  # a clock that is being tied is no trouble
            self._troubles.begin(f"run {name}", error.reason)

    def _has_new_token(self) -> bool:
        """Return whether what holds us is a token that was replaced, or was not there and is."""
        return self._is_held_by_token and self._held_token != self._outbox.token_text()


def ranks_in(spool: Path, run_id: str) -> list[int]:
    """Return the ranks of a run whose processes write, or wrote, to a spool."""
    ranks = set()
    for folder in (folder for run in run_folders(spool) for folder in run.iterdir()):
        try:
            files = ProcessFiles(folder)
        except (OSError, CollectorError):
            continue
        if files.run_id == run_id:
            ranks.add(files.identity.rank)
    return sorted(ranks)


class TroubleLog:
    """What does not work just now, by name.

    Args:
        say: Tells a line.
        monotonic_s: For how long it lasted.
    """

    def __init__(
        self, say: Callable[[str], None], *, monotonic_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._say = say
        self._monotonic_s = monotonic_s
        self._since_s: dict[str, float] = {}
        self._told: dict[str, set[str]] = {}

    def begin(self, name: str, reason: str) -> None:
        """Say why ``name`` does not work, unless that was said since it does not."""
        self._since_s.setdefault(name, self._monotonic_s())
        told = self._told.setdefault(name, set())
        if reason not in told and len(told) < MAX_REASONS:
            told.add(reason)
            self._say(f"{name}: {reason}; data waits in the spool")

    def end(self, name: str) -> None:
        """Say that it works again, if it was said that it does not."""
        self._told.pop(name, None)
        since_s = self._since_s.pop(name, None)
        if since_s is not None:
            self._say(f"{name}: works again after {self._monotonic_s() - since_s:.0f} s")
