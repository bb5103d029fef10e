"""When ranks were last heard of: a line while all go on, a table of those that fell silent."""

from __future__ import annotations

from typing import TYPE_CHECKING

import dash_mantine_components as dmc  # type: ignore[import-untyped]
from dash import html

from rankscope.analysis.report.liveness import RECENT_NS, SILENT_NS
from rankscope.analysis.report.text import UNKNOWN, format_count
from rankscope.tracer.span import NS_PER_S

from ..text import visible
from .frame import card, labelled

if TYPE_CHECKING:
    from dash.development.base_component import Component

    from rankscope.analysis.report.liveness import RankLiveness, SilentRank

MINUTE_S, HOUR_S = 60, 3600
HEAD = {"rank": "number", "host": "", "state": "", "step": "number", "silent for": "number"}


def heard_card(heard: RankLiveness | None) -> list[Component]:
    """Return nothing where nobody tells of a rank, or none is heard: the run says that itself."""
    if heard is None or heard.num_silent == heard.num_ranks:
        return []
    if not heard.is_uneven:
        line = (
            f"{heard.num_recent:,} of {format_count(heard.num_ranks, 'rank')} heard within"
            f" {RECENT_NS // NS_PER_S} s"
        )
        return [html.P(line, className="quiet all-heard")]
    return [
        card(
            html.H2("Last heard"),
            html.P(_sentence(heard), className="about"),
            html.Div(
                _table(heard.silent),
                className="scrolls",
                tabIndex=0,
                role="region",
                **labelled("ranks that fell silent"),
            ),
            class_name="heard",
        )
    ]


def age_text(age_ns: int) -> str:
    """Return how long ago something was, in the two units that count."""
    seconds = age_ns // NS_PER_S
    if seconds < MINUTE_S:
        return f"{seconds} s"
    if seconds < HOUR_S:
        return f"{seconds // MINUTE_S} min {seconds % MINUTE_S} s"
    return f"{seconds // HOUR_S:,} h {seconds % HOUR_S // MINUTE_S} min"


def _sentence(heard: RankLiveness) -> str:
    told = (
        f"{heard.num_silent:,} of {format_count(heard.num_ranks, 'rank')} silent for more than"
        f" {SILENT_NS // NS_PER_S} s, while {heard.num_recent:,} were heard within"
        f" {RECENT_NS // NS_PER_S} s."
    )
    if heard.num_silent > len(heard.silent):
        told += f" The {len(heard.silent)} longest silences:"
    return told


def _table(silent: tuple[SilentRank, ...]) -> Component:
    table: Component = dmc.Table(
        [
            dmc.TableThead(
                dmc.TableTr([dmc.TableTh(word, className=style) for word, style in HEAD.items()])
            ),
            dmc.TableTbody([_row(one) for one in silent]),
        ],
        tabularNums=True,
        verticalSpacing=1,
        className="silent-ranks",
    )
    return table


def _row(one: SilentRank) -> Component:
    row: Component = dmc.TableTr(
        [
            dmc.TableTd(str(one.rank), className="number"),
            dmc.TableTd(visible(one.host)),
            dmc.TableTd(visible(one.state)),
            dmc.TableTd(UNKNOWN if one.step is None else f"{one.step:,}", className="number"),
            dmc.TableTd(age_text(one.age_ns), className="number"),
        ]
    )
    return row
