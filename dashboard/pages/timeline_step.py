"""The step that the timeline shows: read for a view, with its rows laid out, and its replay."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from rankscope.analysis.causes import crash, stage_imbalance
from rankscope.analysis.drawing.raster import (
    MAX_BARS,
    StepPicture,
    draw_picture,
    redraw_viewport,
)
from rankscope.analysis.drawing.rows import (
    RowOrder,
    lay_out_rows,
    order_ranks,
    rank_by_excess,
    split_ranks,
)
from rankscope.analysis.drawing.selection import (
    choose_finding,
    find_proof,
    find_rank_stops,
    find_related,
    find_stop,
    frame_stop,
)
from rankscope.analysis.drawing.timeline import StepTimeline, cut_timeline
from rankscope.analysis.report.report import RunReport
from rankscope.analysis.report.text import format_count, format_duration
from rankscope.analysis.severity import ends_run
from rankscope.analysis.trace.errors import AnalysisError

from ..address import TIMELINE, WHOLE, read_address, view_finding
from ..figures.excess import shown_excess
from ..figures.timeline_axes import Stop
from ..figures.timeline_raster import raster_rows

if TYPE_CHECKING:
    from rankscope.analysis.drawing.raster import Stretches
    from rankscope.analysis.drawing.rows import RowLayout
    from rankscope.analysis.drawing.selection import RelatedRanks
    from rankscope.analysis.drawing.step_replay import StepReplay
    from rankscope.analysis.report.report import Finding
    from rankscope.dashboard.records.progress import AnalysisFailed, AnalysisInProgress

    from ..address import View
    from ..provider import ReportProvider
    from .timeline_controls import Shown

    Analysed = RunReport | AnalysisInProgress | AnalysisFailed | None
    """What is known of a run's diagnosis."""

MAX_STOPPED = 64
"""Ranks of a large step that are read for when it came to a stop."""

MAX_SLOWEST = 64
"""Ranks of a large step that are read when the slowest ones are on top."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownStep:
    """The part of a step that is drawn, and its rows."""

    view: View
    """With the part of the step that fills the figure."""

    step: StepTimeline | StepPicture
    """Spans are drawn as bars, a picture as pixels."""

    rows: RowLayout
    is_whole: bool
    """Whether all spans of the step are drawn, so that a zoom needs no others."""

    @property
    def spans(self) -> StepTimeline | None:
        """The spans that are drawn as bars; None: pixels are drawn."""
        return self.step if isinstance(self.step, StepTimeline) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReading:
    """A step as it was read for a view."""

    shown: ShownStep
    recorded: StepTimeline | StepPicture
    """The step, or a part of its picture."""

    timeline: StepTimeline | None
    """All spans, or those of a picture's slowest ranks; None: it is shown as its picture."""

    notes: tuple[str, ...]
    """What is shown of it, and why."""

    related: RelatedRanks | None = None
    """The ranks that are shown of a finding's proof; None: all."""

    stops: tuple[Stop, ...] = ()
    """Of the culprits, if the job ended in the step."""

    is_pending: bool = False
    """Whether spans that are to be shown are still being read."""


def read_step(provider: ReportProvider, view: View, report: Analysed) -> StepReading | None:
    """Read the step of a view that names run, epoch and step; None while it is being read.

    It is shown until it came to a stop, unless the address names a part or the whole of it.
    """
    run_id = str(view.run)
    step: Any = {"epoch": view.epoch or 0, "step": view.step or 0}
    related = related_ranks(report, view)
    if related is not None and isinstance(report, RunReport):
        part = provider.ranks_of_step(run_id, **step, ranks=related.all)
        if part.is_pending:
            return None
        if part.found is not None:
            return _show_related(view, part.found, related, report.world_size)
    picture = provider.picture(run_id, **step, order=view.order, viewport=view.viewport)
    ranking = _rank_slowest(report, view)
    timeline = None
    if picture is None:
        timeline = provider.timeline(run_id, **step)
    elif view.order is RowOrder.EXCESS:
        timeline = provider.rank_spans(picture, ranking[:MAX_SLOWEST])
    sample = timeline
    if sample is None and picture is not None and find_fatal(report, view):
        every = len(picture.ranks) // MAX_STOPPED + 1
        sample = provider.rank_spans(picture, picture.ranks[::every])
    notes = []
    if picture is not None and timeline is not None:
        num_shown = format(len(np.unique(timeline.spans.rank)), ",")
        num_ranks = format_count(picture.num_ranks, "rank")
        notes.append(f"The {num_shown} slowest of {num_ranks}, the slowest one on top.")
    stops = _find_stops(provider, report, view, timeline or picture)
    stop_ns = None if sample is None else find_stop(sample)
    if sample is not None and stop_ns is not None:
        when = format_duration(stop_ns)
        notes.append(f"No operation began after {when}, and some that ran then did not end.")
        first_ns = min((stop.at_ns for stop in stops), default=None)
        frame, length_ns = frame_stop(stop_ns, first_ns), sample.end_ns - sample.begin_ns
        is_asked = view.show == WHOLE or view.viewport is not None
        if not is_asked and frame.end_ns < length_ns:
            shown_ns = frame.end_ns - frame.begin_ns
            notes.append(
                f'Shown: {format_duration(shown_ns)} of {format_duration(length_ns)}; "Whole step"'
                " shows all."
            )
            view = replace(view, viewport=frame)
            if picture is not None and timeline is None:
                picture = provider.picture(run_id, **step, order=view.order, viewport=frame)
    if timeline is not None:
        timeline = replace(timeline, ranking=ranking)
        return StepReading(
            shown=show_timeline(view, timeline),
            recorded=picture or timeline,
            timeline=timeline,
            notes=tuple(notes),
            stops=stops,
        )
    if picture is None:
        return None
    part = provider.viewport_spans(picture)
    return StepReading(
        shown=_show_tiles(view, picture, part.found),
        recorded=picture,
        timeline=None,
        notes=tuple(notes),
        stops=stops,
        is_pending=part.is_pending,
    )


def related_ranks(report: Analysed, view: View) -> RelatedRanks | None:
    """Return the ranks that are shown of a finding's proof; None: all, because they are few."""
    framed = find_framed(report, view)
    if not isinstance(report, RunReport) or framed is None:
        return None
    is_of_stages = framed.cause == stage_imbalance.CAUSE.name
    if view.order is not (RowOrder.PP if is_of_stages else RowOrder.EXCESS):
        return None
    if report.world_size <= MAX_SLOWEST or view.show == WHOLE:
        return None
    return find_related(report, framed)


def _show_related(
    view: View, part: StepTimeline, related: RelatedRanks, num_ranks: int
) -> StepReading:
    """Show the ranks in which a finding shows, the culprits on top."""
    timeline = replace(part, ranking=related.all, sections=related.sections)
    counts = {
        f"{format_count(len(related.culprits), 'rank')} at fault": related.culprits,
        f"{len(related.partners):,} of its groups": related.partners,
        f"{len(related.peers):,} alike": related.peers,
        f"{len(related.waiting):,} that wait for it": related.waiting,
    }
    shown = ", ".join(text for text, ranks in counts.items() if ranks)
    note = f"From the top: {shown}. {num_ranks - len(related.all):,} others are folded."
    return StepReading(
        shown=show_timeline(view, timeline),
        recorded=timeline,
        timeline=timeline,
        notes=(note,),
        related=related,
    )


def find_fatal(report: Analysed, view: View) -> tuple[Finding, ...]:
    """Return the findings with which the job ended in a view's step."""
    findings = report.findings if isinstance(report, RunReport) else ()
    return tuple(
        finding
        for finding in findings
        if ends_run(finding) and finding.steps and finding.steps[1] == view.step
    )


def _find_stops(
    provider: ReportProvider, report: Analysed, view: View, step: StepTimeline | StepPicture | None
) -> tuple[Stop, ...]:
    """Return where the culprits came to a stop, if the job ended in the step."""
    word_by_rank = {
        rank: "died here" if finding.cause == crash.CAUSE.name else "stuck here"
        for finding in find_fatal(report, view)
        for rank in finding.ranks[:MAX_STOPPED]
    }
    if isinstance(step, StepPicture) and word_by_rank:
        step = provider.rank_spans(step, tuple(word_by_rank))
    if not isinstance(step, StepTimeline) or not word_by_rank:
        return ()
    at_ns = find_rank_stops(step, word_by_rank)
    return tuple(Stop(rank=rank, at_ns=at_ns[rank], word=word_by_rank[rank]) for rank in at_ns)


def _rank_slowest(report: Analysed, view: View) -> tuple[int, ...]:
    """Return the ranks by their excess in a view's step; empty if unknown or of no use.

    The rank of a framed proof is the first, then the marked ones.
    """
    if not isinstance(report, RunReport) or view.order is not RowOrder.EXCESS:
        return ()
    framed = find_framed(report, view)
    first = framed.proof.rank if framed is not None and framed.proof is not None else None
    marked, ranks = set(view.ranks), rank_by_excess(shown_excess(report), view.step or 0)
    return tuple(sorted(ranks, key=lambda rank: (rank != first, rank not in marked)))


def find_framed(report: Analysed, view: View) -> Finding | None:
    """Return the finding of a view's marked ranks whose proof is in its step."""
    findings = report.findings if isinstance(report, RunReport) else ()
    return find_proof(findings, epoch=view.epoch or 0, step=view.step or 0, ranks=view.ranks)


def go_to_proof(view: View, report: Analysed) -> View:
    """Return the view at the proof of the finding that an address names, if it is known."""
    if not isinstance(report, RunReport) or view.show is None or view.viewport is not None:
        return view
    finding = choose_finding(report.findings, view.show, view.ranks)
    return view if finding is None else view_finding(view, finding)


def show_timeline(view: View, timeline: StepTimeline) -> ShownStep:
    """Show a step of which all spans were read: as bars, or as pixels if they are too many."""
    ranks = order_ranks(timeline, view.order)
    rows = lay_out_rows(timeline, view.order, split_ranks(ranks, 1), view.folded)
    viewport = view.viewport
    if viewport is not None:
        viewport = viewport.clip(timeline.end_ns - timeline.begin_ns, len(ranks))
        view = replace(view, viewport=viewport)
    if _fits_bars(timeline, rows):
        return ShownStep(view=view, step=timeline, rows=rows, is_whole=True)
    if viewport is not None:
        shown_ranks = ranks[viewport.first_row : viewport.end_row]
        part = cut_timeline(timeline, viewport, shown_ranks)
        rows = lay_out_rows(
            timeline,
            view.order,
            split_ranks(shown_ranks, 1),
            view.folded,
            num_ranks=len(ranks),
            first_place=viewport.first_row,
        )
        if len(part.spans) and _fits_bars(part, rows):
            return ShownStep(view=view, step=part, rows=rows, is_whole=False)
    picture = draw_picture(timeline, ranks, viewport)
    return _show_pixels(replace(view, viewport=picture.viewport), picture)


def _show_tiles(view: View, picture: StepPicture, part: StepTimeline | None) -> ShownStep:
    """Show a picture from tiles, or the spans of its viewport if they are read."""
    if part is None:
        return _show_pixels(view if picture.viewport else replace(view, viewport=None), picture)
    rows = lay_out_rows(
        part,
        view.order,
        split_ranks(picture.ranks, 1),
        view.folded,
        num_ranks=picture.num_ranks,
        first_place=picture.first_row,
    )
    if _fits_bars(part, rows):
        view = replace(view, viewport=picture.viewport)
        return ShownStep(view=view, step=part, rows=rows, is_whole=False)
    return _show_pixels(view, redraw_viewport(picture, part))


def _show_pixels(view: View, picture: StepPicture) -> ShownStep:
    rows = raster_rows(picture, view.order, view.folded)
    return ShownStep(view=view, step=picture, rows=rows, is_whole=False)


def _fits_bars(timeline: StepTimeline, rows: RowLayout) -> bool:
    """Return whether spans are few enough for bars: those of folded groups are not drawn."""
    num_bars = len(timeline.spans)
    if rows.folded and num_bars > MAX_BARS:
        num_bars = int(np.count_nonzero(np.isin(timeline.spans.rank, rows.single_ranks)))
    return num_bars <= MAX_BARS


def read_shown(provider: ReportProvider, search: str | None, shown: Shown) -> ShownStep | None:
    """Return what a page shows; None if it shows no step.

    Args:
        search: The page's query.
        shown: The page's state.
    """
    if shown.run is None or shown.step is None or shown.scale is None:
        return None
    view = replace(
        read_address(TIMELINE, search), run=shown.run, epoch=shown.epoch or 0, step=shown.step
    )
    report = provider.report(shown.run)
    reading = read_step(provider, go_to_proof(view, report), report)
    return None if reading is None else reading.shown


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """The replay of a step, or why there is none."""

    replay: StepReplay | None = None
    reason: str = ""
    """From outside, in part."""

    is_pending: bool = False

    def path_of(self, layers: tuple[str, ...]) -> Stretches | None:
        """Return the critical path, if it is known and among the layers that are drawn."""
        return self.replay.path if self.replay is not None and "path" in layers else None


NO_REPLAY = Replayed()


def find_replay(provider: ReportProvider, recorded: StepTimeline | StepPicture) -> Replayed:
    """Return the replay of a step as the provider has it now."""
    try:
        replay = provider.step_replay(recorded)
    except AnalysisError as error:
        return Replayed(reason=str(error))
    if replay is None:
        return Replayed(reason="the step is being replayed", is_pending=True)
    return Replayed(replay=replay)
