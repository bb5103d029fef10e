"""The page of who waits for whom: a graph from the culprit outward."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from dash import Dash, Input, Output, State, dcc, html
from dash.exceptions import PreventUpdate

from rankscope.analysis.breakdown.starved import MIN_WAIT_RATIO
from rankscope.analysis.breakdown.wait_graph import (
    MAX_NODES,
    follow_finding,
    follow_waits,
    most_waited_for,
)
from rankscope.analysis.report.network import TRANSFER_CAUSES
from rankscope.analysis.report.report import Severity
from rankscope.analysis.report.text import (
    format_count,
    format_percent,
    format_ranges,
    format_ranks,
    format_steps,
)
from rankscope.analysis.severity import ends_run

from ..address import GRAPH, RANK, View, write_address
from ..callback_checks import Click, checked
from ..figures.wait_graph import least_width, wait_graph_figure
from .components import card, graph, rank_links, table
from .placeholders import no_data
from .refresh import Shown
from .report_page import choices, page_head, report_page

if TYPE_CHECKING:
    from dash.development.base_component import Component

    from rankscope.analysis.breakdown.wait_graph import WaitGraph, WaitNode
    from rankscope.analysis.report.network import DirectWaits
    from rankscope.analysis.report.report import Finding, RunReport

    from ..provider import ReportProvider
    from .components import Cell

BY_RANK, BY_GROUP = "ranks", "groups"
MAX_SINGLE = 32
"""Ranks that are nodes of their own unless the reader asks for more."""

LEAST = format_percent(MIN_WAIT_RATIO)
"""Share of a step below which a wait is left out."""

MAX_CULPRITS = 8
MAX_ROWS = 40


def show_graph(_provider: ReportProvider, report: RunReport, view: View) -> list[Component]:
    """Return the graph around the culprits of the view, else those of the top finding."""
    view = replace(view, ranks=tuple(rank for rank in view.ranks if rank in report.coords))
    culprits = view.ranks or _culprits(report)
    if report.direct_waits is None:
        why = "The overview says why, under the quality of the data."
        return [no_data("no step could be replayed", why)]
    if not culprits:
        why = "Waits within the bubble of the pipeline are not counted."
        return [no_data("no rank waits for another", why)]
    max_nodes = MAX_NODES if view.show == BY_RANK else MAX_SINGLE
    finding = _of_one_node(report, culprits)
    if finding is not None:
        max_nodes = 0 if view.show == BY_GROUP else max_nodes
        found = follow_finding(report, finding, max_nodes=max_nodes)
        named = format_ranks(culprits)
        if finding.cause in TRANSFER_CAUSES:
            named = f"the slow transfers of {named}"
    else:
        max_nodes = len(culprits) if view.show == BY_GROUP else max_nodes
        found = follow_waits(report.direct_waits, culprits, report.coords, max_nodes=max_nodes)
        named = format_ranks(culprits)
    others = "" if view.ranks else _others(report, culprits)
    head = page_head("Who waits for whom", *_controls(report, view, found))
    top, ending = report.top_finding, ""
    if ends_run(top) and top.steps and set(culprits) <= set(top.ranks):
        ending = f"In {format_steps(top.steps)}, all other ranks wait for {named} ({top.cause})."
    if not found.edges:
        sentence: list[Component | str] | str
        if ending:
            sentence = (
                f"{ending} Before, none waited for {LEAST} of a step or more{_BEYOND}: this graph"
                " shows steps that have ended."
            )
        else:
            sentence = _no_waits(report, report.direct_waits, named)
        if finding is not None and finding.cause in TRANSFER_CAUSES and not ending:
            sentence = (
                f"No rank waits for {named} for {LEAST} of a step or more: the ranks that lose time"
                " transfer themselves. The page Links has the times."
            )
        return [head, card(html.P(sentence))]
    num_waiting = found.num_ranks - len(culprits)
    return [
        head,
        card(
            html.H2(f"{format_count(num_waiting, 'rank')} wait for {named}, directly or not"),
            html.P(f"{ending} The graph shows steps that have ended.") if ending else None,
            html.P(
                "An arrow leads from a rank to one that waits for it, with the share of a step,"
                f" beyond the bubble of the pipeline. Waits below {LEAST} of a step are left out."
                f"{_of_groups(found)} Click a rank to open it.{others}"
                f"{'' if finding else _without_arrow(found)}",
                className="about",
            ),
            graph(
                "graph-figure",
                wait_graph_figure(found, run=report.run),
                min_px=least_width(found),
            ),
        ),
        _edges(report, found),
    ]


def _register(app: Dash, _provider: ReportProvider) -> None:
    @app.callback(
        Output("url", "href", allow_duplicate=True),
        Input("graph-figure", "clickData"),
        State("page-shown", "data"),
        prevent_initial_call=True,
    )
    @checked
    def open_rank(click: Click | None, shown: Shown | None) -> str:
        rank = None if click is None else click.point.customdata  # arrows and labels have none
        if rank is None or shown is None:
            raise PreventUpdate
        return write_address(View(page=RANK, run=shown.run, ranks=(rank,)))


PAGE = report_page(GRAPH, "Graph", show_graph, register=_register)

_BEYOND = " beyond the bubble of the pipeline"


def _culprits(report: RunReport) -> tuple[int, ...]:
    """Return the ranks of the top finding, else the rank that others wait on most.

    If the finding has all ranks, it is the one of them that others wait on most.
    """
    waited = () if report.waterfall is None else report.waterfall.waiting_on
    most = [one.rank for one in waited if one.rank is not None]
    top = report.top_finding
    known = tuple(rank for rank in top.ranks if rank in report.coords)
    is_of_all = len(known) == len(report.coords)
    if known and (top.cause in TRANSFER_CAUSES or (len(known) > MAX_CULPRITS and not is_of_all)):
        return known
    if not known or top.severity is Severity.NONE:
        return tuple(most[:1])
    if len(known) <= MAX_CULPRITS and len(known) < len(report.coords):
        return known
    return tuple([rank for rank in most if rank in known][:1]) or known[:1]


def _of_one_node(report: RunReport, culprits: tuple[int, ...]) -> Finding | None:
    """Return the finding of these ranks, if they are drawn as one node; else None.

    They are if ranks wait for transfers between them, or if they are too many.
    """
    return next(
        (
            each
            for each in report.findings
            if (each.cause in TRANSFER_CAUSES or len(culprits) > MAX_CULPRITS)
            and culprits == tuple(rank for rank in each.ranks if rank in report.coords)
        ),
        None,
    )


def _no_waits(report: RunReport, waits: DirectWaits, named: str) -> list[Component | str]:
    """Return a sentence about culprits for which no rank waits, and who is waited for instead."""
    most = most_waited_for(waits)
    if most is None:
        return [f"No rank waits for another for {LEAST} of a step or more{_BEYOND}."]
    href = write_address(View(page=GRAPH, run=report.run, ranks=(most,)))
    none = f"No rank waits for {named} for {LEAST} of a step or more{_BEYOND}."
    return [f"{none} Most waited for: ", dcc.Link(format_ranks((most,)), href=href), "."]


def _others(report: RunReport, culprits: tuple[int, ...]) -> str:
    """Return a sentence about the ranks of the top finding from which the graph does not begin."""
    top = report.top_finding
    if len(top.ranks) <= len(culprits):
        return ""
    return (
        f" {top.cause} is on {format_count(len(top.ranks), 'rank')}: the graph begins at the one"
        " that others wait for most."
    )


def _of_groups(found: WaitGraph) -> str:
    """Return a sentence about arrows to groups of which only some ranks wait."""
    if all(len(edge.ranks) == len(found.nodes[edge.node].ranks) for edge in found.edges):
        return ""
    return (
        " A share is the mean of the ranks that wait; an arrow is thin if few ranks of a group do."
    )


def _without_arrow(found: WaitGraph) -> str:
    """Return a sentence about the culprits that were never the last to arrive."""
    waited_for = {edge.on_node for edge in found.edges}
    ranks = [
        rank
        for number, node in enumerate(found.nodes)
        if node.distance == 0 and number not in waited_for
        for rank in node.ranks
    ]
    if not ranks:
        return ""
    return (
        f" No arrow leads from {format_ranks(ranks)}: of members that arrive together, the others"
        " wait for the last one."
    )


def _controls(report: RunReport, view: View, found: WaitGraph) -> list[Component]:
    plain = View(page=GRAPH, run=report.run)
    shown = replace(plain, ranks=view.ranks)
    options = {
        (): (_named(report.top_finding.cause, _culprits(report)), plain),
        **{
            each.ranks: (_named(each.cause, each.ranks), replace(plain, ranks=each.ranks))
            for each in report.findings
            if each.ranks
            and (len(each.ranks) <= MAX_CULPRITS or each.cause == "slow-link")
            and each.ranks != _culprits(report)
        },
    }
    if view.ranks and view.ranks not in options:
        options[view.ranks] = (_named("", view.ranks), shown)
    parts = []
    if len(options) > 1:
        parts.append(choices("from", options.values(), view=shown))
    if len(found.nodes) > 1:
        kinds = [
            ("ranks", replace(shown, show=BY_RANK)),
            ("groups", replace(shown, show=BY_GROUP)),
        ]
        by_rank = len(found.nodes) == found.num_ranks
        now = replace(shown, show=BY_RANK if by_rank else BY_GROUP)
        parts.append(choices("nodes", kinds, view=now))
    return parts


def _named(cause: str, ranks: tuple[int, ...]) -> str:
    return f"{cause} {format_ranges(ranks, max_ranges=2)}".strip()


def _edges(report: RunReport, found: WaitGraph) -> Component:
    longest = sorted(found.edges, key=lambda edge: -edge.ratio)[:MAX_ROWS]

    def names(ranks: tuple[int, ...], node: WaitNode) -> list[Component | str]:
        listed = rank_links(report.run, ranks, max_ranges=3)
        return [*listed, " ", html.Span(f"(stage {node.stage})", className="unbroken")]

    rows: list[list[Cell]] = [
        [
            names(edge.ranks, found.nodes[edge.node]),
            names(found.nodes[edge.on_node].ranks, found.nodes[edge.on_node]),
            format_percent(edge.ratio, digits=1),
        ]
        for edge in longest
    ]
    head = {"rank": "", "waits for": "", "share of a step": "number"}
    few = (
        f" The longest {MAX_ROWS} of {len(found.edges):,}." if len(rows) < len(found.edges) else ""
    )
    return card(
        html.H2("Waits"),
        html.P(
            f"Mean of the ranks that wait; waits below {LEAST} are left out.{few}",
            className="about",
        ),
        table("waits", head, rows, class_name="plain-rows"),
    )
