"""Cards of a profile: parts of a step on the device, busiest kernels, kernels that differ."""

from __future__ import annotations

from typing import TYPE_CHECKING

import dash_mantine_components as dmc  # type: ignore[import-untyped]
from dash import html

from rankscope.analysis.report.device_time import CHANGE_COLUMNS, KERNEL_COLUMNS
from rankscope.analysis.report.text import UNKNOWN, format_count, format_percent, format_seconds

from ..text import escape
from ..theme import KIND_COLORS, PART_COLORS
from .components import card, decorative, table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dash.development.base_component import Component

    from rankscope.analysis.report.device_time import Kernel, KernelChange
    from rankscope.analysis.report.report import RunReport

    from .components import Cell

MAX_SHOWN = 15
"""Kernels of a card, the busiest or those that differ most."""

_COLORS = {
    "compute": PART_COLORS["useful_compute"],
    "idle, input": PART_COLORS["input"],
    "idle, launch": PART_COLORS["host_gap"],
    "idle, synchronisation": PART_COLORS["gc"],
    **{f"exposed {kind}": color for kind, color in KIND_COLORS.items()},
}


def profile_cards(report: RunReport) -> tuple[Component, ...]:
    """Return device time and kernels, means of all ranks; nothing if no profile was imported."""
    if report.device_time is None:
        return ()
    whose = f"mean of {format_count(len(report.device_time.ranks), 'rank')}"
    device_time = report.device_time
    cards = (device_time_card(device_time.mean_s, device_time.file_ratio, whose=whose),)
    return (*cards, kernels_card(report.kernels)) if report.kernels else cards


def device_time_card(
    parts: Mapping[str, float], of_file: Mapping[str, float] | None = None, *, whose: str
) -> Component:
    """Return the parts of a mean step on the device, as shares of it.

    Args:
        parts: Seconds by part, which sum to the step.
        of_file: Shares in the whole files.
        whose: "mean of 8 ranks".
    """
    total_s = sum(parts.values()) or 1.0
    rows: list[list[Cell]] = []
    for part, seconds in parts.items():
        if not seconds and not (of_file and of_file[part]):
            continue
        color = _COLORS.get(part, PART_COLORS["unknown"])
        width = f"{100 * seconds / total_s:.2f}%"
        fill = html.Span(className="bar-fill", style={"width": width, "background": color})
        rows.append(
            [
                dmc.TableTd(escape(part), className="unbroken"),
                dmc.TableTd(
                    html.Span(fill, className="bar-track"), className="share-bar", **decorative()
                ),
                format_percent(seconds / total_s, digits=1),
                format_seconds(seconds),
                *([] if of_file is None else [format_percent(of_file[part], digits=1)]),
            ]
        )
    head = {"part": "", "": "", "share": "number", "per step": "number"}
    if of_file is not None:
        head["of the whole file"] = "number"
    return card(
        html.H2("Device time of a step"),
        html.P(
            f"{whose[:1].upper()}{whose[1:]}, {format_seconds(total_s)}. Exposed: communication"
            " that no compute covers. Idle: no kernel runs, by what the host did. They sum to the"
            " step; no replay is needed.",
            className="about",
        ),
        table(
            "device time of a step",
            head,
            rows,
            class_name="plain-rows device-time",
        ),
    )


def kernels_card(kernels: Sequence[Kernel]) -> Component:
    """Return the busiest kernels, and what they reach of the device's peaks if it is known."""
    rows = [
        _named(
            each.cells[:-1],
            dmc.TableTd(each.reached or UNKNOWN, className="unbroken"),
        )
        for each in kernels[:MAX_SHOWN]
    ]
    about = (
        "Launches and time in a step of a rank. Reached: FLOP/s and bytes/s of memory, with their"
        " share of the device's peak, where the profile has shapes. The larger share limits it."
    )
    head = dict.fromkeys(KERNEL_COLUMNS[:2], "") | dict.fromkeys(KERNEL_COLUMNS[2:4], "number")
    title = "Busiest kernels"
    if len(kernels) > MAX_SHOWN:
        title = f"The {MAX_SHOWN} busiest of {format_count(len(kernels), 'kernel')}"
    return card(
        html.H2(title),
        html.P(about, className="about"),
        table("busiest kernels", head | {KERNEL_COLUMNS[4]: ""}, rows, class_name="plain-rows"),
    )


def kernel_changes_card(changes: Sequence[KernelChange], names: tuple[str, str]) -> Component:
    """Return the kernels that differ between two runs, the largest differences first."""
    rows = [_named(each.cells[:-1], each.cells[-1]) for each in changes[:MAX_SHOWN]]
    head = dict.fromkeys(CHANGE_COLUMNS[:3], "") | dict.fromkeys(CHANGE_COLUMNS[3:], "number")
    title = "Kernels that differ"
    if len(changes) > MAX_SHOWN:
        title = f"The {MAX_SHOWN} kernels that differ most, of {len(changes):,}"
    return card(
        html.H2(title),
        html.P(
            f"In a step of a rank, {names[0]} -> {names[1]}: launches, and the sum of their times.",
            className="about",
        ),
        table("kernels that differ", head, rows, class_name="plain-rows")
        if rows
        else html.P("No kernel differs by more than 2 %.", className="quiet"),
    )


def _named(cells: tuple[str, ...], last: Cell) -> list[Cell]:
    """Return the cells of a row whose first one is the name of a kernel."""
    name, *rest = cells
    return [dmc.TableTd(escape(name), className="mono kernel"), *rest, last]
