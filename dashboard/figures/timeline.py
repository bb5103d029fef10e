"""Draw one step: what every rank did when, and in communication whom it waited for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import plotly.graph_objects as go

from rankscope.analysis.drawing.rows import Rows, arrange_rows
from rankscope.analysis.report.text import format_bytes, format_duration
from rankscope.tracer.span import KINDS, NONE, NS_PER_MS, SpanFlag, SpanKind

from ..text import plotly_text
from ..theme import INK, KIND_COLORS, dressed

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from rankscope.analysis.drawing.raster import Window
    from rankscope.analysis.drawing.rows import GroupBy
    from rankscope.analysis.drawing.timeline import StepTimeline

_WAIT_ALPHA = 0.22
_LEAST_HEIGHT = 260
_MOST_HEIGHT = 860
_PIXELS_PER_RANK = 62
_NESTED_SHRINK = 0.62
_DEEPEST_SHRUNK = 3
_NAMES = {SpanKind.WAIT: "wait (thread blocked)"}


def timeline_figure(
    timeline: StepTimeline, group_by: GroupBy, window: Window | None = None
) -> go.Figure:
    """Draw every span of the step as a bar, in milliseconds since the step's first span.

    Each rank has a row with one lane per track, compute above communication.
    Of a communication span whose wait is known, the wait for its last member
    is hatched and light, the transfer solid. One trace per kind and part holds
    all its bars.

    Args:
        timeline: The step, or some ranks of it for a while.
        group_by: What the rows are gathered by.
        window: The stretch of time that fills the figure; None: the step.
    """
    rows = arrange_rows(timeline, group_by)
    texts = hover_texts(timeline)
    split = (timeline.wait_ns > 0) & (timeline.wait_ns <= timeline.spans.duration_ns)
    figure = go.Figure()
    outer_first = np.argsort(timeline.spans.depth, kind="stable")
    for code in np.unique(timeline.spans.kind).tolist():
        own = outer_first[timeline.spans.kind[outer_first] == code]
        _add_bars(figure, timeline, rows, texts, own, split)
    _add_wait_legend(figure, shown=bool(split.any()))
    _dressed(figure, timeline, rows, group_by)
    if window is not None:
        figure.update_xaxes(range=[window.begin_ns / NS_PER_MS, window.end_ns / NS_PER_MS])
        figure.update_layout(uirevision=f"{figure.layout.uirevision} {window}")
    return figure


def _add_bars(
    figure: go.Figure,
    timeline: StepTimeline,
    rows: Rows,
    texts: NDArray[np.object_],
    own: NDArray[np.intp],
    split: NDArray[np.bool_],
) -> None:
    """Add the bars of one kind: whole spans and transfers solid, waits hatched."""
    spans = timeline.spans
    kind = KINDS[int(spans.kind[own[0]])]
    start = spans.start_ns[own] - timeline.begin_ns
    waited = np.where(split[own], timeline.wait_ns[own], 0)
    solid = _bars(kind, rows, own, start + waited, spans.duration_ns[own] - waited, spans.depth)
    solid.update(name=_NAMES.get(kind, kind.value), hovertext=texts[own], marker=_solid(kind))
    figure.add_trace(go.Bar(solid))
    waits = own[waited > 0]
    if len(waits):
        ahead = _bars(kind, rows, waits, start[waited > 0], timeline.wait_ns[waits], spans.depth)
        ahead.update(
            name=f"{kind.value}, waiting",
            showlegend=False,
            hovertext=texts[waits],
            marker=_hatched(KIND_COLORS[kind]),
        )
        figure.add_trace(go.Bar(ahead))


def _bars(
    kind: SpanKind,
    rows: Rows,
    own: NDArray[np.intp],
    start_ns: NDArray[np.int64],
    duration_ns: NDArray[np.int64],
    depth: NDArray[np.int16],
) -> dict[str, object]:
    # A blocked thread is cut out of its span at full height; work within work lies inside it.
    nesting = 0 if kind is SpanKind.WAIT else np.minimum(depth[own], _DEEPEST_SHRUNK)
    shrink = np.power(_NESTED_SHRINK, nesting)
    return {
        "orientation": "h",
        "base": start_ns / NS_PER_MS,
        "x": duration_ns / NS_PER_MS,
        "y": rows.center[own],
        "width": rows.height[own] * shrink,
        "legendgroup": kind.value,
        "hovertemplate": "%{hovertext}<extra></extra>",
    }


def _solid(kind: SpanKind) -> dict[str, object]:
    if kind is SpanKind.WAIT:
        return _hatched(KIND_COLORS[kind])
    return {"color": KIND_COLORS[kind], "line": {"width": 0}}


def _hatched(color: str) -> dict[str, object]:
    return {
        "color": color,
        "line": {"width": 1, "color": color},
        "pattern": {
            "shape": "/",
            "size": 5,
            "solidity": 0.25,
            "fillmode": "replace",
            "fgcolor": color,
            "bgcolor": _faint(color),
        },
    }


def _faint(color: str) -> str:
    red, green, blue = (int(color[place : place + 2], 16) for place in (1, 3, 5))
    return f"rgba({red},{green},{blue},{_WAIT_ALPHA})"


def _add_wait_legend(figure: go.Figure, *, shown: bool) -> None:
    if shown:
        figure.add_trace(
            go.Bar(
                name="hatched: waiting for the last member",
                orientation="h",
                x=[None],
                y=[None],
                marker=_hatched(INK),
                hoverinfo="skip",
            )
        )


def _dressed(figure: go.Figure, timeline: StepTimeline, rows: Rows, group_by: GroupBy) -> go.Figure:
    num_ranks = len(rows.ranks)
    height = min(max(_PIXELS_PER_RANK * num_ranks + 110, _LEAST_HEIGHT), _MOST_HEIGHT)
    dressed(figure, height=height, keep=f"{timeline.run} {timeline.epoch} {timeline.step}")
    figure.update_layout(
        barmode="overlay",
        bargap=0,
        hovermode="closest",
        dragmode="pan",
        margin={"l": 132, "r": 16, "t": 40, "b": 48},
    )
    figure.update_xaxes(
        title_text="time since the step's first span (ms)",
        tickformat=",",
        range=[0, (timeline.end_ns - timeline.begin_ns) / NS_PER_MS],
        showspikes=True,
        spikemode="across",
        spikesnap="cursor",
        spikethickness=1,
        spikedash="dot",
        spikecolor=INK,
    )
    dress_rows(figure, rows, group_by)
    return figure


def dress_rows(figure: go.Figure, rows: Rows, group_by: GroupBy) -> None:
    """Name the rows on the y axis and part the groups by lines."""
    ticks = _ticks(len(rows.ranks))
    figure.update_yaxes(
        range=[len(rows.ranks) - 0.5, -0.5],
        tickmode="array",
        tickvals=ticks,
        ticktext=[f"rank {rows.ranks[row]}" for row in ticks],
        showgrid=False,
        automargin=False,
        uirevision=f"{figure.layout.uirevision} {group_by}",
    )
    line = {"color": "rgba(134,142,150,0.45)", "width": 1}
    figure.update_layout(
        shapes=group_lines((at - 0.5 for at, _ in rows.groups if at > 0), line),
        annotations=group_names(rows.groups, yanchor="middle", align="left"),
    )


MOST_NAMES = 64


def group_lines(rows: Iterable[float], line: dict[str, object]) -> list[dict[str, object]]:
    """Return lines across the figure at these heights, as plotly's shapes.

    Plotly's own ``add_hline`` takes a time that grows with the square of their number.
    """
    return [
        {
            "type": "line",
            "x0": 0,
            "x1": 1,
            "xref": "x domain",
            "y0": row,
            "y1": row,
            "yref": "y",
            "line": line,
        }
        for row in rows
    ]


def group_names(groups: Sequence[tuple[float, str]], **place: object) -> list[dict[str, object]]:
    """Return the names of groups in the left margin, as plotly's annotations.

    Beyond `MOST_NAMES` only evenly spaced ones have room.

    Args:
        groups: Height and name of each.
        place: How a name stands at its height.
    """
    every = max(1, -(-len(groups) // MOST_NAMES))
    return [
        {
            "text": f"<b>{label}</b>",
            "x": 0,
            "xref": "paper",
            "xanchor": "left",
            "xshift": -126,
            "y": at,
            "yref": "y",
            "showarrow": False,
            **place,
        }
        for at, label in groups[::every]
    ]


def _ticks(num_rows: int) -> tuple[int, ...]:
    """Return the rows that are named: all, or evenly spaced ones when there are many."""
    return tuple(range(0, num_rows, max(1, -(-num_rows // _MOST_TICKS))))


_MOST_TICKS = 64


def hover_texts(timeline: StepTimeline) -> NDArray[np.object_]:
    """Return the label of every span, shape (spans,), in plotly's own line breaks.

    Quantities that are unknown or mean nothing for the span are left out;
    names come from outside and are made inert.
    """
    names = [plotly_text(name) for name in timeline.spans.names]
    places = {rank: f"PP {at.pp} · DP {at.dp} · TP {at.tp}" for rank, at in timeline.coords.items()}
    texts = np.empty(len(timeline.spans), dtype=object)
    for row in range(len(timeline.spans)):
        texts[row] = "<br>".join(_lines(timeline, row, names, places))
    return texts


def _lines(timeline: StepTimeline, row: int, names: list[str], places: dict[int, str]) -> list[str]:
    spans = timeline.spans
    rank = int(spans.rank[row])
    microbatch = int(spans.microbatch[row])
    kind = KINDS[int(spans.kind[row])].value
    begin_ms = (int(spans.start_ns[row]) - timeline.begin_ns) / NS_PER_MS
    lines = [
        f"<b>{names[int(spans.name[row])]}</b>",
        kind if microbatch == NONE else f"{kind}, micro-batch {microbatch}",
        f"rank {rank}" + (f" ({places[rank]})" if rank in places else ""),
        f"duration {format_duration(int(spans.duration_ns[row]))}, from {begin_ms:,.3f} ms",
    ]
    return lines + _communication(timeline, row) + _flags(int(spans.flags[row]))


def _communication(timeline: StepTimeline, row: int) -> list[str]:
    spans = timeline.spans
    lines = []
    if timeline.wait_ns[row] >= 0:
        wait, last = int(timeline.wait_ns[row]), int(timeline.last_rank[row])
        blamed = f" for rank {last}" if wait > 0 and last != spans.rank[row] else ""
        lines.append(f"wait {format_duration(wait)}{blamed}")
        lines.append(f"transfer {format_duration(int(timeline.transfer_ns[row]))}")
    if spans.src_rank[row] != NONE and spans.dst_rank[row] != NONE:
        lines.append(f"rank {int(spans.src_rank[row])} → rank {int(spans.dst_rank[row])}")
    if spans.num_bytes[row] != NONE:
        lines.append(format_bytes(int(spans.num_bytes[row])))
    return lines


def _flags(flags: int) -> list[str]:
    lines = []
    if flags & SpanFlag.OPEN:
        lines.append("had not ended when last seen")
    if flags & SpanFlag.ERROR:
        lines.append("left by an exception")
    return lines
