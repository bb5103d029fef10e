"""Runs by configuration: those that should take equally long, side by side."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from dash import dcc, html

from rankscope.analysis.report.text import (
    EMPTY,
    UNKNOWN,
    format_change,
    format_count,
    format_percent,
    format_seconds,
    format_time,
)

from ..address import View, write_address
from ..text import escape
from .components import card, local_time, table
from .overview_cards import cause_style

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dash.development.base_component import Component

    from rankscope.dashboard.records.page_results import RunLine

    from .components import Cell

MAX_CONFIGURATIONS = 100
"""Configurations that are shown, those of the newest runs."""

MAX_RUNS = 50
"""Runs of one that are shown, the newest."""

COMMIT_DIGITS = 10


def configuration_cards(lines: Sequence[RunLine]) -> list[Component]:
    """Return a table for each configuration: those with several runs first, then by the newest."""
    groups: dict[tuple[str, ...], list[RunLine]] = defaultdict(list)
    for line in lines:
        groups[_configuration(line)].append(line)
    ordered = sorted(groups.items(), key=lambda group: len(group[1]) == 1)  # a stable order
    return [_configuration_card(words, runs) for words, runs in ordered[:MAX_CONFIGURATIONS]]


def _configuration(line: RunLine) -> tuple[str, ...]:
    """Return what must be equal for two runs to be of one configuration, in words."""
    sizes = line.run.layout.to_dict()
    axes = " ".join(f"{axis}{size}" for axis, size in sizes.items() if size > 1)
    num = line.num_microbatches
    return (
        escape(line.model) or "model unknown",
        format_count(line.run.world_size, "rank"),
        axes or "no parallel axis",
        "micro-batches unknown" if num is None else format_count(num, "micro-batch"),
        f"commit {escape(line.commit[:COMMIT_DIGITS])}" if line.commit else "commit unknown",
    )


def _configuration_card(words: tuple[str, ...], runs: Sequence[RunLine]) -> Component:
    shown = runs[:MAX_RUNS]
    fastest = min((line.step_s for line in shown if line.step_s), default=None)
    best_mfu = max((line.mfu for line in shown if line.mfu is not None), default=None)
    head = {
        "run": "", "verdict": "", "step time": "number", "against the fastest": "",
        "MFU": "number", "steps": "number", "started": "", "tags": "",
    }  # fmt: skip
    rows: list[list[Cell]] = [
        [
            dcc.Link(
                escape(line.run.run_id),
                href=write_address(View(run=line.run.run_id)),
                className="run-link",
            ),
            html.Span(
                line.cause or EMPTY, className=f"cause {cause_style(line.cause, line.severity)}"
            ),
            _marked(format_seconds(line.step_s), is_best=line.step_s == fastest),
            _against(line.step_s, fastest, num=len(shown)),
            _marked(format_percent(line.mfu, digits=1), is_best=line.mfu == best_mfu),
            f"{line.run.num_steps:,}",
            local_time(format_time(line.run.started_ns)),
            html.Span([html.Span(escape(tag), className="tag") for tag in line.tags]),
        ]
        for line in shown
    ]
    more = len(runs) - len(shown)
    return card(
        html.Div([html.H2(" · ".join(words)), html.Span(format_count(len(runs), "run"))],
                 className="titled"),
        table("runs of this configuration", head, rows, class_name="plain-rows by-configuration"),
        *([html.P(f"{more:,} older runs are not shown.", className="quiet")] if more else []),
        label=" · ".join(words),
    )  # fmt: skip


def _marked(text: str, *, is_best: bool) -> Component | str:
    return html.B(text) if is_best and text != UNKNOWN else text


def _against(step_s: float | None, fastest: float | None, *, num: int) -> Component | str:
    if step_s is None or fastest is None or num == 1:
        return EMPTY
    return html.B("fastest") if step_s == fastest else format_change(step_s / fastest)
