"""Axes of a step, and what is marked over it: legend, names of rows, critical path, selection."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from rankscope.analysis.report.text import MIN_AXIS_S
from rankscope.tracer.span import NS_PER_MS, NS_PER_S, SpanKind

from ..text import cut_middle, escape, escape_for_plotly
from ..theme import INK, KIND_COLORS, PATH, SLOW, base_layout, rgba

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from rankscope.analysis.drawing.raster import StepPicture, Stretches, Viewport
    from rankscope.analysis.drawing.rows import Group, Lanes, RowLayout
    from rankscope.analysis.drawing.selection import Arrow
    from rankscope.analysis.drawing.timeline import StepTimeline
    from rankscope.analysis.report.report import Proof

    FindPlace = Callable[[int, int], float | None]
    """Returns the height of a kind on a rank; None if it is not drawn."""

MAX_GROUP_NAMES = 64
"""Names of groups that fit into the margin."""

VEIL = "rgba(134,142,150,0.62)"
"""Colour over what is not marked, of the same effect on white and on near-black."""

NOT_LOADED = "rgba(134,142,150,0.25)"

TOP = 26
"""Pixels above the rows: times."""

BELOW = 8
"""Pixels beneath them."""

_LETTER = 7.4
"""Pixels of a letter in the margin, on average."""

_MAX_NAME = 20
"""Letters of a group's name: on a phone, more would leave no room for the rows."""

_LEAST_MARGIN = 56
"""Pixels of the word "rank" and half of a label of times."""

_MAX_WHOLE_LABELS = 200
"""Labels in seconds that an axis brings along: beyond them, a zoom has its labels in ms."""

_NAMES = {SpanKind.WAIT: "wait (thread blocked)"}

_RANKS_TITLE: dict[str, object] = {
    "text": "rank", "x": 0, "xref": "paper", "xanchor": "right", "xshift": -24,
    "y": 1, "yref": "paper", "yanchor": "bottom", "yshift": 2, "showarrow": False,
}  # fmt: skip
"""Above the numbers of the rows, which have no word of their own: on a phone it took a tenth. The
first label of times, which may reach into the margin, is beside it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """Moment at which a rank came to a stop."""

    rank: int
    at_ns: int
    """From the step's begin."""

    word: str
    """"died here" or "stuck here"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """Marks over a step."""

    ranks: tuple[int, ...] = ()
    """If there are any, the other ranks are dimmed."""

    peers: tuple[int, ...] = ()
    """Ranks that are not dimmed either: the marked ones are held against them."""

    path: Stretches | None = None
    """The critical path; None: it is not drawn."""

    proof: Proof | None = None
    """The proof of a finding, which is framed."""

    framed: tuple[int, ...] = ()
    """Ranks that the proof is on; none: its own."""

    stops: tuple[Stop, ...] = ()
    span: int | None = None
    """The selected span, as its row among those that are drawn."""

    arrows: tuple[Arrow, ...] = ()
    """What the selected span waited for and delayed, as of `describe_span`."""

    box: Viewport | None = None
    """The measured box."""

    sought: tuple[int, ...] = ()
    """Ranks that were searched for: their rows are framed."""


NO_MARKS = Marks()


@dataclass(frozen=True, slots=True, kw_only=True)
class RowStyle:
    """Sizes and places of the labels of rows."""

    height: int
    """Pixels of the figure."""

    max_ticks: int
    """Labels that fit into the margin."""

    separator: str
    """Colour of the lines between groups; empty: there are none."""

    name_offset: float
    """Place of a group's name from the middle of its first line, in lines."""

    name_px: int
    """Pixels of a name's height."""

    name_place: dict[str, object]
    """Plotly's properties of its place."""


def step_layout(
    step: StepTimeline | StepPicture, rows: RowLayout, marks: Marks, style: RowStyle
) -> dict[str, Any]:
    """Return the axes of a whole step with its rows and groups, as plotly's layout."""
    length_ms = (step.end_ns - step.begin_ns) / NS_PER_MS
    num_lines, groups = rows.lines[-1], rows.groups
    ticks, labels = row_ticks(rows, marks.ranks, max_ticks=style.max_ticks)
    left = left_margin((f"▾ {short_name(group)}" for group in groups), labels)
    layout = base_layout(height=style.height, zoom_key=f"{step.run} {step.epoch} {step.step}")
    layout["xaxis"].update(time_axis(length_ms), range=[0, length_ms], showgrid=False)
    layout["yaxis"].update(
        range=[num_lines - 0.5, -0.5],
        tickmode="array",
        ticklabeloverflow="allow",  # else plotly measures each label
        tickvals=[rows.middle(row) for row in ticks],
        ticktext=labels,
        showgrid=False,
        automargin=False,
    )
    # Beneath the rows. The page has a legend of its own, which takes half of the lines on a phone.
    layout["legend"].update(y=0, yanchor="top")
    line_px = (style.height - TOP - BELOW) / num_lines
    names = _group_names(
        rows,
        style.name_offset,
        min_lines=style.name_px / line_px - 1,
        xshift=6 - left,
        **style.name_place,
    )
    separators = groups[1:] if style.separator else ()
    stops = [
        _mark_stop(rows, row, stop) for stop in marks.stops for row in rows.rows_with((stop.rank,))
    ]
    layout.update(
        hovermode=False,
        dragmode="pan",
        margin={"l": left, "r": 16, "t": TOP, "b": BELOW},
        shapes=[
            *(_line_across(rows.lines[group.row] - 0.5, style.separator) for group in separators),
            *_dimmed(rows, (*marks.ranks, *marks.peers) if marks.ranks else ()),
            *_proof_frame(rows, marks),
            *_frames(rows, marks),
            *(line for line, _ in stops),
        ],
        annotations=[*names, _RANKS_TITLE, *(text for _, text in stops)],
    )
    return layout


def time_axis(length_ms: float) -> dict[str, Any]:
    """Return the axis of times since a step's first span. Its values are ms at any length.

    A label has the unit: a title would be on the legend. Only the last one has " ms", so that
    there is room on a phone. Labels of a long step are in seconds, as far as they are multiples of
    a power of ten of which the step has at most `_MAX_WHOLE_LABELS`; those of a closer zoom are in
    ms.
    """
    axis: dict[str, Any] = {
        "side": "top",  # rows may reach below the screen
        "tickformat": ",",
        "ticksuffix": " ms",
        "showticksuffix": "last",
        "ticklabeloverflow": "allow",
    }
    if length_ms * NS_PER_MS >= MIN_AXIS_S * NS_PER_S:
        grid_ms = 10 ** max(3, math.ceil(math.log10(length_ms / _MAX_WHOLE_LABELS)))
        # Plotly cannot divide: it replaces texts, of which these alone have no comma.
        axis["tickformatstops"] = [{"dtickrange": [grid_ms, None], "value": "d"}]
        axis["labelalias"] = {
            f"{at}{suffix}": f"{at // 1000:,} s"
            for at in range(grid_ms, round(length_ms) + grid_ms, grid_ms)
            for suffix in ("", " ms")
        }
    return axis


def row_ticks(
    rows: RowLayout, marked: Sequence[int], *, max_ticks: int
) -> tuple[list[int], list[str]]:
    """Return the labelled rows and their labels: evenly spaced ones, and marked ones in bold.

    Folded groups are labelled with their number of ranks: all of them if there is room.
    """
    blocks, folded = rows.blocks, rows.folded_rows
    every = max(1, -(-len(blocks) // max_ticks))
    bold = rows.rows_with(marked)[:max_ticks]
    sure = {*bold, *(folded if len(folded) <= max_ticks else ())}
    # A label beside one of these would be printed over it.
    plain = [
        row for row in range(0, len(blocks), every) if all(abs(row - at) >= every for at in sure)
    ]
    labels = {row: f"{blocks[row][0]}{'…' if len(blocks[row]) > 1 else ''}" for row in plain}
    labels |= {row: f"{len(blocks[row]):,} ranks" for row in folded if row in {*sure, *plain}}
    for row in bold:
        ranks = [rank for rank in blocks[row] if rank in marked]
        labels[row] = f"<b>{ranks[0]}{'…' if len(ranks) > 1 else ''}</b>"
    ticks = sorted(labels)
    return ticks, [labels[row] for row in ticks]


def left_margin(names: Iterable[str], ticks: Iterable[str]) -> int:
    """Return the width in pixels of a margin with names of groups beside labels of rows."""
    plain = (tick.removeprefix("<b>").removesuffix("</b>") for tick in ticks)
    letters = sum(max(map(len, texts), default=0) for texts in (names, plain))
    return max(round(letters * _LETTER) + 28, _LEAST_MARGIN)


def _dimmed(rows: RowLayout, marked: Sequence[int]) -> list[dict[str, object]]:
    """Return a veil over the rows without marked ranks, as plotly's shapes.

    Nothing if no row has one, or all have.
    """
    bright = rows.rows_with(marked)
    if not bright:
        return []
    return [
        _rect("not marked", None, _heights(rows, above + 1, below), fillcolor=VEIL, layer="above")
        for above, below in pairwise([-1, *bright, len(rows.blocks)])
        if below > above + 1
    ]


def _line_across(height: float, color: str) -> dict[str, object]:
    """Return a line across the figure, as plotly's shape.

    The time of plotly's own ``add_hline`` grows with the square of their number.
    """
    return {
        "type": "line",
        "x0": 0,
        "x1": 1,
        "xref": "x domain",
        "y0": height,
        "y1": height,
        "yref": "y",
        "line": {"color": color, "width": 1},
    }


def _group_names(
    rows: RowLayout, offset: float, *, min_lines: float, **place: object
) -> list[dict[str, object]]:
    """Return the names of groups in the left margin, as plotly's annotations.

    A click on one folds it. An annotation is named after its number and its ends, between which
    the assets keep it in view. Of more than `MAX_GROUP_NAMES` groups only evenly spaced ones are
    named.

    Args:
        offset: As in `RowStyle`.
        min_lines: Lines between two names that are not printed over each other.
        place: Plotly's properties of the text's place.
    """
    every = max(1, -(-len(rows.groups) // MAX_GROUP_NAMES))
    heights = [rows.lines[group.row] + offset for group in rows.groups]
    ends = [*heights, math.inf][1:]
    named: list[tuple[Group, float, float]] = []
    for group, height, end in list(zip(rows.groups, heights, ends, strict=True))[::every]:
        if not named or height - named[-1][1] >= min_lines:
            named.append((group, height, end))
    return [
        {
            "name": f"fold {group.number} {height:g} {end:g}",
            "text": f"{'▸' if group.number in rows.folded else '▾'}"
            f" <b>{escape_for_plotly(short_name(group))}</b>",
            "captureevents": True,
            "hovertext": escape_for_plotly(group.name),
            "x": 0,
            "xref": "paper",
            "xanchor": "left",
            "y": height,
            "yref": "y",
            "showarrow": False,
            **place,
        }
        for group, height, end in named
    ]


def short_name(group: Group) -> str:
    """Return the name of a group, without its middle if it is long: hosts differ at the end."""
    return cut_middle(escape(group.name), _MAX_NAME)


def legend_entries(kinds: Iterable[SpanKind]) -> list[dict[str, Any]]:
    """Return an entry of the legend for each kind, as a trace without points."""
    return [
        {
            "type": "scatter",
            "name": _NAMES.get(kind, kind.value),
            "legendgroup": kind.value,  # the assets hide what belongs to an entry that is off
            "x": [None],
            "y": [None],
            "mode": "markers",
            "marker": {"symbol": "square", "size": 10, "color": KIND_COLORS[kind]},
            "hoverinfo": "skip",
        }
        for kind in kinds
    ]


def not_loaded(
    step: StepTimeline | StepPicture, loaded_ms: tuple[float, float], *, num_lines: int
) -> list[dict[str, object]]:
    """Return shapes over what a figure of a viewport does not have, as plotly's shapes.

    White would mean that nothing happened there.

    Args:
        loaded_ms: Begin and end of what the figure has, from the step's begin.
        num_lines: Lines of the figure.
    """
    begin_ms, end_ms = loaded_ms
    length_ms = (step.end_ns - step.begin_ns) / NS_PER_MS
    beyond = 1e6  # further than a reader can zoom out
    boxes = (
        (0.0, begin_ms, -beyond, beyond),
        (end_ms, length_ms, -beyond, beyond),
        (begin_ms, end_ms, -beyond, -0.5),
        (begin_ms, end_ms, num_lines - 0.5, beyond),
    )
    return [
        _rect(
            "not loaded",
            (x0, x1),
            (y0, y1),
            fillcolor=NOT_LOADED,
            layer="below",
            label={"text": "not loaded yet", "font": {"color": INK}},
        )
        for x0, x1, y0, y1 in boxes
        if x1 > x0
    ]


def _proof_frame(rows: RowLayout, marks: Marks) -> list[dict[str, Any]]:
    """Return frames around a proof, as plotly's shapes: one for neighbouring rows.

    None if the ranks that it is on are not shown.
    """
    proof = marks.proof
    if proof is None:
        return []
    framed = rows.rows_with(marks.framed or (proof.rank,))
    first = [row for row in framed if row - 1 not in framed]
    last = [row for row in framed if row + 1 not in framed]
    return [
        _rect(
            "proof",
            (proof.begin_ns / NS_PER_MS, proof.end_ns / NS_PER_MS),
            _heights(rows, top, bottom + 1),
            line={"color": PATH, "width": 2},
        )
        for top, bottom in zip(first, last, strict=True)
    ]


def _frames(rows: RowLayout, marks: Marks) -> list[dict[str, Any]]:
    """Return frames around the rows of the ranks that were searched for, and the measured box."""
    line = {"color": SLOW, "width": 2}
    frames = [
        _rect("found", None, _heights(rows, row, row + 1), line=line)
        for row in rows.rows_with(marks.sought)
    ]
    if marks.box is not None:
        first, last = marks.box.first_row - rows.first_place, marks.box.end_row - rows.first_place
        inside = rows.rows_with(rows.ranks[max(first, 0) : max(last, 0)])
        if inside:
            times_ms = (marks.box.begin_ns / NS_PER_MS, marks.box.end_ns / NS_PER_MS)
            heights = _heights(rows, inside[0], inside[-1] + 1)
            frames.append(_rect("box", times_ms, heights, line={**line, "dash": "dot"}))
    return frames


def _rect(
    name: str, x: tuple[float, float] | None, y: tuple[float, float], **look: object
) -> dict[str, Any]:
    """Return a rectangle as plotly's shape; its ``x`` is in ms, or None for the whole width."""
    x0, x1 = x or (0, 1)
    return {
        "type": "rect",
        "name": name,
        "x0": x0,
        "x1": x1,
        "xref": "x domain" if x is None else "x",
        "y0": y[0],
        "y1": y[1],
        "yref": "y",
        "line": {"width": 0},
        **look,
    }


def _heights(rows: RowLayout, first: int, end: int) -> tuple[float, float]:
    """Return the heights of the upper edges of two rows."""
    return rows.lines[first] - 0.5, rows.lines[end] - 0.5


def _mark_stop(rows: RowLayout, row: int, stop: Stop) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a line across a row where its rank came to a stop, and the words beside it."""
    at_ms = stop.at_ns / NS_PER_MS
    line = {
        "type": "line",
        "name": "stop",
        "x0": at_ms,
        "x1": at_ms,
        "xref": "x",
        "y0": rows.lines[row] - 0.5,
        "y1": rows.lines[row + 1] - 0.5,
        "yref": "y",
        "line": {"color": SLOW, "width": 4},
    }
    text = {
        "text": f"<b>rank {stop.rank} {stop.word}</b>",
        "x": at_ms,
        "xref": "x",
        "y": rows.middle(row),
        "yref": "y",
        "xanchor": "left",
        "yanchor": "middle",
        "xshift": 4,
        "showarrow": False,
        "bgcolor": rgba(SLOW, 0.3),
        "font": {"size": 11},
    }
    return line, text


def bar_places(timeline: StepTimeline, rows: RowLayout, lanes: Lanes) -> FindPlace:
    """Return the heights of kinds on ranks that are drawn as bars: the lane of each kind."""
    spans = timeline.spans
    from_top = rows.row_by_rank()
    codes, first = np.unique(spans.kind, return_index=True)
    lane = {
        code: float(lanes.center[row]) - from_top[int(spans.rank[row])]
        for code, row in zip(codes.tolist(), first.tolist(), strict=True)
    }
    return lambda rank, kind: from_top[rank] + lane.get(kind, 0.0) if rank in from_top else None


def path_trace(path: Stretches, find_place: FindPlace) -> dict[str, Any]:
    """Return the critical path as a line; it is broken where it leaves the shown ranks."""
    x: list[float | None] = []
    y: list[float | None] = []
    times = zip(path.start_ns / NS_PER_MS, path.end_ns / NS_PER_MS, strict=True)
    for rank, kind, (begin, end) in zip(path.rank.tolist(), path.kind.tolist(), times, strict=True):
        place = find_place(rank, kind)
        if place is None:
            x.append(None)
            y.append(None)
        else:
            x += [float(begin), float(end)]
            y += [place, place]
    return {
        "type": "scatter",
        "name": "critical path",
        "x": x,
        "y": y,
        "mode": "lines",
        "line": {"color": PATH, "width": 3},
        "hoverinfo": "skip",
    }


def selection_traces(
    timeline: StepTimeline, marks: Marks, *, rows: RowLayout, lanes: Lanes
) -> list[dict[str, Any]]:
    """Return a frame around the selected span, and arrows to what it waited for and delayed.

    Args:
        marks: With the span.
    """
    span = marks.span or 0
    begin = (int(timeline.spans.start_ns[span]) - timeline.begin_ns) / NS_PER_MS
    end = begin + int(timeline.spans.duration_ns[span]) / NS_PER_MS
    top = float(lanes.center[span] - lanes.height[span] / 2)
    bottom = float(lanes.center[span] + lanes.height[span] / 2)
    row = rows.row_by_rank()
    drawn = [arrow for arrow in marks.arrows if arrow.from_rank in row and arrow.to_rank in row]
    common = {"type": "scatter", "showlegend": False, "hoverinfo": "skip"}
    return [
        {
            **common,
            "name": "selected",
            "x": [begin, end, end, begin, begin],
            "y": [top, top, bottom, bottom, top],
            "mode": "lines",
            "line": {"color": SLOW, "width": 3},
        },
        {
            **common,
            "x": [
                at
                for arrow in drawn
                for at in (arrow.from_ns / NS_PER_MS, arrow.to_ns / NS_PER_MS, None)
            ],
            "y": [at for arrow in drawn for at in (row[arrow.from_rank], row[arrow.to_rank], None)],
            "mode": "lines+markers",
            "marker": {"symbol": "arrow", "size": 11, "angleref": "previous", "color": SLOW},
            "line": {"color": SLOW, "width": 2},
        },
    ]
