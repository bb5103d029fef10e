"""Slowdown by worker over the parallel layout; of a slow link, the transfers of the slowest."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import plotly.graph_objects as go

from rankscope.analysis.report.text import format_link, format_range, format_slowdown

from ..theme import DIVERGING, SLOW, apply_style, axis_unit
from .excess import split_blocks

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from rankscope.analysis.report.report import RankStepExcess, RunReport

_MIN_SPREAD = 0.1
_MAX_BARS = 12
"""Links that are drawn: a slow one is far above the rest."""

_MAX_LABELLED = 64
"""Cells up to which each shows its number."""

_MAX_LABELLED_COLUMNS = 5
"""Likewise columns: a number takes 32 px, and a phone has 180 px for all."""

_MAX_COLUMNS = 64
"""Columns up to which one cell is at least 2 px wide on a phone, and so visible."""


def worker_figure(report: RunReport) -> go.Figure:
    """Draw slowdown by worker: x DP position, y pipeline stage, neutral at 1.

    It is the replay with the recorded times of that worker alone. The shortcut that the paper draws
    shows a whole row or column for one slow worker, so it is in the hover text only.

    A slow link would show as slow workers at both its ends: if the top finding is one, the
    transfers of the slowest links are drawn instead.

    If the layout is unknown, each rank is a worker, in one row. A cell without a value is unknown.
    Above `_MAX_COLUMNS` DP positions, neighbours share a cell, which shows the slowest of them.
    The scale spans at least +-0.1, so that noise stays pale.

    Source:
        arXiv 2505.05713, the worker heat-map.
    """
    if report.evidence is not None and report.evidence.links:
        return _link_figure(report.run, report.evidence)
    workers = report.exact_slowdown_by_worker
    dps = sorted({dp for dp, _ in workers})
    stages = sorted({stage for _, stage in workers})
    begins, blocks = split_blocks(dps, _MAX_COLUMNS)
    columns = dict(zip(dps, np.searchsorted(begins, range(len(dps)), "right") - 1, strict=True))
    slowdown = np.full((len(stages), len(blocks)), np.nan)
    shortcut = np.full((len(stages), len(blocks)), np.nan)
    for (dp, stage), value in workers.items():
        cell = stages.index(stage), columns[dp]
        if value is None or slowdown[cell] >= value:
            continue
        slowdown[cell] = value
        other = report.slowdown_by_worker.get((dp, stage))
        shortcut[cell] = np.nan if other is None else other
    spread = float(np.nanmax(np.abs(slowdown - 1), initial=_MIN_SPREAD))
    column, hover = "DP position", "DP %{x}, stage %{y}"
    if not report.has_layout:
        column, hover = "rank (parallel layout unknown)", "rank %{x}"
    is_labelled = len(workers) <= _MAX_LABELLED and len(dps) <= _MAX_LABELLED_COLUMNS
    figure = go.Figure(
        go.Heatmap(
            x=[format_range(block) for block in blocks],
            y=[f"{stage}" for stage in stages],
            z=slowdown,
            customdata=_texts(shortcut),
            colorscale=DIVERGING,
            zmin=1 - spread,
            zmax=1 + spread,
            xgap=2 if is_labelled else 0,
            ygap=2 if is_labelled else 0,
            hoverongaps=False,
            hovertemplate=(
                f"{hover}<br>slowdown %{{z:.3f}}x if only this worker were slow"
                "<br>smaller one of its DP position and stage: %{customdata}<extra></extra>"
            ),
            colorbar={"title": {"text": "slowdown", "side": "right"}, "thickness": 10},
        )
    )
    if is_labelled:
        figure.update_traces(text=_texts(slowdown), texttemplate="%{text}")
    apply_style(figure, height=340, zoom_key=f"workers {report.run}")
    figure.update_layout(margin={"l": 50, "r": 8, "t": 12, "b": 44})
    figure.update_xaxes(type="category", title_text=column, showgrid=False, nticks=6)
    figure.update_yaxes(
        type="category",
        title_text="PP position (stage)" if report.has_layout else None,
        showticklabels=report.has_layout,
        showgrid=False,
        autorange="reversed",
    )
    return figure


def worker_title(report: RunReport) -> tuple[str, str]:
    """Return what `worker_figure` shows: its title, and a sentence about it."""
    if report.evidence is not None and report.evidence.links:
        return "Slowest links", "Mean time of a step in a link's transfers, above alike links."
    about = "If only that worker were slow. A red row: a slow stage."
    num_dps = len({dp for dp, _ in report.exact_slowdown_by_worker})
    _, blocks = split_blocks(range(num_dps), _MAX_COLUMNS)
    if len(blocks) < num_dps:
        word = "DP positions" if report.has_layout else "ranks"
        about += f" {num_dps:,} {word} in {len(blocks)} columns: each cell shows its slowest."
    return "Slowdown by worker", about


def _link_figure(run: str, evidence: RankStepExcess) -> go.Figure:
    """Draw the mean excess of the slowest links as bars, the slowest on top."""
    known = np.isfinite(evidence.excess_ns)
    sums = np.where(known, evidence.excess_ns, 0.0).sum(axis=1)
    mean_ns = (sums / np.maximum(known.sum(axis=1), 1))[:_MAX_BARS]
    unit, unit_ns = axis_unit(float(np.abs(mean_ns).max(initial=0.0)))
    labels = [format_link(members) for members in evidence.links[:_MAX_BARS]]
    figure = go.Figure(
        go.Bar(
            x=mean_ns / unit_ns,
            y=labels,
            orientation="h",
            marker={"color": SLOW},
            hovertemplate=f"%{{y}}<br>%{{x:+,.2f}} {unit} a step above alike links<extra></extra>",
        )
    )
    apply_style(figure, height=340, zoom_key=f"workers {run}")
    figure.update_layout(margin={"l": 50, "r": 8, "t": 12, "b": 44})
    figure.update_xaxes(title_text=f"above alike links ({unit} a step)")
    figure.update_yaxes(type="category", autorange="reversed", showgrid=False)
    return figure


def _texts(values: NDArray[np.float64]) -> list[list[str]]:
    return [
        [format_slowdown(None if np.isnan(value) else value) for value in row]
        for row in values.tolist()
    ]
