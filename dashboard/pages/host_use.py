"""A card about the hosts of a job: exchanged by a restart, or excluded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dash import html

from rankscope.analysis.breakdown.host_moves import find_moves, format_move

from ..text import escape
from .components import card, with_code

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dash.development.base_component import Component

    from rankscope.analysis.report.report import RunReport

MAX_LINES = 12


def host_use_card(report: RunReport, excluded: Sequence[str]) -> list[Component]:
    """Return what restarts changed, and which excluded hosts are in use; nothing without either.

    Args:
        excluded: A sentence about each excluded host that it uses or has used.
    """
    lines = [f"{format_move(move)}." for move in find_moves(report)]
    lines = [line[0].upper() + line[1:] for line in lines] + [*excluded]
    if not lines:
        return []
    more = len(lines) - MAX_LINES
    shown = [html.Li(with_code(escape(line))) for line in lines[-MAX_LINES:]]
    earlier = (
        [html.P(f"{more:,} earlier ones are not listed.", className="quiet")] if more > 0 else []
    )
    return [card(html.H2("Hosts"), *earlier, html.Ul(shown, className="notices"))]
