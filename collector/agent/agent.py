"""The node agent: sends the spool of one host to a collector, each run on its own."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..errors import CollectorError
from ..host.heartbeat import HEARTBEAT_PERIOD_S, HEARTBEATS_PER_REQUEST
from ..spool.control import ControlWriter
from ..spool.descriptions import CLOCK_LINE, event_row
from ..spool.folder import all_process_folders, run_folders
from ..spool.process import ProcessFiles
from ..spool.tail import SegmentPolicy, SpoolTail
from .errors import RetryLaterError
from .outbox import MAX_SAMPLES
from .retry import Backoff

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from ..host.host_events import HostEventQueue, HostEventRows
    from ..identity import Row
    from .buffer import RowBuffer
    from .clock import AgentClocks
    from .outbox import Outbox, RunRowSender
    from .quota import SpoolQuota

TURN_S = 1.0
"""Pause between two turns: many small requests cost the collector more than a few large ones."""

BATCH_ROWS = 81_920
"""Rows that are decoded, held in memory (17 MB) and sent in one request. All others wait in the
segments, so an outage and its backlog take little more memory than a busy second. Measured:
requests of 98,304 rows take 1.1 to 1.2 times the processor time per row of those of 131,072, and
the agent takes 188 MiB with them, against 150 MiB in a second of 64,000 rows."""

DEFECT_PAUSE_S = 60.0
"""Pause of a run after an unexpected exception."""

MIN_REPORTED_PAUSE_S = 1.0
"""A shorter pause of a run is not logged: its clock is being aligned."""

COLLECTOR = "the collector"
SPOOL_LIMIT = "the spool's limit"

MAX_REASONS = 8
"""Number of reasons of one trouble that are logged."""


@dataclass(slots=True)
class _Run:
    tail: SpoolTail
    retry_at_s: float = 0.0
    backoff: Backoff = field(default_factory=Backoff)


class NodeAgent:
    """Follows a spool and sends it to a collector.

    Each run has its own tail, so that a run that the collector rejects delays no other. If the
    collector does not answer, all runs pause.

    Args:
        spool: Folder with one folder per run.
        outbox: Receives cuts and descriptions.
        quota: Bounds the size of the spool; None: only the ranks' own limits apply.
        monotonic_s: Clock of the pauses.
    """

    def __init__(
        self,
        spool: Path,
        outbox: Outbox,
        clocks: AgentClocks,
        *,
        say: Callable[[str], None],
        quota: SpoolQuota | None = None,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._spool = spool
        self._outbox = outbox
        self._clocks = clocks
        self._say = say
        self._quota = quota
        self._monotonic_s = monotonic_s
        self._runs: dict[str, _Run] = {}
        self._clock_rows: list[Row] = []
        self._clock_events: list[Row] = []
        self._buffers: list[tuple[str, RowBuffer]] = []
        self._heartbeats: tuple[RowBuffer, RunRowSender] | None = None
        self._own_senders: list[tuple[RowBuffer, RunRowSender]] = []
        self._heartbeats_at_s = 0.0
        self._host_events: tuple[HostEventQueue, HostEventRows] | None = None
        self._retry_at_s = 0.0
        self._waits_for_token = False
        self._failed_token: str | None = None
        self._backoff = Backoff()
        self._troubles = TroubleLog(say, monotonic_s=monotonic_s)
        self._control = ControlWriter(say=say)

    def send_rows(self, table: str, buffer: RowBuffer) -> None:
        """Also send the rows of a buffer, as rows of ``table``."""
        self._buffers.append((table, buffer))

    def send_with(self, buffer: RowBuffer, sender: RunRowSender) -> None:
        """Also send the rows of a buffer with a sender of their own, in each turn."""
        self._own_senders.append((buffer, sender))

    def send_heartbeats(self, buffer: RowBuffer, sender: RunRowSender) -> None:
        """Also send the heartbeats of a buffer."""
        self._heartbeats = (buffer, sender)

    def send_host_events(self, queue: HostEventQueue, rows: HostEventRows) -> None:
        """Also send what the logs of the host say, in the runs that it concerns."""
        self._host_events = (queue, rows)

    def run(self, stopping: threading.Event) -> None:
        """Take turns until ``stopping`` is set, and a last one."""
        pause_s = 0.0
        while not stopping.wait(pause_s):
            pause_s = self.turn()
        self._heartbeats_at_s = 0.0
        self.turn()  # the ranks of the same pod end at the same time: their last rows
        self.close()

    def turn(self) -> float:
        """Send everything that is new, once; return the pause until the next turn in seconds."""
        if self._quota is not None:
            self._enforce_quota(self._quota)
        now_s = self._monotonic_s()
        if now_s < self._retry_at_s and not self._has_new_token():
            return min(self._retry_at_s - now_s, TURN_S)
        try:
            self._find_runs()
            for name, run in self._runs.items():
                self._poll(name, run)
            self._send_host_rows()
        except RetryLaterError as error:
            self._retry_at_s = self._monotonic_s() + self._backoff.failed(error.pause_s)
            self._waits_for_token = error.is_token_problem
            self._failed_token = self._outbox.sent_token_text()
            self._troubles.begin(COLLECTOR, error.reason)
            return min(max(self._retry_at_s - self._monotonic_s(), 0.0), TURN_S)
        self._backoff.succeeded()
        self._troubles.end(COLLECTOR)
        waits = [run.retry_at_s - self._monotonic_s() for run in self._runs.values()]
        return min([wait for wait in waits if wait > 0] + [TURN_S])

    def close(self) -> None:
        """Close the spool's files."""
        for run in self._runs.values():
            run.tail.close()

    def _find_runs(self) -> None:
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
        if self._monotonic_s() < run.retry_at_s and not self._has_new_token():
            return
        try:
            progress = run.tail.poll()
        except RetryLaterError as error:
            if not error.is_run_only:
                raise
            self._pause(name, run, error)
        except Exception as error:  # noqa: BLE001  # other runs must go on
            reason = f"{type(error).__name__}: {error}"
            self._pause(name, run, RetryLaterError(reason, pause_s=DEFECT_PAUSE_S))
        else:
            run.backoff.succeeded()
            self._troubles.end(f"run {name}")
            for problem in progress.problems:
                self._say(problem)

    def _send_host_rows(self) -> None:
        """Send rows that belong to the host: clocks, samples, checks and heartbeats."""
        self._clocks.renew()
        self._send_clock_events()
        self._clock_rows += self._clocks.take_rows()
        if self._clock_rows:
            self._outbox.upsert("clock", self._clock_rows)
            self._clock_rows = []
        for table, buffer in self._buffers:

            def send(rows: Sequence[Row], table: str = table) -> None:
                self._outbox.upsert(table, rows)

            buffer.send(send, rows_per_call=MAX_SAMPLES)
        for buffer, sender in self._own_senders:
            buffer.send(sender.send, rows_per_call=HEARTBEATS_PER_REQUEST)
        if self._host_events is not None:
            queue, events = self._host_events
            events.note_running(files for run in self._runs.values() for files in run.tail.running)
            events.send(queue.take(), self._outbox.upsert)
        self._send_heartbeats()

    def _send_heartbeats(self) -> None:
        if self._heartbeats is None or self._monotonic_s() < self._heartbeats_at_s:
            return
        buffer, sender = self._heartbeats
        if not len(buffer):
            return

        def send(rows: Sequence[Row]) -> None:
            for run in self._runs.values():
                rows = run.tail.placed_heartbeats(rows)
            running = [files for run in self._runs.values() for files in run.tail.running]
            self._control.write(running, sender.send(rows))

        buffer.send(send, rows_per_call=HEARTBEATS_PER_REQUEST)
        self._heartbeats_at_s = self._monotonic_s() + HEARTBEAT_PERIOD_S

    def _send_clock_events(self) -> None:
        """Store the events of this host's clocks in each run that trains here."""
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

    def _enforce_quota(self, quota: SpoolQuota) -> None:
        try:
            runs = self._runs.values()
            message = quota.enforce(folder for run in runs for folder in run.tail.stored)
        except (OSError, RetryLaterError) as error:
            self._troubles.begin(SPOOL_LIMIT, str(error))
        else:
            if message is not None:
                self._say(message)
            self._troubles.end(SPOOL_LIMIT)

    def _pause(self, name: str, run: _Run, error: RetryLaterError) -> None:
        run.retry_at_s = self._monotonic_s() + run.backoff.failed(error.pause_s)
        if error.is_token_problem:
            self._waits_for_token = True
            self._failed_token = self._outbox.sent_token_text()
        if (error.pause_s or 0.0) >= MIN_REPORTED_PAUSE_S:
            self._troubles.begin(f"run {name}", error.reason)

    def _has_new_token(self) -> bool:
        """Return whether the token that failed was replaced."""
        return self._waits_for_token and self._failed_token != self._outbox.token_text()


class TroubleLog:
    """Log of what does not work: one line when it begins, for each new reason, and when it ends."""

    def __init__(
        self, say: Callable[[str], None], *, monotonic_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._say = say
        self._monotonic_s = monotonic_s
        self._since_s: dict[str, float] = {}
        self._logged: dict[str, set[str]] = {}

    def begin(self, name: str, reason: str) -> None:
        """Log why ``name`` does not work, unless this reason was logged since it began."""
        self._since_s.setdefault(name, self._monotonic_s())
        logged = self._logged.setdefault(name, set())
        if reason not in logged and len(logged) < MAX_REASONS:
            logged.add(reason)
            self._say(f"{name}: {reason}; data waits in the spool")

    def end(self, name: str) -> None:
        """Log that ``name`` works again, if trouble was logged."""
        self._logged.pop(name, None)
        since_s = self._since_s.pop(name, None)
        if since_s is not None:
            self._say(f"{name}: works again after {self._monotonic_s() - since_s:.0f} s")


def ranks_in(spool: Path, run_id: str) -> list[int]:
    """Return the ranks of a run that have a folder in a spool."""
    ranks = set()
    for folder in all_process_folders(spool):
        with suppress(OSError, CollectorError):
            files = ProcessFiles(folder)
            if files.run_id == run_id:
                ranks.add(files.identity.rank)
    return sorted(ranks)
