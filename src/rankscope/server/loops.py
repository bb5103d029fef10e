"""Background threads of a server: tail, analysis, sampler, heartbeats, memory."""

from __future__ import annotations

import threading
import time
import traceback
from collections import Counter, deque
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from rankscope.analysis.trace.errors import AnalysisError
from rankscope.collector.errors import StoreClosedError
from rankscope.collector.spool.descriptions import RUNNING

from ..errors import find_exit_code, format_error
from ..memory import release_memory
from ..terminal import lines as terminal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from rankscope.analysis.trace.tables import RunSummary, SpanSource
    from rankscope.collector.agent.buffer import RowBuffer
    from rankscope.collector.host.sampler import Sampler
    from rankscope.collector.identity import Row
    from rankscope.collector.retention.deletion import Deletions
    from rankscope.collector.spool.tail import SpoolTail
    from rankscope.collector.store.store import Store

    from .alerting import Alerting
    from .finding_tracker import LiveFindings
    from .reports import Reports

TAIL_PAUSE_S = 1.0
"""Many small inserts cost the engine more than a few large ones: fsyncs now, merges later."""

ANALYSIS_PAUSE_S = 1.0
SAMPLER_PAUSE_S = 1.0
HEARTBEAT_PAUSE_S = 1.0
HEARTBEAT_ROWS = 10_000
MEMORY_PAUSE_S = 2.0
"""Shorter than the five seconds for which the engine keeps freed pages, and which it counts only
while it allocates."""

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

    An expected failure of a turn is logged once, and the turn is retried. While it fails,
    `trouble` holds the reason. Any other error ends the thread. A turn that outlives `stop` may
    find the store closed, which is its end and no failure.

    Args:
        name: Name of the thread.
        turn: The work. Expected failures are those with an exit status (`find_exit_code`).
        pause_s: Pause between two turns.
        say: Logs a line. None: `terminal.lines.say`.
    """

    def __init__(
        self,
        name: str,
        turn: Callable[[], None],
        *,
        pause_s: float,
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
        while not self._stopping.wait(self._pause_s):
            begun_ns = time.monotonic_ns()
            try:
                self._turn()
            except Exception as error:
                if self._stopping.is_set() and isinstance(error, StoreClosedError):
                    return
                if find_exit_code(error) is None:
                    raise
                self.num_failures += 1
                self._log_once(f"{self.name}: {format_error(error)}")
            else:
                self.trouble = None
            self.num_turns += 1
            self.busy_ns += time.monotonic_ns() - begun_ns

    def _log_once(self, line: str) -> None:
        if line != self.trouble:
            self._say(line)
        self.trouble = line


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attempt:
    """The last analysis of a run, whether it succeeded or not."""

    ended_ns: int
    duration_ns: int
    pause_ns: int
    """Pause before the next analysis, unless the run grows."""


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
        num_signs: Mapping[str, int] = NO_SIGNS,
        monotonic_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._source = source
        self._num_signs = num_signs
        self._signs: dict[str, tuple[int, int]] = {}
        """Number of signs of each run, and when it was first seen."""

        self._troubles: dict[str, str] = {}
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
        """Analyse the runs that have grown, or else one that has no report; forget deleted ones."""
        runs = self._source.runs()
        self._reports.keep_only({run.run_id for run in runs})
        num_analysed = 0
        for run in runs:
            size = _size(run)
            has_grown = self._seen.get(run.run_id) != size
            if self._is_due(run, has_grown=has_grown):
                self._try_analysis(run, has_grown=has_grown)
                self._seen[run.run_id] = size
                num_analysed += 1
        if self._unreported and not num_analysed:
            self._report_old(self._unreported.popleft())

    def _report_old(self, run_id: str) -> None:
        """Make the report of a run that ended before this server started, if it has none."""
        try:
            self._reports.get(run_id)
        except AnalysisError as error:
            self._log_failure(run_id, error)

    def _is_due(self, run: RunSummary, *, has_grown: bool) -> bool:
        last = self._attempts.get(run.run_id)
        if last is None or (run.state != RUNNING and not has_grown):
            return has_grown
        if run.state != self._seen[run.run_id][0]:
            return True  # the run has ended
        now_ns = self._monotonic_ns()
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

    def _try_analysis(self, run: RunSummary, *, has_grown: bool) -> None:
        """Analyse a run. An error in its data is logged and does not stop the others."""
        begun_ns = self._monotonic_ns()
        is_new = False
        try:
            is_new = self._analyze(run, has_grown=has_grown)
        except Exception as error:
            if not isinstance(error, AnalysisError) and find_exit_code(error) is not None:
                raise  # a failure of the store concerns all runs
            self._log_failure(run.run_id, error)
        else:
            self._troubles.pop(run.run_id, None)
        last = self._attempts.get(run.run_id)
        pause_ns = MIN_PAUSE_NS if is_new or last is None else round(PAUSE_GROWTH * last.pause_ns)
        ended_ns = self._monotonic_ns()
        self._attempts[run.run_id] = _Attempt(
            ended_ns=ended_ns,
            duration_ns=ended_ns - begun_ns,
            pause_ns=min(pause_ns, MAX_PAUSE_NS),
        )

    def _analyze(self, run: RunSummary, *, has_grown: bool) -> bool:
        """Analyse a run if it has new steps; return whether its diagnosis is new."""
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
        return is_new

    def _log_failure(self, run_id: str, error: Exception) -> None:
        """Log why a run cannot be analysed, once for each reason."""
        if isinstance(error, AnalysisError):
            line = f"{run_id}: not analysed: {format_error(error)}"
        else:
            # Type and place only: the text of the error may contain data of the job.
            (frame,) = traceback.extract_tb(error.__traceback__)[-1:]
            place = f"{'/'.join(Path(frame.filename).parts[-2:])}:{frame.lineno}"
            line = f"{run_id}: not analysed: {type(error).__name__} at {place}: please report it"
        if self._troubles.get(run_id) != line:
            self._troubles[run_id] = line
            terminal.say(line)


def _size(run: RunSummary) -> tuple[str, int, int]:
    """Return the state and size of a run, which is analysed again when they change.

    A running job is analysed once for each step. An ended one may still receive the last rows of
    a slow host for steps that other hosts have reported, so its rows count.
    """
    return run.state, run.num_steps, 0 if run.state == RUNNING else run.num_rows


def tail_loop(tail: SpoolTail) -> Loop:
    """Return the loop that stores the records of the spool."""

    def turn() -> None:
        progress = tail.poll()
        loop.counts.update(
            spans=progress.num_spans,
            steps=progress.num_steps,
            torn=progress.num_torn,
            bad=progress.num_bad,
        )
        loop.counts["refused_files"] = progress.num_unreadable
        for problem in progress.problems:
            terminal.say(problem)

    loop = Loop("tail", turn, pause_s=TAIL_PAUSE_S)
    return loop


def analysis_loop(analysis: LiveAnalysis) -> Loop:
    """Return the loop that analyses runs."""
    return Loop("analysis", analysis.turn, pause_s=ANALYSIS_PAUSE_S)


def sampler_loop(sampler: Sampler) -> Loop:
    """Return the loop that reads the counters of this host. Its turns never raise."""
    return Loop("sampler", sampler.turn, pause_s=SAMPLER_PAUSE_S)


def memory_loop(store: Store | None = None) -> Loop:
    """Return the loop that returns unused memory to the machine."""
    return Loop("spare-memory", partial(release_memory, store), pause_s=MEMORY_PAUSE_S)


def heartbeat_loop(
    store: Store,
    buffer: RowBuffer,
    deletions: Deletions,
    *,
    placed: Callable[[Sequence[Row]], Sequence[Row]] = lambda rows: rows,
) -> Loop:
    """Return the loop that stores heartbeats. If the store fails, they stay in the buffer.

    Args:
        store: The store.
        buffer: Rows of table ``heartbeats``.
        deletions: Tombstones: heartbeats of deleted runs are not stored.
        placed: Returns heartbeats with run and epoch as stored (`SpoolTail.placed_heartbeats`).
    """

    def write(rows: Sequence[Row]) -> None:
        kept = [row for row in placed(rows) if not deletions.is_deleted(row["run_id"])]
        if kept:
            store.insert_rows("heartbeats", kept)

    return Loop(
        "heartbeats",
        lambda: buffer.send(write, rows_per_call=HEARTBEAT_ROWS),
        pause_s=HEARTBEAT_PAUSE_S,
    )
