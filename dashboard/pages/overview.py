"""The overview: the verdict on one run, and the evidence for it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import plotly.graph_objects as go
from dash import Dash, Input, Output, State, dcc, html, no_update
from dash.exceptions import PreventUpdate

from rankscope.analysis.report.progress import AnalysisInProgress
from rankscope.analysis.report.report import RunReport
from rankscope.analysis.trace.errors import UnknownRunError

from ..address import Page, View, write_address
from ..figures.excess import excess_figure, excess_note
from ..figures.step_time import seen_figure, step_time_figure
from ..figures.workers import worker_figure
from ..theme import blank_figure
from .components import (
    LIVE_MS,
    RESCUE,
    SOON_MS,
    announced,
    card,
    clock,
    graph,
    graph_style,
    next_tick,
    pace_of,
    register_graph,
)
from .overview_cards import (
    early_figures,
    findings_table,
    heard_card,
    key_figures,
    mfu_reason,
    quality_list,
    starved_list,
    verdict_card,
)
from .placeholders import LATER, NEVER, missing_run, no_runs, no_steps, no_verdict, no_verdict_yet

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dash.development.base_component import Component

    from rankscope.analysis.report.liveness import RankLiveness
    from rankscope.analysis.report.progress import AnalysisFailed
    from rankscope.analysis.trace.tables import RunSummary

    from ..provider import ReportProvider

LIVE_STATES = frozenset({"running", "lost"})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shown:
    """What stands on the page, part by part; the parts are the outputs of every refresh."""

    run: str | None
    revision: int | None
    problem: list[Component] = field(default_factory=list)
    """A card that says why there is no report; the rest is hidden then."""

    verdict: list[Component] = field(default_factory=list)
    key_figures: list[Component] = field(default_factory=list)
    steps: go.Figure = field(default_factory=go.Figure)
    steps_note: str = ""
    workers: go.Figure = field(default_factory=go.Figure)
    excess: go.Figure = field(default_factory=go.Figure)
    excess_note: str = ""
    starved: list[Component] = field(default_factory=list)
    findings: list[Component] = field(default_factory=list)
    quality: list[Component] = field(default_factory=list)
    pace_ms: int = LIVE_MS
    """When the page looks again."""

    def outputs(self, num_ticks: int | None = 0) -> tuple[Any, ...]:
        """Return the parts in the order of `_OUTPUTS`, after so many ticks of their clock."""
        return (
            {"run": self.run, "revision": self.revision},
            self.problem,
            "hidden" if self.problem else "",
            self.verdict,
            self.key_figures,
            self.steps,
            self.steps_note,
            self.workers,
            self.excess,
            graph_style(self.excess),
            self.excess_note,
            self.starved,
            self.findings,
            self.quality,
            self.pace_ms,
            next_tick(num_ticks),
        )


_OUTPUTS = (
    Output("overview-shown", "data"),
    Output("overview-problem", "children"),
    Output("overview-report", "className"),
    Output("overview-verdict", "children"),
    Output("overview-figures", "children"),
    Output("overview-steps-fresh", "data"),
    Output("overview-steps-note", "children"),
    Output("overview-workers-fresh", "data"),
    Output("overview-excess-fresh", "data"),
    Output("overview-excess", "style"),
    Output("overview-excess-note", "children"),
    Output("overview-starved", "children"),
    Output("overview-findings", "children"),
    Output("overview-quality", "children"),
    Output("overview-clock", "interval"),
    Output("overview-clock", "max_intervals"),
)


def overview_page(provider: ReportProvider, run_id: str | None, *, base_path: str) -> Component:
    """Return the page of one run, or of the newest one where ``run_id`` is None."""
    shown = _look(provider, run_id, base_path)
    data, problem, hidden, *_ = shown.outputs()
    return html.Div(
        [
            dcc.Store(id="overview-shown", data=data),
            clock("overview-clock", pace_ms=shown.pace_ms),
            clock("heard-clock", pace_ms=pace_of(provider.runs(), shown.run)),
            html.Div(problem, id="overview-problem", **announced()),
            html.Div(shown.verdict, id="overview-verdict", **announced()),
            html.Div(heard_card(_heard(provider, shown.run)), id="overview-heard", **announced()),
            html.Div(_report(shown), id="overview-report", className=hidden),
        ]
    )


def register(app: Dash, provider: ReportProvider, *, base_path: str) -> None:
    """Keep the page current while its run trains, and lead from a cell to its step."""
    for part in ("overview-steps", "overview-workers", "overview-excess"):
        register_graph(app, part)

    @app.callback(
        *_OUTPUTS,
        Input("overview-clock", "n_intervals"),
        Input(RESCUE, "n_intervals"),
        State("overview-shown", "data"),
        prevent_initial_call=True,
    )
    def refresh(num_ticks: int, _rescues: int, shown: dict[str, Any]) -> tuple[Any, ...]:
        now = _revision(provider, shown["run"])
        if now is not None and now == shown["revision"]:
            return _same(num_ticks)
        fresh = _look(provider, shown["run"], base_path)
        is_made = fresh.pace_ms != SOON_MS
        if is_made and (fresh.run, fresh.revision) == (shown["run"], shown["revision"]):
            return _same(num_ticks)
        return fresh.outputs(num_ticks)

    # Of its own: a run that hangs brings nothing new, and its ranks fall silent all the same.
    @app.callback(
        Output("overview-heard", "children"),
        Output("heard-clock", "interval"),
        Output("heard-clock", "max_intervals"),
        Input("heard-clock", "n_intervals"),
        Input(RESCUE, "n_intervals"),
        State("overview-shown", "data"),
        prevent_initial_call=True,
    )
    def listen(num_ticks: int, _rescues: int, shown: dict[str, Any]) -> tuple[Any, ...]:
        run_id = shown["run"]
        pace = pace_of(provider.runs(), run_id)
        return heard_card(_heard(provider, run_id)), pace, next_tick(num_ticks)

    @app.callback(
        Output("url", "href", allow_duplicate=True),
        Input("overview-excess", "clickData"),
        State("overview-shown", "data"),
        prevent_initial_call=True,
    )
    def open_step(click: dict[str, Any] | None, shown: dict[str, Any]) -> str:
        if not click:
            raise PreventUpdate
        step = int(str(click["points"][0]["x"]).partition("-")[0])
        view = View(page=Page.TIMELINE, run=shown["run"], step=step)
        return write_address(view, base_path=base_path)


def _same(num_ticks: int | None) -> tuple[Any, ...]:
    """Return that nothing changed; the clock goes on."""
    return *(no_update,) * (len(_OUTPUTS) - 1), next_tick(num_ticks)


def _revision(provider: ReportProvider, run_id: str | None) -> int | None:
    """Return the run's revision; None where there is no such run."""
    if run_id is None:
        return None
    try:
        return provider.revision(run_id)
    except UnknownRunError:
        return None


def _heard(provider: ReportProvider, run_id: str | None) -> RankLiveness | None:
    """Return who is heard of in a run that trains, or was lost; None in any other."""
    states = {run.run_id: run.state for run in provider.runs()}
    return provider.liveness(run_id) if run_id and states.get(run_id) in LIVE_STATES else None


def _look(provider: ReportProvider, run_id: str | None, base_path: str) -> _Shown:
    """Ask the provider anew."""
    runs = provider.runs()
    if run_id is None:
        if not runs:
            return _Shown(run=None, revision=None, problem=[no_runs()])
        run_id = runs[0].run_id
    pace = pace_of(runs, run_id)
    revision = _revision(provider, run_id)
    try:
        report = provider.report(run_id)
    except UnknownRunError as error:
        return _Shown(run=run_id, revision=revision, problem=[missing_run(error)], pace_ms=pace)
    if report is None:
        problem = [no_steps(run_id, state=_state(runs, run_id))]
        return _Shown(run=run_id, revision=revision, problem=problem, pace_ms=pace)
    if not isinstance(report, RunReport):
        return _early(report)
    return _Shown(
        run=run_id,
        revision=revision,
        verdict=verdict_card(report, provider.verdict(report), num_spans=_num_spans(runs, run_id)),
        key_figures=key_figures(report),
        steps=step_time_figure(report),
        steps_note="" if report.mfu else f"MFU n/a: {mfu_reason(report)}.",
        workers=worker_figure(report),
        excess=excess_figure(report),
        excess_note=excess_note(report.excess),
        starved=starved_list(report.starved),
        findings=[findings_table(report, base_path=base_path)],
        quality=quality_list(report),
        pace_ms=pace,
    )


def _num_spans(runs: Sequence[RunSummary], run_id: str) -> int | None:
    return next((run.num_spans for run in runs if run.run_id == run_id), None)


def _state(runs: Sequence[RunSummary], run_id: str) -> str:
    return next((run.state for run in runs if run.run_id == run_id), "")


def _early(found: AnalysisInProgress | AnalysisFailed) -> _Shown:
    """Show what is known without a diagnosis, each part in the place that it will have."""
    is_busy = isinstance(found, AnalysisInProgress)
    when = LATER if is_busy else NEVER
    run_id, seen = found.run.run_id, found.steps
    blank = blank_figure(when, height=340)
    said: list[Component] = [html.P(when, className="quiet")]
    return _Shown(
        run=run_id,
        revision=None,
        verdict=no_verdict_yet(found)
        if isinstance(found, AnalysisInProgress)
        else no_verdict(found),
        key_figures=early_figures(found),
        steps=blank if seen is None else seen_figure(run_id, seen),
        workers=blank,
        excess=blank_figure(when, height=220),
        starved=said,
        findings=said,
        quality=said,
        pace_ms=SOON_MS,
    )


def _report(shown: _Shown) -> list[Component]:
    """Lay the parts out."""
    return [
        html.Div(shown.key_figures, id="overview-figures", className="figures"),
        html.Div(
            [
                _drawn(
                    "overview-steps",
                    shown.steps,
                    title="Step time and MFU",
                    about="Every step as it was. Shaded: the steps of the top finding."
                    " Hollow: start-up.",
                    note=shown.steps_note,
                ),
                _drawn(
                    "overview-workers",
                    shown.workers,
                    title="Slowdown by worker",
                    about="An isolated cell is a worker, a row a stage.",
                ),
                _drawn(
                    "overview-excess",
                    shown.excess,
                    title="Excess compute time by rank and step",
                    about="Own compute above the step's median rank, waits left out."
                    " Blank: unknown. Click a cell to open its step.",
                    note=shown.excess_note,
                ),
                card(
                    html.H2("Who starves on whom"),
                    html.P("Waiting time over step time, followed to the root.", className="about"),
                    html.Div(shown.starved, id="overview-starved"),
                ),
            ],
            className="grid",
        ),
        card(html.H2("Findings"), html.Div(shown.findings, id="overview-findings")),
        card(html.H2("Data quality"), html.Div(shown.quality, id="overview-quality")),
    ]


def _drawn(part: str, figure: go.Figure, *, title: str, about: str, note: str = "") -> Component:
    return card(
        html.H2(title),
        html.P(about, className="about"),
        graph(part, figure),
        html.P(note, id=f"{part}-note", className="note"),
        label=title,
    )
