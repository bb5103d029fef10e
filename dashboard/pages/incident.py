"""The incident page: one finding with its life, at an address that stays the same."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING
from urllib.parse import urlencode

import dash_mantine_components as dmc  # type: ignore[import-untyped]
from dash import Dash, Input, Output, State, dcc, html
from dash.exceptions import PreventUpdate

from rankscope.analysis.report.report import RunReport, Severity
from rankscope.analysis.report.text import (
    EMPTY,
    UNKNOWN,
    format_age,
    format_count,
    format_device_hours,
    format_range,
    format_ranges,
    format_seconds,
    format_time,
)
from rankscope.dashboard.records.alert_list import AlertState
from rankscope.dashboard.records.incident import FixOutcome, IncidentState

from ..address import INCIDENT, View, read_address, write_address
from ..callback_checks import Number, checked
from ..exports import INCIDENT_PATH
from ..text import escape
from .alerts import alert_buttons, change_parts
from .components import STACKED, announced, card, labelled, link_ranks, rank_links, table, with_code
from .overview_cards import cause_style, escape_sentence, proof_cards
from .page import Content, Page
from .placeholders import no_data
from .refresh import AGAIN

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dash.development.base_component import Component

    from rankscope.dashboard.records.incident import Fix, Incident, IncidentView, Moment, ShownNote

    from ..provider import ReportProvider
    from .components import Cell

STYLES = {IncidentState.ENDED: "unsure", IncidentState.FIXED: "calm"}
"""Style of the verdict, if the state and not the severity decides."""

MAX_NUMBER = 9
"""Digits of an incident's number in an address."""

MAX_CHARS, MAX_NAME_CHARS = 2_000, 100
"""Of a note and of its author's name, as the store takes them."""


def show_incident(provider: ReportProvider, view: View) -> Content:
    """Return the incident that a view names, or the list of a run's incidents."""
    run_id = str(view.run)
    report = provider.report(run_id)
    if view.show is None:
        return Content(children=_list(provider.incidents(run_id), run_id))
    number = _number(view.show)
    shown = None if number is None else provider.incident(run_id, number)
    if shown is None:
        return Content(problem=missing_incident(run_id, view.show))
    found = report if isinstance(report, RunReport) else None
    page = _Page(shown=shown, report=found, provider=provider)
    return Content(children=page.parts(), is_unfinished=report is not None and found is None)


def missing_incident(run_id: str, number: str) -> Component:
    """Return the card for an incident that a run does not have."""
    return no_data(
        f"run {escape(run_id)!r} has no incident {escape(number)!r}",
        "Findings that matter are numbered from 0 in the order in which they opened. Check the"
        " address, or choose one of the list.",
        command=f"rankscope findings {escape(run_id)}",
    )


class _Page:
    """The parts of the page of one incident."""

    def __init__(
        self, *, shown: IncidentView, report: RunReport | None, provider: ReportProvider
    ) -> None:
        self.incident = shown.incident
        self.shown = shown
        self.report = report
        self.provider = provider

    def parts(self) -> list[Component]:
        return [
            html.Div(self.verdict(), id="incident-verdict", **announced()),
            html.Div(self.figures(), id="incident-figures", className="incident-figures"),
            html.Div(self.proof(), id="incident-proof"),
            html.Div(self.care(), id="incident-care"),
            html.Div(_notes(self.incident.notes), id="incident-notes"),
        ]

    def verdict(self) -> list[Component]:
        """Return what it is and its state in large letters, and where else it is shown."""
        incident = self.incident
        style = STYLES.get(incident.state) or cause_style(incident.cause, incident.severity)
        word = f"{incident.cause} · {incident.state}"
        facts: list[Component | str] = [
            f"incident {incident.number} of run {escape(incident.run)}",
            incident.severity or "not graded",
            *([f"on {_hosts(incident.hosts)}"] if incident.hosts else []),
            f"confidence {incident.confidence:.2f}",
        ]
        sentence = link_ranks(escape_sentence(self.sentence()), incident.run)
        return [
            html.Div(
                [
                    html.P(word, className="verdict-cause"),
                    html.H1(sentence, className="verdict-sentence"),
                    html.P(self.life(), className="incident-life"),
                    html.P([html.Span(fact) for fact in facts], className="facts"),
                    html.Div(self.links(), className="actions incident-links"),
                ],
                className=f"verdict {style}",
            )
        ]

    def sentence(self) -> str:
        """Return the verdict about this finding alone, or its evidence."""
        finding, report = self.shown.finding, self.report
        if finding is not None and report is not None and finding in report.findings:
            return self.provider.verdict(replace(report, findings=(finding,)))
        incident = self.incident
        ranks = f" of rank {format_ranges(incident.ranks)}" if incident.ranks else ""
        return f"{incident.cause}{ranks}: {incident.evidence}."

    def life(self) -> list[Component | str]:
        """Return the state in words: since when, until when, fixed or not, came back or not."""
        incident = self.incident
        parts: list[Component | str] = [f"{state_sentence(incident)} "]
        if incident.came_back_from is not None:
            parts += [
                "It came back: ",
                self.link_to(incident.came_back_from),
                " had ended before. ",
            ]
        if incident.came_back_as is not None:
            parts += ["It came back later as ", self.link_to(incident.came_back_as), "."]
        return parts

    def link_to(self, number: int) -> Component:
        view = View(page=INCIDENT, run=self.incident.run, show=str(number))
        address = write_address(view)
        return dcc.Link(f"incident {number}", href=address)

    def links(self) -> list[Component]:
        run = self.incident.run
        places = {
            "Overview": View(run=run),
            "All incidents of this run": View(page=INCIDENT, run=run),
        }
        query = urlencode({"run": run, "incident": self.incident.number})
        return [
            *(
                dcc.Link(text, href=write_address(view), className="button small")
                for text, view in places.items()
            ),
            html.A(
                "JSON",
                href=f"/{INCIDENT_PATH}?{query}",
                title="This incident as a file",
                className="button small",
            ),
        ]

    def figures(self) -> list[Component]:
        incident = self.incident
        steps = 0
        if incident.onset is not None and incident.last is not None:
            steps = incident.last.step - incident.onset.step + 1
        cost = "not priced: what it costs does not show in the time of steps"
        if incident.saved_s is not None and steps:
            cost = f"{format_seconds(incident.saved_s)} in each of {format_count(steps, 'step')}"
            cost += ", times the ranks of the job"
        figures = [
            ("onset", *_moment(incident.onset, incident.opened_ns, "first found")),
            ("last seen", *self.last_seen()),
            ("cost so far", format_device_hours(incident.lost_device_h), cost),
        ]
        if incident.fix is not None:
            figures.append(("step time", *_step_times(incident.fix)))
        return [
            html.Div(
                [
                    html.Span(word, className="figure-word"),
                    html.Span(value, className="figure-value"),
                    html.Span(meaning, className="figure-meaning"),
                ],
                className="figure",
            )
            for word, value, meaning in figures
        ]

    def last_seen(self) -> tuple[str, str]:
        """Return the last step that shows it, and up to which step was looked."""
        incident = self.incident
        value, at = _moment(incident.last, incident.closed_ns, "closed")
        if incident.last is None:
            return value, at
        if incident.state is IncidentState.ONGOING:
            onset = incident.onset
            begun_ns = None if onset is None else onset.at_ns
            if begun_ns is not None and incident.last.at_ns is not None:
                at = f"{format_age(incident.last.at_ns - begun_ns)} after the onset; {at}"
            return value, at
        return value, f"{at}; analysed up to step {incident.checked_step:,}"

    def proof(self) -> list[Component]:
        finding, report = self.shown.finding, self.report
        columns = html.Div(
            [
                html.Div(self.before_onset(), id="incident-before"),
                html.Div(self.history(), id="incident-history"),
            ],
            className="incident-columns",
        )
        if finding is None or report is None:
            text = "The proof is shown when the run is analysed."
            return [card(html.H2("Proof"), html.P(text, className="quiet")), columns]
        if finding.severity not in (Severity.CRITICAL, Severity.WARNING):
            finding = replace(finding, severity=Severity.WARNING)  # else it is not opened
        report = replace(report, findings=(finding,))
        return proof_cards(report, beneath=[columns])

    def before_onset(self) -> list[Component]:
        incident = self.incident
        title = html.H2("Before the onset")
        if not incident.before_onset:
            text = "No restart, setting, checkpoint or event is stored of the steps before it."
            return [card(title, html.P(text, className="quiet"))]
        rows: list[list[Cell]] = [
            [
                html.Span(escape(each.kind), className="mono"),
                dmc.TableTd(
                    link_ranks(escape_sentence(each.text), incident.run), className="evidence"
                ),
                _before(each.num_steps_before),
            ]
            for each in incident.before_onset
        ]
        head = {"what": "", "change": "", "before": "number"}
        about = "Stored changes, the restart first. They came before it; none is proved its cause."
        return [
            card(
                title,
                html.P(about, className="about"),
                table("before the onset", head, rows, class_name="plain-rows"),
            )
        ]

    def history(self) -> list[Component]:
        incident = self.incident
        title = f"History of {_hosts(incident.hosts)}" if incident.hosts else "History of its hosts"
        follows = []
        if incident.follows:
            sentence = f"{incident.follows[0].upper()}{incident.follows[1:]}."
            follows = [html.P(escape_sentence(sentence), className="about")]
        if not incident.history:
            text = "No other finding of any run names a rank there."
            if not incident.hosts:
                text = "It names no host."
            return [card(html.H2(title), *follows, html.P(text, className="quiet"))]
        rows: list[list[Cell]] = [
            [
                dmc.TableTd(format_time(each.opened_ns), className="unbroken"),
                escape(each.run_id),
                dcc.Link(
                    escape(each.cause),
                    href=write_address(View(page=INCIDENT, run=each.run_id, show=str(each.number))),
                    className="cause",
                ),
                rank_links(each.run_id, each.ranks, max_ranges=4),
                format_range(each.steps) if each.steps else EMPTY,
            ]
            for each in incident.history
        ]
        head = {"found (UTC)": "", "run": "", "cause": "", "ranks": "", "steps": "number"}
        return [
            card(
                html.H2(title),
                *follows,
                table("history of its hosts", head, rows, class_name=f"plain-rows {STACKED}"),
            )
        ]

    def care(self) -> list[Component]:
        """Return the buttons of its alert and the form for a note; for a reader, why not."""
        alert = self.shown.alert
        about = "No alert was raised about it."
        if alert is not None:
            about = f"Its alert ({alert.name}) is {alert.state}"
            if alert.acknowledged_by:
                is_that = alert.state is AlertState.ACKNOWLEDGED
                about += f"{'' if is_that else ', acknowledged'} by {escape(alert.acknowledged_by)}"
            about += "."
        # Parts of their own: a change of them leaves the form, and what is typed there.
        head = [
            html.H2("Acknowledgement and notes"),
            html.P(about, id="incident-about", className="about"),
        ]
        if not self.shown.may_change:
            text = "To acknowledge, silence or write, open the URL that `rankscope serve` printed."
            return [card(*head, html.P(with_code(text)))]
        return [
            card(
                *head,
                html.Div([] if alert is None else alert_buttons(alert), id="incident-buttons"),
                html.Div(
                    [
                        dmc.Textarea(
                            id="incident-text",
                            placeholder="What was seen or done: host drained, commit reverted, ...",
                            autosize=True,
                            minRows=2,
                            maxRows=12,
                            attributes={"input": {"maxLength": MAX_CHARS}},
                            size="sm",
                            className="incident-text",
                            **labelled("note"),
                        ),
                        html.Div(
                            [
                                dmc.TextInput(
                                    id="incident-author",
                                    placeholder="your name",
                                    attributes={"input": {"maxLength": MAX_NAME_CHARS}},
                                    persistence=True,
                                    size="sm",
                                    w=200,
                                    **labelled("your name"),
                                ),
                                dmc.Button("Add note", id="incident-add", size="sm"),
                            ],
                            className="controls",
                        ),
                    ],
                    className="stack incident-form",
                ),
                *change_parts(),
            )
        ]


def state_sentence(incident: Incident) -> str:
    """Return the state of an incident in a sentence."""
    onset, last, fix = incident.onset, incident.last, incident.fix
    since = "" if onset is None else f" since step {onset.step:,}"
    if incident.state is IncidentState.ONGOING:
        return f"Ongoing{since}."
    if incident.restarted is not None:
        again = incident.restarted
        return (
            f"It ended the job, which trains again in epoch {again.epoch}, from step"
            f" {again.step:,} on."
        )
    if incident.state is IncidentState.OPEN_AT_END:
        return f"Open at the end of the run{since}."
    if incident.state is IncidentState.ENDED_RUN:
        return "It ended the run." if last is None else f"It ended the run in step {last.step:,}."
    ended = "Ended." if last is None else f"Ended after step {last.step:,}."
    return ended if fix is None else f"{ended} {fix_sentence(fix)}"


def fix_sentence(fix: Fix) -> str:
    """Return whether the steps since the end are faster, with the interval of the difference."""
    since = f"since step {fix.first_step:,}"
    if fix.outcome is FixOutcome.TOO_FEW:
        if fix.num_before < fix.num_needed:
            return (
                f"Not verified: {format_count(fix.num_before, 'step')} showed it, and"
                f" {fix.num_needed} are needed."
            )
        return f"Not verified yet: {fix.num_after} of {fix.num_needed} steps {since}."
    change = format_change_of(fix)
    if fix.before_s is None or fix.after_s is None or fix.margin_s is None:
        return f"{fix.outcome.capitalize()}: {change} {since}."
    less_s = fix.before_s - fix.after_s
    interval = (
        f"{format_seconds(abs(less_s))} ± {format_seconds(fix.margin_s)}"
        f" {'less' if less_s >= 0 else 'more'}, 98 % interval"
    )
    return f"{fix.outcome.capitalize()}: {change} {since} ({interval})."


def format_change_of(fix: Fix) -> str:
    """Return the step time while it showed and since then: "460 to 338 ms"."""
    before, after = format_seconds(fix.before_s), format_seconds(fix.after_s)
    unit = after.rpartition(" ")[2]
    return f"{before.removesuffix(f' {unit}')} to {after}"


def _number(text: str) -> int | None:
    is_number = text.isascii() and text.isdigit() and len(text) <= MAX_NUMBER
    return int(text) if is_number else None


def _hosts(hosts: Sequence[str]) -> str:
    shown = ", ".join(escape(host) for host in hosts[:2])
    return f"{shown} and {len(hosts) - 2:,} more" if len(hosts) > 2 else shown  # noqa: PLR2004


def _moment(moment: Moment | None, found_ns: int | None, word: str) -> tuple[str, str]:
    """Return a step and its time; without a step, when the analysis had it."""
    if moment is None:
        at = "" if found_ns is None else f"{word} {format_time(found_ns)} UTC"
        return EMPTY, ", ".join(filter(None, ("no step shows it", at)))
    at = "no recorded end" if moment.at_ns is None else f"{format_time(moment.at_ns)} UTC"
    return f"step {moment.step:,}", f"{at}, epoch {moment.epoch}"


def _step_times(fix: Fix) -> tuple[str, str]:
    """Return the step time before and after the end, and before the onset."""
    if fix.outcome is FixOutcome.TOO_FEW:
        return EMPTY, fix_sentence(fix)
    usual = "" if fix.usual_s is None else f"; {format_seconds(fix.usual_s)} before the onset"
    steps = f"{fix.num_before:,} steps with it, {fix.num_after:,} since"
    return format_change_of(fix), f"{fix.outcome}: {steps}{usual}"


def _before(num_steps: int | None) -> str:
    if num_steps is None:
        return UNKNOWN
    return "same step" if num_steps == 0 else format_count(num_steps, "step")


def _notes(notes: Sequence[ShownNote]) -> list[Component]:
    """Return the notes, the newest first. A browser shows their text as text, never as markup."""
    if not notes:
        return []
    shown = [
        html.Article(
            [
                html.P(
                    [html.B(escape(note.by) or "no name"), f" {format_time(note.at_ns)} UTC"],
                    className="about",
                ),
                *(html.P(escape_sentence(line)) for line in note.text.splitlines() if line.split()),
            ],
            className="incident-note",
        )
        for note in notes
    ]
    return [card(html.H2(format_count(len(notes), "note")), *shown)]


def _list(incidents: Sequence[Incident], run_id: str) -> list[Component]:
    title = html.H1(f"Incidents of run {escape(run_id)}", className="page-title")
    if not incidents:
        return [title, html.P("No finding that matters was recorded.", className="quiet")]
    rows: list[list[Cell]] = [
        [
            dcc.Link(
                f"{each.number}",
                href=write_address(View(page=INCIDENT, run=run_id, show=str(each.number))),
            ),
            html.Span(each.cause, className=f"cause {cause_style(each.cause, each.severity)}"),
            rank_links(run_id, each.ranks, max_ranges=4),
            dmc.TableTd(state_sentence(each), className="evidence"),
            format_device_hours(each.lost_device_h),
            f"{len(each.notes)}",
        ]
        for each in reversed(incidents)
    ]
    head = {"no.": "", "cause": "", "ranks": "", "state": "", "cost": "number", "notes": "number"}
    return [
        html.Div(
            [title, card(table("incidents", head, rows, class_name=STACKED))], className="stack"
        )
    ]


def _register(app: Dash, provider: ReportProvider) -> None:
    """Store a note; the buttons are those of the alerts page."""

    @app.callback(
        Output("alerts-changed", "children", allow_duplicate=True),
        Output("incident-text", "value"),
        Output(AGAIN, "data", allow_duplicate=True),
        Input("incident-add", "n_clicks"),
        State("incident-text", "value"),
        State("incident-author", "value"),
        State("url", "pathname"),
        State("url", "search"),
        prevent_initial_call=True,
    )
    @checked
    def add_note(
        num_clicks: Number | None,
        text: str | None,
        author: str | None,
        path: str | None,
        search: str | None,
    ) -> tuple[str, str, Number]:
        view = read_address(path, search)
        number = _number(view.show or "")
        if not num_clicks or not text or number is None or view.run is None:
            raise PreventUpdate
        problem = provider.add_note(view.run, number, text, by=author or "")
        return escape(problem) or "Noted.", text if problem else "", num_clicks


PAGE = Page(
    name=INCIDENT,
    title="Incident",
    show=show_incident,
    is_listed=False,
    register=_register,
)
