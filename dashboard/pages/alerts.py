"""The alerts page: open, acknowledged, silenced and resolved alerts, and what is silenced."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, Any, Literal

import dash_mantine_components as dmc  # type: ignore[import-untyped]
from dash import Dash, Input, Output, dcc, html
from dash.exceptions import PreventUpdate

from rankscope.analysis.report.text import EMPTY, format_count, format_range
from rankscope.dashboard.records.alert_list import AlertState

from ..address import ALERTS, HEALTH, INCIDENT, TIMELINE, View, write_address, write_query
from ..callback_checks import Number, Posted, checked
from ..text import escape
from .components import (
    announced,
    card,
    labelled,
    link_ranks,
    local_time,
    rank_links,
    table,
    with_code,
)
from .overview_cards import escape_sentence
from .page import Content, Page
from .refresh import AGAIN

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dash.development.base_component import Component

    from rankscope.dashboard.records.alert_list import AlertList, ShownAlert, ShownSilence

    from ..provider import ReportProvider
    from .components import Cell

FILTERS = ("active", "open", "acknowledged", "silenced", "resolved", "all")
"""What is listed: "active" is all but the resolved ones."""

Hours = Literal["1", "8", "24", "168"]
DURATIONS: dict[Hours, str] = {"1": "1 hour", "8": "8 hours", "24": "1 day", "168": "1 week"}
"""Lengths of a silence by hours."""


class Change(Posted):
    """A button that was pressed in the row of an alert."""

    alert: str
    hours: Hours | None = None
    """Length of a silence; None: the alert is acknowledged."""

    number: Number
    """Of the change, so that two of the same differ."""


MAX_RANGES = 4
"""Ranges of ranks that a row names before it counts the rest."""

BADGE_WIDTH = 92
"""Pixels that the longest severity needs."""

_CLAUSE_END = re.compile(r"; (?![^()]*\))")
"""Between clauses, but not within parentheses."""

_AS_CODE = re.compile(r"`([^`]+)`|(docs/[\w.-]+\.md(?:#[\w-]+)?)")
"""A command, or a place in the documentation, which this server does not serve."""

COLORS = {"critical": "red", "warning": "orange"}


def show_alerts(provider: ReportProvider, view: View) -> Content:
    """Return the alerts of a view: of one run or all, and those in the state that it shows."""
    found = provider.alerts()
    shown = view.show if view.show in FILTERS else FILTERS[0]
    names = {alert.run for alert in found.alerts} | {view.run or ""}
    runs = [{"value": name, "label": escape(name)} for name in sorted(names - {""})]
    head = [
        html.H1("Alerts", className="page-title"),
        html.Div(
            [
                dmc.SegmentedControl(
                    id="alerts-filter",
                    data=[{"value": state, "label": state} for state in FILTERS],
                    value=shown,
                    size="sm",
                    **labelled("state of the alerts"),
                ),
                dmc.Select(
                    id="alerts-run",
                    data=[{"value": "", "label": "all runs"}, *runs],
                    value=view.run or "",
                    size="sm",
                    searchable=True,
                    allowDeselect=False,
                    w="min(340px, 100%)",
                    **labelled("run of the alerts"),
                ),
            ],
            className="controls",
        ),
    ]
    listed = html.Div(_table(found, shown, view.run), id="alerts-table", **announced())
    parts = [
        card(*head, listed),
        *change_parts(),
        html.Div(_silences(found.silences), id="alerts-silences"),
    ]
    return Content(children=[html.Div(parts, className="stack")])


def _register(app: Dash, provider: ReportProvider) -> None:
    @app.callback(
        Output("url", "search", allow_duplicate=True),
        Input("alerts-filter", "value"),
        Input("alerts-run", "value"),
        prevent_initial_call=True,
    )
    @checked
    def filter_alerts(shown: str, run: str | None) -> str:
        view = View(page=ALERTS, run=run or None, show=None if shown == FILTERS[0] else shown)
        return write_query(view)

    @app.callback(
        Output("alerts-changed", "children"),
        Output(AGAIN, "data", allow_duplicate=True),
        Input("alerts-change", "data"),
        prevent_initial_call=True,
    )
    @checked
    def change_alert(change: Change | None) -> tuple[str, Number]:
        if change is None:
            raise PreventUpdate
        if change.hours is None:
            done = provider.acknowledge_alert(change.alert)
        else:
            done = provider.silence_alert(change.alert, for_s=3600.0 * int(change.hours))
        return escape(done), change.number


PAGE = Page(name=ALERTS, title="Alerts", show=show_alerts, is_of_run=False, register=_register)


def _is_shown(alert: ShownAlert, shown: str, run: str | None) -> bool:
    if run is not None and alert.run != run:
        return False
    if shown == "active":
        return alert.state is not AlertState.RESOLVED
    return shown in ("all", alert.state.value)


def _table(found: AlertList, shown: str, run: str | None) -> list[Component]:
    alerts = [alert for alert in found.alerts if _is_shown(alert, shown, run)]
    counts = Counter(alert.state for alert in found.alerts if run in (None, alert.run))
    facts = ", ".join(f"{counts[state]:,} {state}" for state in AlertState)
    if found.num_left_out:
        facts += f"; {found.num_left_out:,} older ones are not listed"
    about = (
        f"{facts}. Acknowledge: it is not sent again, only its end is. Silence: nothing about its"
        " cause on the same ranks and hosts is sent for a time."
        if found.may_change
        else f"{facts}. To silence or acknowledge, open the URL that `rankscope serve` printed."
    )
    parts: list[Component] = [html.P(with_code(about), className="about")]
    if not alerts:
        what = (
            "active alert" if shown == "active" else "alert" if shown == "all" else f"{shown} alert"
        )
        return [*parts, html.P(f"No {what}.", className="quiet")]
    head = {
        "severity": "",
        "alert": "",
        "ranks": "",
        "hosts": "",
        "steps": "number",
        "state": "",
        "fired": "",
    }
    rows = [_row(alert, may_change=found.may_change) for alert in alerts]
    return [*parts, table("alerts", head, rows, class_name="alerts")]


def _row(alert: ShownAlert, *, may_change: bool) -> list[Cell]:
    by = alert.acknowledged_by if alert.state is AlertState.ACKNOWLEDGED else ""
    because = f": {alert.resolved_because}" if alert.resolved and alert.resolved_because else ""
    state = [
        escape(f"{alert.state.value}{by and f' by {by}'}{alert.resolved and ' '}"),
        local_time(alert.resolved),
        escape(because),
    ]
    clauses = [escape_sentence(clause) for clause in _CLAUSE_END.split(alert.text)]
    about = [html.Div(_ranks_linked(clause, alert)) for clause in clauses]
    if alert.cost:
        about.append(html.Div(escape(f"costs {alert.cost}"), className="about"))
    if alert.cause and alert.run:
        shown = View(run=alert.run)
        if alert.incident is not None:
            shown = View(page=INCIDENT, run=alert.run, show=str(alert.incident))
        proof = write_address(shown)
        about.append(html.Div(dcc.Link("Proof and what to do", href=proof), className="about"))
    # Servers before this one stored a path of the documentation.
    if alert.action and not alert.action.startswith("docs/"):
        about.append(html.Div(["do: ", *_action(alert)], className="about"))
    if alert.delivery == "undelivered":
        about.append(html.Div("a receiver did not get it", className="about"))
    return [
        dmc.Badge(
            alert.severity,
            color=COLORS.get(alert.severity, "gray"),
            variant="light",
            miw=BADGE_WIDTH,
        ),
        dmc.TableTd(about, className="evidence"),
        dmc.TableTd(
            rank_links(alert.run, alert.ranks, max_ranges=MAX_RANGES), className="of-ranks"
        ),
        dmc.TableTd(_hosts(alert.hosts), className="of-hosts"),
        dmc.TableTd(_link(alert), className="steps number"),
        dmc.TableTd([*state, *(alert_buttons(alert) if may_change else [])], className="state"),
        dmc.TableTd(local_time(alert.fired), className="fired"),
    ]


def _ranks_linked(text: str, alert: ShownAlert) -> list[Component | str]:
    """Return an escaped text with its ranks as links, if the alert is about a run."""
    return link_ranks(text, alert.run) if alert.run else [text]


def _action(alert: ShownAlert) -> list[Component | str]:
    """Return what to do: its commands as code, its ranks as links."""
    text, done = escape(alert.action), 0
    parts: list[Component | str] = []
    for found in _AS_CODE.finditer(text):
        parts += _ranks_linked(text[done : found.start()], alert)
        parts.append(html.Code(found[1] or found[2]))
        done = found.end()
    return [*parts, *_ranks_linked(text[done:], alert)]


def _hosts(hosts: Sequence[str]) -> list[Component | str]:
    """Return the first hosts, a line each: a name is not broken at its hyphens."""
    if not hosts:
        return [EMPTY]
    names = [escape(host) for host in hosts[:MAX_RANGES]]
    lines = [html.Div(name, title=name, className="host-name") for name in names]
    more = [f"and {len(hosts) - MAX_RANGES:,} more"] if len(hosts) > MAX_RANGES else []
    return [*lines, *more]


def _link(alert: ShownAlert) -> Component:
    """Return the link to the view that shows an alert: its first step, with its ranks marked.

    One about a host leads to the checks of the hosts.
    """
    view, text = View(run=alert.run), "run"
    if not alert.run:
        view, text = View(page=HEALTH), "host checks"
    elif alert.steps is not None:
        view = View(
            page=TIMELINE,
            run=alert.run,
            step=alert.steps[0],
            ranks=alert.ranks,
            show=alert.cause or None,
        )
        text = format_range(alert.steps)
    href = write_address(view)
    return dcc.Link(text, href=href, className="proof-link")


def change_parts() -> list[Component]:
    """Return where a pressed button of `alert_buttons` is stored, and where the answer is shown."""
    return [
        html.Div(id="alerts-changed", className="about", **announced()),
        dcc.Store(id="alerts-change"),
    ]


def alert_buttons(alert: ShownAlert) -> list[Component]:
    """Return what acknowledges and silences an active alert, by `assets/alerts.js`.

    The page has `change_parts` too.
    """
    if alert.state is AlertState.RESOLVED:
        return []

    def button(text: str, **change: str) -> Component:
        named: dict[str, Any] = {f"data-{name}": value for name, value in change.items()}
        return html.Button(text, className="button small", **named)

    lengths = [button(text, alert=alert.name, hours=hours) for hours, text in DURATIONS.items()]
    silence = html.Details(
        [html.Summary("Silence", className="button small"), html.Div(lengths)],
        className="drop-down",
    )
    is_open = alert.state is AlertState.OPEN
    acknowledge = [button("Acknowledge", alert=alert.name)] if is_open else []
    return [html.Div([*acknowledge, silence], className="row-buttons")]


def _silences(silences: Sequence[ShownSilence]) -> list[Component]:
    if not silences:
        return []
    rows: list[list[Cell]] = [
        [
            html.Code(each.name),
            escape(each.covers),
            local_time(each.until),
            escape(each.by or EMPTY),
            escape(each.reason or EMPTY),
        ]
        for each in silences
    ]
    head = dict.fromkeys(("name", "alerts of", "until", "by", "reason"), "")
    return [
        card(
            html.H2(format_count(len(silences), "silence")),
            html.P(
                [html.Code("rankscope alerts silence --end NAME"), " ends one."], className="about"
            ),
            table("silences", head, rows, class_name="plain-rows"),
        )
    ]
