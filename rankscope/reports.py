"""Finished diagnoses of a store's runs, each kept until new data of its run comes."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from analysis.analyze import analyze_run
from analysis.errors import EmptyRunError, UnknownRunError
from analysis.mfu import compute_mfu

if TYPE_CHECKING:
    from analysis.report import RunReport
    from analysis.source import RunInfo, RunSummary, SpanSource, StepTable

MAX_SPANS = 4_000_000
"""Bounds the time and the memory of one analysis; a window of the last steps beyond."""


@dataclass(slots=True)
class _Entry:
    """What is known of one run; its lock lets one thread analyse it at a time."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    size: tuple[int, int, str] | None = None
    """Spans, steps and state of the run when `report` was made."""

    report: RunReport | None = None
    revision: int = 0


class Reports:
    """Diagnoses by run, made when first asked for and again when the run has grown.

    Args:
        source: The runs.
        max_spans: Spans that one analysis reads at most; of a longer run, its last steps.
    """

    def __init__(self, source: SpanSource, *, max_spans: int = MAX_SPANS) -> None:
        self._source = source
        self._max_spans = max_spans
        self._lock = threading.Lock()
        self._entries: dict[str, _Entry] = {}

    def get(self, run_id: str) -> RunReport | None:
        """Return the latest diagnosis; None while the run has no step to analyse.

        Raises:
            UnknownRunError: The store holds no run of that name.
        """
        entry = self._entry(run_id)
        if entry is None or entry.size is None:
            return self.refresh(self._summary(run_id))
        return entry.report

    def refresh(self, summary: RunSummary) -> RunReport | None:
        """Analyse the run again if it has grown since; return the latest diagnosis.

        Args:
            summary: The run as the store sees it now.
        """
        size = (summary.num_spans, summary.num_steps, summary.state)
        with self._lock:
            entry = self._entries.setdefault(summary.run_id, _Entry())
        with entry.lock:
            if entry.size != size:
                entry.report = self._analyze(summary)
                entry.size = size
                entry.revision += 1
            return entry.report

    def revision(self, run_id: str) -> int:
        """Return how often the run was analysed since the start."""
        entry = self._entry(run_id)
        return entry.revision if entry is not None else 0

    def _entry(self, run_id: str) -> _Entry | None:
        with self._lock:
            return self._entries.get(run_id)

    def _summary(self, run_id: str) -> RunSummary:
        found = self._source.runs()
        for summary in found:
            if summary.run_id == run_id:
                return summary
        raise UnknownRunError(run_id, tuple(summary.run_id for summary in found))

    def _analyze(self, summary: RunSummary) -> RunReport | None:
        info = self._source.run_info(summary.run_id)
        steps = self._source.steps(summary.run_id)
        last = last_whole_step(info, steps) if summary.state == "running" else None
        if not len(steps) or (summary.state == "running" and last is None):
            return None
        first = _first_within(self._max_spans, summary, steps)
        try:
            report = analyze_run(self._source, summary.run_id, first=first, last=last)
        except EmptyRunError:
            return None
        # The window bounds the replay; MFU is cheap, and an alert needs the run's whole past.
        return report if first is None else replace(report, mfu=compute_mfu(info, steps))


def last_whole_step(info: RunInfo, steps: StepTable) -> int | None:
    """Return the last step that every traced rank of its epoch has ended; None before the first."""
    num_ranks = {epoch.epoch: len(epoch.ranks) for epoch in info.epochs}
    pairs = np.stack([steps.epoch, steps.step], axis=1)[steps.end_ns > 0]
    found, counts = np.unique(pairs, axis=0, return_counts=True)
    whole = [
        step
        for (epoch, step), count in zip(found.tolist(), counts.tolist(), strict=True)
        if count >= num_ranks.get(epoch, 1)
    ]
    return max(whole, default=None)


def _first_within(max_spans: int, summary: RunSummary, steps: StepTable) -> int | None:
    """Return the first step of the window that ``max_spans`` allows; None for the whole run."""
    if summary.num_spans <= max_spans:
        return None
    numbers = np.unique(steps.step)
    kept = max(1, int(len(numbers) * max_spans / summary.num_spans))
    return int(numbers[-kept])
