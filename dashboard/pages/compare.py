"""The compare page: two runs, or two ranges of steps of one, the settings first."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import dash_mantine_components as dmc  # type: ignore[import-untyped]
import plotly.graph_objects as go
from dash import Dash, Input, Output, State, html
from dash.exceptions import PreventUpdate

from rankscope.analysis.report.report import Severity
from rankscope.analysis.report.text import (
    EMPTY,
    UNKNOWN,
    format_change,
    format_count,
    format_range,
    format_seconds,
)
from rankscope.analysis.trace.errors import UnknownRunError
from rankscope.dashboard.records.progress import AnalysisFailed
from rankscope.tracer.span import NS_PER_S

from ..address import COMPARE, View, read_steps, write_address
from ..callback_checks import Number, checked
from ..text import cut_middle, escape, escape_for_plotly
from ..theme import IDEAL, STEP_TIME, apply_style, axis_unit
from .components import announced, card, graph, labelled, rank_links, table
from .device_time import kernel_changes_card
from .overview_cards import cause_style, escape_sentence
from .page import Content, Page
from .placeholders import missing_run, no_runs

if TYPE_CHECKING:
    from dash.development.base_component import Component

    from rankscope.analysis.report.report import Finding, RunReport
    from rankscope.dashboard.records.page_results import ComparedNumber, RunComparison

    from ..provider import ReportProvider

MIN_RATIO, MAX_RATIO = 0.98, 1.02
"""Changes within 2 % are not coloured: a mean step time varies as much between equal runs."""

_MAX_RANGES = 4

_MAX_BESIDE = 3
"""Settings whose card fits above the numbers, beside the parts of a step."""

_MAX_CHARS = 32
"""Characters of a run's name in a legend or heading, which a phone shows whole."""


def show_compare(provider: ReportProvider, view: View) -> Content:
    """Return the page of two runs; by default, the newest run against the one before it."""
    runs = provider.runs()
    if not runs:
        return Content(problem=no_runs())
    run = view.run or runs[0].run_id
    others = [other.run_id for other in runs if other.run_id != run]
    with_run = view.with_run or (run if view.steps or not others else others[0])
    names = [listed.run_id for listed in runs]
    compared = _compare(provider, replace(view, run=run, with_run=with_run))
    shown = compared or [_notice("Both runs are being analysed", "This page updates by itself.")]
    head = html.Div(
        [
            html.H1("Compare"),
            *_chooser("compare-run", "this run", names, run, view.steps),
            html.Span("with", className="quiet"),
            *_chooser("compare-with", "the run before", names, with_run, view.with_steps),
            html.Button("Compare", id="compare-go", className="button"),
        ],
        className="page-head",
    )
    return Content(
        children=[head, html.Div(shown, id="compare-content", **announced())],
        view=replace(view, run=run),
        is_unfinished=compared is None,
    )


def _register(app: Dash, _provider: ReportProvider) -> None:
    @app.callback(
        Output("url", "href", allow_duplicate=True),
        Input("compare-go", "n_clicks"),
        State("compare-with", "value"),
        State("compare-with-steps", "value"),
        State("compare-run", "value"),
        State("compare-run-steps", "value"),
        prevent_initial_call=True,
    )
    @checked
    def compare(
        num_clicks: Number | None,
        with_run: str | None,
        with_steps: str | None,
        run: str | None,
        steps: str | None,
    ) -> str:
        if not num_clicks:
            raise PreventUpdate
        view = View(
            page=COMPARE,
            run=run,
            with_run=with_run,
            steps=read_steps(steps or ""),
            with_steps=read_steps(with_steps or ""),
        )
        return write_address(view)


PAGE = Page(
    name=COMPARE,
    title="Compare",
    show=show_compare,
    is_of_run=False,
    revision=lambda _provider, _view: "a comparison is made once",
    register=_register,
)


def _chooser(
    part: str, label: str, names: list[str], run: str, steps: tuple[int, int] | None
) -> list[Component]:
    return [
        dmc.Select(
            id=part,
            data=[{"value": name, "label": escape(name)} for name in dict.fromkeys([*names, run])],
            value=run,
            searchable=True,
            allowDeselect=False,
            size="sm",
            limit=200,
            className="compare-run",
            **labelled(label),
        ),
        dmc.TextInput(
            id=f"{part}-steps",
            value="" if steps is None else f"{steps[0]}-{steps[1]}",
            placeholder="all, or 10-19",
            size="sm",
            className="compare-steps",
            **labelled(f"steps of {label}"),
        ),
    ]


def _compare(provider: ReportProvider, view: View) -> list[Component] | None:
    """Return the comparison, or why there is none; None while it is being made."""
    first, second = view.with_run or "", view.run or ""
    same = [_notice("Both are the same", "Choose another run, or other steps.")]
    if (first, view.with_steps) == (second, view.steps):
        return same
    try:
        found = provider.comparison(
            first, second, first_steps=view.with_steps, second_steps=view.steps
        )
    except UnknownRunError as error:
        return [missing_run(error)]
    if found is None:
        return None
    if isinstance(found, AnalysisFailed):
        reason = escape_sentence(found.reason)
        return [_notice("These cannot be compared", reason, "Choose other runs or steps.")]
    if (found.first.run, found.first.steps) == (found.second.run, found.second.steps):
        return same
    return _comparison(found)


def _notice(title: str, *lines: str) -> Component:
    return card(html.H2(title, className="empty-title"), *map(html.P, lines), class_name="empty")


def _comparison(found: RunComparison) -> list[Component]:
    full = _names(found)
    first, second = (cut_middle(name, _MAX_CHARS) for name in full)
    names = full if first == second else (first, second)
    settings = _settings_card(found, names)
    is_long = len(found.settings) > _MAX_BESIDE
    return [
        _verdict(found, full),
        *([settings] if is_long else []),
        html.Div(
            [
                *([] if is_long else [settings]),
                card(
                    html.H2("Numbers"),
                    _numbers("numbers", found.numbers, names),
                ),
                card(
                    html.H2("Where the time of a step goes"),
                    html.P("Mean of the ranks, by part of the waterfall.", className="about"),
                    _numbers("parts of a step", found.parts_s, names),
                ),
            ],
            className="columns",
        ),
        *(
            [kernel_changes_card(found.kernels, names)]
            if found.first.kernels and found.second.kernels
            else []
        ),
        card(
            html.H2("Step time"),
            graph("compare-steps", compared_steps_figure(found.first, found.second, names)),
            label="step time of both",
        ),
        card(
            html.H2("Findings"),
            *_findings("New", found.appeared, found.second),
            *_findings("Gone", found.disappeared, found.first),
            *_findings("In both", found.remained, found.second),
        ),
    ]


def _names(found: RunComparison) -> tuple[str, str]:
    """Return the names of both sides: the runs, or the steps of one run."""
    if found.first.run == found.second.run:
        return _steps_of(found.first), _steps_of(found.second)
    return escape(found.first.run), escape(found.second.run)


def _steps_of(report: RunReport) -> str:
    if not report.steps:
        return EMPTY
    first, last = report.steps[0], report.steps[-1]
    return f"step {first}" if first == last else f"steps {format_range((first, last))}"


def _verdict(found: RunComparison, names: tuple[str, str]) -> Component:
    change = found.step_change
    step_time = f"A step is {format_change(change.ratio)}."
    causes, num_settings = _new_causes(found), len(found.settings)
    changes = [
        "1 setting differs" if num_settings == 1 else f"{num_settings:,} settings differ",
        format_count(len(found.appeared), "new finding"),
        f"{len(found.disappeared)} gone",
    ]
    if found.first.run != found.second.run and found.first.steps != found.second.steps:
        changes.insert(0, f"{_steps_of(found.second)} against {_steps_of(found.first)}")
    if not _is_same_layout(found):
        changes.insert(0, "the layouts differ, so a step is not the same work")
    return html.Div(
        [
            html.P(f"{names[1]} against {names[0]}", className="verdict-cause"),
            html.H2(
                f"New: {causes}. {step_time}" if causes else step_time,
                className="verdict-sentence",
            ),
            html.P([html.Span(each) for each in changes], className="facts"),
        ],
        className=f"verdict {_style(found, change.ratio)}",
    )


def _style(found: RunComparison, ratio: float | None) -> str:
    """Return the colour: of a new critical finding, else of the step time if it can be compared."""
    if _new_causes(found):
        return ""
    if ratio is None or MIN_RATIO <= ratio <= MAX_RATIO or not _is_same_layout(found):
        return "busy"
    return "" if ratio > MAX_RATIO else "calm"


def _is_same_layout(found: RunComparison) -> bool:
    return found.first.layout == found.second.layout


def _new_causes(found: RunComparison) -> str:
    new = (each.cause for each in found.appeared if each.severity is Severity.CRITICAL)
    return ", ".join(dict.fromkeys(new))


def _settings_card(found: RunComparison, names: tuple[str, str]) -> Component:
    rows = [
        [
            dmc.TableTd(escape(name), className="mono"),
            "not set" if first is None else escape(first),
            "not set" if second is None else escape(second),
        ]
        for name, first, second in found.settings
    ]
    empty = html.P("No setting differs.", className="quiet")
    return card(
        html.H2("Settings that differ"),
        html.P("From the manifests, as most ranks have them.", className="about"),
        table("settings", {"setting": "", names[0]: "", names[1]: ""}, rows, class_name="settings")
        if rows
        else empty,
    )


def _numbers(label: str, numbers: tuple[ComparedNumber, ...], names: tuple[str, str]) -> Component:
    head = {"quantity": "", names[0]: "number", names[1]: "number", "change": "number"}
    rows = [[number.label, *number.cells] for number in numbers]
    return table(label, head, rows)


def _findings(title: str, findings: tuple[Finding, ...], report: RunReport) -> list[Component]:
    if not findings:
        return [html.P(f"{title}: none.", className="quiet")]
    rows = [
        [
            html.Span(each.cause, className=f"cause {cause_style(each.cause, each.severity)}"),
            each.severity or UNKNOWN,
            dmc.TableTd(
                rank_links(report.run, each.ranks, max_ranges=_MAX_RANGES), className="of-ranks"
            ),
            dmc.TableTd(format_range(each.steps), className="steps"),
            dmc.TableTd(escape_sentence(each.evidence), className="evidence"),
        ]
        for each in findings
    ]
    head = {"cause": "", "severity": "", "ranks": "", "steps": "", "evidence": ""}
    return [html.H3(title), table(title, head, rows, class_name="findings")]


def compared_steps_figure(first: RunReport, second: RunReport, names: tuple[str, str]) -> go.Figure:
    """Draw step times, each from its first step on: ranges of one run lie over each other."""
    figure = go.Figure()
    both = (first.actual_s_by_step, second.actual_s_by_step)
    longest_s = max((seconds for by_step in both for seconds in by_step.values()), default=0.0)
    unit, unit_ns = axis_unit(longest_s * NS_PER_S)
    for seconds, name, color in zip(both, names, (IDEAL, STEP_TIME), strict=True):
        steps = sorted(seconds)
        figure.add_trace(
            go.Scatter(
                x=list(range(len(steps))),
                y=[seconds[step] * NS_PER_S / unit_ns for step in steps],
                mode="lines+markers",
                name=escape_for_plotly(name),
                line={"color": color, "width": 1.6},
                marker={"size": 4},
                customdata=[[step, format_seconds(seconds[step])] for step in steps],
                hovertemplate="step %{customdata[0]}: %{customdata[1]}<extra>%{fullData.name}"
                "</extra>",
            )
        )
    apply_style(figure, height=280, zoom_key=f"compare {names}")
    figure.update_layout(margin={"t": 34})
    figure.update_xaxes(title_text="steps from the first one")
    figure.update_yaxes(title_text=f"step time ({unit})", rangemode="tozero")
    return figure
