"""What stands around every page: the name, the run chooser, the menu, the theme."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import dash_mantine_components as dmc  # type: ignore[import-untyped]
from dash import Dash, Input, Output, State, dcc, html, no_update
from dash.exceptions import PreventUpdate

from rankscope.analysis.report.text import format_count

from ..address import Page, View, read_address, write_address
from ..text import visible
from .components import LIVE_MS, QUIET_MS, RESCUE, clock, labelled, next_tick, rescue

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dash.development.base_component import Component

    from rankscope.analysis.trace.tables import RunSummary

    from ..provider import ReportProvider

_LIVE = "running"


def shell() -> Component:
    """Return the frame; `register` fills it."""
    frame: Component = dmc.MantineProvider(
        [
            dcc.Location(id="url", refresh="callback-nav"),
            clock("tick", pace_ms=LIVE_MS),
            rescue(),
            dcc.Store(id="runs-shown"),
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


def register(app: Dash, provider: ReportProvider, *, base_path: str) -> None:
    """Keep the chooser and the menu true to the address and the store."""

    @app.callback(
        Output("run-chooser", "children"),
        Output("menu", "children"),
        Output("runs-shown", "data"),
        Output("tick", "interval"),
        Output("tick", "max_intervals"),
        Input("url", "pathname"),
        Input("url", "search"),
        Input("tick", "n_intervals"),
        Input(RESCUE, "n_intervals"),
        State("runs-shown", "data"),
    )
    def fill(
        path: str,
        search: str,
        num_ticks: int,
        _rescues: int,
        shown: Any,  # noqa: ANN401
    ) -> tuple[Any, ...]:
        view = read_address(app.strip_relative_path(path) or "", search or "")
        runs = provider.runs()
        known = [run.run_id for run in runs]
        run_id = view.run or (known[0] if known else None)
        fresh = [view.page.value, run_id, [[run.run_id, run.state] for run in runs]]
        if fresh == shown:
            return *(no_update,) * 4, next_tick(num_ticks)
        live = not runs or any(run.state == _LIVE for run in runs)
        return (
            _chooser(runs, run_id),
            _menu(view.page, run_id, base_path),
            fresh,
            LIVE_MS if live else QUIET_MS,
            next_tick(num_ticks),
        )

    @app.callback(
        Output("url", "href"),
        Input("choose-run", "value"),
        State("url", "pathname"),
        State("runs-shown", "data"),
        prevent_initial_call=True,
    )
    def choose(chosen: str | None, path: str, shown: Any) -> str:  # noqa: ANN401
        if chosen is None or shown is None or chosen == shown[1]:
            raise PreventUpdate
        here = read_address(app.strip_relative_path(path) or "", "").page
        page = Page.TIMELINE if here is Page.TIMELINE else Page.RUN
        return write_address(View(page=page, run=chosen), base_path=base_path)


def _chooser(runs: Sequence[RunSummary], run_id: str | None) -> list[Component]:
    known = {run.run_id for run in runs}
    gone = [] if run_id is None or run_id in known else [{"value": run_id, "label": "not here"}]
    if not runs and not gone:
        return [html.Span("no runs yet", className="quiet")]
    chooser = dmc.Select(
        id="choose-run",
        data=[*({"value": run.run_id, "label": _label(run)} for run in runs), *gone],
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
    # A name may be longer than its place.
    return [html.Div(chooser, title=visible(run_id or ""), className="run-name")]


def _label(run: RunSummary) -> str:
    parts = [visible(run.run_id), run.state, format_count(run.world_size, "rank")]
    return " · ".join(part for part in parts if part)


def _menu(page: Page, run_id: str | None, base_path: str) -> list[Component]:
    overview = View(page=Page.RUN if run_id else Page.NEWEST, run=run_id)
    entries = [
        ("Overview", overview, page in (Page.NEWEST, Page.RUN)),
        ("Timeline", View(page=Page.TIMELINE, run=run_id), page is Page.TIMELINE),
    ]
    return [
        dcc.Link(
            word,
            href=write_address(view, base_path=base_path),
            className="menu-entry here" if here else "menu-entry",
        )
        for word, view, here in entries
    ]
