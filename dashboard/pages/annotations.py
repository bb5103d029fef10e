"""Tags and notes of runs: what pages show of them, and how a reader changes them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import dash_mantine_components as dmc  # type: ignore[import-untyped]
from dash import Dash, Input, Output, State, dcc, html
from dash.exceptions import PreventUpdate

from ..callback_checks import Number, checked
from ..text import escape
from .components import announced, labelled, local_time
from .refresh import AGAIN, Shown

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from dash.development.base_component import Component

    from rankscope.dashboard.records.page_results import RunAnnotations, ShownNote

    from ..provider import ReportProvider


def tags_input(part: str, tags: Sequence[str], *, may_change: bool = True) -> list[Component]:
    """Return a field of tags, and those that were stored when it was shown."""
    return [
        dcc.Store(id=f"{part}-stored", data=list(tags)),
        dmc.TagsInput(
            id=part,
            value=list(tags),
            placeholder="" if tags else "add a tag",
            size="xs",
            splitChars=[","],
            disabled=not may_change,
            acceptValueOnBlur=True,
            className="tags-input",
            **labelled("tags"),
        ),
    ]


def change_tags(
    provider: ReportProvider, runs: Collection[str], now: Collection[str], stored: Collection[str]
) -> str:
    """Add the tags that are new in a field to some runs, and remove those that went.

    Raises:
        PreventUpdate: The field is as stored.
    """
    changes = [(tag, False) for tag in now if tag not in stored]
    changes += [(tag, True) for tag in stored if tag not in now]
    if not changes or not runs:
        raise PreventUpdate
    done = [
        provider.annotate(run, "tag", tag, is_removed=is_removed)
        for run in runs
        for tag, is_removed in changes
    ]
    return (
        escape(done[0])
        if len(set(done)) == 1
        else escape(f"{len(done)} changes; the last one: {done[-1]}")
    )


def annotations_row(annotations: RunAnnotations) -> Component:
    """Return the tags and notes of a run in one row; what a reader may not change is not offered.

    Its fields are there in any case: a callback needs them.
    """
    may_change = annotations.may_change
    return html.Div(
        [
            html.Div(
                tags_input("overview-tags", annotations.tags, may_change=may_change),
                className="tags" if may_change or annotations.tags else "hidden",
            ),
            html.Div(
                dmc.TextInput(
                    id="overview-note",
                    placeholder="add a note, Enter to save",
                    size="xs",
                    **labelled("new note"),
                ),
                className="new-note" if may_change else "hidden",
            ),
            html.Span(id="overview-annotated", className="about", **announced()),
            html.Ul(
                [html.Li(_note(note)) for note in annotations.notes],
                id="overview-notes",
                className="notes" if annotations.notes else "hidden",
            ),
        ],
        id="overview-annotations",
        className="annotations",
    )


def _note(note: ShownNote) -> list[Component | str]:
    author = f"{escape(note.author)}, " if note.author else ""
    written = html.Span([author, local_time(note.written)], className="quiet")
    return [" ".join(escape(word) for word in note.text.split(" ")), " ", written]


def register_annotations(app: Dash, provider: ReportProvider) -> None:
    """Store the tags and notes that a reader writes on the overview of a run."""

    @app.callback(
        Output("overview-annotated", "children"),
        Output(AGAIN, "data", allow_duplicate=True),
        Input("overview-tags", "value"),
        State("overview-tags-stored", "data"),
        State("page-shown", "data"),
        prevent_initial_call=True,
    )
    @checked
    def tag(
        now: list[str] | None, stored: list[str] | None, shown: Shown | None
    ) -> tuple[str, Any]:
        if shown is None or shown.run is None:
            raise PreventUpdate
        return change_tags(provider, [shown.run], now or (), stored or ()), time.time_ns()

    @app.callback(
        Output("overview-annotated", "children", allow_duplicate=True),
        Output("overview-note", "value"),
        Output(AGAIN, "data", allow_duplicate=True),
        Input("overview-note", "n_submit"),
        State("overview-note", "value"),
        State("page-shown", "data"),
        prevent_initial_call=True,
    )
    @checked
    def note(
        num_submits: Number | None, text: str | None, shown: Shown | None
    ) -> tuple[str, str, Any]:
        if not num_submits or not text or shown is None or shown.run is None:
            raise PreventUpdate
        return escape(provider.annotate(shown.run, "note", text)), "", time.time_ns()
