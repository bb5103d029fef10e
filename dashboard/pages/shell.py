"""The frame around every page: name, run chooser, menu and theme switch."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import dash_mantine_components as dmc  # type: ignore[import-untyped]
from dash import Dash, Input, Output, State, dcc, html, no_update
from dash.exceptions import PreventUpdate

from rankscope.analysis.report.text import format_age, format_count, format_duration, format_ranges

from ..address import (
    OVERVIEW,
    RANK,
    TIMELINE,
    View,
    provable,
    read_address,
    view_proof,
    write_address,
)
from ..callback_checks import Posted, Ticks, checked
from ..text import escape
from .components import (
    FALLBACK_TIMER,
    LIVE_MS,
    NO_NEW_STEP,
    QUIET_MS,
    RUNNING,
    decorative,
    fallback_timer,
    labelled,
    next_tick,
    poll_timer,
    run_in_browser,
)
from .refresh import page_frame, render_parts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dash.development.base_component import Component

    from rankscope.analysis.trace.tables import RunSummary
    from rankscope.dashboard.records.page_results import RunStrip

    from ..provider import ReportProvider
    from .page import Page


MAX_PLACES = 2_000
"""Places of the palette: pages, hosts and the newest runs; 200 kB."""


class FrameShown(Posted):
    """The shown state of the frame, which it keeps in the browser."""

    run: str | None
    """Whether the palette has the hosts and the proof of the run's report."""

    digests: dict[str, dict[str, str]]


def shell() -> Component:
    """Return the frame; `register` fills it."""
    frame: Component = dmc.MantineProvider(
        [
            dcc.Location(id="url", refresh="callback-nav"),
            poll_timer("frame-timer", interval_ms=LIVE_MS),
            fallback_timer(),
            dcc.Store(id="frame-place"),
            dcc.Store(id="frame-shown"),
            dcc.Store(id="frame-changes"),
            dcc.Store(id="frame-title"),
            dcc.Store(id="frame-titled"),
            dcc.Store(id="frame-palette"),
            dcc.Store(id="frame-offered"),
            dcc.Store(id="palette-asked"),
            html.A("Skip to the page", href="#page", className="skip"),
            html.Header(
                [
                    html.Div("rankscope", className="brand"),
                    html.Div(id="run-chooser", className="run-chooser"),
                    html.Div(id="strip", className="strip"),
                    html.Div(className="spring"),
                    html.Button(
                        ["Go to", html.Kbd("Ctrl K")], id="open-palette", className="button small"
                    ),
                    dmc.ColorSchemeToggle(
                        id="theme-toggle",
                        lightIcon="☀",
                        darkIcon="☾",
                        variant="default",
                        size="lg",
                        **labelled("switch between light and dark"),
                    ),
                    html.Nav(id="menu", className="menu", **labelled("pages")),
                ],
                className="header",
            ),
            *page_frame(),
        ],
        defaultColorScheme="auto",
        theme={"primaryColor": "blue", "fontFamily": "var(--font)", "autoContrast": True},
    )
    return frame


def register(app: Dash, provider: ReportProvider, pages: Sequence[Page]) -> None:
    """Keep the frame in step with the address and the store."""
    # A zoom changes the address, but not the page and the run: the frame stays as it is.
    run_in_browser(
        app,
        "rankscope.findPlace",
        Output("frame-place", "data"),
        Input("url", "pathname"),
        Input("url", "search"),
        State("frame-place", "data"),
        at_start=True,
    )
    run_in_browser(app, "rankscope.applyChanges", Input("frame-changes", "data"))
    run_in_browser(
        app, "rankscope.setTitle", Output("frame-titled", "data"), Input("frame-title", "data")
    )
    run_in_browser(
        app,
        "rankscope.offerPlaces",
        Output("frame-offered", "data"),
        Input("frame-palette", "data"),
    )
    run_in_browser(app, "rankscope.openPalette", Input("open-palette", "n_clicks"))
    page_by_name = {page.name: page for page in pages}

    @app.callback(
        Output("frame-changes", "data"),
        Output("frame-shown", "data"),
        Output("frame-timer", "interval"),
        Output("frame-timer", "max_intervals"),
        Input("frame-place", "data"),
        Input("frame-timer", "n_intervals"),
        Input(FALLBACK_TIMER, "n_intervals"),
        State("url", "pathname"),
        State("url", "search"),
        State("frame-shown", "data"),
        prevent_initial_call=True,
    )
    @checked
    def refresh_frame(
        _place: str | None,
        num_ticks: Ticks,
        _fallback_ticks: Ticks,
        path: str | None,
        search: str | None,
        shown: FrameShown | None,
    ) -> tuple[Any, ...]:
        view = read_address(path, search)
        runs = provider.runs()
        run_id = view.run or (runs[0].run_id if runs else None)
        page = page_by_name.get(view.page)
        strip = None if run_id is None else provider.strip(run_id)
        is_of_run = run_id is not None and (page is None or page.is_of_run)
        name = page.title if page is not None else ""
        title = " - ".join(filter(None, (name, "rankscope")))
        if is_of_run:
            title = _title(str(run_id), strip, "" if view.page == OVERVIEW else name)
        parts = [
            html.Div(_chooser(runs, run_id), id="run-chooser"),
            html.Div([*_strip(strip), *_proof_link(strip)] if is_of_run else [], id="strip"),
            html.Nav(_menu(pages, view.page, run_id), id="menu"),
            dcc.Store(id="frame-title", data=title),
        ]
        rendered = render_parts(parts)
        is_live = not runs or any(run.state == RUNNING for run in runs)
        return (
            rendered.changes({} if shown is None else shown.digests) or no_update,
            FrameShown(run=run_id, digests=rendered.digests).model_dump(),
            LIVE_MS if is_live else QUIET_MS,
            next_tick(num_ticks),
        )

    @app.callback(
        Output("frame-palette", "data"),
        Input("palette-asked", "data"),
        State("url", "pathname"),
        State("url", "search"),
        prevent_initial_call=True,
    )
    @checked
    def offer_places(_asked: float, path: str | None, search: str | None) -> dict[str, Any]:
        # Asked for when it opens: 1,500 hosts take longer than the rest of the frame.
        runs = provider.runs()
        run_id = read_address(path, search).run or (runs[0].run_id if runs else None)
        strip = None if run_id is None else provider.strip(run_id)
        return _palette(pages, runs, run_id, strip)

    @app.callback(
        Output("url", "href"),
        Input("choose-run", "value"),
        State("url", "pathname"),
        State("frame-shown", "data"),
        prevent_initial_call=True,
    )
    @checked
    def choose_run(run: str | None, path: str | None, shown: FrameShown | None) -> str:
        if run is None or shown is None or run == shown.run:
            raise PreventUpdate
        here = read_address(path, "").page
        return write_address(View(page=here if here in page_by_name else OVERVIEW, run=run))


def _title(run_id: str, strip: RunStrip | None, page: str) -> str:
    """Return the title of the browser's tab: the run, its verdict, the page."""
    verdict = ""
    if strip is not None and strip.report is not None:
        top = strip.report.top_finding
        ranks = format_ranges(top.ranks, max_ranges=2) if top.ranks else ""
        verdict = f": {top.cause} {ranks}".rstrip()
    return " - ".join(part for part in (f"{escape(run_id)}{verdict}", page, "rankscope") if part)


def _strip(strip: RunStrip | None) -> list[Component]:
    if strip is None:
        return []
    run, report = strip.run, strip.report
    is_live = run.state == RUNNING and not strip.is_silent
    state = "live" if is_live else NO_NEW_STEP if strip.is_silent else run.state
    parts: list[tuple[str, bool]] = [(state, strip.is_silent)]
    if report is not None and report.steps:
        age = "" if strip.age_ns is None else f", {format_age(strip.age_ns)} old"
        parts.append((f"step {report.steps[-1]:,}{age}", False))
    if strip.num_recent is not None:
        some = strip.num_recent < run.world_size
        parts.append((f"{strip.num_recent:,} of {run.world_size:,} ranks send heartbeats", some))
    if report is not None:
        num_dropped = report.quality.account.num_dropped
        parts.append((f"{num_dropped:,} records lost", num_dropped > 0))
        if report.quality.clock_error_ns is not None:
            error = format_duration(report.quality.clock_error_ns)
            parts.append((f"clocks within {error}", False))
    mark = [html.Span(className="live-mark", **decorative())] if is_live else []
    return [
        *mark,
        *(html.Span(text, className="attention" if bad else "") for text, bad in parts),
    ]


def _chooser(runs: Sequence[RunSummary], run_id: str | None) -> list[Component]:
    names = {None, *(run.run_id for run in runs)}
    missing = [] if run_id in names else [{"value": run_id, "label": "not here"}]
    if not runs and not missing:
        return [html.Span("no runs yet", className="quiet")]
    listed = []
    for run in runs:
        parts = (escape(run.run_id), run.state, format_count(run.world_size, "rank"))
        listed.append({"value": run.run_id, "label": " · ".join(filter(None, parts))})
    chooser = dmc.Select(
        id="choose-run",
        data=[*listed, *missing],
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


def _proof_link(strip: RunStrip | None) -> list[Component]:
    """Return the link that the key P takes where the page has none."""
    report = None if strip is None else strip.report
    top = None if report is None else provable(report)
    if report is None or top is None:
        return []
    href = write_address(view_proof(View(run=report.run), top))
    return [dcc.Link("Proof", href=href, className="proof-link hidden")]


def _palette(
    pages: Sequence[Page], runs: Sequence[RunSummary], run_id: str | None, strip: RunStrip | None
) -> dict[str, Any]:
    """Return where the palette leads: label, kind and address of each place, and ranks by number.

    A run has too many ranks to list them: the browser fills a number into ``rank_address``.
    """
    places = [
        {
            "label": page.title,
            "kind": "page",
            "href": write_address(View(page=page.name, run=run_id)),
        }
        for page in pages
        if page.is_listed
    ]
    report = None if strip is None else strip.report
    ranks_of_host: dict[str, list[int]] = defaultdict(list)
    if report is not None and report.placements:
        for rank, (host, _) in sorted(report.placements[-1].of_rank.items()):
            ranks_of_host[host].append(rank)
    for host, ranks in ranks_of_host.items():
        if host:
            view = View(page=TIMELINE, run=run_id, ranks=tuple(ranks))
            address = write_address(view)
            places.append({"label": escape(host), "kind": "host", "href": address})
    for run in runs:
        address = write_address(View(run=run.run_id))
        places.append({"label": escape(run.run_id), "kind": "run", "href": address})
    view = View(page=RANK, run=run_id)
    return {
        "places": places[:MAX_PLACES],
        "run": run_id or "",
        "pages_of_run": [write_address(View(page=page.name)) for page in pages if page.is_of_run],
        "num_ranks": 0 if strip is None else strip.run.world_size,
        "rank_address": write_address(view),
    }


def _menu(pages: Sequence[Page], current: str, run_id: str | None) -> list[Component]:
    return [
        dcc.Link(
            page.title,
            href=write_address(View(page=page.name, run=run_id)),
            className="menu-entry here" if page.name == current else "menu-entry",
        )
        for page in pages
        if page.is_listed
    ]
