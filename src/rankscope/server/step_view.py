"""Data of the pages about one step: timeline, picture, spans, replay and file."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from rankscope.analysis.analyze import read_operations
from rankscope.analysis.drawing.selection import AlikeSpan
from rankscope.analysis.drawing.step_replay import replay_step
from rankscope.analysis.drawing.tiles import MAX_REDRAWN_SPANS, is_few, needs_spans
from rankscope.analysis.drawing.timeline import (
    NO_SPANS,
    ViewportSpans,
    read_timeline,
    records_groups,
)
from rankscope.analysis.trace.errors import EmptyRunError
from rankscope.analysis.what_if import open_play
from rankscope.collector.read.pictures import StepId
from rankscope.collector.read.ranks import read_closed_bounds
from rankscope.collector.read.runs import read_events
from rankscope.collector.read.spans import (
    SpanSelection,
    count_selected_spans,
    read_bounds,
    read_filtered_spans,
)
from rankscope.collector.spool.descriptions import RUNNING

from ..sources.store_source import to_event
from .around_runs import write_step_trace
from .background_jobs import KeptResults
from .pictures import (
    MAX_PICTURES,
    StepPictures,
    draw_in_portions,
    make_part,
    read_part,
    read_part_rows,
)
from .reports import MAX_SPANS, first_step
from .shared_results import SharedResults

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankscope.analysis.drawing.raster import StepPicture, Viewport
    from rankscope.analysis.drawing.rows import RowOrder
    from rankscope.analysis.drawing.step_replay import StepReplay
    from rankscope.analysis.drawing.timeline import StepTimeline
    from rankscope.analysis.trace.tables import RunSummary, SpanSource
    from rankscope.analysis.what_if import RunPlay
    from rankscope.collector.store.store import Store
    from rankscope.tracer.span import SpanKind

    from .pictures import Places
    from .reports import Reports
    from .run_view import JobQueues, RunView

MAX_TIMELINES = 8
"""Timelines kept in memory: a page requests the same step at each zoom."""

MAX_PARTS = 4
"""Parts of steps kept in memory, 50 MB each at most: a page asks for one again when it is read."""

MAX_READING_PARTS = 4
"""Parts that are read or wait for it: of a reader who zooms on, most are outdated."""

PART_TIMEOUT_RATIO = 1 / 8
"""Time that a page waits for the spans of a part before it shows the part's tiles, over the time
that it waits for other results: they are shown meanwhile, so a short time is no loss."""

PROOF_TIMEOUT_RATIO = 4
"""Time that a page waits for the ranks that show a proof, over the time that it waits for other
results: at 12,288 ranks they take a second, and a page that says so would be asked for again."""

LARGE_STEP_SPANS = 5_000_000
"""Larger steps are drawn in portions, because a whole step takes 250 bytes per span."""

MAX_REPLAYED_SPANS = 2_000_000
"""Spans that are read for one replay, some 0.7 GB in memory: the ideal durations are those of as
many steps around as fit."""

MAX_REPLAYS = 4
"""Replays kept in memory."""

MAX_CLOSED = 10_000
"""Newest steps of which a span can be held against alike ones."""

MAX_PLAYS = 1
"""Runs kept in memory to be replayed with changes, up to 1 GB."""

MAX_PLAYED_SPANS = 5_000_000
"""Spans of a step that is replayed with changes, of which at least one is read: some 3.5 GB. A step
of 12,288 ranks with 32 micro-batches has 4.5 million."""


class StepView:
    """Steps of the runs of a store, as pages show them.

    A run that the store does not hold is an `UnknownRunError`.

    Args:
        runs: What is known of the runs.
        store: The store with the pictures of closed steps.
        timeout_s: Time that a page waits for a background job.
    """

    def __init__(
        self,
        source: SpanSource,
        reports: Reports,
        *,
        runs: RunView,
        store: Store,
        queues: JobQueues,
        timeout_s: float,
    ) -> None:
        self._source = source
        self._reports = reports
        self._runs = runs
        self._store = store
        self._queues = queues
        self._timeout_s = timeout_s
        self._pictures = StepPictures(store)
        self._drawn: KeptResults[StepPicture] = KeptResults(MAX_PICTURES)
        self._timelines: KeptResults[StepTimeline] = KeptResults(MAX_TIMELINES)
        self._parts: KeptResults[StepTimeline | None] = KeptResults(MAX_PARTS)
        self._replays: KeptResults[StepReplay] = KeptResults(MAX_REPLAYS)
        self._plays: KeptResults[RunPlay] = KeptResults(MAX_PLAYS)
        self._last_places: SharedResults[tuple[str, int, int], Places] = SharedResults(
            max_results=1
        )

    def timeline(self, run_id: str, *, epoch: int, step: int) -> StepTimeline | None:
        """Return one step with all its spans; None while a background job reads it.

        Raises:
            EmptyRunError: The step holds no spans.
        """
        if self._has_large_steps(run_id):
            return None  # `picture` draws large steps
        run = self._runs.find(run_id)

        def read() -> StepTimeline:
            return read_timeline(
                self._source,
                run_id,
                epoch=epoch,
                step=step,
                info=self._runs.info(run_id),
                events=map(to_event, read_events(self._store, run_id)),
                now_ns=time.time_ns() if run.state == RUNNING else None,
            )

        done = self._timelines.get(
            (run_id, self._reports.revision(run_id), epoch, step),
            read,
            # In the queue of the analyses: a large step takes as much memory as one.
            jobs=self._queues.of_run(run),
            timeout_s=self._timeout_s,
        )
        return None if done is None else done.result()

    def picture(
        self,
        run_id: str,
        *,
        epoch: int,
        step: int,
        order: RowOrder,
        viewport: Viewport | None = None,
    ) -> StepPicture | None:
        """Return the picture of a step; None if it must be drawn from `timeline`, or is not ready.

        The picture comes from stored tiles, the finest that there are. A large step without tiles
        is drawn whole, by a background job, once for all clients.

        Raises:
            EmptyRunError: The step is large and holds no spans.
        """
        step_id = StepId(run_id=run_id, epoch=epoch, step=step)
        picture = self._pictures.picture(
            step_id,
            order=order,
            read_places=lambda num_described: self._places(run_id, epoch, num_described),
            viewport=viewport,
        )
        if picture is not None or not self._has_large_steps(run_id):
            return picture

        def draw() -> StepPicture:
            info = self._source.run_info(run_id)
            return draw_in_portions(self._store, info, step_id, order=order)

        done = self._drawn.get(
            (step_id, order), draw, jobs=self._queues.large, timeout_s=self._timeout_s
        )
        return None if done is None else done.result()

    def _has_large_steps(self, run_id: str) -> bool:
        run = self._runs.find(run_id)
        return records_groups(run) and run.num_spans > LARGE_STEP_SPANS * max(run.num_steps, 1)

    def viewport_spans(self, picture: StepPicture) -> ViewportSpans:
        """Return the spans of a picture's viewport, if bars show them or its tiles are too coarse.

        They are read by a background job: among all ranks that takes a pass over the step.
        """
        viewport = picture.viewport
        if viewport is None or not (is_few(picture) or needs_spans(picture)):
            return NO_SPANS
        info = self._runs.info(picture.run)
        if not records_groups(info):
            return NO_SPANS
        revision = self._reports.revision(picture.run)
        portion = SpanSelection(
            run_id=picture.run,
            epoch=picture.epoch,
            step=picture.step,
            ranks=picture.ranks,
            after_ns=picture.begin_ns + viewport.begin_ns,
            before_ns=picture.begin_ns + viewport.end_ns,
        )
        bounds_ns = (picture.begin_ns, picture.end_ns)

        def read() -> StepTimeline | None:
            is_shown = 0 < count_selected_spans(self._store, portion) <= MAX_REDRAWN_SPANS
            if not is_shown:
                return None
            return read_part(self._store, info, portion, bounds_ns=bounds_ns)

        done = self._parts.get(
            (revision, portion, bounds_ns),
            read,
            jobs=self._queues.parts,
            timeout_s=PART_TIMEOUT_RATIO * self._timeout_s,
            max_unfinished=MAX_READING_PARTS,
        )
        return (
            ViewportSpans(is_pending=True) if done is None else ViewportSpans(found=done.result())
        )

    def rank_spans(self, picture: StepPicture, ranks: Sequence[int]) -> StepTimeline | None:
        """Return the spans of some ranks of a picture's whole step.

        None if there are none, or the run's format does not record groups.
        """
        portion = SpanSelection(
            run_id=picture.run, epoch=picture.epoch, step=picture.step, ranks=ranks
        )
        info = self._runs.info(picture.run)
        if not records_groups(info) or not count_selected_spans(self._store, portion):
            return None
        bounds_ns = (picture.begin_ns, picture.end_ns)
        return read_part(self._store, info, portion, bounds_ns=bounds_ns)

    def ranks_of_step(
        self, run_id: str, *, epoch: int, step: int, ranks: Sequence[int]
    ) -> ViewportSpans:
        """Return the spans of some ranks of a step; begin and end are the whole step's.

        They are read by a background job. None are found if the run's format does not record
        groups.
        """
        if not records_groups(self._runs.find(run_id)):
            return NO_SPANS
        portion = SpanSelection(run_id=run_id, epoch=epoch, step=step, ranks=ranks)

        def read() -> StepTimeline | None:
            # The descriptions of 12,288 ranks take longer than these spans, which wait on the
            # engine: both are read at once.
            with ThreadPoolExecutor(1) as executor:
                info = executor.submit(self._runs.info, run_id)
                rows = read_part_rows(self._store, portion)
                if not rows.spans.num_rows:
                    return None
                kept = self._pictures.kept(StepId(run_id=run_id, epoch=epoch, step=step))
                bounds_ns = (
                    read_bounds(self._store, run_id, epoch=epoch, step=step)
                    if kept is None
                    else (kept.begin_ns, kept.end_ns)
                )
                return make_part(info.result(), portion, rows, bounds_ns=bounds_ns)

        done = self._parts.get(
            (self._reports.revision(run_id), portion, None),
            read,
            jobs=self._queues.parts,
            timeout_s=PROOF_TIMEOUT_RATIO * self._timeout_s,
        )
        return (
            ViewportSpans(is_pending=True) if done is None else ViewportSpans(found=done.result())
        )

    def alike_spans(  # noqa: PLR0913  # what they have in common
        self,
        run_id: str,
        *,
        epoch: int,
        steps: Sequence[int],
        ranks: Sequence[int],
        kind: SpanKind,
        name: str,
        microbatch: int,
    ) -> tuple[AlikeSpan, ...]:
        """Return the spans of a kind, name and micro-batch in closed steps, on some ranks.

        A step that is not closed yet has no begin.
        """
        closed = read_closed_bounds(self._store, run_id, epoch, most=MAX_CLOSED)
        begin_ns = {row["step"]: row["begin_ns"] for row in closed if row["step"] in steps}
        if not begin_ns:
            return ()
        spans = read_filtered_spans(
            self._store, run_id, first=min(begin_ns), last=max(begin_ns), ranks=ranks, kinds=[kind]
        )
        columns = ("epoch", "name", "microbatch", "step", "rank", "start_ns", "duration_ns")
        return tuple(
            AlikeSpan(
                step=step, rank=rank, begin_ns=start - begin_ns[step], duration_ns=duration_ns
            )
            for *of, step, rank, start, duration_ns in zip(
                *(spans[column].to_pylist() for column in columns), strict=True
            )
            if of == [epoch, name, microbatch] and step in begin_ns
        )

    def step_replay(self, recorded: StepTimeline | StepPicture) -> StepReplay | None:
        """Return the replay of a step; None while a background job makes it.

        Raises:
            AnalysisError: The step cannot be replayed, or has too many spans.
        """
        run = self._runs.find(recorded.run)
        revision = self._reports.revision(recorded.run)
        done = self._replays.get(
            ("replay", run.run_id, recorded.epoch, recorded.step, revision),
            lambda: make_replay(self._source, run, recorded),
            jobs=self._queues.small,
            timeout_s=self._timeout_s,
        )
        return None if done is None else done.result()

    def play(self, run_id: str) -> RunPlay | None:
        """Return a run whose steps can be replayed with changes; None while it is being read.

        Of a large run these are the last steps, as in its report; at least one.

        Raises:
            AnalysisError: No step can be replayed, or a step has too many spans.
        """
        run = self._runs.find(run_id)
        num_spans = run.num_spans // max(run.num_steps, 1)
        if num_spans > MAX_PLAYED_SPANS:
            raise EmptyRunError(
                f"a step has about {num_spans:,} spans; at most {MAX_PLAYED_SPANS:,} are read for a"
                f" page. Use open_run({run_id!r}).play in a notebook"
            )

        def read() -> RunPlay:
            steps = self._source.steps(run_id)
            first = first_step(MAX_SPANS, run, steps) if len(steps) else None
            play = open_play(self._source, run_id, first=first)
            # Of 12,288 ranks one step is read, whose path takes 4 s the first time: not on a page.
            play.step(play.reading.steps[-1]).critical_path()
            return play

        done = self._plays.get(
            ("play", run_id, self._reports.revision(run_id)),
            read,
            jobs=self._queues.of_run(run),
            timeout_s=self._timeout_s,
        )
        return None if done is None else done.result()

    def picture_revision(self, run_id: str, *, epoch: int, step: int) -> int:
        """Return a number that changes whenever the stored picture of a step does."""
        kept = self._pictures.kept(StepId(run_id=run_id, epoch=epoch, step=step))
        return 0 if kept is None else kept.revision

    def _places(self, run_id: str, epoch: int, num_described: int) -> Places:
        """Return coordinates and hosts of an epoch's ranks, as of a number of descriptions.

        Reading the descriptions of 12,288 ranks takes longer than the picture, and they change only
        at the start of a run.
        """

        def read() -> Places:
            epochs = [info for info in self._runs.info(run_id).epochs if info.epoch == epoch]
            ranks = [rank for info in epochs for rank in info.ranks]
            return (
                {rank.rank: rank.coords for rank in ranks},
                {rank.rank: rank.host for rank in ranks if rank.host},
            )

        return self._last_places.get((run_id, epoch, num_described), read)

    def step_trace(
        self,
        run_id: str,
        *,
        epoch: int,
        step: int,
        ranks: tuple[int, ...],
        window_ns: tuple[int, int] | None = None,
    ) -> str:
        """Return the spans of a step, or of some of its ranks or time, as a file for Perfetto.

        Raises:
            EmptyRunError: There are no such spans, or too many.
        """
        self._runs.find(run_id)
        return write_step_trace(
            self._store, run_id, epoch=epoch, step=step, ranks=ranks, window_ns=window_ns
        )


def make_replay(
    source: SpanSource, run: RunSummary, recorded: StepTimeline | StepPicture
) -> StepReplay:
    """Return the replay of a step.

    Raises:
        AnalysisError: The step cannot be replayed, or has too many spans.
    """
    num_spans = max(run.num_spans // max(run.num_steps, 1), 1)
    if num_spans > MAX_REPLAYED_SPANS:
        raise EmptyRunError(
            f"step {recorded.step} has about {num_spans:,} spans; at most"
            f" {MAX_REPLAYED_SPANS:,} are replayed for a page."
            f" Use open_run({run.run_id!r}).critical_path in a notebook"
        )
    info = source.run_info(run.run_id)
    if recorded.epoch != max(epoch.epoch for epoch in info.epochs):
        raise EmptyRunError(
            f"step {recorded.step} is of epoch {recorded.epoch}, and only the last epoch is"
            " replayed"
        )
    around = (MAX_REPLAYED_SPANS // num_spans - 1) // 2
    first, last = recorded.step - around, recorded.step + around
    reading = read_operations(
        info,
        source.spans(run.run_id, first=first, last=last),
        source.steps(run.run_id, first=first, last=last),
    )
    return replay_step(reading, recorded)
