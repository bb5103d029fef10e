"""The health page: is the server itself well?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import dash_mantine_components as dmc  # type: ignore[import-untyped]
from dash import Dash, Input, Output, html

from ..address import HEALTH, View
from ..callback_checks import Post, Ticks, takes
from ..text import escape
from .components import FALLBACK_TIMER, LIVE_MS, announced, card, next_tick, poll_timer, table
from .placeholders import no_data
from .shell import Page

if TYPE_CHECKING:
    from dash.development.base_component import Component

    from rankscope.dashboard.records.page_results import Health, HealthSection

    from ..provider import ReportProvider


class RefreshPost(Post):
    """The values that `refresh` takes."""

    num_ticks: Ticks
    fallback_ticks: Ticks


def health_page(provider: ReportProvider, view: View, *, base_path: str) -> Component:
    """Return the page; it is the same for every view."""
    verdict, sections = _content(provider.health())
    return html.Div(
        [
            poll_timer("health-timer", interval_ms=LIVE_MS),
            html.Div(verdict, id="health-verdict", **announced()),
            html.Div(sections, id="health-sections", className="columns"),
        ]
    )


def register(app: Dash, provider: ReportProvider, *, base_path: str) -> None:
    """Refresh the page."""

    @app.callback(
        Output("health-verdict", "children"),
        Output("health-sections", "children"),
        Output("health-timer", "max_intervals"),
        Input("health-timer", "n_intervals"),
        Input(FALLBACK_TIMER, "n_intervals"),
        prevent_initial_call=True,
    )
    @takes(RefreshPost)
    def refresh(post: RefreshPost) -> tuple[Any, ...]:
        return *_content(provider.health()), next_tick(post.num_ticks)


PAGE = Page(name=HEALTH, title="Health", build=health_page, register=register)


def _content(health: Health | None) -> tuple[list[Component], list[Component]]:
    if health is None:
        title = html.H1("Health", className="page-title")
        return [title, no_data("this server does not report its state")], []
    sentence = "The server is well."
    if health.problems:
        num = len(health.problems)
        sentence = "One thing needs attention." if num == 1 else f"{num} things need attention."
    verdict: Component = html.Div(
        [
            html.P("health", className="verdict-cause"),
            html.H1(sentence, className="verdict-sentence"),
            html.Ul([html.Li(escape(each)) for each in health.problems], className="notices"),
        ],
        className=f"verdict {'unsure' if health.problems else 'calm'}",
    )
    return [verdict], [_section(section) for section in health.sections]


def _section(section: HealthSection) -> Component:
    first, *others = section.columns
    head = {first: "", **dict.fromkeys(others, "number")}
    rows = [
        dmc.TableTr(
            [
                dmc.TableTd(
                    escape(cell),
                    className=" ".join(["number" if place else "", "attention"])
                    if row[0] in section.bad
                    else "number"
                    if place
                    else "",
                )
                for place, cell in enumerate(row)
            ]
        )
        for row in section.rows
    ]
    return card(
        html.H2(section.title),
        html.P(section.about, className="about"),
        table(section.title, head, rows),
        label=section.title,
    )
