"""The start-up page: what the ranks did before their first step, the slowest rank first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import dash_mantine_components as dmc  # type: ignore[import-untyped]
import plotly.graph_objects as go
from dash import html

from rankscope.analysis.report.text import format_count, format_duration
from rankscope.tracer.span import SpanKind

from ..address import START_UP
from ..text import escape, escape_for_plotly
from ..theme import KIND_COLORS, apply_style, axis_unit
from .components import card, graph, rank_link, table
from .page import Content, Page
from .placeholders import no_data

if TYPE_CHECKING:
    from dash.development.base_component import Component

    from rankscope.dashboard.records.page_results import Startup, StartupSpan

    from ..address import View
    from ..provider import ReportProvider


_MAX_NAMED = 8
"""Parts with a colour of their own; the others are one."""

_OTHERS = "other parts"

_ROW_PX, _FRAME_PX, _LEGEND_PX = 20, 116, 20
_NUM_PER_LINE = 2
"""Names of parts in a line of the legend, on a phone."""


def show_start_up(provider: ReportProvider, view: View) -> Content:
    """Return the page of a run."""
    run_id = str(view.run)
    startup = provider.startup(run_id)
    if startup is None:
        missing = no_data(
            f"run {escape(run_id)!r} has no span outside its steps",
            "The tracer records imports, the model's build, the first compilation and the load of"
            " a checkpoint before the first step, if they take long. Simulated and imported runs"
            " have none.",
        )
        return Content(problem=missing)
    return Content(children=[_head(startup, run_id), *_cards(startup, run_id)])


PAGE = Page(
    name=START_UP,
    title="Start-up",
    show=show_start_up,
    revision=lambda provider, view: provider.revision(str(view.run)),
)


def _head(found: Startup, run_id: str) -> Component:
    slowest = found.slowest[0]
    longest = format_duration(slowest.total_ns)
    host = f" on {escape(slowest.host)}" if slowest.host else ""
    sentence: list[Any] = ["Rank ", rank_link(run_id, slowest.rank), host]
    if found.num_ranks == 1:
        sentence.append(f" took {longest} to start.")
    else:
        sentence.append(
            f" took longest to start: {longest}. The median of"
            f" {format_count(found.num_ranks, 'rank')} is {format_duration(found.median_ns)}."
        )
    return html.Div(
        [
            html.P(f"start-up of epoch {found.epoch}", className="verdict-cause"),
            html.H1(sentence, className="verdict-sentence"),
        ],
        className="verdict busy",
    )


def _cards(found: Startup, run_id: str) -> list[Component]:
    head = {
        "part": "",
        "kind": "",
        "ranks": "number",
        "calls": "number",
        "median": "number",
        "longest": "number",
        "slowest rank": "number",
    }
    rows = [
        [
            dmc.TableTd(escape(part.name), className="any-name"),
            part.kind,
            f"{part.num_ranks:,}",
            f"{part.num_calls:,}",
            format_duration(part.median_ns),
            format_duration(part.longest_ns),
            rank_link(run_id, part.slowest_rank),
        ]
        for part in found.parts
    ]
    num, of = len(found.slowest), format_count(found.num_ranks, "rank")
    shown = f"The {num} slowest of {of}." if num < found.num_ranks else "The slowest rank first."
    by_rank = [
        card(
            html.H2("Start-up by rank"),
            html.P(f"The longest spans before the first step. {shown}", className="about"),
            graph("start-up", start_up_figure(found), min_px=560),
            label="start-up by rank",
        )
    ]
    is_drawn = any(span.duration_ns for one in found.slowest for span in one.spans)
    return [
        *(by_rank if is_drawn else []),
        card(
            html.H2("Parts"),
            html.P(
                "Each part as the sum of its spans on one rank, the longest first. Calls are the"
                " most on one rank: each barrier waits for all ranks.",
                className="about",
            ),
            table("parts of the start-up", head, rows, class_name="plain-rows start-up-parts"),
        ),
    ]


def start_up_figure(found: Startup) -> go.Figure:
    """Draw the spans of each of the slowest ranks where they were, the shorter ones in front."""
    unit, unit_ns = axis_unit(found.slowest[0].total_ns)
    labels = [f"rank {one.rank}" for one in found.slowest]
    figure = go.Figure()
    colors = _colors(found)
    spans_of: dict[str, list[tuple[str, StartupSpan]]] = {}
    for label, one in zip(labels, found.slowest, strict=True):
        for span in one.spans:
            name = span.name if span.name in colors else _OTHERS
            spans_of.setdefault(name, []).append((label, span))
    for name, color in [*colors.items(), (_OTHERS, KIND_COLORS[SpanKind.OTHER])]:
        spans = spans_of.get(name)
        if not spans:
            continue
        figure.add_trace(
            go.Bar(
                orientation="h",
                y=[label for label, _ in spans],
                base=[span.begin_ns / unit_ns for _, span in spans],
                x=[span.duration_ns / unit_ns for _, span in spans],
                name=escape_for_plotly(name),
                marker={"color": color},
                customdata=[
                    f"{escape_for_plotly(span.name)}, {format_duration(span.duration_ns)}"
                    for _, span in spans
                ],
                hovertemplate="%{y}: %{customdata}<extra></extra>",
            )
        )
    num_lines = -(-len(spans_of) // _NUM_PER_LINE)
    height = _FRAME_PX + _ROW_PX * len(labels) + _LEGEND_PX * max(num_lines - 1, 0)
    apply_style(figure, height=height, zoom_key="start-up")
    figure.update_layout(barmode="overlay", bargap=0.3, margin={"t": 40}, showlegend=True)
    figure.update_yaxes(autorange="reversed", type="category", categoryarray=labels, showgrid=False)
    figure.update_xaxes(title_text=f"time since the first span ({unit})", rangemode="tozero")
    return figure


def _colors(found: Startup) -> dict[str, str]:
    """Return the colour of each named part: of its kind, else one that no other part has."""
    named = found.parts[:_MAX_NAMED]
    colors = {kind: color for kind, color in KIND_COLORS.items() if kind is not SpanKind.OTHER}
    own: dict[SpanKind, str] = {}
    for part in named:
        own.setdefault(SpanKind(part.kind), part.name)
    first = {name: colors[kind] for kind, name in own.items() if kind in colors}
    free = iter([color for color in colors.values() if color not in first.values()])
    return {part.name: first.get(part.name) or next(free) for part in named}
