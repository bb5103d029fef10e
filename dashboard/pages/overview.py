"""The overview page: the verdict on one run, and the evidence for it."""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b
from threading import Lock
from typing import TYPE_CHECKING
from urllib.parse import urlencode

from cachetools import LRUCache, cached
from dash import Dash, Input, Output, State, html
from dash.exceptions import PreventUpdate

from rankscope.analysis.breakdown.host_moves import find_moves, format_move
from rankscope.analysis.report.report import RunReport, Severity
from rankscope.analysis.severity import MATTERS
from rankscope.dashboard.records.progress import AnalysisInProgress

from ..address import OVERVIEW, TIMELINE, View, read_steps, write_address
from ..callback_checks import Click, Point, checked
from ..exports import FINDINGS_PATH, REPORT_PATH
from ..figures.excess import (
    excess_figure,
    excess_note,
    excess_title,
    ranks_of_row,
    shown_excess,
)
from ..figures.step_time import kind_times_figure, marked_steps_figure, step_time_figure
from ..figures.workers import worker_figure, worker_title
from ..text import escape
from ..theme import blank_figure
from .annotations import annotations_row, register_annotations
from .components import LOST, RUNNING, announced, card, graph, with_code
from .device_time import profile_cards
from .goodput import goodput_card
from .overview_cards import (
    early_figures,
    findings_table,
    key_figures,
    liveness_card,
    proof_cards,
    quality_list,
    starved_list,
    steps_note,
    verdict_card,
)
from .page import Content, Page
from .placeholders import (
    AFTER_ANALYSIS,
    NEEDS_ANALYSIS,
    no_steps,
    no_verdict,
    no_verdict_yet,
)
from .refresh import Shown
from .report_page import state_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dash.development.base_component import Component

    from rankscope.analysis.report.liveness import RankLiveness
    from rankscope.dashboard.records.progress import AnalysisFailed, MeanKindTimes

    from ..provider import ReportProvider
    from .components import Figure

MAX_HOST_LINES = 12
MAX_DRAWN = 4
"""Reports whose figures are kept: drawing those of 12,288 ranks takes 0.1 s."""


def show_overview(provider: ReportProvider, view: View) -> Content:
    """Return the verdict on a run and its evidence, or each part in its place without a report."""
    run_id = str(view.run)
    report = provider.report(run_id)
    state = state_of(provider, run_id)
    liveness = html.Div(
        liveness_card(_liveness(provider, run_id), provider.silence(run_id), run=run_id),
        id="overview-liveness",
        **announced(),
    )
    if report is None:
        return Content(problem=no_steps(run_id, state=state), children=[liveness])
    times = provider.kind_times(run_id)
    open_step = report.open_step if isinstance(report, RunReport) else None
    kinds = _figure_card(
        "overview-kinds",
        kind_times_figure(run_id, times, open_step),
        title="Time by kind of span",
        about=_kinds_about(times, open_step),
    )
    if not isinstance(report, RunReport):
        row = annotations_row(provider.annotations(run_id))
        return _without_report(report, liveness, kinds, row)
    num_spans = next((run.num_spans for run in provider.runs() if run.run_id == run_id), None)
    verdict = verdict_card(
        report,
        provider.verdict(report),
        num_spans=num_spans,
        silence=provider.silence(run_id),
        is_lost=state == LOST,
    )
    parts = _Parts(
        verdict=verdict,
        proofs=proof_cards(
            report,
            incidents=provider.incident_numbers(report),
            beneath=[
                liveness,
                _numbers(key_figures(report)),
                annotations_row(provider.annotations(run_id)),
            ],
        ),
        figures=_draw(report)[1],
        starved=starved_list(report),
        findings=[findings_table(report)],
        device=(*_host_use_card(report, provider.excluded_hosts(report)), *profile_cards(report)),
        goodput=goodput_card(provider.goodput(run_id)),
        kinds=kinds,
        quality=quality_list(report),
        is_calm=report.top_finding.severity in (Severity.NONE, Severity.MINOR),
    )
    return Content(children=parts.arrange(run_id))


@cached(LRUCache(maxsize=MAX_DRAWN), key=id, lock=Lock())
def _draw(report: RunReport) -> tuple[RunReport, list[Component]]:
    """Return the figures of a report, which its viewers share, and the report that has the id."""
    excess = shown_excess(report)
    workers_title, workers_about = worker_title(report)
    return report, [
        _figure_card(
            "overview-steps",
            step_time_figure(report),
            title=_STEPS_TITLE,
            about=_STEPS_ABOUT if report.top_finding.severity in MATTERS else _WARM_UP_ABOUT,
            note=with_code(steps_note(report)),
        ),
        _figure_card(
            "overview-workers", worker_figure(report), title=workers_title, about=workers_about
        ),
        _figure_card(
            "overview-excess",
            excess_figure(report),
            title=excess_title(excess),
            about=f"Time above {excess.baseline}, without waiting. Blank: unknown."
            " Click a cell to open its step with its ranks marked.",
            note=excess_note(excess),
        ),
    ]


_STEPS_TITLE = "Step time and MFU"
_WARM_UP_ABOUT = "Hollow points: warm-up."
_STEPS_ABOUT = f"Shaded: steps of the top finding. {_WARM_UP_ABOUT}"


def _without_report(
    found: AnalysisInProgress | AnalysisFailed,
    liveness: Component,
    kinds: Component,
    annotations: Component,
) -> Content:
    """Return what is known without a diagnosis, each part in its final place."""
    if isinstance(found, AnalysisInProgress):
        reason, verdict = AFTER_ANALYSIS, no_verdict_yet(found)
    else:
        reason, verdict = NEEDS_ANALYSIS, no_verdict(found)
    run_id = found.run.run_id
    blank = blank_figure(reason, height=340)
    steps = blank if found.steps is None else marked_steps_figure(run_id, found.steps)
    text: list[Component] = [html.P(reason, className="quiet")]
    figures = [
        _figure_card("overview-steps", steps, title=_STEPS_TITLE, about=_STEPS_ABOUT),
        _figure_card("overview-workers", blank, title="Slowdown by worker"),
        _figure_card(
            "overview-excess", blank_figure(reason, height=220), title="Excess by rank and step"
        ),
    ]
    parts = _Parts(
        verdict=verdict,
        proofs=[liveness, _numbers(early_figures(found)), annotations],
        figures=figures,
        starved=text,
        findings=text,
        kinds=kinds,
        quality=text,
    )
    return Content(children=parts.arrange(run_id), is_unfinished=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """Parts of the page that differ with and without a report."""

    verdict: list[Component]
    proofs: list[Component]
    """Also key figures, tags and notes, beneath the first."""

    figures: list[Component]
    starved: list[Component]
    findings: list[Component]
    kinds: Component
    quality: list[Component]
    device: tuple[Component, ...] = ()
    goodput: list[Component] = field(default_factory=list)
    is_calm: bool = False
    """Whether no finding matters: the maps by rank are closed then."""

    def arrange(self, run_id: str) -> list[Component]:
        downloads = _downloads(run_id)
        waits = card(
            html.H2("Who waits for whom"),
            html.P(
                "Share of each step spent waiting, and the rank or link that caused it.",
                className="about",
            ),
            html.Div(self.starved, id="overview-starved"),
        )
        return [
            html.Div(self.verdict, id="overview-verdict", **announced()),
            html.Div(self.proofs, id="overview-proof"),
            *self._maps(waits),
            card(
                html.Div([html.H2("Findings"), *downloads], className="titled"),
                html.Div(self.findings, id="overview-findings"),
            ),
            *self.device,
            html.Div(self.goodput, id="overview-goodput", className="wide-cards"),
            self.kinds,
            card(html.H2("Data quality"), html.Div(self.quality, id="overview-quality")),
        ]

    def _maps(self, waits: Component) -> list[Component]:
        """Return the figures in a grid; if no finding matters, the maps closed beneath."""
        steps, *maps = self.figures
        if not self.is_calm:
            return [html.Div([*self.figures, waits], className="grid")]
        closed = html.Details(
            [html.Summary("Maps of all ranks, which show no finding"), *maps],
            id="overview-maps",
            className="more-proofs",
        )
        return [html.Div([steps, waits], className="grid"), closed]


def _revision(provider: ReportProvider, view: View) -> str:
    """Return what changes with a run's report, and with what its ranks do meanwhile.

    A run that hangs has no new report, but its ranks fall silent; and steps are summed up by kind
    after they were analysed.
    """
    run_id = str(view.run)
    times, silence = provider.kind_times(run_id), provider.silence(run_id)
    parts = (
        provider.revision(run_id),
        silence is not None,
        None if times is None else times.revision,
        _liveness(provider, run_id),
        provider.annotations(run_id),
    )
    return blake2b(repr(parts).encode(), digest_size=8).hexdigest()


def _register(app: Dash, provider: ReportProvider) -> None:
    register_annotations(app, provider)

    @app.callback(
        Output("url", "href", allow_duplicate=True),
        Input("overview-excess", "clickData"),
        State("page-shown", "data"),
        prevent_initial_call=True,
    )
    @checked
    def open_step(click: Click | None, shown: Shown | None) -> str:
        point = Point() if click is None else click.point
        steps = read_steps(str(point.x))  # one step, or the first and last of several
        if steps is None or shown is None or shown.run is None:
            raise PreventUpdate
        report = provider.report(shown.run)
        ranks: tuple[int, ...] = ()
        if isinstance(report, RunReport):
            ranks = ranks_of_row(shown_excess(report), str(point.y))
        view = View(page=TIMELINE, run=shown.run, step=steps[0], ranks=ranks)
        return write_address(view)


PAGE = Page(
    name=OVERVIEW, title="Overview", show=show_overview, revision=_revision, register=_register
)


def _liveness(provider: ReportProvider, run_id: str) -> RankLiveness | None:
    """Return the liveness of a run that trains or was lost; None for any other."""
    return provider.liveness(run_id) if state_of(provider, run_id) in (RUNNING, LOST) else None


def _numbers(figures: list[Component]) -> Component:
    return html.Div(figures, id="overview-figures", className="figures")


def _downloads(run_id: str | None) -> list[Component]:
    files = {
        FINDINGS_PATH: ("CSV", "The findings as a table for a spreadsheet"),
        REPORT_PATH: ("Report to send", "One HTML file without scripts, which needs no server"),
    }
    query = urlencode({"run": run_id or ""})
    return [
        html.A(text, href=f"/{path}?{query}", title=title, className="button small")
        for path, (text, title) in files.items()
    ]


def _host_use_card(report: RunReport, excluded: Sequence[str]) -> list[Component]:
    """Return what restarts changed, and which excluded hosts are in use; nothing without either.

    Args:
        excluded: A sentence about each excluded host that it uses or has used.
    """
    lines = [f"{format_move(move)}." for move in find_moves(report)]
    lines = [line[0].upper() + line[1:] for line in lines] + [*excluded]
    if not lines:
        return []
    more = len(lines) - MAX_HOST_LINES
    shown = [html.Li(with_code(escape(line))) for line in lines[-MAX_HOST_LINES:]]
    earlier = (
        [html.P(f"{more:,} earlier ones are not listed.", className="quiet")] if more > 0 else []
    )
    return [card(html.H2("Hosts"), *earlier, html.Ul(shown, className="notices"))]


def _kinds_about(times: MeanKindTimes | None, open_step: int | None) -> str:
    about = (
        "Mean per rank. Communication: the time that no compute hides, waiting included. Kinds"
        " overlap, so they do not add up to the step time."
    )
    steps = {step for by_step in times.busy_s.values() for step in by_step} if times else set()
    if open_step is None or max(steps, default=-1) < open_step:
        return about  # Of a running job, the step that hangs is not summed up.
    return f"{about} Step {open_step:,} never ended: a triangle is a time beyond the axis."


def _figure_card(
    part: str,
    figure: Figure,
    *,
    title: str,
    about: str = "",
    note: str | list[Component | str] = "",
) -> Component:
    return card(
        html.H2(title, id=f"{part}-title"),
        html.P(about, id=f"{part}-about", className="about"),
        graph(part, figure),
        html.P(note, id=f"{part}-note", className="note"),
        label=title,
    )
