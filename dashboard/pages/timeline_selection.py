"""Selection on the timeline: facts of a span, a measured box, and spans that match a text."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from dash import Dash, Input, Output, Patch, State, ctx, dcc, html
from dash.exceptions import PreventUpdate
from pydantic import Field

from rankscope.analysis.drawing.raster import Viewport
from rankscope.analysis.drawing.selection import compare_box, describe_span, find_spans
from rankscope.analysis.report.text import (
    format_bytes,
    format_count,
    format_duration,
    format_percent,
    format_ranks,
)
from rankscope.tracer.span import KINDS, NS_PER_MS, SpanKind

from ..address import MAX_SEARCH, write_address
from ..callback_checks import AxisPlace, Click, Posted, checked
from ..figures.timeline_axes import mark_selected
from ..text import escape, format_place
from .components import announced, card, link_ranks, pressed, rank_link, table
from .timeline_controls import Shown

if TYPE_CHECKING:
    from collections.abc import Callable

    from dash.development.base_component import Component

    from rankscope.analysis.drawing.rows import RowLayout
    from rankscope.analysis.drawing.selection import SpanFacts
    from rankscope.analysis.drawing.timeline import StepTimeline

    from ..address import View
    from .timeline_step import Replayed, ShownStep

_ROWS_AROUND = 8
"""Ranks above and below a found span that its link shows."""

_MAX_ROWS = 16
"""Rows of a table beside the figure."""

KEYS = (
    ("Ctrl + wheel, W, S", "zoom time"),
    ("Ctrl + Shift + wheel", "zoom ranks"),
    ("wheel", "scroll the page"),
    ("A, D, ←, →", "pan"),
    ("F", "zoom to the selected span or box"),
    ("0, double-click", "whole step"),
    ("M", "drag a box to measure; M again to pan"),
    ("G", "fold or unfold all groups"),
    ("C", "critical path on or off"),
    ("I", "usual step beneath on or off"),
    ("/", "search"),
    ("?", "this list"),
)


class Range(Posted):
    """A box on the figure: ends on both axes."""

    x: list[AxisPlace] = Field(min_length=2, max_length=2)
    y: list[AxisPlace] = Field(min_length=2, max_length=2)


class Box(Posted):
    """A selection on the figure; without a range if it was cleared."""

    range: Range | None = None


def selection_controls() -> list[Component]:
    """Return the search, the measure, the list of keys, and the place of what is selected."""
    keys = [html.Div([html.Kbd(key), html.Span(does)]) for key, does in KEYS]
    return [
        html.Button(
            "measure",
            id="timeline-measure",
            className="button small",
            title="Drag a box to measure and compare what is in it (M)",
            **pressed(is_on=False),
        ),
        html.Div(
            dcc.Input(
                id="timeline-search",
                type="search",
                debounce=True,
                placeholder="rank, host, kind or name",
                maxLength=MAX_SEARCH,
            ),
            title="Find spans (/)",
            className="search",
        ),
        html.Details(
            [html.Summary("keys", className="button small"), html.Div(keys, className="keys")],
            id="timeline-keys",
            className="drop-down",
        ),
        html.Div(id="timeline-selection", **announced()),
    ]


def register_selection(
    app: Dash,
    read_shown: Callable[[str | None, Shown], ShownStep | None],
    find_replay: Callable[[StepTimeline], Replayed],
    *,
    base_path: str,
) -> None:
    """Show what is clicked, boxed or searched.

    Args:
        app: The application.
        read_shown: Returns what a page of a query and a state shows.
        find_replay: Returns the replay of a step.
        base_path: Path of the application.
    """

    @app.callback(
        Output("timeline-selection", "children"),
        Output("timeline-graph", "figure", allow_duplicate=True),
        Input("timeline-graph", "clickData"),
        Input("timeline-graph", "selectedData"),
        Input("timeline-search", "value"),
        State("url", "search"),
        State("timeline-shown", "data"),
        prevent_initial_call=True,
    )
    @checked
    def select(
        click: Click | None,
        box: Box | None,
        text: Annotated[str | None, Field(max_length=MAX_SEARCH)],
        search: str | None,
        state: Shown,
    ) -> tuple[Any, Any]:
        shown = read_shown(search, state)
        timeline = None if shown is None else shown.spans
        marks = Patch()
        if shown is None or timeline is None:
            about = "Zoom in until single spans show: then they can be selected and searched."
            return [card(html.P(about, className="quiet"))], marks
        view, rows = shown.view, shown.rows
        source = ctx.triggered[0]["prop_id"] if ctx.triggered else ""
        if source.endswith("clickData"):
            points = [] if click is None else click.points
            clicked = [bar.customdata for bar in points if bar.customdata is not None]
            span = clicked[0] if clicked else -1
            if not 0 <= span < len(timeline.spans):
                raise PreventUpdate
            facts = describe_span(timeline, span)
            mark_selected(marks, timeline, span, rows=rows, arrows=facts.arrows)
            slack = _slack(find_replay(timeline), facts)
            return [_span_card(view, facts, slack, base_path)], marks
        if source.endswith("selectedData"):
            if box is None or box.range is None:
                raise PreventUpdate
            return [_box_card(timeline, rows, box.range)], marks
        if not text:
            return [], marks
        return [_matches_card(view, timeline, rows, text, base_path)], marks


def _slack(replayed: Replayed, facts: SpanFacts) -> str:
    """Return the slack of a span in words, or why it is unknown."""
    if replayed.replay is None:
        return "n/a: the step is being replayed" if replayed.is_pending else "n/a"
    kind = KINDS.index(SpanKind(facts.kind))
    end_ns = facts.begin_ns + facts.duration_ns
    slack_ns = replayed.replay.slack_of(
        rank=facts.rank, kind=kind, begin_ns=facts.begin_ns, end_ns=end_ns
    )
    if slack_ns is None:
        return "n/a: not part of the replay"
    if slack_ns == math.inf:
        return "unlimited: the step's end does not wait for it"
    if slack_ns < 1:
        return "none: on the critical path"
    return f"{format_duration(slack_ns)} before it delays the step"


def _sentences(facts: SpanFacts) -> list[str]:
    sentences = []
    if facts.waited_for is not None:
        did = ""
        if facts.before is not None:
            did = f", which did {facts.before} for {format_duration(facts.before_ns)} before"
        sentences.append(f"It waited for rank {facts.waited_for}{did}.")
    if facts.members and facts.wait_ns is None:
        sentences.append("A member is missing: it has not arrived, or its record was lost.")
    if facts.delayed:
        sentences.append(
            f"{format_ranks(facts.delayed).capitalize()} waited for rank {facts.rank}."
        )
    return sentences


def _span_card(view: View, facts: SpanFacts, slack: str, base_path: str) -> Component:
    rows: list[tuple[str, Component | str]] = [
        ("rank", rank_link(view.run, facts.rank, base_path)),
        ("begin", format_place(facts.begin_ns)),
        ("duration", format_duration(facts.duration_ns)),
        ("slack", slack),
    ]
    if facts.microbatch is not None:
        rows.append(("micro-batch", str(facts.microbatch)))
    if facts.wait_ns is not None:
        rows += [
            ("wait", format_duration(facts.wait_ns)),
            ("transfer", format_duration(facts.transfer_ns)),
        ]
    if facts.num_bytes is not None:
        rows.append(("payload", format_bytes(facts.num_bytes)))
    if facts.bytes_per_s is not None:
        rows.append(("payload rate", f"{facts.bytes_per_s / 1e9:,.2f} GB/s"))
    parts: list[Component] = [
        html.H2(f"{facts.kind} · {escape(facts.name)}"),
        html.Dl(
            [html.Div([html.Dt(word), html.Dd(value)]) for word, value in rows], className="pairs"
        ),
        *(html.P(link_ranks(text, view.run, base_path)) for text in _sentences(facts)),
    ]
    if facts.members:
        late = facts.members[::-1][:_MAX_ROWS]
        cells: list[list[Component | str]] = [
            [rank_link(view.run, member.rank, base_path), f"+ {format_duration(member.after_ns)}"]
            for member in late
        ]
        head = {"member": "number", "arrived after the first": "number"}
        parts.append(table("members by arrival, the last first", head, cells))
        if len(facts.members) > len(late):
            more = f"The {len(late)} last of {format_count(len(facts.members), 'member')}."
            parts.append(html.P(more, className="quiet"))
    return _panel(parts, facts.begin_ns, facts.begin_ns + facts.duration_ns)


def _matches_card(
    view: View, timeline: StepTimeline, rows: RowLayout, text: str, base_path: str
) -> Component:
    longest, num_matches = find_spans(timeline, text, most=_MAX_ROWS)
    spans = timeline.spans
    place = {rank: at for at, rank in enumerate(rows.ranks, start=rows.first_place)}
    cells: list[list[Component | str]] = []
    for span in longest.tolist():
        rank, begin_ns = int(spans.rank[span]), int(spans.start_ns[span]) - timeline.begin_ns
        duration_ns = int(spans.duration_ns[span])
        around = Viewport(
            begin_ns=max(begin_ns - duration_ns, 0),
            end_ns=begin_ns + 2 * duration_ns + 1,
            first_row=max(place[rank] - _ROWS_AROUND, 0),
            end_row=place[rank] + _ROWS_AROUND + 1,
        )
        href = write_address(replace(view, viewport=around, ranks=(rank,)), base_path=base_path)
        name = spans.names[int(spans.name[span])]
        cells.append(
            [
                dcc.Link(escape(name), href=href),
                KINDS[int(spans.kind[span])].value,
                rank_link(view.run, rank, base_path),
                format_place(begin_ns),
                format_duration(duration_ns),
            ]
        )
    head = {"span": "", "kind": "", "rank": "number", "begin": "number", "duration": "number"}
    title = f"{format_count(num_matches, 'span')} match “{escape(text)}”"
    about = f"The {len(longest)} longest." if num_matches > len(longest) else ""
    matches = [table("spans that match", head, cells)] if cells else []
    return _foldable([html.H2(title), html.P(about, className="about"), *matches])


def _box_card(timeline: StepTimeline, rows: RowLayout, box: Range) -> Component:
    begin_ns, end_ns = (round(at * NS_PER_MS) for at in sorted(box.x))
    top, bottom = sorted(box.y)
    inside_ranks = [
        rank
        for row, block in enumerate(rows.blocks)
        if top - 0.5 <= row <= bottom + 0.5
        for rank in block
    ]
    spans = timeline.spans
    start_ns = spans.start_ns - timeline.begin_ns
    inside = (start_ns < end_ns) & (start_ns + spans.duration_ns > begin_ns)
    inside &= np.isin(spans.rank, inside_ranks)
    num = int(np.count_nonzero(inside))
    head = f"{format_duration(end_ns - begin_ns)} between the two ends"
    about = f"{format_count(num, 'span')} of {format_count(len(inside_ranks), 'rank')}."
    shared = compare_box(timeline, inside)
    parts: list[Component] = [html.H2(head), html.P(about, className="about")]
    if shared:
        columns = {"in common": "", "": "", "here": "number", "elsewhere": "number"}
        cells = [
            [
                trait.name,
                escape(trait.value),
                format_percent(trait.inside_ratio),
                format_percent(trait.outside_ratio),
            ]
            for trait in shared[:_MAX_ROWS]
        ]
        parts.append(table("what the box has more of than the rest", columns, cells))
    else:
        parts.append(html.P("These spans are like the rest.", className="quiet"))
    return _panel(parts, begin_ns, end_ns)


def _foldable(parts: list[Component]) -> Component:
    """Return a card over the figure that folds to its title, the first part."""
    title, *rest = parts
    return card(html.Details([html.Summary(title), *rest], open=True))


def _panel(parts: list[Component], begin_ns: int, end_ns: int) -> Component:
    """Return a card that the key F zooms to."""
    # The assets read the ends of what is selected from here.
    ends: Any = {"data-begin-ms": begin_ns / NS_PER_MS, "data-end-ms": end_ns / NS_PER_MS}
    return html.Div(_foldable(parts), **ends)
