"""The page of one rank, and without a rank the heat map of all."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import dash_mantine_components as dmc  # type: ignore[import-untyped]
from dash import Dash, Input, Output, State, dcc, html
from dash.exceptions import PreventUpdate

from rankscope.analysis.report.text import (
    EMPTY,
    UNKNOWN,
    format_age,
    format_count,
    format_percent,
    format_range,
    format_seconds,
    format_steps,
    format_time,
)
from rankscope.dashboard.figures.host_boxes import arrange_hosts
from rankscope.dashboard.records.rank_details import RankQuantity

from ..address import GRAPH, INCIDENT, RANK, TIMELINE, View, read_address, read_steps, write_address
from ..callback_checks import Click, Number, Posted, checked
from ..figures.rank import heat_map_figure, place_figure, rank_over_steps_figure
from ..text import escape
from .components import (
    LOST,
    RUNNING,
    announced,
    card,
    graph,
    labelled,
    link_ranks,
    local_time,
    rank_link,
    rank_links,
    table,
)
from .device_time import device_time_card, kernels_card
from .overview_cards import escape_sentence, host_notes, wait_row
from .placeholders import no_data
from .refresh import Shown
from .report_page import choices, page_head, report_page

if TYPE_CHECKING:
    from dash.development.base_component import Component

    from rankscope.analysis.report.report import RunReport
    from rankscope.dashboard.records.rank_details import (
        RankDetails,
        RankEvent,
        RankRequest,
        RankValues,
    )

    from ..provider import ReportProvider
    from .components import Cell

MAX_LISTED = 8
LEAST_RATIO = 0.005
"""Share of a step below which a wait would be shown as 0 %, and is not listed."""

LEAST_CELL_PX = 3
"""Width of a rank in the heat map, below which it scrolls: a slow one must be seen."""

MAX_CAUSES = 4
MAX_SLOWEST = 20
MAX_LINES = 400
"""Lines of an event's stacks."""

AXES = {
    "tp": "tensor parallel: shares each layer",
    "pp": "pipeline: activations forward, gradients back",
    "dp": "data parallel: reduces gradients",
    "cp": "context parallel: shares each sequence",
    "ep": "expert parallel: exchanges tokens",
}
REQUESTS = {"profile": "Profile", "stacks": "Python stacks", "full": "All spans"}
"""What a running rank can be asked for, as `rankscope control --level` names it."""

REQUESTED_STEPS, MAX_REQUESTED_STEPS = 3, 100
"""Steps of a request unless the page says otherwise, and the most."""

QUANTITIES = {
    RankQuantity.COMPUTE: "compute above the median rank",
    RankQuantity.WAIT: "waiting in communication",
    RankQuantity.EXPOSED: "exposed communication",
    RankQuantity.HOST: "data, gc and checkpoints",
}


class Drawn(Posted):
    """The quantity and the steps of the heat map."""

    quantity: str
    steps: str


def show_rank(provider: ReportProvider, report: RunReport, view: View) -> list[Component]:
    """Return the page of the view's first rank, or the heat map of all ranks."""
    if not view.ranks:
        return _show_all(provider, report, view)
    rank = view.ranks[0]
    details = provider.rank_details(report, rank)
    if details is None or rank not in report.coords:
        return [
            no_data(
                f"rank {rank} of run {escape(report.run)!r} is not known",
                f"The run has {format_count(report.world_size, 'rank')}, numbered from 0. Nothing"
                " was received of a rank that was not traced.",
            )
        ]
    return [
        _head(report, details),
        _facts(details),
        *_now(details),
        html.Div([_place(report, details), _waits(report, rank)], className="grid"),
        _over_steps(report, details),
        *_on_device(report, details),
        _findings(report, rank),
        *_requests(details),
        _events(details),
        _host(details),
    ]


def _register(app: Dash, provider: ReportProvider) -> None:
    def open_view(shown: Shown | None, **parts: Any) -> str:  # noqa: ANN401  # fields of a view
        if shown is None:
            raise PreventUpdate
        return write_address(View(page=RANK, run=shown.run, **parts))

    for part in ("rank-place", "rank-heat"):

        @app.callback(
            Output("url", "href", allow_duplicate=True),
            Input(part, "clickData"),
            State("page-shown", "data"),
            prevent_initial_call=True,
        )
        @checked
        def open_rank(click: Click | None, shown: Shown | None) -> str:
            rank = None if click is None else click.point.customdata
            if rank is None or rank < 0:  # a cell without a rank
                raise PreventUpdate
            return open_view(shown, ranks=(rank,))

    @app.callback(
        Output("url", "href", allow_duplicate=True),
        Input("rank-number", "value"),
        State("page-shown", "data"),
        prevent_initial_call=True,
    )
    @checked
    def choose_rank(text: str, shown: Shown | None) -> str:
        numbers = read_steps(text)
        if numbers is None or numbers[0] != numbers[1]:
            raise PreventUpdate
        return open_view(shown, ranks=numbers[:1])

    @app.callback(
        Output("url", "href", allow_duplicate=True),
        Input("rank-steps", "value"),
        State("rank-drawn", "data"),
        State("page-shown", "data"),
        prevent_initial_call=True,
    )
    @checked
    def choose_steps(text: str, drawn: Drawn, shown: Shown | None) -> str:
        first, to, last = text.replace(" ", "").partition("-")
        steps = read_steps(f"{first}{to}{last}") or read_steps(f"{last}{to}{first}")
        if steps is None or text == drawn.steps:  # the input has just been drawn
            raise PreventUpdate
        return open_view(shown, steps=steps, show=drawn.quantity)

    for level in REQUESTS:

        @app.callback(
            Output("rank-requested", "children", allow_duplicate=True),
            Input(f"rank-request-{level}", "n_clicks"),
            State("rank-request-steps", "value"),
            State("url", "pathname"),
            State("url", "search"),
            State("page-shown", "data"),
            prevent_initial_call=True,
        )
        @checked
        def request_more(
            num_clicks: Number | None,
            steps: Number | str | None,
            path: str | None,
            search: str | None,
            shown: Shown | None,
            level: str = level,
        ) -> str:
            ranks = read_address(path, search).ranks
            if not num_clicks or shown is None or shown.run is None or not ranks:
                raise PreventUpdate
            if not isinstance(steps, int) or not 1 <= steps <= MAX_REQUESTED_STEPS:
                return f"Give 1 to {MAX_REQUESTED_STEPS} steps."
            return escape(provider.request_of_rank(shown.run, ranks[0], level, steps=steps))


PAGE = report_page(RANK, "Rank", show_rank, is_live=True, register=_register)


def _number_input(report: RunReport) -> Component:
    found: Component = dmc.TextInput(
        id="rank-number",
        value="",
        placeholder=f"rank, 0 to {report.world_size - 1}",
        debounce=True,
        w=150,
        size="sm",
        **{"aria-label": "rank"},
    )
    return found


def _show_all(provider: ReportProvider, report: RunReport, view: View) -> list[Component]:
    quantities = _quantities(report)
    quantity = next((each for each in quantities if each == view.show), next(iter(quantities)))
    values = provider.rank_values(report, quantity, steps=view.steps)
    plain = replace(view, show=quantity.value)
    options = [(words, replace(view, show=each.value)) for each, words in quantities.items()]
    steps = "" if values is None else format_range(values.steps)
    chooser: Component = dmc.TextInput(
        id="rank-steps",
        value=steps,
        placeholder="steps, such as 3-7",
        debounce=True,
        w=120,
        size="sm",
        **{"aria-label": "steps"},
    )
    head = page_head(
        "Ranks",
        html.Div([html.Span("steps", className="quiet"), chooser], className="chooser"),
        html.Div(
            [html.Span("open", className="quiet"), _number_input(report)], className="chooser"
        ),
    )
    drawn = Drawn(quantity=quantity.value, steps=steps)
    parts = [head, dcc.Store(id="rank-drawn", data=drawn.model_dump())]
    if values is None or not values.seconds:
        reason = (
            "No closed step is in this range yet. A step is closed a few seconds after its end."
        )
        return [*parts, card(html.H2("Heat map"), html.P(reason, className="quiet"))]
    boxes = arrange_hosts(values)
    above = left_out = ""
    if quantity is RankQuantity.EVIDENCE and report.evidence is not None:
        above = f" above {report.evidence.baseline}"
        if len(values.seconds) < len(report.coords) and report.evidence.links:
            num, of = len(report.evidence.links), format_count(len(report.coords), "rank")
            left_out = f" The {len(values.seconds):,} of {of} with the {num:,} slowest links."
    return [
        *parts,
        card(
            html.Div(
                [html.H2("Heat map"), choices("of", options, view=plain)], className="card-head"
            ),
            html.P(
                f"{quantities[quantity].capitalize()}{above}, mean of {format_steps(values.steps)}."
                " A cell is a rank, a box a host; slow hosts, and switches with them, come first."
                f" Click a rank to open it.{left_out}",
                className="about",
            ),
            graph(
                "rank-heat",
                heat_map_figure(boxes, values, run=report.run, step_s=report.step_time_s.actual),
                min_px=LEAST_CELL_PX * boxes.rank.shape[1],
            ),
        ),
        _most(report, values),
    ]


def _quantities(report: RunReport) -> dict[RankQuantity, str]:
    """Return the quantities in words; what the top finding is seen in comes first."""
    if report.evidence is None:
        return QUANTITIES
    of = " of its slowest link" if report.evidence.links else ""
    return {RankQuantity.EVIDENCE: f"{report.evidence.quantity}{of}", **QUANTITIES}


def _most(report: RunReport, values: RankValues) -> Component:
    ordered = sorted(values.seconds, key=lambda rank: (-values.seconds[rank], rank))
    rows = []
    for rank in ordered[:MAX_SLOWEST]:
        host, switch = values.hosts.get(rank, ("", ""))
        row: list[Cell] = [
            rank_link(report.run, rank),
            escape(host) or UNKNOWN,
            escape(switch) or UNKNOWN,
            format_seconds(values.seconds[rank]),
        ]
        rows.append(row)
    head = {"rank": "number", "host": "", "switch": "", "per step": "number"}
    title = "By rank, the longest first"
    if len(rows) < len(ordered):
        title = f"The {len(rows)} longest of {format_count(len(ordered), 'rank')}"
    return card(
        html.H2(title),
        table("ranks, the longest first", head, rows, class_name="plain-rows"),
    )


def _head(report: RunReport, details: RankDetails) -> Component:
    rank, last = details.rank, report.world_size - 1
    everyone = write_address(View(page=RANK, run=report.run))
    steps = [
        dcc.Link(
            arrow,
            href=write_address(View(page=RANK, run=report.run, ranks=(other,))),
            className="arrow",
            title=f"Show rank {other}",
        )
        for other, arrow in ((rank - 1, "←"), (rank + 1, "→"))
        if 0 <= other <= last
    ]
    timeline = View(page=TIMELINE, run=report.run, ranks=(rank,))
    waits = View(page=GRAPH, run=report.run, ranks=(rank,))
    return page_head(
        f"Rank {rank}",
        dcc.Link("all ranks", href=everyone),
        dcc.Link("timeline", href=write_address(timeline)),
        dcc.Link("who waits for it", href=write_address(waits)),
        html.Div([*steps, _number_input(report)], className="stepper"),
    )


def _facts(details: RankDetails) -> Component:
    facts: dict[str, Cell] = {
        "host": details.host,
        "local rank": "" if details.local_rank < 0 else str(details.local_rank),
        "device": details.device_name,
        "switch": details.switch,
        "rack": details.rack,
        "rail": details.rail,
        **_process(details),
    }
    pairs = [
        html.Div(
            [
                html.Dt(word),
                html.Dd(escape(value) or UNKNOWN if isinstance(value, str) else value),
            ]
        )
        for word, value in facts.items()
    ]
    return card(html.Dl(pairs, className="pairs"))


def _process(details: RankDetails) -> dict[str, Cell]:
    """Return the state of the process, and the last news of one that may still run."""
    state, last = details.exit_state, details.reported
    if details.heartbeat is not None:
        beat, step, age_ns = details.heartbeat
        at = "" if step < 0 else f", step {step:,}"
        return {"process": state, "last heartbeat": f"{beat}{at}, {format_age(age_ns)} ago"}
    if last is not None and state == LOST:
        return {"process": ["lost: no news since ", local_time(format_time(last[0]))]}
    if last is not None and state == RUNNING:
        return {"process": state, "last record": f"{format_age(last[1])} ago"}
    return {"process": state}


def _on_device(report: RunReport, details: RankDetails) -> list[Component]:
    """Return the device time and the kernels of a rank; nothing if no profile was imported."""
    if report.device_time is None:
        return []
    parts = report.device_time.of_rank(details.rank)
    return [
        *([device_time_card(parts, whose=f"mean of rank {details.rank}")] if parts else []),
        *([kernels_card(details.kernels)] if details.kernels else []),
    ]


def _now(details: RankDetails) -> list[Component]:
    """Return in what the rank is blocked, or was when it was last seen."""
    if not details.open_operations:
        return []
    lines = [
        html.Li(
            [
                escape(one.name)
                + (f" ({escape(one.kind)})" if one.kind != one.name else "")
                + f" in step {one.step:,}"
                + (f", group {escape(one.group)}" if one.group else "")
                + ", begun ",
                local_time(format_time(one.start_ns)),
            ]
        )
        for one in details.open_operations
    ]
    return [
        card(
            html.H2("Not ended when it was last seen"),
            html.Ul(lines, className="notices"),
            class_name="liveness",
        )
    ]


def _place(report: RunReport, details: RankDetails) -> Component:
    at, sizes = report.coords[details.rank].to_dict(), report.layout.to_dict()
    words = ", ".join(
        f"{axis.upper()} {at[axis]} (0 to {sizes[axis] - 1})" for axis in AXES if sizes[axis] > 1
    )
    rows = [
        [
            escape(group.name) or UNKNOWN,
            dmc.TableTd(escape(group.kind), className="unbroken"),
            f"{group.num_members:,}",
            rank_links(report.run, group.members, max_ranges=4, num_ranks=group.num_members),
        ]
        for group in details.groups
    ]
    head = {"group": "", "kind": "", "ranks": "number", "members": ""}
    place: list[Component] = [html.P("It is the only rank of the run.", className="quiet")]
    if report.world_size > 1:
        about = (
            f"{words or 'No parallel axis is known'}. Red: this rank. Its row: its data-parallel"
            " peers. Its column: its pipeline; activations go down, gradients up."
        )
        place = [
            html.P(about, className="about"),
            graph("rank-place", place_figure(report, details.rank)),
        ]
    return card(
        html.H2("Its place"),
        *place,
        *([table("its groups", head, rows, class_name="plain-rows")] if rows else []),
    )


def _waits(report: RunReport, rank: int) -> Component:
    own = next((one for one in report.starved if one.rank == rank), None)
    due = (
        (sum(on.ratio for on in one.waits_on if report.is_due_to(on, rank)), one.rank)
        for one in report.starved
        if one.rank != rank
    )
    waiting = sorted((pair for pair in due if pair[0] >= LEAST_RATIO), reverse=True)
    mine: Component = html.P("It waits less than 1 % of a step.", className="quiet")
    if own is not None:
        mine = html.Div(
            [
                html.P(f"It waits {format_percent(own.wait_ratio)} of a step, because of:"),
                *(
                    wait_row(report.run, report.name_waited_for(on), on.ratio)
                    for on in own.waits_on[:MAX_CAUSES]
                    if on.ratio >= LEAST_RATIO
                ),
            ]
        )
    others: list[Component] = [
        html.P("No rank waits because of it or its links.", className="quiet")
    ]
    if waiting:
        verb = "waits" if len(waiting) == 1 else "wait"
        longest = ", the longest:" if len(waiting) > MAX_LISTED else ":"
        others = [
            html.P(
                f"{format_count(len(waiting), 'rank')} {verb} because of it or its links{longest}"
            ),
            *(wait_row(report.run, f"rank {one}", ratio) for ratio, one in waiting[:MAX_LISTED]),
        ]
    return card(
        html.H2("Waiting"),
        html.P(
            "Shares of a step, the bubble of the pipeline included, followed to the root.",
            className="about",
        ),
        mine,
        html.Div(others),
    )


def _over_steps(report: RunReport, details: RankDetails) -> Component:
    if not details.kinds and not details.samples:
        text = (
            "Not summed up yet: the server does so within minutes. No sample of its host is stored."
        )
        return card(html.H2("Over steps"), html.P(text, className="quiet"))
    peers = format_count(details.num_peers, "rank")
    dotted = f" Dotted: the median of {peers} of its stage." if details.num_peers else ""
    missing = "" if details.samples else " No samples of its host and device are stored."
    if details.kinds and report.steps and details.steps[0] > report.steps[0]:
        missing += f" Times by kind are those of the last steps, from {details.steps[0]:,} on."
    if report.open_step in details.steps:
        missing += (
            f" Single marks: step {report.open_step}, which never ended; triangles are beyond the"
            " axis."
        )
    parts = [graph("rank-steps-figure", rank_over_steps_figure(report, details))]
    if details.processes:
        busiest = ", ".join(f"{escape(name)} {cpus:.2f}" for name, cpus in details.processes)
        parts.append(html.P(f"Busiest processes of the host, mean CPUs: {busiest}."))
    return card(
        html.H2("Over steps"),
        html.P(
            f"Solid: this rank.{dotted} On top: what takes longer than theirs; then samples."
            " Forward and backward include the communication and waiting inside them, compute above"
            " the median rank does not. Of communication, the time that no compute hides."
            f"{missing}",
            className="about",
        ),
        *parts,
    )


def _findings(report: RunReport, rank: int) -> Component:
    mine = [one for one in report.findings if rank in one.ranks]
    lines = [
        html.Li(
            [
                html.Span(one.cause, className="cause"),
                f"{f' in {format_steps(one.steps)}' if one.steps else ''}: ",
                *link_ranks(escape_sentence(one.evidence), report.run),
                *host_notes(report, one),
            ]
        )
        for one in mine
    ]
    body = html.Ul(lines, className="notices") if lines else html.P("None.", className="quiet")
    return card(html.H2("Findings that name it"), body)


def _requests(details: RankDetails) -> list[Component]:
    """Return the buttons that request more of a running rank, and what became of requests."""
    is_running = details.exit_state == RUNNING
    if not is_running and not details.requests:
        return []
    buttons = [
        dmc.Button(text, id=f"rank-request-{level}", size="sm", variant="light")
        for level, text in REQUESTS.items()
    ]
    steps = dmc.NumberInput(
        id="rank-request-steps",
        value=REQUESTED_STEPS,
        min=1,
        max=MAX_REQUESTED_STEPS,
        allowDecimal=False,
        suffix=" steps",
        size="sm",
        w=110,
        persistence=True,
        persistence_type="session",
        **labelled("number of steps"),
    )
    asking = [
        html.P(
            "For the next steps, without a restart. A profile delays the rank by some tens of"
            " milliseconds as it begins and ends.",
            className="about",
        ),
        html.Div([*buttons, steps], className="controls", role="group", **labelled("record more")),
        html.Div(id="rank-requested", className="about", **announced()),
    ]
    rows = [
        [
            local_time(format_time(one.at_ns)),
            REQUESTS.get(one.level, one.level),
            f"{one.num_steps:,}",
            escape(one.by),
            _answer(one, is_running=is_running),
        ]
        for one in details.requests
    ]
    head = {"requested": "", "what": "", "steps": "number", "by": "", "answer of the rank": ""}
    answers = [table("requests to this rank", head, rows)] if rows else []
    title = "Record more of it" if is_running else "Requests to it"
    return [card(html.H2(title), *(asking if is_running else []), *answers)]


def _answer(request: RankRequest, *, is_running: bool) -> str:
    if not request.state:
        return "none yet" if is_running else "none: the rank has ended"
    return f"{request.state}: {escape(request.text)}"


def _events(details: RankDetails) -> Component:
    rows = [_event(one) for one in details.events]
    listed = Counter(one.kind for one in details.events)
    earlier = {one.kind: one.num_alike - listed[one.kind] for one in details.events}
    left_out = ", ".join(f"{num:,} of {escape(kind)}" for kind, num in earlier.items() if num > 0)
    if left_out:
        rows.append(html.P(f"Earlier ones, not listed: {left_out}.", className="quiet"))
    body = rows or [html.P("No exit, profile or stacks are stored.", className="quiet")]
    return card(html.H2("Events"), *body)


def _event(event: RankEvent) -> Component:
    at = local_time(format_time(event.at_ns))
    words = [at, f" · {escape(event.kind)} · {escape(event.text)}"]
    if not event.detail:
        return html.P(words, className="event")
    detail = event.detail.splitlines()[:MAX_LINES]
    lines = "\n".join(escape_sentence(line) if line.split() else "" for line in detail)
    return html.Details([html.Summary(words), html.Pre(lines, className="command")])


def _host(details: RankDetails) -> Component:
    title = f"History of host {escape(details.host) or UNKNOWN}"
    if not details.host_findings:
        text = "No stored finding of any run names a rank on it."
        return card(html.H2(title), html.P(text, className="quiet"))
    rows: list[list[Cell]] = [
        [
            local_time(format_time(one.opened_ns)),
            dcc.Link(escape(one.run_id), href=write_address(View(run=one.run_id))),
            dcc.Link(
                escape(one.cause),
                href=write_address(View(page=INCIDENT, run=one.run_id, show=str(one.number))),
                className="cause",
            ),
            rank_links(one.run_id, one.ranks, max_ranges=4),
            format_range(one.steps) if one.steps else EMPTY,
        ]
        for one in details.host_findings
    ]
    head = {"found": "", "run": "", "cause": "", "ranks": "", "steps": "number"}
    return card(
        html.H2(title),
        html.P("Findings of all runs that name a rank on it, the newest first.", className="about"),
        table("findings of its host", head, rows, class_name="plain-rows unbroken"),
    )
