"""The picture of a finding's proof, as a part of a page."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dash import html

from ..figures.proof_card import MIN_PX, proof_figure
from ..text import escape
from .components import graph

if TYPE_CHECKING:
    from dash.development.base_component import Component

    from rankscope.analysis.report.report import Finding, RunReport


def proof_picture(part: str, report: RunReport, finding: Finding) -> Component | None:
    """Return the picture of a finding; None if nothing shows it.

    Facts alone are text, whole and in lines as long as the screen; beside a quantity, the figure
    has them.
    """
    figure = proof_figure(report, finding)
    if figure is None:
        return None
    if figure.data or finding.card is None:
        return graph(part, figure, min_px=MIN_PX)
    lines = [
        line
        for fact in finding.card.facts
        for line in (
            html.Dt(fact.label, className="culprit" if fact.is_culprit else ""),
            html.Dd(escape(fact.text)),
        )
    ]
    return html.Dl(lines, id=part, className="proof-facts")
