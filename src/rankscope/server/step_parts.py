"""Read some ranks of a step, or a while of it, with the waits that the whole step tells."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rankscope.analysis.drawing.picture import StepPart
from rankscope.analysis.drawing.raster import step_raster
from rankscope.analysis.drawing.timeline import portion_of
from rankscope.collector.read.spans import read_arrivals, read_portion
from rankscope.dashboard.figures.timeline_raster import MAX_BARS, MAX_ROWS, NUM_BINS

from ..sources.arrow_tables import arrivals_table, span_table

if TYPE_CHECKING:
    from rankscope.analysis.drawing.picture import StepPicture
    from rankscope.analysis.drawing.timeline import StepTimeline
    from rankscope.analysis.trace.tables import RunInfo
    from rankscope.collector.read.spans import Portion
    from rankscope.collector.store.store import Store

MAX_DRAWN_SPANS = 200_000
"""Of a window that is drawn while somebody waits: a quarter of a second on an idle core."""


def part_of(picture: StepPicture) -> StepPart:
    """Return the ranks and the while that a picture shows, its lines whole."""
    edges = picture.raster.edges_ns
    begin, end = int(edges[0]), int(edges[-1])
    if picture.window is not None:
        begin, end = picture.window.begin_ns, picture.window.end_ns
    bounds = (picture.begin_ns, picture.end_ns)
    return StepPart(ranks=picture.ranks, begin_ns=begin, end_ns=end, bounds_ns=bounds)


def needs_spans(picture: StepPicture) -> bool:
    """Return whether a window's kept pixels are few, and its spans likely not too many.

    So few spans that each has its bar need no pixels.
    """
    window = picture.window
    if window is None:
        return False
    num_lines, num_bins = picture.raster.compute.kind.shape
    most_lines = min(len(picture.ranks), MAX_ROWS)
    is_coarse = num_bins * num_lines < NUM_BINS * most_lines / 2
    share = (window.end_ns - window.begin_ns) / (picture.end_ns - picture.begin_ns)
    likely = picture.num_spans * share * len(picture.ranks) / picture.num_ranks
    return is_coarse and MAX_BARS < likely <= MAX_DRAWN_SPANS


def drawn_anew(picture: StepPicture, part: StepTimeline) -> StepPicture:
    """Return the same window of a step, drawn from its spans.

    Args:
        picture: A window.
        part: The spans of `part_of` it.
    """
    asked = part_of(picture)
    begin_ns = part.begin_ns + asked.begin_ns
    window = replace(part, begin_ns=begin_ns, end_ns=part.begin_ns + asked.end_ns)
    raster = step_raster(window, picture.ranks, max_rows=MAX_ROWS, num_bins=NUM_BINS)
    return replace(picture, raster=replace(raster, edges_ns=raster.edges_ns + asked.begin_ns))


def read_part(
    store: Store, info: RunInfo, portion: Portion, *, bounds_ns: tuple[int, int]
) -> StepTimeline:
    """Return a portion of a step, laid out for drawing.

    Args:
        store: The store.
        info: The run, of a format that records groups.
        portion: What of it.
        bounds_ns: Begin and end of the whole step.
    """
    rows = read_portion(store, portion)
    return portion_of(
        info,
        span_table(rows),
        arrivals_table(read_arrivals(store, portion, rows)),
        epoch=portion.epoch,
        step=portion.step,
        bounds_ns=bounds_ns,
    )
