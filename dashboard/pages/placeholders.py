"""Placeholders: what a page shows while a result is being made, or if there is none."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dash import html

from rankscope.analysis.report.text import (
    format_count,
    format_percent,
    format_ranks,
    format_seconds,
    format_steps,
)
from rankscope.analysis.trace.errors import DeletedRunError, UnknownRunError
from rankscope.dashboard.records.progress import Activity, AnalysisInProgress

from ..text import escape
from .components import ENDED, FAILED, LOST, card, decorative, not_announced, with_code

if TYPE_CHECKING:
    from dash.development.base_component import Component

    from rankscope.analysis.report.report import Finding
    from rankscope.analysis.trace.tables import RunSummary
    from rankscope.dashboard.records.progress import AnalysisFailed

PENDING = "…"
AFTER_ANALYSIS = "after the analysis"
NEEDS_ANALYSIS = "needs the analysis"
FILLS_ITSELF = "This page updates by itself."


def no_verdict_yet(found: AnalysisInProgress) -> list[Component]:
    """Return the verdict's place while the analysis runs: its progress, and earlier findings."""
    return [
        html.Div(
            [
                html.P("analysis in progress", className="verdict-cause"),
                html.H1(f"No verdict yet: {_activity(found)}.", className="verdict-sentence"),
                html.P([html.Span(fact) for fact in _facts(found.run)], className="facts"),
                # A screen reader reads the changes around it, not each second.
                html.P(
                    f"{found.elapsed_s:,.0f} s so far. {FILLS_ITSELF}",
                    className="about",
                    **not_announced(),
                ),
                html.Div(className="busy-bar", **decorative()),
                *map(_earlier_finding, found.earlier_findings),
            ],
            className="verdict busy",
        )
    ]


def no_verdict(found: AnalysisFailed) -> list[Component]:
    """Return the verdict's place if the analysis failed: the reason."""
    return [
        html.Div(
            [
                html.P("analysis failed", className="verdict-cause"),
                html.H1(
                    "No verdict: this run could not be analysed.", className="verdict-sentence"
                ),
                html.P(escape(found.reason), className="failure"),
                html.P([html.Span(fact) for fact in _facts(found.run)], className="facts"),
                html.P(
                    with_code(
                        "Retried every 30 s while this page is open. The server's log and"
                        " `rankscope analyze` report the same error."
                    ),
                    className="about",
                ),
            ],
            className="verdict unsure",
        )
    ]


def known_figures(found: AnalysisInProgress | AnalysisFailed) -> dict[str, tuple[str, str]]:
    """Return value and meaning of the key figures that need no analysis."""
    steps = found.steps
    if steps is None:
        return {
            "step time": (PENDING, "mean, as marked by the ranks"),
            "MFU": (PENDING, "being read"),
        }
    seconds = steps.actual_s_by_step.values()
    mean = format_seconds(sum(seconds) / len(seconds)) if seconds else PENDING
    return {
        "step time": (mean, "mean, as marked by the ranks"),
        "MFU": (PENDING, AFTER_ANALYSIS)
        if steps.mfu is None
        else (
            format_percent(steps.mfu.mean, digits=1),
            f"mean of {format_count(len(steps.mfu.by_step), 'step')}",
        ),
    }


def drawing_step(run_id: str, step: int) -> Component:
    """Return the card for a step whose spans are being read and drawn."""
    return _busy_card(
        f"Drawing step {step} of run {escape(run_id)!r}", f"Reading its spans. {FILLS_ITSELF}"
    )


def reading_steps(run_id: str) -> Component:
    """Return the card for a run whose steps are being read."""
    return _busy_card(f"Reading the steps of run {escape(run_id)!r}", FILLS_ITSELF)


def no_data(reason: str, *advice: str, command: str = "") -> Component:
    """Return a card that explains why there is nothing to show.

    Args:
        reason: What is missing; it completes "No data because ...".
        advice: Sentences that say what to do about it.
        command: A command line to copy.
    """
    return card(
        html.H2(f"No data because {reason}", className="empty-title"),
        *(html.P(sentence) for sentence in advice),
        *([html.Pre(html.Code(command), className="command")] if command else []),
        class_name="empty",
    )


def no_runs() -> Component:
    """Return the card for a store without runs."""
    return no_data(
        "this store holds no runs yet",
        "Train with the tracer, import a trace, or start the demo: the run appears here by itself.",
        command="rankscope demo",
    )


def missing_run(error: UnknownRunError) -> Component:
    """Return the card for a run that is not there."""
    run = escape(error.run_id)
    if isinstance(error, DeletedRunError):
        return no_data(
            f"run {run!r} was deleted",
            "Its data is gone, and its name cannot be used again. Choose another run above.",
            command="rankscope runs",
        )
    return no_data(
        f"there is no run {run!r} in this store",
        "Check the address, or choose another run above.",
        command="rankscope runs",
    )


def no_steps(run_id: str, *, state: str) -> Component:
    """Return the card for a run without a complete step.

    Args:
        state: The run's state, as in `RunSummary.state`.
    """
    run = escape(run_id)
    if state in (ENDED, FAILED):
        return no_data(
            f"run {run!r} {state} before a step was recorded completely",
            "The job is over, so no step follows. Its own log says why it ended. If it did train"
            " steps, check that it marks them.",
        )
    if state == LOST:
        return no_data(
            f"run {run!r} fell silent before a step was recorded completely",
            "No heartbeat of its ranks arrived for 15 minutes: its hosts are gone, or cannot reach"
            f" this server. {FILLS_ITSELF}",
        )
    return no_data(
        f"no step of run {run!r} has been recorded completely yet",
        f"{FILLS_ITSELF} If it stays empty while the job trains, check that the job marks its"
        " steps and that the collector reads its spool.",
    )


def unknown_page(path: str) -> Component:
    """Return the card for an address of no page."""
    return card(
        html.H2(f"There is no page at {escape(path)!r}", className="empty-title"),
        html.P("Choose a page in the menu above."),
        class_name="empty",
    )


def _busy_card(title: str, about: str) -> Component:
    return card(
        html.H2(title, className="empty-title"),
        html.P(about),
        html.Div(className="busy-bar", **decorative()),
        class_name="empty",
    )


def _activity(found: AnalysisInProgress) -> str:
    progress = found.progress
    if progress.activity is Activity.WAITING:
        return "other runs are analysed first"
    if progress.activity is Activity.READING or not progress.num_spans:
        return f"reading the records of {format_count(found.run.world_size, 'rank')}"
    return f"replaying {format_count(progress.num_spans, 'span')} and comparing the ranks"


def _facts(run: RunSummary) -> list[str]:
    sizes = " x ".join(
        f"{axis.upper()} {size}" for axis, size in run.layout.to_dict().items() if size > 1
    )
    return [
        format_count(run.world_size, "rank"),
        *([sizes] if sizes else []),
        format_count(run.num_steps, "step"),
        format_count(run.num_spans, "span"),
        *([run.state] if run.state else []),
        *run.warnings,
    ]


def _earlier_finding(finding: Finding) -> Component:
    ranks = f" on {format_ranks(finding.ranks)}" if finding.ranks else ""
    steps = f", {format_steps(finding.steps)}" if finding.steps else ""
    return html.P(
        [
            "Found before this analysis: ",
            html.Span(finding.cause, className="cause"),
            f"{ranks}{steps}.",
        ],
        className="earlier",
    )
