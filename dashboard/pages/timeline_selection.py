"""Selection on the timeline: facts of a span, a measured box, and what matches a text."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
from dash import dcc, html

from rankscope.analysis.drawing.raster import Viewport
from rankscope.analysis.drawing.rows import RowOrder
from rankscope.analysis.drawing.selection import (
    SpanPlace,
    compare_box,
    describe_span,
    find_alike,
    find_ranks,
    find_span,
    find_spans,
)
from rankscope.analysis.report.text import (
    format_bytes,
    format_count,
    format_duration,
    format_percent,
    format_ranges,
    format_ranks,
)
from rankscope.tracer.span import KINDS, NS_PER_MS, SpanKind

from ..address import MAX_SEARCH, write_address, write_query
from ..figures.alike_spans import alike_figure
from ..text import escape, format_place
from ..theme import graph_config
from .components import card, graph_style, link_ranks, pressed, rank_link, table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dash.development.base_component import Component

    from rankscope.analysis.drawing.rows import RowLayout
    from rankscope.analysis.drawing.selection import AlikeSpan, SpanFacts
    from rankscope.analysis.drawing.timeline import StepTimeline

    from ..address import View
    from .timeline_step import Replayed, ShownStep

_ROWS_AROUND = 8
"""Ranks above and below a found span that its link shows."""

_MAX_ROWS = 16
"""Rows of a table beside the figure."""

_MAX_COPIED = 64
"""Members and delayed ranks of a span that is copied."""

KEYS = (
    ("Ctrl + wheel, W, S", "zoom time"),
    ("Ctrl + Shift + wheel", "zoom ranks"),
    ("wheel", "scroll the page"),
    ("A, D, ←, →", "pan"),
    ("F", "zoom to the selected span or box"),
    ("0, double-click", "whole step"),
    ("P", "proof of the top finding"),
    ("M", "drag a box to measure; M again to pan"),
    ("G", "fold or unfold all groups"),
    ("C", "critical path on or off"),
    ("I", "usual step beneath on or off"),
    ("/", "search: a rank or host is framed"),
    ("Esc", "close what is selected"),
    ("Ctrl + K", "go to a page, run, host or rank"),
    ("?", "this list"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Selected:
    """Selection of an address in a shown step: a span, else a box, else what a text matches."""

    span: int | None = None
    """Row of the span among those that are drawn."""

    facts: SpanFacts | None = None
    """Of the span."""

    box: Viewport | None = None
    sought: tuple[int, ...] = ()
    """Ranks that the text names."""

    text: str = ""


def find_selected(shown: ShownStep) -> Selected:
    """Return what a view selects of the step that is drawn for it."""
    view, timeline = shown.view, shown.spans
    if view.span is not None and timeline is not None:
        span = find_span(timeline, view.span)
        if span is not None:
            return Selected(span=span, facts=describe_span(timeline, span))
    if view.box is not None:
        return Selected(box=view.box)
    if view.find is None:
        return Selected()
    return Selected(sought=find_ranks(shown.step, view.find), text=view.find)


def selection_controls() -> list[Component]:
    """Return the search, the measure and the list of keys."""
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
    ]


def show_selection(
    shown: ShownStep, selected: Selected, *, slack: str = "", over_steps: Sequence[AlikeSpan] = ()
) -> list[Component]:
    """Return the card of what is selected; nothing if nothing is.

    Args:
        selected: As of `find_selected`.
        slack: Slack of a selected span, in words.
        over_steps: Spans like a selected one in other steps.
    """
    view, timeline = shown.view, shown.spans
    if selected.sought and shown.spans is None:
        return [_ranks_card(shown, selected)]
    if timeline is None:
        is_asked = view.span or view.box or view.find
        about = "Zoom in until single spans show: then they can be selected and searched."
        return [_panel([html.H2("No single spans"), html.P(about)])] if is_asked else []
    if selected.span is not None and selected.facts is not None:
        alike = find_alike(timeline, selected.span)
        row = shown.rows.row_by_rank()[selected.facts.rank]
        drawn = _drawn_alike(view, alike, over_steps)
        jump = {"data-line": shown.rows.middle(row)}
        return [_span_card(view, selected.facts, slack, drawn=drawn, jump=jump)]
    if selected.box is not None:
        return [_box_card(timeline, shown.rows, selected.box)]
    return [_matches_card(shown, timeline, selected)] if selected.text else []


def slack_words(replayed: Replayed, facts: SpanFacts) -> str:
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


def _span_card(
    view: View, facts: SpanFacts, slack: str, *, drawn: Component, jump: dict[str, Any]
) -> Component:
    rows: list[tuple[str, Component | str]] = [
        ("rank", rank_link(view.run, facts.rank)),
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
        html.H2(
            escape(facts.name)
            if facts.name == facts.kind
            else f"{facts.kind} · {escape(facts.name)}"
        ),
        html.Dl(
            [html.Div([html.Dt(word), html.Dd(value)]) for word, value in rows], className="pairs"
        ),
        *(html.P(link_ranks(text, view.run)) for text in _sentences(facts)),
        drawn,
    ]
    if facts.members:
        late = facts.members[::-1][:_MAX_ROWS]
        cells: list[list[Component | str]] = [
            [rank_link(view.run, member.rank), f"+ {format_duration(member.after_ns)}"]
            for member in late
        ]
        head = {"member": "number", "arrived after the first": "number"}
        parts.append(table("members by arrival, the last first", head, cells))
        if len(facts.members) > len(late):
            more = f"The {len(late)} last of {format_count(len(facts.members), 'member')}."
            parts.append(html.P(more, className="quiet"))
    ends_ns = (facts.begin_ns, facts.begin_ns + facts.duration_ns)
    copied: Component = dcc.Clipboard(
        "copy",
        id="timeline-copy",
        copied_children="copied",
        content=span_json(view, facts),
        title="Copy the span as JSON",
        className="button small",
    )
    return _panel(parts, ends_ns, copied, jump=jump)


def span_json(view: View, facts: SpanFacts) -> str:
    """Return a span as JSON: where it is, and its facts, with `_MAX_COPIED` ranks of a list."""
    document = {"run": view.run, "epoch": view.epoch, "step": view.step, **asdict(facts)}
    del document["arrows"]  # they are drawn from the rest
    lists = {name: value[:_MAX_COPIED] for name, value in document.items() if type(value) is tuple}
    return json.dumps({**document, **lists}, indent=1)


def _drawn_alike(
    view: View, alike: Sequence[AlikeSpan], over_steps: Sequence[AlikeSpan]
) -> Component:
    """Return spans like a selected one, by rank and by step; a click on one selects it."""
    selected = view.span
    assert selected is not None  # noqa: S101  # of a view with a selected span
    others = [one for one in over_steps if one.step != view.step]

    def query(one: AlikeSpan) -> str:
        place = SpanPlace(rank=one.rank, kind=selected.kind, at_ns=one.begin_ns)
        is_here = one.step == view.step
        shown = replace(
            view, step=one.step, span=place, viewport=view.viewport if is_here else None, show=None
        )
        return write_query(shown)

    figure = alike_figure(alike, others, rank=selected.rank, step=view.step or 0, query=query)
    if figure is None:
        return html.P("It is the only one of its kind and name.", className="quiet")
    config: Any = {**graph_config(selects=False), "displayModeBar": False}
    about = "Spans of this name and micro-batch. Click one to go there."
    return html.Div(
        [
            html.P(about, className="about"),
            dcc.Graph(id="timeline-alike", figure=figure, config=config, style=graph_style(figure)),
        ]
    )


def _ranks_card(shown: ShownStep, selected: Selected) -> Component:
    title, jump = _found(shown, selected)
    links = [rank_link(shown.view.run, rank) for rank in selected.sought[:_MAX_ROWS]]
    parts = [part for link in links for part in (link, " ")]
    return _panel([html.H2(title), html.P(["Pages of: ", *parts])], jump=jump)


def _found(shown: ShownStep, selected: Selected) -> tuple[str, dict[str, Any]]:
    """Return the ranks that a text names as a title, and how the assets go to the first row."""
    view, rows, known = shown.view, shown.rows, shown.step.coords or shown.rows.row_by_rank()
    ranks = tuple(rank for rank in selected.sought if rank in known or rank in rows.ranks)
    if not ranks:
        text = f"No rank {selected.sought[0]}: ranks are {format_ranges(sorted(known))}"
        return text, {}
    title = format_ranks(ranks).capitalize()
    first = ranks[0]
    row = rows.row_by_rank().get(first)
    window = view.viewport
    is_near = window is not None and window.end_row - window.first_row <= 2 * _ROWS_AROUND + 1
    if row is not None and (shown.spans is not None or is_near):
        place = rows.first_place + rows.ranks.index(first)
        if window is None or window.first_row <= place < window.end_row:
            return title, {"data-line": rows.middle(row)}
    elif row is None and view.order is RowOrder.RANK and is_near:
        return f"{title} has no spans here", {}
    else:
        place = first
        view = replace(view, order=RowOrder.RANK, folded=())
    length_ns = shown.step.end_ns - shown.step.begin_ns
    around = Viewport(
        begin_ns=0 if window is None else window.begin_ns,
        end_ns=length_ns if window is None else window.end_ns,
        first_row=max(place - _ROWS_AROUND, 0),
        end_row=place + _ROWS_AROUND + 1,
    )
    return title, {"data-search": write_query(replace(view, viewport=around, show=None))}


def _matches_card(shown: ShownStep, timeline: StepTimeline, selected: Selected) -> Component:
    view, rows = shown.view, shown.rows
    longest, num_matches = find_spans(timeline, selected.text, most=_MAX_ROWS)
    spans = timeline.spans
    place = {rank: at for at, rank in enumerate(rows.ranks, start=rows.first_place)}
    cells: list[list[Component | str]] = []
    for span in longest.tolist():
        rank, begin_ns = int(spans.rank[span]), int(spans.start_ns[span]) - timeline.begin_ns
        duration_ns = int(spans.duration_ns[span])
        kind = KINDS[int(spans.kind[span])]
        around = Viewport(
            begin_ns=max(begin_ns - duration_ns, 0),
            end_ns=begin_ns + 2 * duration_ns + 1,
            first_row=max(place[rank] - _ROWS_AROUND, 0),
            end_row=place[rank] + _ROWS_AROUND + 1,
        )
        chosen = SpanPlace(rank=rank, kind=kind, at_ns=begin_ns)
        href = write_address(replace(view, viewport=around, span=chosen))
        cells.append(
            [
                dcc.Link(escape(spans.names[int(spans.name[span])]), href=href, title=kind.value),
                rank_link(view.run, rank),
                format_place(begin_ns),
                format_duration(duration_ns),
            ]
        )
    head = {"span": "", "rank": "number", "begin": "number", "duration": "number"}
    title = f"{format_count(num_matches, 'span')} match “{escape(selected.text)}”"
    jump: dict[str, Any] = {}
    if selected.sought:
        title, jump = _found(shown, selected)
    about = ""
    if cells:
        about = f"The {len(longest)} longest of {format_count(num_matches, 'span')}."
    matches = [table("spans that match", head, cells)] if cells else []
    return _panel([html.H2(title), html.P(about, className="about"), *matches], jump=jump)


def _box_card(timeline: StepTimeline, rows: RowLayout, box: Viewport) -> Component:
    first, end = box.first_row - rows.first_place, box.end_row - rows.first_place
    inside_ranks = list(islice(rows.ranks, max(first, 0), max(end, 0)))
    spans = timeline.spans
    start_ns = spans.start_ns - timeline.begin_ns
    inside = (start_ns < box.end_ns) & (start_ns + spans.duration_ns > box.begin_ns)
    inside &= np.isin(spans.rank, inside_ranks)
    num = int(np.count_nonzero(inside))
    head = f"{format_duration(box.end_ns - box.begin_ns)} between the two ends"
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
    return _panel(parts, (box.begin_ns, box.end_ns))


def _panel(
    parts: list[Component],
    ends_ns: tuple[int, int] | None = None,
    *buttons: Component,
    jump: dict[str, Any] | None = None,
) -> Component:
    """Return a card over the figure that folds to its title, the first part.

    Args:
        ends_ns: Begin and end of what the key F zooms to, which the assets read from here.
        buttons: Beside the one that closes it.
        jump: Attributes that lead the assets to what was found.
    """
    title, *rest = parts
    ends: dict[str, Any] = {}
    if ends_ns is not None:
        begin_ns, end_ns = ends_ns
        ends = {"data-begin-ms": begin_ns / NS_PER_MS, "data-end-ms": end_ns / NS_PER_MS}
    close = html.Button(
        "close", id="timeline-deselect", className="button small", title="Select nothing (Esc)"
    )
    return html.Div(
        card(
            html.Details([html.Summary(title), *rest], open=True),
            html.Div([*buttons, close], className="panel-buttons"),
        ),
        **ends,
        **(jump or {}),
    )
