"""The two threads of a live server: one stores what ranks write, one analyses what was stored."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from rankscope import terminal
from rankscope.errors import exit_code_of, plain_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from analysis.source import RunSummary, SpanSource
    from collector.tail import SpoolTail
    from rankscope.alerting import Alerting
    from rankscope.reports import Reports

TAIL_PAUSE_S = 1.0
"""Many small inserts cost the engine more than few large ones: fsyncs now, merges later."""

ANALYSIS_PAUSE_S = 1.0
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
        self._name = name
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
            return f"the {self._name} thread has ended"
        return self.trouble

    def _run(self) -> None:
        while not self._stopping.wait(self._pause_s):
            try:
                self._turn()
            except Exception as error:
                if exit_code_of(error) is None:
                    raise
                self._tell(f"{self._name}: {plain_line(error)}")
            else:
                self.trouble = None

    def _tell(self, line: str) -> None:
        if line != self.trouble:
            self._say(line)
        self.trouble = line


class LiveAnalysis:
    """One turn of analysis: runs that grew since the last turn are analysed and alerted on.

    Runs that stand still are left to the pages, which analyse them when
    somebody looks; their old drops raise no alert.

    Args:
        source: The store's runs.
        reports: Where the pages find the results.
        alerting: Evaluates each result.
        before: The runs as the store had them when the server started.
    """

    def __init__(
        self,
        source: SpanSource,
        reports: Reports,
        alerting: Alerting,
        *,
        before: Iterable[RunSummary],
    ) -> None:
        self._source = source
        self._reports = reports
        self._alerting = alerting
        self._seen = {run.run_id: (run.num_steps, run.state) for run in before}

    def turn(self) -> None:
        """Analyse what grew."""
        for run in self._source.runs():
            size = (run.num_steps, run.state)
            if self._seen.get(run.run_id) == size:
                continue
            report = self._reports.refresh(run)
            if report is not None:
                self._alerting.evaluate(report)
            self._seen[run.run_id] = size


def tail_loop(tail: SpoolTail) -> Loop:
    """Return the loop that stores what ranks write."""

    def turn() -> None:
        for problem in tail.poll().problems:
            terminal.say(problem)

    return Loop("tail", turn, pause_s=TAIL_PAUSE_S)


def analysis_loop(analysis: LiveAnalysis) -> Loop:
    """Return the loop that analyses what was stored."""
    return Loop("analysis", analysis.turn, pause_s=ANALYSIS_PAUSE_S)
