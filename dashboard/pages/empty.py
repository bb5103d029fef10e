"""What a page says when there is nothing to draw: why, and what to do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dash import html

from rankscope.analysis.trace.errors import DeletedRunError, UnknownRunError

from ..text import visible
from .frame import card

OVER = frozenset({"ended", "failed"})
LOST = "lost"

if TYPE_CHECKING:
    from dash.development.base_component import Component


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
