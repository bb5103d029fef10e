"""The frame of a page that shows parts of a run's report: its states, and its refresh."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dash import dcc, html

from rankscope.dashboard.records.progress import AnalysisFailed, AnalysisInProgress

from ..address import View, write_address
from .components import RUNNING, labelled, with_code
from .page import Content, Page
from .placeholders import no_steps, no_verdict, no_verdict_yet

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from dash.development.base_component import Component

    from rankscope.analysis.report.report import RunReport

    from ..provider import ReportProvider
    from .page import Register

    ShowReport = Callable[[ReportProvider, RunReport, View], list[Component] | Content]
    """Returns what a page shows of a report, whose run is ``view.run``."""


def report_page(
    name: str,
    title: str,
    show_report: ShowReport,
    *,
    is_live: bool = False,
    register: Register | None = None,
) -> Page:
    """Return a page that shows parts of a run's report.

    Args:
        name: First part of its address.
        title: Its name in the menu.
        is_live: Whether the content of a running job changes without a new report.
        register: Registers callbacks of its own.
    """

    def show(provider: ReportProvider, view: View) -> Content:
        report = provider.report(str(view.run))
        if report is None:
            return Content(problem=no_steps(str(view.run), state=state_of(provider, str(view.run))))
        if isinstance(report, AnalysisInProgress):
            return Content(children=no_verdict_yet(report), is_unfinished=True)
        if isinstance(report, AnalysisFailed):
            return Content(children=no_verdict(report), is_unfinished=True)
        shown = show_report(provider, report, view)
        return shown if isinstance(shown, Content) else Content(children=shown)

    def revision(provider: ReportProvider, view: View) -> int | None:
        if is_live and state_of(provider, str(view.run)) == RUNNING:
            return None
        return provider.revision(str(view.run))

    return Page(name=name, title=title, show=show, revision=revision, register=register)


def state_of(provider: ReportProvider, run_id: str) -> str:
    """Return the state of a run; "" if it is unknown."""
    return next((run.state for run in provider.runs() if run.run_id == run_id), "")


def choices(label: str, options: Iterable[tuple[str, View]], *, view: View) -> Component:
    """Return a row of links of which the one to the shown view is marked.

    Args:
        options: Text and view of each.
    """
    links = [
        dcc.Link(
            text,
            href=write_address(option),
            className="choice chosen" if option == view else "choice",
        )
        for text, option in options
    ]
    row = html.Div(links, className="choices plain", role="group", **labelled(label))
    return html.Div([html.Span(label, className="quiet"), row], className="chooser")


def page_head(title: str, *parts: Component | str, about: str = "") -> Component:
    """Return the heading of a page, with what is beside it and a sentence below."""
    return html.Div(
        [
            html.Div(
                [html.H1(title), *([html.P(with_code(about), className="about")] if about else [])]
            ),
            html.Div(list(parts), className="controls"),
        ],
        className="timeline-head",
    )
