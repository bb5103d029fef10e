"""Bars of one step: the spans of every rank, with wait and transfer of communication."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import plotly.graph_objects as go

from rankscope.analysis.drawing.rows import Rows, arrange_rows
from rankscope.analysis.report.text import format_bytes, format_duration
from rankscope.tracer.span import KINDS, NONE, NS_PER_MS, SpanFlag, SpanKind

from ..text import escape_for_plotly
from ..theme import INK, KIND_COLORS, apply_style, rgba

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from rankscope.analysis.drawing.raster import Viewport
    from rankscope.analysis.drawing.rows import GroupBy
    from rankscope.analysis.drawing.timeline import StepTimeline

MAX_GROUP_NAMES = 64
"""Names of groups that fit into the margin."""

_MAX_TICKS = 64
_WAIT_ALPHA = 0.22
_MIN_HEIGHT = 260
_MAX_HEIGHT = 860
_PIXELS_PER_RANK = 62
_NESTED_SHRINK = 0.62
_MAX_NESTING = 3
_NAMES = {SpanKind.WAIT: "wait (thread blocked)"}


def timeline_figure(
    timeline: StepTimeline, group_by: GroupBy, viewport: Viewport | None = None
) -> go.Figure:
    """Draw every span of a step as a bar, in milliseconds since the step's first span.

    Each rank has a row with one lane for each track, compute above communication. If the wait of a
    communication span is known, its wait is hatched and pale, its transfer solid. All bars of a
    kind are one trace, and their waits another.

    Args:
        timeline: The step, or the spans of a viewport.
        group_by: What the rows are grouped by.
        viewport: Its times fill the figure; None: the whole step.
    """
    rows = arrange_rows(timeline, group_by)
    texts = hover_texts(timeline)
    is_split = (timeline.wait_ns > 0) & (timeline.wait_ns <= timeline.spans.duration_ns)
    figure = go.Figure()
    outer_first = np.argsort(timeline.spans.depth, kind="stable")
    for code in np.unique(timeline.spans.kind).tolist():
        own = outer_first[timeline.spans.kind[outer_first] == code]
        _add_bars(figure, timeline, rows, texts, own, is_split)
    if is_split.any():
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
    _style(figure, timeline, rows, group_by)
    if viewport is not None:
        figure.update_xaxes(range=[viewport.begin_ns / NS_PER_MS, viewport.end_ns / NS_PER_MS])
        figure.update_layout(uirevision=f"{figure.layout.uirevision} {viewport}")
    return figure


def hover_texts(timeline: StepTimeline) -> NDArray[np.object_]:
    """Return the text of every span under the pointer, shape (spans,), with plotly's line breaks.

    Quantities that are unknown or mean nothing for the span are left out.
    """
    names = [escape_for_plotly(name) for name in timeline.spans.names]
    places = {rank: f"PP {at.pp} · DP {at.dp} · TP {at.tp}" for rank, at in timeline.coords.items()}
    texts = np.empty(len(timeline.spans), dtype=object)
    for row in range(len(timeline.spans)):
        texts[row] = "<br>".join(_lines(timeline, row, names, places))
    return texts


def group_lines(heights: Iterable[float], line: dict[str, object]) -> list[dict[str, object]]:
    """Return lines across the figure, as plotly's shapes.

    The time of plotly's own ``add_hline`` grows with the square of their number.
    """
    return [
        {
            "type": "line",
            "x0": 0,
            "x1": 1,
            "xref": "x domain",
            "y0": height,
            "y1": height,
            "yref": "y",
            "line": line,
        }
        for height in heights
    ]


def group_names(groups: Sequence[tuple[float, str]], **place: object) -> list[dict[str, object]]:
    """Return the names of groups in the left margin, as plotly's annotations.

    Of more than `MAX_GROUP_NAMES` groups only evenly spaced ones are named.

    Args:
        groups: Height and name of each.
        place: Plotly's properties of the text's place.
    """
    every = max(1, -(-len(groups) // MAX_GROUP_NAMES))
    return [
        {
            "text": f"<b>{name}</b>",
            "x": 0,
            "xref": "paper",
            "xanchor": "left",
            "xshift": -126,
            "y": height,
            "yref": "y",
            "showarrow": False,
            **place,
        }
        for height, name in groups[::every]
    ]


def _add_bars(
    figure: go.Figure,
    timeline: StepTimeline,
    rows: Rows,
    texts: NDArray[np.object_],
    own: NDArray[np.intp],
    is_split: NDArray[np.bool_],
) -> None:
    """Add the bars of one kind: whole spans and transfers solid, waits hatched."""
    spans = timeline.spans
    kind = KINDS[int(spans.kind[own[0]])]
    start = spans.start_ns[own] - timeline.begin_ns
    wait = np.where(is_split[own], timeline.wait_ns[own], 0)
    solid = _bars(kind, rows, own, start + wait, spans.duration_ns[own] - wait, spans.depth)
    solid.update(name=_NAMES.get(kind, kind.value), hovertext=texts[own], marker=_solid(kind))
    figure.add_trace(go.Bar(solid))
    waiting = own[wait > 0]
    if len(waiting):
        hatched = _bars(
            kind, rows, waiting, start[wait > 0], timeline.wait_ns[waiting], spans.depth
        )
        hatched.update(
            name=f"{kind.value}, waiting",
            showlegend=False,
            hovertext=texts[waiting],
            marker=_hatched(KIND_COLORS[kind]),
        )
        figure.add_trace(go.Bar(hatched))


def _bars(
    kind: SpanKind,
    rows: Rows,
    own: NDArray[np.intp],
    start_ns: NDArray[np.int64],
    duration_ns: NDArray[np.int64],
    depth: NDArray[np.int16],
) -> dict[str, object]:
    # A nested span is drawn inside the span around it, a blocked thread at full height.
    nesting = 0 if kind is SpanKind.WAIT else np.minimum(depth[own], _MAX_NESTING)
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
            "bgcolor": rgba(color, _WAIT_ALPHA),
        },
    }


def _style(figure: go.Figure, timeline: StepTimeline, rows: Rows, group_by: GroupBy) -> None:
    height = min(max(_PIXELS_PER_RANK * len(rows.ranks) + 110, _MIN_HEIGHT), _MAX_HEIGHT)
    zoom_key = f"{timeline.run} {timeline.epoch} {timeline.step}"
    apply_style(figure, height=height, zoom_key=zoom_key)
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
    ticks = range(0, len(rows.ranks), max(1, -(-len(rows.ranks) // _MAX_TICKS)))
    figure.update_yaxes(
        range=[len(rows.ranks) - 0.5, -0.5],
        tickmode="array",
        tickvals=list(ticks),
        ticktext=[f"rank {rows.ranks[row]}" for row in ticks],
        showgrid=False,
        automargin=False,
        uirevision=f"{zoom_key} {group_by}",
    )
    line = {"color": "rgba(134,142,150,0.45)", "width": 1}
    figure.update_layout(
        barmode="overlay",
        bargap=0,
        hovermode="closest",
        dragmode="pan",
        margin={"l": 132, "r": 16, "t": 40, "b": 48},
        shapes=group_lines((at - 0.5 for at, _ in rows.groups if at > 0), line),
        annotations=group_names(rows.groups, yanchor="middle", align="left"),
    )


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
        wait_ns, last = int(timeline.wait_ns[row]), int(timeline.last_rank[row])
        cause = f" for rank {last}" if wait_ns > 0 and last != spans.rank[row] else ""
        lines.append(f"wait {format_duration(wait_ns)}{cause}")
        lines.append(f"transfer {format_duration(int(timeline.transfer_ns[row]))}")
    if spans.src_rank[row] != NONE and spans.dst_rank[row] != NONE:
        lines.append(f"rank {int(spans.src_rank[row])} → rank {int(spans.dst_rank[row])}")
    if spans.num_bytes[row] != NONE:
        lines.append(format_bytes(int(spans.num_bytes[row])))
    return lines


def _flags(flags: int) -> list[str]:
    lines = []
    if flags & SpanFlag.OPEN:
        lines.append("still open when last seen")
    if flags & SpanFlag.ERROR:
        lines.append("ended by an exception")
    return lines
