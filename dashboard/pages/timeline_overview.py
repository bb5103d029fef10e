"""The run and the step around what the timeline shows: a column for each step, and a minimap."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dash import Dash, Input, Output, State, dcc, html, no_update

from rankscope.analysis.drawing.raster import draw_raster, shrink_raster
from rankscope.analysis.drawing.rows import order_ranks, rank_by_excess
from rankscope.analysis.report.report import RunReport
from rankscope.analysis.trace.errors import AnalysisError

from ..address import TIMELINE, View, read_address, view_finding, write_query
from ..callback_checks import checked
from ..figures.excess import shown_excess
from ..figures.run_axis import run_axis_figure
from ..figures.timeline_canvas import canvas_document
from ..figures.timeline_raster import MINIMAP_BINS, MINIMAP_LINES, minimap_cells
from ..theme import graph_config
from .components import canvas, graph_style, labelled, run_in_browser
from .timeline_controls import Shown

if TYPE_CHECKING:
    from dash.development.base_component import Component

    from ..provider import ReportProvider


def around_step() -> Component:
    """Return the places of the run and of the minimap, which are filled when the page is shown."""
    minimap = html.Div(
        [
            html.Div(id="timeline-minimap-picture", className="over-canvas"),
            html.Div(id="timeline-window", className="minimap-window"),
        ],
        id="timeline-minimap",
        className="minimap",
        title="The whole step; drag to move what is shown, or to choose it",
        **labelled("whole step"),
    )
    drawn = dcc.Store(id="timeline-around-drawn")  # what run and minimap show
    return html.Div([drawn, html.Div(id="timeline-run"), minimap], className="around-step")


def register_around(app: Dash, provider: ReportProvider) -> None:
    """Draw run and minimap when another step is shown, and follow clicks on a step."""
    run_in_browser(
        app,
        "timeline.around",
        Output("timeline-around-drawn", "data"),
        Input("timeline-shown", "data"),
        State("timeline-around-drawn", "data"),
        at_start=True,
    )

    @app.callback(
        Output("timeline-run", "children"),
        Output("timeline-minimap-picture", "children"),
        Input("timeline-around-drawn", "data"),
        State("timeline-shown", "data"),
        State("url", "search"),
        prevent_initial_call=True,
    )
    @checked
    def refresh_around(_changed: str | None, shown: Shown, search: str | None) -> tuple[Any, ...]:
        view = read_address(TIMELINE, search)
        if shown.run is None or shown.step is None or shown.scale is None:
            return (no_update,) * 2
        view = View(
            page=TIMELINE, run=shown.run, epoch=shown.epoch, step=shown.step, order=view.order
        )
        try:
            return _run_axis(provider, view), _minimap(provider, view)
        except AnalysisError:  # the page itself says so
            return [], []

    run_in_browser(
        app,
        "timeline.openPoint",
        Output("url", "search", allow_duplicate=True),
        Input("timeline-run-graph", "clickData"),
    )
    run_in_browser(
        app,
        "timeline.follow",
        Input("timeline-graph", "relayoutData"),
        Input("timeline-graph", "figure"),
        Input("timeline-shown", "data"),
        State("page-shown", "data"),
        at_start=True,
    )


def _run_axis(provider: ReportProvider, view: View) -> list[Component]:
    report = provider.report(str(view.run))
    if not isinstance(report, RunReport):
        return []
    links = {
        finding: write_query(proof)
        for finding in report.findings
        if (proof := view_finding(view, finding)).viewport is not None
    }
    figure = run_axis_figure(report, provider.history(report.run), step=view.step, links=links)
    config: Any = graph_config(selects=False)
    drawn = dcc.Graph(
        id="timeline-run-graph", figure=figure, config=config, style=graph_style(figure)
    )
    return [html.Div(drawn, role="group", **labelled("steps of the run"))]


def _minimap(provider: ReportProvider, view: View) -> list[Component]:
    run_id = str(view.run)
    step: Any = {"epoch": view.epoch or 0, "step": view.step or 0}
    picture = provider.picture(run_id, **step, order=view.order)
    timeline = None if picture is not None else provider.timeline(run_id, **step)
    if picture is not None:
        raster = shrink_raster(picture.raster, max_lines=MINIMAP_LINES, max_bins=MINIMAP_BINS)
    elif timeline is not None:
        report = provider.report(run_id)
        if isinstance(report, RunReport):
            ranking = rank_by_excess(shown_excess(report), timeline.step)
            timeline = replace(timeline, ranking=ranking)
        ranks = order_ranks(timeline, view.order)
        raster = draw_raster(timeline, ranks, max_lines=MINIMAP_LINES, num_bins=MINIMAP_BINS)
    else:
        return []
    layout, cells = minimap_cells(raster)
    part = "timeline-minimap"
    return canvas(part, canvas_document(part, {"cells": cells}, layout))
