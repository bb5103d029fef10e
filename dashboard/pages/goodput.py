"""The card of a run's goodput: what its GPU-hours were spent on, over all restarts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import dash_mantine_components as dmc  # type: ignore[import-untyped]
from dash import html

from rankscope.analysis.goodput import GoodputPart, describe_goodput
from rankscope.analysis.report.text import (
    UNKNOWN,
    format_device_hours,
    format_percent,
    format_range,
)

from ..text import escape
from ..theme import GOODPUT_COLORS
from .components import card, decorative, table

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dash.development.base_component import Component

    from rankscope.analysis.goodput import Goodput

MAX_EPOCHS = 40
"""Newest epochs that are listed."""

_MEANING: dict[GoodputPart, str] = {
    GoodputPart.PRODUCTIVE: "steps that were kept, without the parts below",
    GoodputPart.REPEATED: "steps that a restart trained again, and steps that never ended",
    GoodputPart.DETECTION: "from the first failure, or the last progress, to the end of all ranks",
    GoodputPart.RESTART: "until the first process of the next epoch",
    GoodputPart.STARTUP: "from there to the first step, and what the first steps took longer",
    GoodputPart.CHECKPOINT: "the training waits for a save",
    GoodputPart.EVALUATION: "the price of the evaluations",
    GoodputPart.FINDINGS: "the prices of the findings, over all steps that show them",
    GoodputPart.UNKNOWN: "no record explains it: the running step, the time after the last one",
}


def goodput_card(goodput: Goodput | None) -> list[Component]:
    """Return the goodput as one bar with its parts, and the epochs; nothing if it is unknown."""
    if goodput is None:
        return []
    return [
        card(
            html.H2(f"Goodput {format_percent(goodput.ratio, digits=1)}"),
            html.P(escape(describe_goodput(goodput)), className="about"),
            _bar(goodput.rank_s, class_name="parts-bar goodput-bar"),
            _parts(goodput),
            *([_epochs(goodput)] if len(goodput.epochs) > 1 else []),
            class_name="goodput",
        )
    ]


def _parts(goodput: Goodput) -> Component:
    rows = [
        [
            dmc.TableTd(
                [
                    html.Span(
                        className="part-key", style={"background": GOODPUT_COLORS[part]},
                        **decorative(),
                    ),
                    part.word,
                ],
                className="unbroken",
            ),
            _number(goodput.hours(part)),
            format_percent(goodput.share(part), digits=1),
            dmc.TableTd(_meaning(goodput, part), className="quiet"),
        ]
        for part in GoodputPart
        if goodput.rank_s[part] > 0
    ]  # fmt: skip
    head = {"part": "", "GPU-hours": "number", "share": "number", "meaning": ""}
    return table("parts of the goodput", head, rows, class_name="plain-rows goodput-parts")


def _meaning(goodput: Goodput, part: GoodputPart) -> str:
    causes = goodput.finding_rank_s
    if part is not GoodputPart.FINDINGS or not causes:
        return _MEANING[part]
    shares = ", ".join(
        f"{cause} {format_percent(seconds / goodput.total_rank_s, digits=1)}"
        for cause, seconds in sorted(causes.items(), key=lambda item: -item[1])
    )
    return f"{_MEANING[part]}: {escape(shares)}"


def _epochs(goodput: Goodput) -> Component:
    shown = goodput.epochs[-MAX_EPOCHS:]
    longest_s = max(sum(epoch.rank_s.values()) for epoch in shown)
    rows = []
    for epoch in shown:
        whole_s = sum(epoch.rank_s.values())
        width = {"width": f"{100 * whole_s / longest_s:.1f}%"} if longest_s else {}
        rows.append(
            [
                str(epoch.epoch),
                f"{epoch.num_ranks:,}",
                UNKNOWN if epoch.steps is None else format_range(epoch.steps),
                f"{epoch.num_repeated:,}",
                _number(whole_s / 3_600),
                dmc.TableTd(
                    html.Div(_bar(epoch.rank_s), style=width), className="epoch-bar", **decorative()
                ),
            ]
        )
    head = {
        "epoch": "number",
        "ranks": "number",
        "steps": "number",
        "repeated": "number",
        "GPU-hours": "number",
        "": "",
    }
    return html.Div(
        [
            html.H3("Epochs"),
            html.P(
                "Each with the time until the next one. Findings and evaluations are part of the"
                " productive time here.",
                className="about",
            ),
            table("epochs", head, rows, class_name="plain-rows"),
        ]
    )


def _number(hours: float) -> str:
    return format_device_hours(hours).partition(" ")[0]


def _bar(rank_s: Mapping[str, float], *, class_name: str = "parts-bar") -> Component:
    whole_s = sum(rank_s.values()) or 1.0
    return html.Div(
        [
            html.Span(
                className="part",
                style={
                    "flexGrow": f"{100 * rank_s[part] / whole_s:.6f}",
                    "background": GOODPUT_COLORS[part],
                },
                title=part.word,
            )
            for part in GoodputPart
            if rank_s[part] > 0
        ],
        className=class_name,
        **decorative(),
    )
