"""A source that tells what is being read of each run, so that a page can say it."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rankscope.analysis.report.progress import Doing, Phase

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankscope.analysis.trace.context import RunContext
    from rankscope.analysis.trace.tables import (
        RunInfo,
        RunSummary,
        SpanSource,
        SpanTable,
        StepTable,
    )


class WatchedSource:
    """`analysis.trace.tables.SpanSource` over another one, with what is done with it.

    Args:
        source: The runs.
    """

    def __init__(self, source: SpanSource) -> None:
        self._source = source
        self._lock = threading.Lock()
        self._phases: dict[str, Phase] = {}

    def phase(self, run_id: str) -> Phase | None:
        """Return how far the run's analysis is; None where none is under way."""
        with self._lock:
            return self._phases.get(run_id)

    @contextmanager
    def watched(self, run_id: str) -> Iterator[None]:
        """Note what an analysis of the run does until the block ends."""
        with self._lock:
            self._phases[run_id] = Phase(doing=Doing.READING)
        try:
            yield
        finally:
            with self._lock:
                self._phases.pop(run_id, None)

    def runs(self) -> tuple[RunSummary, ...]:
        """Return every run, the newest first."""
        return self._source.runs()

    def run_info(self, run_id: str) -> RunInfo:
        """Return what is known of a run besides its spans."""
        return self._source.run_info(run_id)

    def steps(self, run_id: str, *, first: int | None = None, last: int | None = None) -> StepTable:
        """Return the step rows with ``first <= step <= last``."""
        return self._source.steps(run_id, first=first, last=last)

    def spans(self, run_id: str, *, first: int | None = None, last: int | None = None) -> SpanTable:
        """Return the spans of these steps."""
        self._note(run_id, Doing.READING, num_spans=0)
        found = self._source.spans(run_id, first=first, last=last)
        self._note(run_id, Doing.COMPARING, num_spans=len(found))
        return found

    def context(
        self, run_id: str, *, first: int | None = None, last: int | None = None
    ) -> RunContext:
        """Return what is known around the spans of these steps."""
        return self._source.context(run_id, first=first, last=last)

    def _note(self, run_id: str, doing: Doing, *, num_spans: int) -> None:
        with self._lock:
            before = self._phases.get(run_id)
            if before is not None:
                num_read = before.num_spans + num_spans
                self._phases[run_id] = Phase(doing=doing, num_spans=num_read)
