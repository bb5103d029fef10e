"""What a page says while the diagnosis is made, and where it can't be."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dash import html

from rankscope.analysis.report.progress import Activity, AnalysisInProgress
from rankscope.analysis.report.text import (
    format_count,
    format_percent,
    format_ranks,
    format_seconds,
)
from rankscope.analysis.trace.errors import DeletedRunError, UnknownRunError

from ..text import visible
from .components import card

if TYPE_CHECKING:
    from dash.development.base_component import Component

    from rankscope.analysis.report.progress import AnalysisFailed, MarkedSteps
    from rankscope.analysis.report.report import Finding
    from rankscope.analysis.trace.tables import RunSummary

LATER = "after the analysis"
NEVER = "needs the analysis"


def no_verdict_yet(found: AnalysisInProgress) -> list[Component]:
    """Return, in the place of the verdict, what the analysis does and what is known before it."""
    return [
        html.Div(
            [
                html.P("analysis under way", className="verdict-cause"),
                html.H1(f"No verdict yet: {_doing(found)}.", className="verdict-sentence"),
                html.P([html.Span(fact) for fact in _facts(found.run)], className="facts"),
                # A screen reader hears of what changes, not of each second.
                html.P(
                    f"{found.elapsed_s:,.0f} s so far. This page fills by itself.",
                    className="about",
                    **quietly(),
                ),
                html.Div(className="busy-bar", **hidden_from_readers()),
                *map(_told, found.earlier_findings),
            ],
            className="verdict busy",
        )
    ]


def no_verdict(found: AnalysisFailed) -> list[Component]:
    """Return, in the place of the verdict, why there is none."""
    return [
        html.Div(
            [
                html.P("analysis failed", className="verdict-cause"),
                html.H1(
                    "No verdict: this run could not be analysed.", className="verdict-sentence"
                ),
                html.P(visible(found.reason), className="failure"),
                html.P([html.Span(fact) for fact in _facts(found.run)], className="facts"),
                html.P(
                    "It is tried again every half minute while this page is open. The server's"
                    " log and `rankscope analyze` tell the same.",
                    className="about",
                ),
            ],
            className="verdict unsure",
        )
    ]


def known_figures(found: AnalysisInProgress | AnalysisFailed) -> list[tuple[str, str, str]]:
    """Return the key figures as word, value and meaning; "…" where the analysis tells."""
    seen = found.steps
    when = LATER if isinstance(found, AnalysisInProgress) else NEVER
    return [
        ("step time", _mean_text(seen), "mean, as the ranks marked it"),
        ("ideal", "…", when),
        ("slowdown", "…", when),
        ("waste", "…", when),
        (
            "MFU",
            "…" if seen is None or seen.mfu is None else format_percent(seen.mfu.mean, digits=1),
            _mfu(seen),
        ),
        ("launch", "…", when),
    ]


def drawing(run_id: str, step: int) -> Component:
    """Say that a step's spans are being read and drawn."""
    return card(
        html.H2(f"Drawing step {step} of run {visible(run_id)!r}", className="empty-title"),
        html.P("Its spans are read one by one. This page fills by itself."),
        html.Div(className="busy-bar", **hidden_from_readers()),
        class_name="empty",
    )


def reading_steps(run_id: str) -> Component:
    """Say that the run's steps are being looked up."""
    return card(
        html.H2(f"Looking up the steps of run {visible(run_id)!r}", className="empty-title"),
        html.P("This page fills by itself."),
        html.Div(className="busy-bar", **hidden_from_readers()),
        class_name="empty",
    )


def quietly() -> dict[str, Any]:
    """Return the attribute that keeps a screen reader from telling a part's changes."""
    return {"aria-live": "off"}


def hidden_from_readers() -> dict[str, Any]:
    """Return the attribute of an ornament."""
    return {"aria-hidden": "true"}


def _doing(found: AnalysisInProgress) -> str:
    progress = found.progress
    if progress.activity is Activity.WAITING:
        return "other runs are analysed first"
    if progress.activity is Activity.READING or not progress.num_spans:
        return f"reading what {format_count(found.run.world_size, 'rank')} recorded"
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
    ]


def _told(finding: Finding) -> Component:
    who = f" on {format_ranks(finding.ranks)}" if finding.ranks else ""
    since = f", steps {finding.steps[0]} to {finding.steps[1]}" if finding.steps else ""
    return html.P(
        [
            "Found before this analysis: ",
            html.Span(finding.cause, className="cause"),
            f"{who}{since}.",
        ],
        className="told",
    )


def _mean_text(seen: MarkedSteps | None) -> str:
    if seen is None or not seen.actual_s_by_step:
        return "…"
    return format_seconds(sum(seen.actual_s_by_step.values()) / len(seen.actual_s_by_step))


def _mfu(seen: MarkedSteps | None) -> str:
    if seen is None:
        return "being read"
    if seen.mfu is None:
        return LATER
    return f"mean of {format_count(len(seen.mfu.by_step), 'step')}"


OVER = frozenset({"ended", "failed"})


LOST = "lost"


def no_data(reason: str, *advice: str, command: str = "") -> Component:
    """Return a card that explains an absence.

    Args:
        reason: What is missing, completing "No data because ...".
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
    """Say how a first run gets into the store."""
    return no_data(
        "this store holds no runs yet",
        "Train something with the tracer on, import a trace, or watch the demo:"
        " the run appears here by itself.",
        command="rankscope demo",
    )


def missing_run(error: UnknownRunError) -> Component:
    """Say why the run is not there."""
    if isinstance(error, DeletedRunError):
        return _deleted_run(error.run_id)
    return _unknown_run(error.run_id)


def _deleted_run(run_id: str) -> Component:
    return no_data(
        f"run {visible(run_id)!r} was deleted",
        "Nothing of it is left, and its name is not given again. Choose another run above.",
        command="rankscope runs",
    )


def _unknown_run(run_id: str) -> Component:
    return no_data(
        f"there is no run {visible(run_id)!r} in this store",
        "The address may be mistyped. Choose another run above.",
        command="rankscope runs",
    )


def no_steps(run_id: str, *, state: str) -> Component:
    """Say that the run is known and nothing of it can be analysed, yet or at all.

    Args:
        run_id: The run.
        state: Whether it trains, as its line of `rankscope runs` tells.
    """
    if state in OVER:
        return no_data(
            f"run {visible(run_id)!r} {state} before a step of it was recorded completely",
            "The job is over, so nothing more comes. Its own log says what ended it; if it trained"
            " for a while, check that it marks its steps.",
        )
    if state == LOST:
        return no_data(
            f"run {visible(run_id)!r} fell silent before a step of it was recorded completely",
            "None of its ranks was heard of for 15 minutes: its hosts are gone, or cannot reach"
            " this server. If they can again, this page fills by itself.",
        )
    return no_data(
        f"no step of run {visible(run_id)!r} has been recorded completely yet",
        "This page fills by itself as soon as one has. If it stays empty while the job trains,"
        " check that the job marks its steps and that its spool is the one being read.",
    )


def unknown_page(path: str) -> Component:
    """Say that the address names no page."""
    return no_data(
        f"there is no page at {visible(path)!r}", "The menu above leads to the pages that exist."
    )
