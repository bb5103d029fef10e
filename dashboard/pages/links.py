"""The page of a run's links: their transfers against those of alike ones."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import plotly.graph_objects as go
from dash import dcc, html

from rankscope.analysis.breakdown.link_summary import MAX_TOTALS
from rankscope.analysis.report.network import LinkGroup
from rankscope.analysis.report.text import (
    EMPTY,
    UNKNOWN,
    format_bytes,
    format_count,
    format_duration,
    format_percent,
    format_range,
    format_rate,
)

from ..address import LINKS, TIMELINE, View, write_address
from ..text import cut_middle, escape, escape_for_plotly
from ..theme import DIVERGING, apply_style
from .components import STACKED, card, graph, rank_link, rank_links, table
from .placeholders import no_data
from .report_page import page_head, report_page

if TYPE_CHECKING:
    from dash.development.base_component import Component

    from rankscope.analysis.report.network import LinkMatrix, LinkSummary, LinkTotal, LinkTransfers
    from rankscope.analysis.report.report import Bandwidth, RunReport

    from ..provider import ReportProvider
    from .components import Cell

ALL = "all"
MAX_ROWS, MAX_EVEN_ROWS = 40, 10
"""Rows of a table before the reader asks for all: of slow links, and of those that are alike."""

MAX_NAMED_RANGES = 3

_MIN_SPREAD = 0.1
_MIN_HEIGHT, _MAX_ROWS_PX, _PIXELS_PER_ROW = 240, 530, 22
_MAX_LABEL, _SLANTED_PX, _CHAR_PX = 24, 4, 7
"""Characters of a label, and the pixels of each in height below the matrix and in width beside."""

_BELOW_PX, _BESIDE_PX = 74, 140
"""Room for the title of the axis, and for that of the other one and the scale."""

_MAX_LEAST_PX = 560

_MAX_SPACED = 48
"""Rows up to which cells have a gap between them."""

_WORDS = {LinkGroup.HOST: "host", LinkGroup.SWITCH: "switch"}


def show_links(_provider: ReportProvider, report: RunReport, view: View) -> list[Component]:
    """Return the links of a run, the slow ones first."""
    links = report.links
    if links is None:
        return [
            no_data(
                f"run {escape(report.run)!r} has no transfer that could be measured",
                "One rank communicates with no other. Else check that the tracer captures"
                " communication: the overview lists what is missing.",
            )
        ]
    slowest = _slowest(report, links, view)
    parts = [page_head("Links", about=_sentence(links))]
    parts += [slowest, _totals_by_kind(links)] if links.num_slow else [_totals_by_kind(links)]
    is_in_groups = links.num_slow > 0 and not any(
        link.is_pair for link in links.links if link.slow_steps
    )
    if links.matrix is not None and not is_in_groups:
        parts.append(_matrix(report, links.matrix))
    if not links.num_slow:
        parts.append(slowest)
    for group in _WORDS:
        totals = [one for one in links.totals if one.group is group]
        if len(totals) > 1:
            parts.append(_totals_by_place(group, totals, view))
    if report.bandwidth:
        parts.append(_bandwidths(report.bandwidth))
    return parts


PAGE = report_page(LINKS, "Links", show_links)


def _sentence(links: LinkSummary) -> str:
    total = format_count(links.num_links, "link")
    if not links.num_slow:
        return f"None of {total} is significantly slower than alike ones."
    verb = "is" if links.num_slow == 1 else "are"
    return (
        f"{links.num_slow:,} of {total} {verb} significantly slower than alike ones, or than in"
        " their own other steps."
    )


def _totals_by_kind(links: LinkSummary) -> Component:
    totals = [one for one in links.totals if one.group is LinkGroup.KIND]
    return card(
        html.H2("By kind"),
        html.P(
            "A link is a pair of ranks, or a group whose members communicate. Bandwidth: bytes of"
            " the operation over its transfer time, without waiting.",
            className="about",
        ),
        _totals_table("links by kind", "kind", totals),
    )


def _num_rows(view: View, *, num: int, num_slow: int) -> int:
    """Return how many of the rows are shown: all if asked for, else the slow ones and a few."""
    return num if view.show == ALL else min(num, MAX_ROWS, max(num_slow, MAX_EVEN_ROWS))


def _show_all(text: str, view: View) -> Component:
    return dcc.Link(text, href=write_address(replace(view, show=ALL)))


def _totals_by_place(group: LinkGroup, totals: list[LinkTotal], view: View) -> Component:
    word = _WORDS[group]
    num_slow = sum(one.num_slow > 0 for one in totals)
    num = _num_rows(view, num=len(totals), num_slow=num_slow)
    more: list[Component] = []
    largest = f"the {len(totals):,} with the largest excess"
    is_cut = len(totals) >= MAX_TOTALS
    if num < len(totals):
        shown = largest if is_cut else f"all {len(totals):,}"
        more.append(_show_all(f"Show {shown} on this page", view))
    elif is_cut:
        more.append(html.P(f"Listed: {largest}.", className="quiet"))
    return card(
        html.H2(f"By {word}"),
        html.P(
            f"Links with a member on the {word}. A slow one slows all of its links.",
            className="about",
        ),
        _totals_table(f"links by {word}", word, totals[:num]),
        *more,
    )


def _totals_table(label: str, first: str, totals: list[LinkTotal]) -> Component:
    head = dict.fromkeys((first, "links", "slow", "transfers", "bandwidth", "excess"), "number")
    rows: list[list[Cell]] = [
        [
            escape(one.name),
            f"{one.num_links:,}",
            html.Span(f"{one.num_slow:,}", className="cause") if one.num_slow else "0",
            f"{one.num_transfers:,}",
            format_rate(one.bytes_per_s),
            format_percent(one.excess_ratio, digits=1),
        ]
        for one in totals
    ]
    return table(label, head | {first: ""}, rows, class_name="plain-rows")


def _matrix(report: RunReport, matrix: LinkMatrix) -> Component:
    what = "host" if matrix.of_hosts else "rank"
    note = ""
    if matrix.num_left_out:
        shown = format_count(len(matrix.ends), what)
        note = f"The {shown} with the slowest pairs; {matrix.num_left_out:,} more are left out."
    return card(
        html.H2(f"Pairs by {what}"),
        html.P(
            "Transfer time above that of alike pairs. A red row: a slow sender. A red column: a"
            " slow receiver. Blank: no transfer. Collectives are not in it.",
            className="about",
        ),
        graph(
            "links-matrix",
            link_matrix_figure(matrix, run=report.run),
            min_px=least_width(matrix),
        ),
        html.P(note, className="note"),
    )


def link_matrix_figure(matrix: LinkMatrix, *, run: str) -> go.Figure:
    """Draw the transfer time above that of alike pairs: y sender, x receiver, neutral at 0.

    A cell without a value has no transfer. The scale spans at least +-10 %, so that noise stays
    pale.
    """
    ends = {end: escape_for_plotly(end) for end in matrix.ends}
    names = list(ends.values())
    known = matrix.excess_ratio[np.isfinite(matrix.excess_ratio)]
    spread = max(_MIN_SPREAD, float(np.abs(known).max(initial=0.0)))
    word = "" if matrix.of_hosts else "rank "
    texts = [
        [
            ""
            if np.isnan(excess)
            else f"{format_percent(excess, digits=1)} above alike pairs<br>"
            + format_rate(None if np.isnan(rate) else rate)
            for excess, rate in zip(*rows, strict=True)
        ]
        for rows in zip(matrix.excess_ratio.tolist(), matrix.bytes_per_s.tolist(), strict=True)
    ]
    gap = int(len(names) <= _MAX_SPACED)
    figure = go.Figure(
        go.Heatmap(
            x=names,
            y=names,
            z=(100 * matrix.excess_ratio).astype(np.float32),
            customdata=texts,
            colorscale=DIVERGING,
            zmin=-100 * spread,
            zmax=100 * spread,
            xgap=gap,
            ygap=gap,
            hoverongaps=False,
            hovertemplate=f"{word}%{{y}} to {word}%{{x}}<br>%{{customdata}}<extra></extra>",
            colorbar={"title": {"text": "excess (%)", "side": "right"}, "thickness": 10},
        )
    )
    labels = {name: escape_for_plotly(cut_middle(end, _MAX_LABEL)) for end, name in ends.items()}
    rows_px = min(_PIXELS_PER_ROW * len(names), _MAX_ROWS_PX)
    height = max(rows_px + _SLANTED_PX * _label_chars(matrix) + _BELOW_PX, _MIN_HEIGHT)
    apply_style(figure, height=height, zoom_key=f"links {run}")
    figure.update_xaxes(labelalias=labels)
    figure.update_yaxes(labelalias=labels)
    what = "host" if matrix.of_hosts else "rank"
    figure.update_xaxes(type="category", title_text=f"receiving {what}", showgrid=False, nticks=32)
    figure.update_yaxes(
        type="category",
        title={"text": f"sending {what}", "standoff": 14},
        showgrid=False,
        autorange="reversed",
        nticks=32,
    )
    return figure


def least_width(matrix: LinkMatrix) -> int:
    """Return the width in pixels below which the figure scrolls: a phone shows a few ends whole."""
    labels_px = _CHAR_PX * _label_chars(matrix)
    return min(_PIXELS_PER_ROW * len(matrix.ends) + labels_px + _BESIDE_PX, _MAX_LEAST_PX)


def _label_chars(matrix: LinkMatrix) -> int:
    return min(max(map(len, matrix.ends)), _MAX_LABEL)


def _slowest(report: RunReport, links: LinkSummary, view: View) -> Component:
    num = _num_rows(view, num=len(links.links), num_slow=links.num_slow)
    shown = links.links[:num]
    head = {
        "link": "",
        **({"slow in steps": ""} if links.num_slow else {}),
        "excess": "number",  # a phone shows it without scrolling
        "transfer": "number",
        "alike": "number",
        "lost per step": "number",
        "bandwidth": "number",
        "kind": "",
        "hosts": "",
        "transfers": "number",
    }
    rows = [_link_row(report, one, has_slow=links.num_slow > 0) for one in shown]
    more: list[Component] = []
    if len(shown) < len(links.links):
        text = f"Show {len(links.links):,} of {links.num_links:,}"
        if len(links.links) == links.num_links:
            text = f"Show all {links.num_links:,}"
        more.append(_show_all(text, view))
    elif len(shown) < links.num_links:
        text = f"The {len(shown):,} slowest of {links.num_links:,} links."
        more.append(html.P(text, className="quiet"))
    return card(
        html.H2("Slowest links"),
        html.P(
            "Significantly slow links first, in the steps in which they are slow; the others in"
            " the mean of all analysed steps. Alike: links of equal kind, size and number of"
            " members; of links that became slow together, or have few alike ones, their own other"
            " steps.",
            className="about",
        ),
        table("slowest links", head, rows, class_name="plain-rows unbroken"),
        *more,
    )


def _link_row(report: RunReport, one: LinkTransfers, *, has_slow: bool) -> list[Cell]:
    members: list[Component | str]
    if one.is_pair:
        source, target = (rank_link(report.run, rank) for rank in one.members)
        members = [source, " → ", target]
    else:
        count = f"{format_count(one.num_members, 'rank')}: "
        listed = rank_links(
            report.run, one.members, max_ranges=MAX_NAMED_RANGES, num_ranks=one.num_members
        )
        members = [count, *listed]
    steps: Component | str = EMPTY
    if one.slow_steps is not None:
        last = View(
            page=TIMELINE,
            run=report.run,
            epoch=report.epochs[-1],
            step=one.slow_steps[1],
            ranks=one.members,
        )
        href = write_address(last)
        steps = dcc.Link(format_range(one.slow_steps), href=href, title="Show the last of them")
    excess = format_percent(one.excess_ratio, digits=1)
    return [
        members,
        *([steps] if has_slow else []),
        html.Span(excess, className="cause") if one.slow_steps else excess,
        format_duration(one.transfer_ns),
        format_duration(one.expected_ns),
        format_duration(one.lost_ns_per_step),
        _rates(one),
        one.kind,
        _hosts(one.hosts),
        f"{one.num_transfers:,}",
    ]


def _hosts(hosts: tuple[str, ...]) -> str:
    """Return the hosts of a link, of which a laptop's screen has room for one in a line."""
    if len(hosts) > 2:  # noqa: PLR2004  # a pair is named
        return f"{escape(hosts[0])} and {len(hosts) - 1:,} more"
    return ", ".join(map(escape, hosts)) or UNKNOWN


def _rates(one: LinkTransfers) -> str:
    if one.bytes_per_s is None:
        return UNKNOWN
    own, alike = format_rate(one.bytes_per_s), format_rate(one.expected_bytes_per_s)
    unit = f" {alike.rpartition(' ')[2]}"
    return f"{own.removesuffix(unit)} of {alike}"


def _bandwidths(bandwidths: tuple[Bandwidth, ...]) -> Component:
    head = {"kind": "", "operation": "", "members": "number", "hosts": "", "size": "number"}
    head |= dict.fromkeys(("transfers", "median", "bandwidth", "bus bandwidth"), "number")
    across = {None: UNKNOWN, True: "several", False: "one"}
    rows = [
        [
            one.kind,
            escape(one.name),
            f"{one.num_members:,}",
            across[one.across_hosts],
            format_bytes(one.num_bytes),
            f"{one.num_instances:,}",
            format_duration(one.transfer_ns),
            format_rate(one.algorithm_bytes_per_s),
            format_rate(one.bus_bytes_per_s),
        ]
        for one in bandwidths
    ]
    return card(
        html.H2("By operation and size"),
        html.P(
            "Bus bandwidth: what each member's link carries, as in nccl-tests.", className="about"
        ),
        table(
            "bandwidth by operation and size",
            head,
            rows,
            class_name=f"plain-rows unbroken {STACKED}",
        ),
    )
