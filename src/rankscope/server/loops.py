"""The two threads of a live server: one stores what ranks write, one analyses what was stored."""

from __future__ import annotations

import threading
import time
import traceback
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rankscope.analysis.trace.errors import AnalysisError
from rankscope.collector.spool.descriptions import RUNNING

from ..errors import exit_code_of, plain_line
from ..memory import release_memory
from ..terminal import lines as terminal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from rankscope.analysis.trace.tables import RunSummary, SpanSource
    from rankscope.collector.agent.buffer import RowBuffer
    from rankscope.collector.host.sampler import Sampler
    from rankscope.collector.identity import Row
    from rankscope.collector.retention.deletion import Deletions
    from rankscope.collector.spool.tail import SpoolTail
    from rankscope.collector.store.store import Store

    from .alerting import Alerting
    from .finding_tracker import Tracking
    from .reports import Reports

TAIL_PAUSE_S = 1.0
"""Many small inserts cost the engine more than few large ones: fsyncs now, merges later."""

ANALYSIS_PAUSE_S = 1.0
SAMPLER_PAUSE_S = 1.0
HEARTBEAT_PAUSE_S = 1.0
HEARTBEAT_ROWS = 10_000
MEMORY_PAUSE_S = 2.0
"""Shorter than the five seconds that the engine keeps pages of its own accord, which it counts
only while it allocates."""

MIN_PAUSE_NS = 2_000_000_000
MAX_PAUSE_NS = 30_000_000_000
"""Between two looks at one run that trains; the longer one is reached while it stands still."""

JOIN_S = 10.0


class Loop:
    """Calls ``turn`` again and again in a thread, until stopped.

    A turn that fails in an expected way is told once on stderr and tried again;
    while it fails, `trouble` says why.

    Args:
        name: Of the thread.
        turn: The work; its own exceptions must be those that `exit_code_of` knows.
        pause_s: Between two turns.
        say: Tells a line to the person at the terminal.
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
        """Of the thread."""
        self.num_turns = 0
        self.num_failures = 0
        self.busy_ns = 0
        """In turns, since the start."""
        self.counts: Counter[str] = Counter()
        """What the turns brought, where they count it."""
        self.trouble: str | None = None
        """Why the last turn failed; None when it did not."""

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """Let the turn under way finish, and end the thread."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(JOIN_S)

    def why_stopped(self) -> str | None:
        """Return why this loop does no work just now; None when it does."""
        if not self._thread.is_alive():
            return f"the {self.name} thread has ended"
        return self.trouble

    def _run(self) -> None:
        while not self._stopping.wait(self._pause_s):
            begun_ns = time.monotonic_ns()
            try:
                self._turn()
            except Exception as error:
                if exit_code_of(error) is None:
                    raise
                self.num_failures += 1
                self._tell(f"{self.name}: {plain_line(error)}")
            else:
                self.trouble = None
            self.num_turns += 1
            self.busy_ns += time.monotonic_ns() - begun_ns

    def _tell(self, line: str) -> None:
        if line != self.trouble:
            self._say(line)
        self.trouble = line


@dataclass(frozen=True, slots=True, kw_only=True)
class _Look:
    """The last look at a run that trains."""

    ended_ns: int
    took_ns: int
    pause_ns: int
    """Until the next one, unless a step comes."""


class LiveAnalysis:
    """One turn of analysis: runs that grew since the last turn are analysed and alerted on.

    Runs that stand still are left to the pages, which analyse them when
    somebody looks; their old drops raise no alert. A run that trains is looked
    at every `MIN_PAUSE_NS` at most and never for more than half of the time; less and
    less often while nothing new comes of it.

    Args:
        source: The store's runs.
        reports: Where the pages find the results.
        alerting: Evaluates each result.
        tracking: Follows the findings of each result.
        before: The runs as the store had them when the server started.
        monotonic_ns: Clock for the pauses.
    """

    def __init__(
        self,
        source: SpanSource,
        reports: Reports,
        alerting: Alerting,
        tracking: Tracking,
        *,
        before: Iterable[RunSummary],
        monotonic_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._source = source
        self._troubles: dict[str, str] = {}
        self._reports = reports
        self._alerting = alerting
        self._tracking = tracking
        self._monotonic_ns = monotonic_ns
        self._seen = {run.run_id: _size(run) for run in before}
        self._looks: dict[str, _Look] = {}

    def turn(self) -> None:
        """Analyse what grew; forget what was deleted."""
        runs = self._source.runs()
        self._reports.keep_only({run.run_id for run in runs})
        for run in runs:
            size = _size(run)
            has_grown = self._seen.get(run.run_id) != size
            if self._is_due(run, has_grown=has_grown):
                self._look_apart(run, has_grown=has_grown)
                self._seen[run.run_id] = size

    def _is_due(self, run: RunSummary, *, has_grown: bool) -> bool:
        look = self._looks.get(run.run_id)
        if look is None or (run.state != RUNNING and not has_grown):
            return has_grown
        if run.state != self._seen[run.run_id][0]:
            return True  # its end is news
        # A rank may end or stall without a step, so one that stands still is looked at too.
        pause_ns = MIN_PAUSE_NS if has_grown else look.pause_ns
        return self._monotonic_ns() - look.ended_ns >= max(pause_ns, look.took_ns)

    def _look_apart(self, run: RunSummary, *, has_grown: bool) -> None:
        """Look at a run; what its own rows make fail costs no other run its look."""
        begun_ns = self._monotonic_ns()
        is_new = False
        try:
            is_new = self._look(run, has_grown=has_grown)
        except Exception as error:
            if not isinstance(error, AnalysisError) and exit_code_of(error) is not None:
                raise  # the store, which all runs share
            self._tell(run.run_id, error)
        else:
            self._troubles.pop(run.run_id, None)
        last = self._looks.get(run.run_id)
        pause_ns = MIN_PAUSE_NS if is_new or last is None else 2 * last.pause_ns
        ended_ns = self._monotonic_ns()
        self._looks[run.run_id] = _Look(
            ended_ns=ended_ns,
            took_ns=ended_ns - begun_ns,
            pause_ns=min(pause_ns, MAX_PAUSE_NS),
        )

    def _look(self, run: RunSummary, *, has_grown: bool) -> bool:
        """Look at a run; return whether something new came of it."""
        revision = self._reports.revision(run.run_id)
        report = self._reports.refresh(run)
        is_new = self._reports.revision(run.run_id) != revision
        if report is not None and is_new:
            cost = self._reports.cost(run.run_id)
            self._tracking.update(report, is_over=run.state != RUNNING, cost=cost)
        if report is not None and has_grown:
            self._alerting.evaluate(report)
        return is_new

    def _tell(self, run_id: str, error: Exception) -> None:
        """Say why a run is not analysed, once while it stays so."""
        if isinstance(error, AnalysisError):
            line = f"{run_id}: not analysed: {plain_line(error)}"
        else:
            # Its text may hold what was sent; the type and the place are what a report needs.
            (frame,) = traceback.extract_tb(error.__traceback__)[-1:]
            place = f"{'/'.join(Path(frame.filename).parts[-2:])}:{frame.lineno}"
            line = f"{run_id}: not analysed: {type(error).__name__} at {place}: please report it"
        if self._troubles.get(run_id) != line:
            self._troubles[run_id] = line
            terminal.say(line)


def _size(run: RunSummary) -> tuple[str, int, int]:
    """Return what changes where a run is to be looked at.

    A run that trains is looked at by step. One that has ended may still lack the last rows of a
    host that is behind, of steps that others told of: they count one by one.
    """
    return run.state, run.num_steps, 0 if run.state == RUNNING else run.num_rows


def tail_loop(tail: SpoolTail) -> Loop:
    """Return the loop that stores what ranks write."""

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
    """Return the loop that analyses what was stored."""
    return Loop("analysis", analysis.turn, pause_s=ANALYSIS_PAUSE_S)


def sampler_loop(sampler: Sampler) -> Loop:
    """Return the loop that reads this host once a second; its turns never raise."""
    return Loop("sampler", sampler.turn, pause_s=SAMPLER_PAUSE_S)


def memory_loop(store: Store | None = None) -> Loop:
    """Return the loop that does so again and again."""
    return Loop("spare-memory", partial(release_memory, store), pause_s=MEMORY_PAUSE_S)


def heartbeat_loop(store: Store, buffer: RowBuffer, deletions: Deletions) -> Loop:
    """Return the loop that stores what a buffer holds; where the store fails it still waits there.

    Args:
        store: The open store.
        buffer: Rows of table ``heartbeats``.
        deletions: A deleted run that still trains is kept out.
    """

    def write(rows: Sequence[Row]) -> None:
        kept = [row for row in rows if not deletions.is_deleted(row["run_id"])]
        if kept:
            store.insert_rows("heartbeats", kept)

    return Loop(
        "heartbeats",
        lambda: buffer.send(write, rows_per_call=HEARTBEAT_ROWS),
        pause_s=HEARTBEAT_PAUSE_S,
    )
