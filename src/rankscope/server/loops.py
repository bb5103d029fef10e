"""Background threads of a server: tail, analysis, memory and others."""

from __future__ import annotations

import socket
import threading
import time
from collections import Counter, deque
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING

from rankscope.collector.errors import StoreClosedError, StoreError
from rankscope.collector.host.host_events import HostEventRows
from rankscope.collector.spool.control import ControlWriter
from rankscope.collector.spool.descriptions import RUNNING

from ..errors import find_exit_code
from ..memory import release_memory
from ..terminal import lines as terminal
from .run_failures import ANALYSED, describe_failure, raise_common

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from rankscope.analysis.trace.tables import RunSummary, SpanSource
    from rankscope.collector.host.host_events import HostEventQueue
    from rankscope.collector.read.control import ControlRequests
    from rankscope.collector.spool.cut import Sink
    from rankscope.collector.spool.tail import SpoolTail
    from rankscope.collector.store.store import Store

    from .alerting import Alerting
    from .finding_tracker import LiveFindings
    from .reports import Reports
    from .run_failures import Caught, RunFailures

PAUSE_S = 1.0
"""Pause between two turns. Of the tail: many small inserts cost the engine more than a few large
ones, fsyncs now and merges later."""

MEMORY_PAUSE_S = 2.0
"""Shorter than the five seconds for which the engine keeps freed pages, and which it counts only
while it allocates."""

DEFECT_PAUSE_S = 10.0
"""Pause after a turn that a defect has ended, so that it costs little while it lasts."""

TURN_NS = 2_000_000_000
"""Time after which a turn of the analysis begins with no further run: a new one may have come."""

MIN_PAUSE_NS = 2_000_000_000
MAX_PAUSE_NS = 30_000_000_000
PAUSE_GROWTH = 1.1
"""Pauses between two analyses of a running job, and their growth while it makes no progress. They
reach about a tenth of that time, by which a hang is found late."""

SETTLE_NS = 2_000_000_000
"""Time in which the events of a stalled job arrive from all of its hosts."""

MAX_UNREPORTED = 100
"""Runs that ended before the start of the server and get a report unasked, the newest."""

JOIN_S = 10.0


NO_SIGNS: Mapping[str, int] = MappingProxyType({})


class Loop:
    """A thread that calls ``turn`` repeatedly until it is stopped.

    A failure of a turn is logged once, and the turn is retried: after a longer pause if it is a
    defect, which has no exit status (`find_exit_code`). While it fails, `trouble` holds the reason.
    A turn that outlives `stop` may find the store closed, which is its end and no failure.

    Args:
        turn: The work. It may return a longer pause, s.
        say: Logs a line. None: `terminal.lines.say`.
    """

    def __init__(
        self,
        name: str,
        turn: Callable[[], float | None],
        *,
        pause_s: float = PAUSE_S,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self._turn = turn
        self._pause_s = pause_s
        self._say = say or terminal.say
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.name = name
        """Name of the thread."""
        self.num_turns = 0
        self.num_failures = 0
        self.busy_ns = 0
        """Time spent in turns since the start."""
        self.counts: Counter[str] = Counter()
        """Counts of the rows that the turns handled, if they count any."""
        self.trouble: str | None = None
        """Why the last turn failed; None if it did not."""

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread after its current turn."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(JOIN_S)

    def why_stopped(self) -> str | None:
        """Return why the loop does no work at the moment; None if it works."""
        if not self._thread.is_alive():
            return f"the {self.name} thread has ended"
        return self.trouble

    def _run(self) -> None:
        pause_s = self._pause_s
        while not self._stopping.wait(pause_s):
            begun_ns = time.monotonic_ns()
            pause_s = self._pause_s
            try:
                pause_s = max(pause_s, self._turn() or 0.0)
            except Exception as error:  # noqa: BLE001  # nothing ends a loop but `stop`
                if self._stopping.is_set() and isinstance(error, StoreClosedError):
                    return
                if find_exit_code(error) is None:
                    pause_s = max(pause_s, DEFECT_PAUSE_S)
                self.num_failures += 1
                line = f"{self.name}: {describe_failure(error)}"
                if line != self.trouble:
                    self._say(line)
                self.trouble = line
            else:
                self.trouble = None
            self.num_turns += 1
            self.busy_ns += time.monotonic_ns() - begun_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attempt:
    """The last analysis of a run, whether it succeeded or not."""

    ended_ns: int
    duration_ns: int
    pause_ns: int
    """Pause before the next analysis, unless the run grows."""

    is_unfinished: bool = False
    """Whether the store failed: the analysis is tried again after the pause."""


class LiveAnalysis:
    """Analysis of the runs that have grown, with their alerts.

    A run that ended long before the start raises no alert. It is analysed once, when a page needs
    it or nothing else is to do, if the store has no report of it. A running job is analysed every
    `MIN_PAUSE_NS` at most, never for more than half of the time, and less and less often while it
    makes no progress.

    Args:
        before: The runs of the store when the server started, without those whose alerts an earlier
            server may not have raised or resolved (`Alerting.unsettled_runs`).
        num_signs: Events of processes that stalled or ended, by run; grows.
        monotonic_ns: Clock for the pauses.
    """

    def __init__(  # noqa: PLR0913  # what it works with
        self,
        source: SpanSource,
        reports: Reports,
        alerting: Alerting,
        findings: LiveFindings,
        *,
        before: Iterable[RunSummary],
        failures: RunFailures,
        num_signs: Mapping[str, int] = NO_SIGNS,
        monotonic_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._source = source
        self._num_signs = num_signs
        self._signs: dict[str, tuple[int, int]] = {}
        """Number of signs of each run, and when it was first seen."""

        self._failures = failures
        self._reports = reports
        self._alerting = alerting
        self._findings = findings
        reports.track_with(findings.track)
        self._monotonic_ns = monotonic_ns
        before = tuple(before)
        self._seen = {run.run_id: _size(run) for run in before}
        self._attempts: dict[str, _Attempt] = {}
        self._unreported = deque(
            [run.run_id for run in reports.without_stored(before)][:MAX_UNREPORTED]
        )

    def turn(self) -> None:
        """Analyse the runs that have grown, or else one that has no report; forget deleted ones.

        Runs take turns: the one that has waited longest is first, of new ones the newest.
        """
        runs = self._source.runs()
        stored = {run.run_id for run in runs}
        self._reports.keep_only(stored)
        self._failures.keep_only(stored)
        for run_id in (self._attempts.keys() | self._seen.keys()) - stored:
            self._findings.forget(run_id)
            self._attempts.pop(run_id, None)
            self._seen.pop(run_id, None)
        begun_ns = self._monotonic_ns()
        due = sorted(filter(self._is_due, runs), key=self._last_analysed_ns)
        attempts = []
        for run in due:
            attempts.append(self._try_analysis(run))
            if self._monotonic_ns() - begun_ns >= TURN_NS:
                break
        raise_common(attempts)
        if self._unreported and not due:
            run_id = self._unreported.popleft()
            with self._failures.catch(run_id, ANALYSED):
                self._reports.get(run_id)

    def _last_analysed_ns(self, run: RunSummary) -> int:
        last = self._attempts.get(run.run_id)
        return 0 if last is None else last.ended_ns

    def _is_due(self, run: RunSummary) -> bool:
        last, seen = self._attempts.get(run.run_id), self._seen.get(run.run_id)
        has_grown = seen != _size(run)
        now_ns = self._monotonic_ns()
        if last is not None and last.is_unfinished:
            return now_ns - last.ended_ns >= last.pause_ns
        if last is None or (run.state != RUNNING and not has_grown):
            return has_grown
        if seen is None or run.state != seen[0]:
            return True  # the run has ended
        num = self._num_signs.get(run.run_id, 0)
        known, since_ns = self._signs.setdefault(run.run_id, (num, now_ns - SETTLE_NS))
        if num != known:
            self._signs[run.run_id] = num, now_ns
        if num != known or now_ns - since_ns < SETTLE_NS:
            return False  # those of other hosts follow: in part, they would name other ranks
        # A rank may end or stall without a new step, so a run without one is analysed too.
        is_soon = has_grown or since_ns > last.ended_ns
        pause_ns = MIN_PAUSE_NS if is_soon else last.pause_ns
        return now_ns - last.ended_ns >= max(pause_ns, last.duration_ns)

    def _try_analysis(self, run: RunSummary) -> Caught:
        """Analyse a run. What is raised for it stops no other."""
        begun_ns = self._monotonic_ns()
        size = _size(run)
        is_new = False
        with self._failures.catch(run.run_id, ANALYSED) as caught:
            has_grown = self._seen.get(run.run_id) != size
            revision = self._reports.revision(run.run_id)
            report = self._reports.refresh(run)
            is_new = self._reports.revision(run.run_id) != revision
            is_live = run.state == RUNNING
            if report is not None and (is_new or has_grown):
                cost = self._reports.cost(run.run_id)
                if is_live:
                    self._findings.record(run.run_id, cost=cost)
                else:
                    self._findings.update(report, is_over=True, cost=cost)
            if report is not None and (has_grown or is_live):  # a job that hangs does not grow
                tracked = self._findings.of_run(run.run_id)
                self._alerting.evaluate(report, tracked, is_over=not is_live)
        last = self._attempts.get(run.run_id)
        pause_ns = MIN_PAUSE_NS if is_new or last is None else round(PAUSE_GROWTH * last.pause_ns)
        ended_ns = self._monotonic_ns()
        is_unfinished = isinstance(caught.error, StoreError)
        self._attempts[run.run_id] = _Attempt(
            ended_ns=ended_ns,
            duration_ns=ended_ns - begun_ns,
            pause_ns=min(pause_ns, MAX_PAUSE_NS),
            is_unfinished=is_unfinished,
        )
        if not is_unfinished:
            self._seen[run.run_id] = size
        return caught


def _size(run: RunSummary) -> tuple[str, int, int]:
    """Return the state and size of a run, which is analysed again when they change.

    A running job is analysed once for each step. An ended one may still receive the last rows of
    a slow host for steps that other hosts have reported, so its rows count.
    """
    return run.state, run.num_steps, 0 if run.state == RUNNING else run.num_rows


def tail_loop(
    tail: SpoolTail,
    requests: ControlRequests | None = None,
    *,
    host_events: HostEventQueue | None = None,
    sink: Sink | None = None,
) -> Loop:
    """Return the loop that stores the records of the spool, and passes requests to its ranks.

    Args:
        host_events: What the logs of this host say, to be stored with the runs that it concerns.
        sink: Takes the rows of these events.
    """
    control = ControlWriter(say=terminal.say)
    rows = HostEventRows(socket.gethostname(), unix_ns=time.time_ns)

    def turn() -> float:
        begun_s = time.monotonic()
        progress = tail.poll()
        if host_events is not None and sink is not None:
            rows.note_running(tail.running)
            rows.send(host_events.take(), sink.upsert)
        loop.counts.update(
            spans=progress.num_spans,
            steps=progress.num_steps,
            torn=progress.num_torn,
            bad=progress.num_bad,
        )
        loop.counts["refused_files"] = progress.num_unreadable
        for problem in progress.problems:
            terminal.say(problem)
        if requests is not None:
            running = tail.running
            for run_id in {files.run_id for files in running}:
                control.write(running, requests.of_run(run_id))
        # To look at thousands of ranks takes seconds: in vain, for half of the time at most.
        return 0.0 if progress.num_cuts else time.monotonic() - begun_s

    loop = Loop("tail", turn)
    return loop


def memory_loop(store: Store | None = None) -> Loop:
    """Return the loop that returns unused memory to the machine."""
    return Loop("spare-memory", partial(release_memory, store), pause_s=MEMORY_PAUSE_S)
