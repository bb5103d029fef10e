"""The health page: is the server itself well?"""

from __future__ import annotations

from typing import TYPE_CHECKING

import dash_mantine_components as dmc  # type: ignore[import-untyped]
from dash import html

from ..address import HEALTH
from ..text import escape
from .components import announced, card, table
from .page import Content, Page
from .placeholders import no_data

if TYPE_CHECKING:
    from dash.development.base_component import Component

    from rankscope.dashboard.records.page_results import HealthSection

    from ..address import View
    from ..provider import ReportProvider


def show_health(provider: ReportProvider, _view: View) -> Content:
    """Return the page; it is the same for every view."""
    health = provider.health()
    if health is None:
        title = html.H1("Health", className="page-title")
        return Content(children=[title, no_data("this server does not report its state")])
    sentence = "The server is well."
    if health.problems:
        num = len(health.problems)
        sentence = "One thing needs attention." if num == 1 else f"{num} things need attention."
    verdict = html.Div(
        [
            html.P("health", className="verdict-cause"),
            html.H1(sentence, className="verdict-sentence"),
            html.Ul([html.Li(escape(text)) for text in health.problems], className="notices"),
        ],
        className=f"verdict {'unsure' if health.problems else 'calm'}",
    )
    wide = [_section(section) for section in health.sections if section.texts]
    sections = [_section(section) for section in health.sections if not section.texts]
    return Content(
        children=[
            html.Div(verdict, id="health-verdict", **announced()),
            html.Div(wide, id="health-hosts", className="wide-cards"),
            html.Div(sections, id="health-sections", className="columns"),
        ]
    )


PAGE = Page(name=HEALTH, title="Health", show=show_health, is_of_run=False)


def _section(section: HealthSection) -> Component:
    first, *others = section.columns
    head = {first: "", **{name: "" if name in section.texts else "number" for name in others}}
    rows = [
        [
            dmc.TableTd(cell, className=f"{style} attention")
            if row[0] in section.bad and column not in section.texts
            else cell
            for cell, (column, style) in zip(map(escape, row), head.items(), strict=True)
        ]
        for row in section.rows
    ]
    return card(
        html.H2(section.title),
        html.P(section.about, className="about"),
        table(section.title, head, rows, class_name="health-values"),
        label=section.title,
    )
