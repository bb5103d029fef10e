"""The frame around every page: name, run chooser, menu and theme switch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import dash_mantine_components as dmc  # type: ignore[import-untyped]
from dash import Dash, Input, Output, State, dcc, html, no_update
from dash.exceptions import PreventUpdate

from rankscope.analysis.report.text import format_count

from ..address import OVERVIEW, View, read_address, write_address
from ..callback_checks import PagePath, Post, Ticks, takes
from ..text import escape
from .components import (
    FALLBACK_TIMER,
    LIVE_MS,
    QUIET_MS,
    RUNNING,
    fallback_timer,
    labelled,
    next_tick,
    poll_timer,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dash.development.base_component import Component

    from rankscope.analysis.trace.tables import RunSummary

    from ..provider import ReportProvider


class Build(Protocol):
    """Returns the content of a page."""

    def __call__(self, provider: ReportProvider, view: View, *, base_path: str) -> Component:
        """Build the page of a view."""
        ...


class Register(Protocol):
    """Registers the callbacks of a page."""

    def __call__(self, app: Dash, provider: ReportProvider, *, base_path: str) -> None:
        """Register the callbacks with the application."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """One page of the dashboard."""

    name: str
    """First part of its address."""

    title: str
    """Its name in the menu."""

    build: Build
    register: Register


class ShownRun(Post):
    """A run in the chooser."""

    run: str
    state: str


class Shown(Post):
    """The shown state, which the page keeps in the browser."""

    page: str
    run: str | None
    runs: list[ShownRun]


class FramePost(Post):
    """The values that `fill` takes."""

    path: PagePath
    search: str | None
    num_ticks: Ticks
    fallback_ticks: Ticks
    shown: Shown | None


class ChoicePost(Post):
    """The values that `choose` takes."""

    run: str | None
    path: PagePath
    shown: Shown | None


def shell() -> Component:
    """Return the frame; `register` fills it."""
    frame: Component = dmc.MantineProvider(
        [
            dcc.Location(id="url", refresh="callback-nav"),
            poll_timer("frame-timer", interval_ms=LIVE_MS),
            fallback_timer(),
            dcc.Store(id="frame-shown"),
            html.A("Skip to the page", href="#page", className="skip"),
            html.Header(
                [
                    html.Div("rankscope", className="brand"),
                    html.Div(id="run-chooser", className="run-chooser"),
                    html.Nav(id="menu", className="menu", **labelled("pages")),
                    html.Div(className="spring"),
                    dmc.ColorSchemeToggle(
                        id="theme-toggle",
                        lightIcon="☀",
                        darkIcon="☾",
                        variant="default",
                        size="lg",
                        **labelled("switch between light and dark"),
                    ),
                ],
                className="header",
            ),
            html.Main(id="page", tabIndex=-1),
        ],
        defaultColorScheme="auto",
        theme={"primaryColor": "blue", "fontFamily": "var(--font)", "autoContrast": True},
    )
    return frame


def register(app: Dash, provider: ReportProvider, pages: Sequence[Page], *, base_path: str) -> None:
    """Keep chooser and menu in step with the address and the store."""

    @app.callback(
        Output("run-chooser", "children"),
        Output("menu", "children"),
        Output("frame-shown", "data"),
        Output("frame-timer", "interval"),
        Output("frame-timer", "max_intervals"),
        Input("url", "pathname"),
        Input("url", "search"),
        Input("frame-timer", "n_intervals"),
        Input(FALLBACK_TIMER, "n_intervals"),
        State("frame-shown", "data"),
    )
    @takes(FramePost)
    def fill(post: FramePost) -> tuple[Any, ...]:
        view = read_view(app, post.path, post.search)
        runs = provider.runs()
        run_id = view.run or (runs[0].run_id if runs else None)
        shown = Shown(
            page=view.page,
            run=run_id,
            runs=[ShownRun(run=run.run_id, state=run.state) for run in runs],
        )
        if shown == post.shown:
            return *(no_update,) * 4, next_tick(post.num_ticks)
        is_live = not runs or any(run.state == RUNNING for run in runs)
        return (
            _chooser(runs, run_id),
            _menu(pages, view.page, run_id, base_path),
            shown.model_dump(),
            LIVE_MS if is_live else QUIET_MS,
            next_tick(post.num_ticks),
        )

    @app.callback(
        Output("url", "href"),
        Input("choose-run", "value"),
        State("url", "pathname"),
        State("frame-shown", "data"),
        prevent_initial_call=True,
    )
    @takes(ChoicePost)
    def choose(post: ChoicePost) -> str:
        if post.run is None or post.shown is None or post.run == post.shown.run:
            raise PreventUpdate
        here = read_view(app, post.path, "").page
        page = here if here in {page.name for page in pages} else OVERVIEW
        return write_address(View(page=page, run=post.run), base_path=base_path)


def read_view(app: Dash, path: str | None, search: str | None) -> View:
    """Return the view of the browser's address."""
    below_base = "" if path is None else app.strip_relative_path(path)
    return read_address(below_base or "", search or "")


def _chooser(runs: Sequence[RunSummary], run_id: str | None) -> list[Component]:
    known = {run.run_id for run in runs}
    missing = [] if run_id is None or run_id in known else [{"value": run_id, "label": "not here"}]
    if not runs and not missing:
        return [html.Span("no runs yet", className="quiet")]
    chooser = dmc.Select(
        id="choose-run",
        data=[*({"value": run.run_id, "label": _label(run)} for run in runs), *missing],
        value=run_id,
        searchable=True,
        allowDeselect=False,
        size="sm",
        w="100%",
        maxDropdownHeight=420,
        limit=200,
        nothingFoundMessage="no such run",
        **labelled("run"),
    )
    # The title shows a name that is longer than the chooser.
    return [html.Div(chooser, title=escape(run_id or ""), className="run-name")]


def _label(run: RunSummary) -> str:
    parts = [escape(run.run_id), run.state, format_count(run.world_size, "rank")]
    return " · ".join(part for part in parts if part)


def _menu(
    pages: Sequence[Page], current: str, run_id: str | None, base_path: str
) -> list[Component]:
    return [
        dcc.Link(
            page.title,
            href=write_address(View(page=page.name, run=run_id), base_path=base_path),
            className="menu-entry here" if page.name == current else "menu-entry",
        )
        for page in pages
    ]
