"""The what-if page: a step replayed with changes, and other pipeline schedules."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import dash_mantine_components as dmc  # type: ignore[import-untyped]
from dash import Dash, Input, Output, State, dcc, html
from dash.exceptions import PreventUpdate

from rankscope.analysis.price.operation_sets import Part
from rankscope.analysis.replay.pipeline import ScheduleError, plan
from rankscope.analysis.report.text import (
    format_count,
    format_percent,
    format_ranges,
    format_seconds,
)
from rankscope.analysis.trace.errors import AnalysisError
from rankscope.analysis.what_if import PlayError
from rankscope.tracer.span import NS_PER_S

from ..address import WHAT_IF, View, read_address, read_ranks, write_address
from ..callback_checks import checked
from ..text import escape
from .components import card, labelled, rank_link, table
from .page import Content
from .refresh import Shown
from .report_page import page_head, report_page

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dash.development.base_component import Component

    from rankscope.analysis.report.report import Finding, RunReport
    from rankscope.analysis.what_if import RunPlay, StepPlay

    from ..provider import ReportProvider

BETWEEN = "~"
"""Between the changes of an address."""

MAX_CHANGES = 16
MAX_RANKS = 64
"""Ranks that one change scales."""

MAX_LISTED = 8
"""Ranks of a critical path."""


@dataclass(frozen=True, slots=True)
class Change:
    """One change of the address: a word, and what it is about."""

    word: str
    about: tuple[str, ...] = ()

    def __str__(self) -> str:
        return ":".join((self.word, *self.about))


FIX, SCALE, SWAP, BALANCE = "fix", "scale", "swap", "balance"


def read_changes(text: str) -> tuple[Change, ...]:
    """Return the changes that an address names; those without meaning are left out."""
    parts = (part.split(":") for part in text.split(BETWEEN)[:MAX_CHANGES])
    return tuple(
        Change(word, tuple(about))
        for word, *about in parts
        if len(about) == {FIX: 1, SCALE: 2, SWAP: 2, BALANCE: 0}.get(word)
    )


def apply_change(play: StepPlay, change: Change, report: RunReport) -> StepPlay:
    """Return the step with one change more.

    Raises:
        AnalysisError: The run does not admit it.
    """
    if change.word == BALANCE:
        return play.balance_stages()
    if change.word == SWAP:
        return play.swap_hosts(*change.about)
    if change.word == FIX:
        numbers = read_ranks(change.about[0])
        if not numbers or numbers[0] >= len(report.findings):
            raise PlayError("the report has no such finding any more")
        return play.fix(report.findings[numbers[0]])
    ranks = read_ranks(change.about[0])[:MAX_RANKS]
    try:
        factor = float(change.about[1])
    except ValueError:
        ranks = ()
        factor = 1.0
    if not ranks:
        raise PlayError("give ranks and a factor, such as 33 x 0.7")
    for rank in ranks:
        play = play.scale(Part(rank=rank), factor)
    return play


def show_what_if(provider: ReportProvider, report: RunReport, view: View) -> Content:
    """Return the page of a report."""
    about = (
        "Change a step and replay it. A fixed finding saves what the report says; all else stays as"
        " recorded."
    )
    try:
        run_play = provider.play(report.run)
    except AnalysisError as error:
        reason = card(html.P(f"{error}.", className="quiet"))
        return Content(children=[page_head("What if", about=about), reason])
    if run_play is None:
        wait = html.P("Reading the run…", className="quiet")
        return Content(children=[page_head("What if", about=about), wait], is_unfinished=True)
    steps = run_play.reading.steps
    step = view.step if view.step in steps else _first_step(report, steps)
    view = replace(view, step=step)
    play, refused = run_play.step(step), []
    changes = read_changes(view.show or "")
    kept = []
    for change in changes:
        try:
            play = apply_change(play, change, report)
        except AnalysisError as error:
            refused.append(f"{error}.")
        else:
            kept.append(change)
    page = _Page(run_play, report, view, tuple(kept))
    shown = [
        page_head("What if", page.step_chooser(steps), about=about),
        card(
            html.Div(_sentence(play), className="verdict-sentence", id="what-if-sentence"),
            _bars(play),
            page.made(),
            *(html.P(text, className="attention") for text in refused),
            label="step with the changes",
        ),
        card(
            html.H2("Changes"),
            html.P(
                "33 x 0.7: all that rank 33 does takes 0.7 of its time. Swapped hosts take the"
                " speed of their ranks with them.",
                className="about",
            ),
            page.findings(),
            page.others(),
        ),
        html.Div(
            [
                card(
                    html.H2("What decides the step's end"),
                    html.P("Time of each rank on the critical path.", className="about"),
                    page.critical(run_play.step(step), play),
                ),
                card(html.H2("Other pipelines"), *page.pipelines()),
            ],
            className="columns",
        ),
    ]
    return Content(children=shown, view=view)


def _first_step(report: RunReport, steps: Sequence[int]) -> int:
    """Return the step that shows the top finding best, else the last one."""
    proof = report.top_finding.proof
    return proof.step if proof is not None and proof.step in steps else steps[-1]


def _sentence(play: StepPlay) -> str:
    recorded, played = (format_seconds(ns / NS_PER_S) for ns in (play.recorded_ns, play.played_ns))
    if not play.changes:
        return f"Step {play.step} takes {recorded}."
    share = play.saved_ns / play.recorded_ns
    outcome = "as long as before"
    if round(share, 3):
        outcome = f"{format_percent(abs(share))} {'shorter' if share > 0 else 'longer'}"
    return f"Step {play.step} would take {played} instead of {recorded}: {outcome}."


def _bars(play: StepPlay) -> Component:
    longest_ns = max(play.recorded_ns, play.played_ns)
    rows = []
    times_ns = {"recorded": play.recorded_ns}
    if play.changes:
        times_ns["with changes"] = play.played_ns
    for name, time_ns in times_ns.items():
        width = f"{100 * time_ns / longest_ns:.2f}%"
        bar = html.Div(className=f"what-if-bar {name.split()[0]}", style={"width": width})
        text = format_seconds(time_ns / NS_PER_S)
        rows.append(html.Div([html.Span(name), html.Div(bar), html.Span(text)]))
    return html.Div(rows, className="what-if-bars")


@dataclass(frozen=True, slots=True)
class _Page:
    """A run that is played, and the shown view with its changes."""

    play: RunPlay
    report: RunReport
    view: View
    changes: tuple[Change, ...]

    def address(self, changes: Sequence[Change], *, step: int | None = None) -> str:
        show = BETWEEN.join(map(str, changes)) or None
        view = replace(self.view, show=show, step=self.view.step if step is None else step)
        return write_address(view)

    def toggle(self, text: str, change: Change) -> Component:
        """Return a link that adds a change, or takes it back."""
        is_on = change in self.changes
        rest = [each for each in self.changes if each != change]
        return dcc.Link(
            text,
            href=self.address(rest if is_on else [*self.changes, change]),
            className="choice chosen" if is_on else "choice",
        )

    def step_chooser(self, steps: Sequence[int]) -> Component:
        index = steps.index(self.view.step or 0)
        near = steps[max(index - 3, 0) : index + 4]
        links = [
            dcc.Link(
                f"{step:,}",
                href=self.address(self.changes, step=step),
                className="choice chosen" if step == self.view.step else "choice",
            )
            for step in near
        ]
        row = html.Div(links, className="choices plain", role="group", **labelled("step"))
        return html.Div([html.Span("step", className="quiet"), row], className="chooser")

    def made(self) -> Component:
        links = [
            dcc.Link(
                f"{escape(_describe(change, self.report))} ✕",
                href=self.address([each for each in self.changes if each != change]),
                className="choice chosen",
                title="take it back",
            )
            for change in self.changes
        ]
        row = html.Div(links, className="choices plain")
        return html.Div([row] if links else [], className="chooser")

    def findings(self) -> Component:
        """Return a switch for each finding that has operations."""
        switches = [
            self.toggle(_name(finding), Change(FIX, (str(number),)))
            for number, finding in enumerate(self.report.findings)
            if (change := self.play.change_of(finding)) is not None and len(change.rows)
        ]
        if not switches:
            return html.P("No finding has an operation that a fix would change.", className="quiet")
        row = html.Div(switches, className="choices plain", role="group", **labelled("fix"))
        return html.Div([html.Span("fix", className="quiet"), row], className="chooser")

    def others(self) -> Component:
        scale = dmc.TextInput(
            id="what-if-scale", value="", placeholder="33 x 0.7", debounce=True, w=150, size="sm",
            **labelled("ranks and the factor of their durations"),
        )  # fmt: skip
        swap = dmc.TextInput(
            id="what-if-swap", value="", placeholder="host-a, host-b", debounce=True, w=210,
            size="sm", **labelled("two hosts to exchange"),
        )  # fmt: skip
        parts = [
            html.Div([html.Span(name, className="quiet"), each], className="chooser")
            for name, each in (("ranks x factor", scale), ("swap hosts", swap))
        ]
        stage = self.play.reading.model.stage
        if stage.min() < stage.max():
            switch = self.toggle("equal stages", Change(BALANCE))
            parts.append(html.Div([switch], className="choices plain"))
        return html.Div(parts, className="chooser what-if-typed")

    def critical(self, before: StepPlay, after: StepPlay) -> Component:
        spent: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
        for column, play in enumerate((before, after)):
            path = play.critical_path()
            for rank, time_ns in zip(
                path.rank.tolist(), (path.end_ns - path.start_ns).tolist(), strict=True
            ):
                spent[rank][column] += time_ns
        longest = sorted(spent.items(), key=lambda item: -max(item[1]))[:MAX_LISTED]
        rows: list[list[Component | str]] = [
            [
                rank_link(self.report.run, rank),
                *(format_seconds(time_ns / NS_PER_S) if time_ns else "0" for time_ns in times),
            ]
            for rank, times in longest
        ]
        head = {"rank": "", "recorded": "number", "with changes": "number"}
        return table("critical path", head, rows)

    def pipelines(self) -> list[Component]:
        try:
            pipeline = self.play.pipeline
        except ScheduleError as error:
            return [html.P(f"{error}.", className="quiet")]
        _, chunks, stages = pipeline.compute_ns.shape
        own = pipeline.num_microbatches
        rows = []
        for num_chunks in sorted({1, 2, 4, chunks}):
            for num in sorted({own, 2 * own, 4 * own}):
                try:
                    planned = plan(pipeline, stages=stages, chunks=num_chunks, microbatches=num)
                except ScheduleError:
                    continue
                rows.append(
                    [
                        f"{num_chunks}",
                        f"{num}",
                        format_seconds(planned.step_ns / NS_PER_S),
                        format_percent(planned.bubble_ratio, digits=1),
                        f"{planned.speedup:.2f}x",
                    ]
                )
        about = (
            f"1F1B on {format_count(stages, 'stage')}, from the recorded compute of a micro-batch"
            " and the recorded transfers. Memory is not considered."
        )
        head = {
            "chunks": "number",
            "micro-batches": "number",
            "mean step": "number",
            "bubble": "number",
            "tokens/s": "number",
        }
        return [html.P(about, className="about"), table("other pipelines", head, rows)]


def _describe(change: Change, report: RunReport) -> str:
    match change.word, change.about:
        case "fix", (number,):
            return f"{_name(report.findings[read_ranks(number)[0]])} fixed"
        case "scale", (ranks, factor):
            return f"ranks {ranks} x {factor}"
        case "swap", (one, other):
            return f"hosts {one} and {other} swapped"
        case _:
            return "equal stages"


def _name(finding: Finding) -> str:
    ranks = f" {format_ranges(finding.ranks, max_ranges=2)}" if finding.ranks else ""
    return f"{finding.cause}{ranks}"


def _register(app: Dash, _provider: ReportProvider) -> None:
    def add(change: Change, path: str | None, search: str | None, shown: Shown | None) -> str:
        if shown is None:
            raise PreventUpdate
        view = replace(read_address(path, search), page=WHAT_IF, run=shown.run)
        changes = [*read_changes(view.show or ""), change]
        return write_address(replace(view, show=BETWEEN.join(map(str, changes))))

    @app.callback(
        Output("url", "href", allow_duplicate=True),
        Input("what-if-scale", "value"),
        State("url", "pathname"),
        State("url", "search"),
        State("page-shown", "data"),
        prevent_initial_call=True,
    )
    @checked
    def scale(text: str, path: str | None, search: str | None, shown: Shown | None) -> str:
        ranks, cross, factor = text.replace(" ", "").partition("x")
        if not cross or not read_ranks(ranks):
            raise PreventUpdate
        return add(Change(SCALE, (ranks, factor)), path, search, shown)

    @app.callback(
        Output("url", "href", allow_duplicate=True),
        Input("what-if-swap", "value"),
        State("url", "pathname"),
        State("url", "search"),
        State("page-shown", "data"),
        prevent_initial_call=True,
    )
    @checked
    def swap(text: str, path: str | None, search: str | None, shown: Shown | None) -> str:
        first, comma, second = text.partition(",")
        if not comma or not first.strip() or not second.strip():
            raise PreventUpdate
        return add(Change(SWAP, (first.strip(), second.strip())), path, search, shown)


PAGE = report_page(WHAT_IF, "What if", show_what_if, register=_register)
