"""The page of a run's MFU: its curve, and where the time of a step goes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import dash_mantine_components as dmc  # type: ignore[import-untyped]
from dash import html

from rankscope.analysis.breakdown.waterfall import Part
from rankscope.analysis.breakdown.waterfall_views import (
    PartShare,
    WaterfallBy,
    list_rows,
    split_step,
)
from rankscope.analysis.report.text import (
    UNKNOWN,
    format_bytes,
    format_count,
    format_hfu,
    format_percent,
    format_seconds,
)

from ..address import MFU, View
from ..figures.waterfall import PART_WORDS, mfu_figure, waterfall_figure
from ..theme import PART_COLORS
from .components import STACKED, card, decorative, graph, table, with_code
from .overview_cards import escape_sentence, last_steps, missing_mfu
from .report_page import choices, page_head, report_page

if TYPE_CHECKING:
    from dash.development.base_component import Component

    from rankscope.analysis.breakdown.run_history import RunHistory
    from rankscope.analysis.report.memory import MemoryUse, StageMemory
    from rankscope.analysis.report.report import PipelineBubble, RunReport

    from ..provider import ReportProvider

MEMORY_PARTS = ("parameters", "gradients", "optimizer", "activations", "rest")

_MEANING: dict[Part, str] = {
    Part.USEFUL_COMPUTE: "compute up to its ideal",
    Part.SLOW_COMPUTE: "compute above its ideal",
    Part.EXPOSED_TRANSFER: "communication that no compute hides, without waiting",
    Part.WAITING: "for a later rank, beyond the schedule",
    Part.BUBBLE_WARM_UP: "schedule of the pipeline, before the first backward",
    Part.BUBBLE_STEADY: "schedule of the pipeline, between",
    Part.BUBBLE_COOL_DOWN: "schedule of the pipeline, after the last forward",
    Part.INPUT: "host time before the first compute, and data loading",
    Part.HOST_GAP: "other host time in which the device has no work",
    Part.GC: "Python's garbage collection",
    Part.CHECKPOINT: "saving the model",
    Part.EVALUATION: "forwards without gradients that few steps have",
    Part.UNKNOWN: "no record explains it",
}

_WORDS = {WaterfallBy.STEP: "step", WaterfallBy.STAGE: "stage", WaterfallBy.RANK: "rank"}


def show_mfu(provider: ReportProvider, report: RunReport, view: View) -> list[Component]:
    """Return the curve, the waterfall of the run, and waterfalls side by side."""
    history = provider.history(report.run)
    parts = [page_head("MFU", about=_sentence(report)), _curve(report, history)]
    shares = split_step(report)
    if not shares:
        reason = "No step could be replayed, so the parts of a step are unknown."
        nothing = card(html.H2("Where a step goes"), html.P(reason, className="quiet"))
        return [*parts, nothing, *_memory(report.memory)]
    parts.append(_shares(report, shares))
    return [*parts, *_side_by_side(report, view), *_memory(report.memory)]


PAGE = report_page(MFU, "MFU", show_mfu)


def _sentence(report: RunReport) -> str:
    if report.mfu is None:
        return missing_mfu(report)
    found = report.mfu_shape
    shape = ""
    if found is not None:
        name = "" if found.text.startswith(found.name) else f"{found.name}, "
        shape = f" Shape: {name}{found.text}."
    typical = f" Typical causes: {found.causes}." if found is not None and found.causes else ""
    mean = format_percent(report.mfu.mean, digits=1)
    steps = format_count(len(report.mfu.by_step), "step")
    mean += format_hfu(report.mfu.mean, report.mfu.hfu)
    return f"{mean} mean of {steps}: {escape_sentence(report.mfu.convention)}.{shape}{typical}"


def _curve(report: RunReport, history: RunHistory | None) -> Component:
    has_loss = history is not None and bool(history.loss_by_step)
    if report.mfu is None and not has_loss:
        text = "The MFU of this run is unknown, and no rank passed a loss to `tracer.step`."
        return card(html.H2("Over steps"), html.P(with_code(text), className="quiet"))
    missing = "" if has_loss else "Loss n/a: no rank passed one to `tracer.step`."
    return card(
        html.H2("Over steps"),
        html.P(
            with_code(
                "Shaded: steps of findings. Triangles: checkpoints, evaluations and other pauses"
                f" of all ranks. Dotted: restarts. {missing}"
            ),
            className="about",
        ),
        graph("mfu-curve", mfu_figure(report, history)),
    )


def _shares(report: RunReport, shares: tuple[PartShare, ...]) -> Component:
    largest = max(share.ratio for share in shares)
    rows = [
        [
            dmc.TableTd(PART_WORDS[share.part], className="unbroken"),
            _share_bar(share, largest),
            format_seconds(share.seconds),
            format_percent(share.ratio, digits=1),
            UNKNOWN if share.mfu_ratio is None else f"{100 * share.mfu_ratio:.1f}",
            dmc.TableTd(_MEANING[share.part], className="quiet unbroken"),
        ]
        for share in shares
        if share.ratio > 0
    ]
    head = {"part": "", "": "", "time": "number", "share": "number", "MFU points": "number"}
    covers = f"Covers only the {last_steps(report)}. " if report.num_earlier_steps else ""
    about = (
        f"{covers}Mean step of the mean rank; the parts sum to the step. MFU points of useful"
        " compute: what the run has. Of any other part: what it would add if the devices computed"
        " instead."
    )
    return card(
        html.H2("Where a step goes"),
        html.P(about, className="about"),
        table("parts of a step", head | {"meaning": ""}, rows, class_name="plain-rows shares"),
        *_bubble(report.waterfall.bubble if report.waterfall else None),
    )


def _share_bar(share: PartShare, largest: float) -> Component:
    width, color = f"{100 * share.ratio / largest:.1f}%", PART_COLORS[share.part.value]
    fill = html.Span(className="bar-fill", style={"width": width, "background": color})
    cell: Component = dmc.TableTd(
        html.Span(fill, className="bar-track"), className="share-bar", **decorative()
    )
    return cell


def _bubble(bubble: PipelineBubble | None) -> list[Component]:
    if bubble is None:
        return []
    formula = (
        f"Bubble of the pipeline: {format_percent(bubble.measured_ratio, digits=1)} of useful"
        f" compute as measured, {format_percent(bubble.formula_ratio, digits=1)} by its formula"
        f" {bubble.formula}."
    )
    return [html.P(formula, className="bubble-line")]


def _side_by_side(report: RunReport, view: View) -> list[Component]:
    sides = {by: list_rows(report, by) for by in WaterfallBy}
    known = {by: rows for by, rows in sides.items() if rows is not None}
    if not known:
        return []
    chosen = next((by for by in known if by.value == view.show), next(iter(known)))
    plain = replace(view, show=None)
    options = [
        (_WORDS.get(by, f"{by.value.upper()} position"), replace(plain, show=by.value))
        for by in known
    ]
    rows = known[chosen]
    left_out = ""
    if rows.num_left_out:
        which = "earlier steps" if rows.by is WaterfallBy.STEP else "with more useful compute"
        left_out = f"{rows.num_left_out:,} more are left out: {which}."
    return [
        card(
            html.Div(
                [
                    html.H2("Side by side"),
                    choices("by", options, view=replace(plain, show=chosen.value)),
                ],
                className="card-head",
            ),
            graph("mfu-waterfall", waterfall_figure(rows, run=report.run)),
            html.P(left_out, className="note"),
            label="Side by side",
        )
    ]


def _memory(use: MemoryUse | None) -> list[Component]:
    if use is None:
        return []
    head = {
        "stage": "number",
        "rank": "number",
        "peak": "number",
        "full": "number",
        "with cache": "number",
        "device": "number",
        **dict.fromkeys(MEMORY_PARTS, "number"),
    }
    about = (
        "The rank of each stage whose allocator had the highest peak so far. Full: that peak, of"
        " the device without what is used outside of the allocator. Parameters, gradients"
        " and optimizer: by the shapes of its tensors. Activations: by the formula of arXiv"
        " 2205.05198. Rest: temporary tensors, and what the formula does not count."
    )
    missing = f"Activations n/a {use.missing_activations}." if use.missing_activations else ""
    whole = f"{use.whole_text[:1].upper()}{use.whole_text[1:]}." if use.whole else ""
    known = table(
        "memory by stage", head, [*map(_memory_row, use.stages)], class_name=f"plain-rows {STACKED}"
    )
    return [
        card(
            html.H2("Memory"),
            *([html.P(about, className="about"), known] if use.stages else []),
            *(html.P(text, className="note") for text in (missing, whole) if text),
        )
    ]


def _memory_row(stage: StageMemory) -> list[str]:
    state = stage.state
    parts = (
        (None, None, None)
        if state is None
        else (state.parameter_bytes, state.gradient_bytes, state.optimizer_bytes)
    )
    return [
        str(stage.stage),
        str(stage.rank),
        _size(stage.peak_allocated_bytes),
        format_percent(stage.full_ratio),
        _size(stage.peak_reserved_bytes),
        _size(stage.device_bytes),
        *map(_size, (*parts, stage.activation_bytes, stage.rest_bytes)),
    ]


def _size(num_bytes: float | None) -> str:
    return UNKNOWN if num_bytes is None else format_bytes(round(num_bytes))
