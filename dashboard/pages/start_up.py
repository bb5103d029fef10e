"""The start-up page: what the ranks did before their first step, the slowest rank first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import dash_mantine_components as dmc  # type: ignore[import-untyped]
from dash import html

from rankscope.analysis.report.text import format_count, format_duration

from ..address import START_UP
from ..figures.start_up import start_up_figure
from ..text import escape
from .components import card, graph, rank_link, table
from .page import Content, Page
from .placeholders import no_data

if TYPE_CHECKING:
    from dash.development.base_component import Component

    from rankscope.dashboard.records.page_results import Startup

    from ..address import View
    from ..provider import ReportProvider


def show_start_up(provider: ReportProvider, view: View, *, base_path: str) -> Content:
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
    return Content(
        children=[_head(startup, run_id, base_path), *_cards(startup, run_id, base_path)]
    )


PAGE = Page(
    name=START_UP,
    title="Start-up",
    show=show_start_up,
    revision=lambda provider, view: provider.revision(str(view.run)),
)


def _head(found: Startup, run_id: str, base_path: str) -> Component:
    slowest = found.slowest[0]
    longest = format_duration(slowest.total_ns)
    host = f" on {escape(slowest.host)}" if slowest.host else ""
    sentence: list[Any] = ["Rank ", rank_link(run_id, slowest.rank, base_path), host]
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


def _cards(found: Startup, run_id: str, base_path: str) -> list[Component]:
    head = {
        "part": "",
        "kind": "",
        "ranks": "number",
        "median": "number",
        "longest": "number",
        "slowest rank": "number",
    }
    rows = [
        [
            dmc.TableTd(escape(part.name), className="any-name"),
            part.kind,
            f"{part.num_ranks:,}",
            format_duration(part.median_ns),
            format_duration(part.longest_ns),
            rank_link(run_id, part.slowest_rank, base_path),
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
                "Each part as the sum of its spans on one rank, the longest first.",
                className="about",
            ),
            table("parts of the start-up", head, rows, class_name="plain-rows start-up-parts"),
        ),
    ]
