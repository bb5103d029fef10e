"""The frame of a page that shows parts of a run's report: its states, and its refresh."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from dash import Dash, Input, Output, State, dcc, html, no_update

from rankscope.analysis.report.report import RunReport
from rankscope.analysis.trace.errors import UnknownRunError
from rankscope.dashboard.records.progress import AnalysisInProgress

from ..address import View, write_address
from ..callback_checks import PagePath, Post, Ticks, takes
from .components import (
    FALLBACK_TIMER,
    LIVE_MS,
    RUNNING,
    SOON_MS,
    labelled,
    next_tick,
    poll_interval_ms,
    poll_timer,
    with_code,
)
from .placeholders import missing_run, no_runs, no_steps, no_verdict, no_verdict_yet
from .shell import Page, read_view

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from dash.development.base_component import Component

    from ..provider import ReportProvider


class Show(Protocol):
    """Returns what a page shows of a report."""

    def __call__(
        self, provider: ReportProvider, report: RunReport, view: View, /, *, base_path: str
    ) -> list[Component]:
        """Return the content; ``view.run`` is the report's run."""
        ...


class Shown(Post):
    """The shown state, which the page keeps in the browser."""

    run: str | None
    search: str | None
    revision: int | None


class RefreshPost(Post):
    """The values that `refresh` takes."""

    num_ticks: Ticks
    fallback_ticks: Ticks
    search: str | None
    path: PagePath
    shown: Shown | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Content:
    children: list[Component]
    run: str | None = None
    revision: int | None = None
    """None: not final."""

    interval_ms: int = LIVE_MS


def report_page(
    name: str,
    title: str,
    show: Show,
    *,
    is_live: bool = False,
    register: Callable[..., None] | None = None,
) -> Page:
    """Return a page that shows parts of a run's report, and again after each new one.

    Args:
        name: First part of its address, and of the ids of its components.
        title: Its name in the menu.
        show: Returns its content.
        is_live: Whether the content of a running job changes without a new report.
        register: Registers callbacks of its own, with `Page.register`'s arguments.
    """

    def build(provider: ReportProvider, view: View, *, base_path: str) -> Component:
        found = _request(provider, view, show, base_path)
        # Without the search: the first refresh learns it from the browser.
        shown = Shown(run=found.run, search=None, revision=found.revision)
        return html.Div(
            [
                dcc.Store(id=f"{name}-shown", data=shown.model_dump()),
                poll_timer(f"{name}-timer", interval_ms=found.interval_ms),
                html.Div(found.children, id=f"{name}-content"),
            ]
        )

    def register_all(app: Dash, provider: ReportProvider, *, base_path: str) -> None:
        @app.callback(
            Output(f"{name}-content", "children"),
            Output(f"{name}-shown", "data"),
            Output(f"{name}-timer", "interval"),
            Output(f"{name}-timer", "max_intervals"),
            Input(f"{name}-timer", "n_intervals"),
            Input(FALLBACK_TIMER, "n_intervals"),
            Input("url", "search"),
            State("url", "pathname"),
            State(f"{name}-shown", "data"),
            prevent_initial_call=True,
        )
        @takes(RefreshPost)
        def refresh(post: RefreshPost) -> tuple[Any, ...]:
            view = read_view(app, post.path, post.search)
            unchanged = *(no_update,) * 3, next_tick(post.num_ticks)
            if view.page != name:  # another page is on its way
                return unchanged
            before = post.shown
            is_same = before is not None and before.search in (None, post.search)
            if is_same and before is not None and _is_current(provider, before, is_live=is_live):
                return unchanged
            found = _request(provider, view, show, base_path)
            shown = Shown(run=found.run, search=post.search, revision=found.revision)
            return (
                found.children,
                shown.model_dump(),
                found.interval_ms,
                next_tick(post.num_ticks),
            )

        if register is not None:
            register(app, provider, base_path=base_path)

    return Page(name=name, title=title, build=build, register=register_all)


def choices(
    label: str, options: Iterable[tuple[str, View]], *, view: View, base_path: str
) -> Component:
    """Return a row of links of which the one to the shown view is marked.

    Args:
        label: Its name.
        options: Text and view of each.
        view: The shown view.
        base_path: Path of the application.
    """
    links = [
        dcc.Link(
            text,
            href=write_address(each, base_path=base_path),
            className="choice chosen" if each == view else "choice",
        )
        for text, each in options
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


def _is_current(provider: ReportProvider, shown: Shown, *, is_live: bool) -> bool:
    if shown.run is None or shown.revision is None:
        return False
    if is_live and any(run.run_id == shown.run and run.state == RUNNING for run in provider.runs()):
        return False
    try:
        return provider.revision(shown.run) == shown.revision
    except UnknownRunError:
        return False


def _request(provider: ReportProvider, view: View, show: Show, base_path: str) -> _Content:
    """Return the content of a view as the provider has it now."""
    runs = provider.runs()
    if view.run is None:
        if not runs:
            return _Content(children=[no_runs()])
        view = replace(view, run=runs[0].run_id)
    run_id = view.run or ""
    interval_ms = poll_interval_ms(runs, run_id)
    try:
        revision = provider.revision(run_id)
        report = provider.report(run_id)
    except UnknownRunError as error:
        return _Content(children=[missing_run(error)], run=run_id, interval_ms=interval_ms)
    if report is None:
        state = next((run.state for run in runs if run.run_id == run_id), "")
        missing = [no_steps(run_id, state=state)]
        return _Content(children=missing, run=run_id, revision=revision, interval_ms=interval_ms)
    if not isinstance(report, RunReport):
        is_busy = isinstance(report, AnalysisInProgress)
        verdict = no_verdict_yet(report) if is_busy else no_verdict(report)  # type: ignore[arg-type]
        return _Content(children=verdict, run=run_id, interval_ms=SOON_MS)
    return _Content(
        children=show(provider, report, view, base_path=base_path),
        run=run_id,
        revision=revision,
        interval_ms=interval_ms,
    )
