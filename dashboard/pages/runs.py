"""The runs page: all runs of the store, with their verdicts."""

from __future__ import annotations

import time
from dataclasses import replace
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import dash_ag_grid as dag  # type: ignore[import-untyped]
import dash_mantine_components as dmc  # type: ignore[import-untyped]
from dash import Dash, Input, Output, State, dcc, html
from dash.exceptions import PreventUpdate

from rankscope.analysis.report.text import (
    EMPTY,
    format_age,
    format_count,
    format_ranges,
    format_seconds,
    format_time,
)
from rankscope.tracer.span import NS_PER_S

from ..address import COMPARE, INCIDENT, RUNS, View, read_address, write_address, write_query
from ..callback_checks import Number, Posted, checked
from ..exports import RUNS_PATH
from ..text import escape
from .annotations import change_tags, tags_input
from .components import (
    GRID_THEME,
    LIVE_MS,
    NO_NEW_STEP,
    QUIET_MS,
    RUNNING,
    announced,
    card,
    labelled,
    run_in_browser,
)
from .configurations import configuration_cards
from .overview_cards import cause_style
from .page import Content, Page
from .placeholders import no_runs
from .refresh import AGAIN
from .report_page import choices

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dash.development.base_component import Component

    from rankscope.dashboard.records.page_results import RunLine

    from ..provider import ReportProvider

MAX_RUNS = 5_000
"""Runs in the table, the newest: 5,000 are 2 MB, compressed 150 kB."""

CONFIGURATIONS = "configurations"
"""Word of `View.show` for the runs by configuration, not as a list."""

MIN_PAIR = 2
"""Runs to check for a comparison."""

_NUMBER = {"type": "rightAligned", "filter": "agNumberColumnFilter"}


def _format(expression: str) -> dict[str, str]:
    return {"function": f"params.value == null ? 'n/a' : {expression}"}


_COLUMNS: list[dict[str, Any]] = [
    {
        "field": "run",
        "headerName": "run",
        "cellRenderer": "RunLink",
        "pinned": "left",
        "width": 224,  # a pinned column does not flex
    },
    {
        "field": "verdict",
        "headerName": "verdict",
        "cellRenderer": "Verdict",
        "minWidth": 220,
        "flex": 3,
        "tooltipField": "sentence",
    },
    {"field": "state", "headerName": "state", "cellRenderer": "RunState", "width": 106},
    {"field": "step_s", "headerName": "step time", "width": 96, **_NUMBER,
     "valueFormatter": _format("params.data.step_time")},
    {"field": "mfu", "headerName": "MFU", "width": 74, **_NUMBER,
     "valueFormatter": _format("d3.format('.1f')(100 * params.value) + ' %'")},
    {"field": "cost", "headerName": "lost GPU hours", "width": 132, **_NUMBER,
     "valueFormatter": _format("d3.format(',.3~r')(params.value)")},
    {"field": "loss", "headerName": "loss", "width": 70, **_NUMBER,
     "valueFormatter": _format("d3.format('.4~r')(params.value)")},
    {"field": "steps", "headerName": "steps", "width": 76, **_NUMBER,
     "valueFormatter": _format("d3.format(',')(params.value)")},
    {"field": "duration", "headerName": "duration", "width": 94, **_NUMBER,
     "valueFormatter": _format("params.data.age")},
    {"field": "tags", "headerName": "tags", "width": 130, "cellRenderer": "RunTags"},
    {"field": "excluded", "headerName": "on excluded host", "width": 150},
    {"field": "started", "headerName": "started", "width": 186, "sort": "desc",
     "cellRenderer": "LocalTime"},
    {"field": "ranks", "headerName": "ranks", "width": 76, **_NUMBER,
     "valueFormatter": _format("d3.format(',')(params.value)")},
    {"field": "layout", "headerName": "layout", "width": 120},
    {"field": "lost", "headerName": "lost records", "width": 118, **_NUMBER,
     "valueFormatter": _format("d3.format(',')(params.value)")},
    {"field": "severity", "headerName": "severity", "width": 98},
]  # fmt: skip


_NO_ACTIONS = "Check two runs to compare them."


class ChosenRun(Posted):
    """A row whose box is checked."""

    run: str
    tags: list[str]


def show_runs(provider: ReportProvider, view: View) -> Content:
    """Return the runs with the tags of a view, as a list or by configuration."""
    lines = provider.run_lines()
    tags = sorted({tag for line in lines for tag in line.tags})
    wanted = _wanted_tags(view)
    shown = [line for line in lines if wanted <= set(line.tags)]
    is_grouped = view.show == CONFIGURATIONS
    rows = _rows([] if is_grouped else shown)
    grid = dag.AgGrid(
        id="runs-grid",
        rowData=rows,
        columnDefs=_columns(has_tags=bool(tags), lines=shown),
        defaultColDef={"sortable": True, "filter": True, "resizable": True},
        getRowId="params.data.run",
        dashGridOptions={
            "rowSelection": {"mode": "multiRow"},
            "theme": {"function": GRID_THEME},
            "tooltipShowDelay": 400,
            "enableCellTextSelection": True,
            "ensureDomOrder": True,
            "selectionColumnDef": {"pinned": "left", "width": 36, "sortable": True},
            "rowHeight": 38,
            "suppressDragLeaveHidesColumns": True,
        },
        className="runs-grid",
        style={"height": None, "width": "100%"},
    )
    head = [
        html.H1("Runs"),
        html.P(_about(shown), id="runs-about", className="quiet"),
        html.Div(className="spring"),
        dmc.MultiSelect(
            id="runs-tags-wanted",
            data=[{"value": tag, "label": escape(tag)} for tag in sorted({*tags, *wanted})],
            value=sorted(wanted),
            placeholder="" if wanted else "with tag",
            size="xs",
            clearable=True,
            searchable=True,
            className="tags-input" if tags or wanted else "hidden",
            **labelled("only runs with these tags"),
        ),
        choices(
            "shown as",
            [
                ("list", View(page=RUNS, find=view.find)),
                ("by configuration", View(page=RUNS, find=view.find, show=CONFIGURATIONS)),
            ],
            view=View(page=RUNS, find=view.find, show=view.show if is_grouped else None),
        ),
        html.Div(
            _actions([], hint=_NO_ACTIONS if len(rows) >= MIN_PAIR else ""),
            id="runs-actions",
            className="actions",
        ),
        html.A(
            "CSV",
            href=f"/{RUNS_PATH}",
            download="runs.csv",
            className="button",
            title="All runs as a table for a spreadsheet",
        ),
    ]
    confirm = [
        html.P(id="runs-confirm-text"),
        html.P(
            "Spans, reports and findings of these runs are removed, and their names cannot be used"
            " again.",
            className="quiet",
        ),
        dmc.Button("Delete", id="runs-delete", color="red", variant="filled"),
    ]
    is_live = any(line.run.state == RUNNING for line in lines)
    return Content(
        children=[
            html.Div(head, className="page-head"),
            html.P("", id="runs-deleted", className="note", **announced()),
            html.Div([] if lines else [no_runs()]),
            card(
                grid,
                class_name="runs-card" if lines and not is_grouped else "hidden",
                label="runs",
            ),
            html.Div(
                configuration_cards(shown) if is_grouped else [],
                id="runs-configurations",
                className="stack",
            ),
            dmc.Modal(confirm, id="runs-confirm", title="Delete for good?", opened=False),
        ],
        interval_ms=LIVE_MS if is_live or not lines else QUIET_MS,
    )


def _columns(*, has_tags: bool, lines: Sequence[RunLine]) -> list[dict[str, Any]]:
    """Return the columns that have a value in any row."""
    has_excluded = any(line.excluded_hosts for line in lines)
    empty = ({"tags"} if not has_tags else set()) | ({"excluded"} if not has_excluded else set())
    return [column for column in _COLUMNS if column["field"] not in empty]


def _wanted_tags(view: View) -> set[str]:
    return set(filter(None, (view.find or "").split(",")))


def _revision(provider: ReportProvider, _view: View) -> str:
    """Return what changes with the rows, besides the time that running jobs take."""
    still = {"duration": None, "age": None}
    rows = _rows(provider.run_lines())
    shown = [row | still if row["live"] or row["silent"] else row for row in rows]
    return sha256(repr(shown).encode()).hexdigest()


def _register(app: Dash, provider: ReportProvider) -> None:
    @app.callback(
        Output("url", "search", allow_duplicate=True),
        Input("runs-tags-wanted", "value"),
        State("url", "search"),
        prevent_initial_call=True,
    )
    @checked
    def filter_runs(tags: list[str] | None, search: str | None) -> str:
        shown = read_address(RUNS, search)
        view = replace(shown, find=",".join(tags or ()) or None)
        if view == shown:
            raise PreventUpdate
        return write_query(view)

    @app.callback(
        Output("runs-actions", "children"),
        Input("runs-grid", "selectedRows"),
        prevent_initial_call=True,
    )
    @checked
    def choose(chosen: list[ChosenRun] | None) -> list[Any]:
        rows = chosen or []
        tags = sorted(set(rows[0].tags).intersection(*(row.tags for row in rows))) if rows else []
        return _actions([row.run for row in rows], tags=tags)

    @app.callback(
        Output("runs-deleted", "children", allow_duplicate=True),
        Output(AGAIN, "data", allow_duplicate=True),
        Input("runs-tags", "value"),
        State("runs-tags-stored", "data"),
        State("runs-grid", "selectedRows"),
        prevent_initial_call=True,
    )
    @checked
    def tag(
        now: list[str] | None, stored: list[str] | None, chosen: list[ChosenRun] | None
    ) -> tuple[str, Any]:
        names = [row.run for row in chosen or ()]
        return change_tags(provider, names, now or (), stored or ()), time.time_ns()

    @app.callback(
        Output("runs-confirm", "opened"),
        Output("runs-confirm-text", "children"),
        Input("runs-ask", "n_clicks"),
        State("runs-grid", "selectedRows"),
        prevent_initial_call=True,
    )
    @checked
    def ask(num_clicks: Number | None, chosen: list[ChosenRun] | None) -> tuple[bool, str]:
        names = [escape(row.run) for row in chosen or ()]
        return bool(num_clicks and names), ", ".join(names)

    run_in_browser(
        app,
        "rankscope.fitRuns",
        Output("runs-grid", "columnDefs"),
        Output("runs-grid", "dashGridOptions"),
        Input("runs-grid", "id"),
        State("runs-grid", "columnDefs"),
        State("runs-grid", "dashGridOptions"),
        at_start=True,
    )
    run_in_browser(
        app,
        "rankscope.deleteRuns",
        Output("runs-deleted", "children"),
        Output(AGAIN, "data", allow_duplicate=True),
        Input("runs-delete", "n_clicks"),
        State("runs-grid", "selectedRows"),
    )
    run_in_browser(
        app,
        "rankscope.closeDialog",
        Output("runs-confirm", "opened", allow_duplicate=True),
        Input("runs-deleted", "children"),
    )


PAGE = Page(
    name=RUNS,
    title="Runs",
    show=show_runs,
    is_of_run=False,
    revision=_revision,
    register=_register,
)


def _rows(lines: Sequence[RunLine]) -> list[dict[str, Any]]:
    return [_row(line) for line in lines[:MAX_RUNS]]


def _row(line: RunLine) -> dict[str, Any]:
    run = line.run
    ranks = f" on {format_ranges(line.ranks, max_ranges=2)}" if line.ranks else ""
    started = run.started_ns
    return {
        "run": run.run_id,
        "href": write_address(View(run=run.run_id)),
        "incident": ""
        if line.incident is None
        else write_address(View(page=INCIDENT, run=run.run_id, show=str(line.incident))),
        "verdict": f"{line.cause}{ranks}" if line.cause else EMPTY,
        "sentence": escape(line.verdict) or "No report yet.",
        "style": cause_style(line.cause, line.severity),
        "severity": line.severity or EMPTY,
        "state": NO_NEW_STEP if line.is_silent else run.state,
        "live": _is_live(line),
        "silent": line.is_silent,
        "started": EMPTY if started is None else format_time(started),
        "ranks": run.world_size,
        "layout": " ".join(
            f"{axis}{size}" for axis, size in run.layout.to_dict().items() if size > 1
        )
        or EMPTY,
        "steps": run.num_steps,
        "duration": None if line.duration_ns is None else line.duration_ns // NS_PER_S,
        "age": "" if line.duration_ns is None else format_age(line.duration_ns),
        "step_s": line.step_s,
        "step_time": format_seconds(line.step_s),
        "mfu": line.mfu,
        "loss": line.loss,
        "cost": line.lost_device_h,
        "lost": line.num_dropped,
        "tags": list(line.tags),
        "excluded": ", ".join(line.excluded_hosts),
    }


def _about(lines: Sequence[RunLine]) -> str:
    live = sum(map(_is_live, lines))
    silent = sum(line.is_silent for line in lines)
    stopped = f", {silent:,} without a new step" if silent else ""
    newest = f", of which the newest {MAX_RUNS:,} are listed" if len(lines) > MAX_RUNS else ""
    counted = f"{format_count(len(lines), 'run')}{newest}; {live:,} live{stopped}"
    return f"{counted}. All from stored results."


def _is_live(line: RunLine) -> bool:
    return line.run.state == RUNNING and not line.is_silent


def _actions(
    chosen: Sequence[str], *, tags: Sequence[str] = (), hint: str = _NO_ACTIONS
) -> list[Component]:
    field = html.Div(tags_input("runs-tags", tags), className="tags" if chosen else "hidden")
    delete = html.Button(
        "Delete…" if len(chosen) < MIN_PAIR else f"Delete {len(chosen)}…",
        id="runs-ask",
        className="button danger" if chosen else "hidden",
    )
    if len(chosen) != MIN_PAIR:
        return [html.Span("" if chosen else hint, className="quiet"), field, delete]
    view = View(page=COMPARE, run=chosen[1], with_run=chosen[0])
    address = write_address(view)
    return [dcc.Link("Compare the two", href=address, className="button"), field, delete]
