"""Replays of single steps for the timeline, made in the background."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

from rankscope.analysis.analyze import read_operations
from rankscope.analysis.drawing.step_replay import replay_step
from rankscope.analysis.trace.errors import EmptyRunError

if TYPE_CHECKING:
    from rankscope.analysis.drawing.raster import StepPicture
    from rankscope.analysis.drawing.step_replay import StepReplay
    from rankscope.analysis.drawing.timeline import StepTimeline
    from rankscope.analysis.trace.tables import RunSummary, SpanSource

    from .background_jobs import BackgroundJobs

MAX_SPANS = 2_000_000
"""Spans that are read for one replay, some 0.7 GB in memory: the ideal durations are those of as
many steps around as fit."""

MAX_REPLAYS = 4
"""Replays kept in memory."""


class StepReplays:
    """Replays of single steps, each made once.

    Args:
        source: The runs.
        jobs: Background jobs that make them.
    """

    def __init__(self, source: SpanSource, jobs: BackgroundJobs) -> None:
        self._source = source
        self._jobs = jobs
        self._lock = threading.Lock()
        self._replays: OrderedDict[tuple[str, int, int, int], StepReplay] = OrderedDict()

    def replay(
        self,
        run: RunSummary,
        recorded: StepTimeline | StepPicture,
        *,
        revision: int,
        timeout_s: float,
    ) -> StepReplay | None:
        """Return the replay of a step; None while it is being made.

        Args:
            run: The run.
            recorded: The step.
            revision: A number that changes with the run's data.
            timeout_s: Longest time to wait for it.

        Raises:
            AnalysisError: The step cannot be replayed, or has too many spans.
        """
        key = (run.run_id, recorded.epoch, recorded.step, revision)
        with self._lock:
            if key in self._replays:
                self._replays.move_to_end(key)
                return self._replays[key]
        job = ("replay", *key)
        done = self._jobs.result(job, lambda: self._make(key, run, recorded), timeout_s=timeout_s)
        found: StepReplay | None = None if done is None else done.result()
        return found

    def _make(
        self,
        key: tuple[str, int, int, int],
        run: RunSummary,
        recorded: StepTimeline | StepPicture,
    ) -> StepReplay:
        num_spans = max(run.num_spans // max(run.num_steps, 1), 1)
        if num_spans > MAX_SPANS:
            raise EmptyRunError(
                f"step {recorded.step} has about {num_spans:,} spans; at most {MAX_SPANS:,} are"
                f" replayed for a page. Use open_run({run.run_id!r}).critical_path in a notebook"
            )
        info = self._source.run_info(run.run_id)
        if recorded.epoch != max(epoch.epoch for epoch in info.epochs):
            raise EmptyRunError(
                f"step {recorded.step} is of epoch {recorded.epoch}, and only the last epoch is"
                " replayed"
            )
        around = (MAX_SPANS // num_spans - 1) // 2
        first, last = recorded.step - around, recorded.step + around
        reading = read_operations(
            info,
            self._source.spans(run.run_id, first=first, last=last),
            self._source.steps(run.run_id, first=first, last=last),
        )
        made = replay_step(reading, recorded)
        with self._lock:
            self._replays[key] = made
            while len(self._replays) > MAX_REPLAYS:
                self._replays.popitem(last=False)
        return made
