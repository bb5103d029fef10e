"""Draw who was slow when: each rank's compute time above the median rank's, step by step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import plotly.graph_objects as go

from rankscope.tracer.span import NS_PER_S

from ..theme import DIVERGING, axis_unit, dressed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from rankscope.analysis.report.report import RankStepExcess, RunReport

MAX_ROWS = 768
MAX_COLUMNS = 1500
_LEAST_RANGE_RATIO = 0.05
_PIXELS_PER_ROW = 30
_LEAST_HEIGHT = 220
_MOST_HEIGHT = 560
_TALL_CELLS = 48


@dataclass(frozen=True, slots=True, kw_only=True)
class ExcessBlocks:
    """A heat-map of who was slow when, neighbours joined."""

    rank_blocks: tuple[tuple[int, int], ...]
    """First and last rank of each row."""

    step_blocks: tuple[tuple[int, int], ...]
    """First and last step of each column."""

    excess_ns: NDArray[np.float64]
    """Shape (rank blocks, step blocks): the largest excess in the block; NaN where unknown."""


def excess_figure(report: RunReport) -> go.Figure:
    """Draw excess compute time in ms or s: x step, y rank, neutral at 0.

    Past `MAX_ROWS` ranks or `MAX_COLUMNS` steps neighbours share a cell, which
    shows the worst of them, and the labels name the ranges. The colour ends at
    the 99th percentile of what is there, but at no less than 5 % of the mean
    step time, so that noise looks like noise.
    """
    shown = worst_in_blocks(report.excess, max_rows=MAX_ROWS, max_columns=MAX_COLUMNS)
    step_s = report.step_time_s.actual or 0.0
    limit_ns = max(_LEAST_RANGE_RATIO * step_s * NS_PER_S, _high(shown.excess_ns))
    unit, unit_ns = axis_unit(limit_ns)
    spaced = len(shown.rank_blocks) <= _TALL_CELLS and len(shown.step_blocks) <= _TALL_CELLS
    figure = go.Figure(
        go.Heatmap(
            x=[_range(block) for block in shown.step_blocks],
            y=[_range(block) for block in shown.rank_blocks],
            z=(shown.excess_ns / unit_ns).astype(np.float32),
            colorscale=DIVERGING,
            zmin=-limit_ns / unit_ns,
            zmax=limit_ns / unit_ns,
            xgap=1 if spaced else 0,
            ygap=1 if spaced else 0,
            hoverongaps=False,
            hovertemplate=(
                "rank %{y}, step %{x}<br>%{z:+,.2f} "
                + unit
                + " against the step's median rank<extra></extra>"
            ),
            colorbar={"title": {"text": f"excess ({unit})", "side": "right"}, "thickness": 10},
        )
    )
    height = _PIXELS_PER_ROW * len(shown.rank_blocks) + 80
    dressed(
        figure,
        height=min(max(height, _LEAST_HEIGHT), _MOST_HEIGHT),
        keep=f"excess {report.run}",
    )
    figure.update_layout(margin={"l": 50, "r": 8, "t": 12, "b": 44})
    figure.update_xaxes(type="category", title_text="step", showgrid=False, nticks=16)
    figure.update_yaxes(
        type="category", title_text="rank", showgrid=False, autorange="reversed", nticks=24
    )
    return figure


def excess_note(excess: RankStepExcess) -> str:
    """Say when neighbours share a cell; "" where each rank and step has its own."""
    shown = worst_in_blocks(excess, max_rows=MAX_ROWS, max_columns=MAX_COLUMNS)
    parts = []
    if len(shown.rank_blocks) < len(excess.ranks):
        parts.append(f"{len(excess.ranks):,} ranks in {len(shown.rank_blocks):,} rows")
    if len(shown.step_blocks) < len(excess.steps):
        parts.append(f"{len(excess.steps):,} steps in {len(shown.step_blocks):,} columns")
    return f"Showing {' and '.join(parts)}; each cell is its worst member." if parts else ""


def _high(excess_ns: np.ndarray[tuple[int, int], np.dtype[np.float64]]) -> float:
    known = np.abs(excess_ns[np.isfinite(excess_ns)])
    return float(np.percentile(known, 99)) if known.size else 0.0


def _range(block: tuple[int, int]) -> str:
    return f"{block[0]}" if block[0] == block[1] else f"{block[0]}-{block[1]}"


def worst_in_blocks(excess: RankStepExcess, *, max_rows: int, max_columns: int) -> ExcessBlocks:
    """Join neighbouring ranks and steps until they fit, each block showing its largest excess.

    The mean would hide one slow rank among its neighbours; the largest cannot.

    Args:
        excess: Shape (ranks, steps).
        max_rows: Most rows of the result, at least 1.
        max_columns: Most columns of the result, at least 1.
    """
    rows, rank_blocks = _blocks(excess.ranks, max_rows)
    columns, step_blocks = _blocks(excess.steps, max_columns)
    worst = excess.excess_ns
    if worst.size:
        worst = np.fmax.reduceat(np.fmax.reduceat(worst, rows, axis=0), columns, axis=1)
    return ExcessBlocks(rank_blocks=rank_blocks, step_blocks=step_blocks, excess_ns=worst)


def _blocks(
    labels: Sequence[int], most: int
) -> tuple[NDArray[np.intp], tuple[tuple[int, int], ...]]:
    """Cut a row of labels into at most ``most`` blocks of equal size (the last may be smaller)."""
    size = max(1, -(-len(labels) // most))
    first = np.arange(0, len(labels), size)
    last = [min(begin + size, len(labels)) - 1 for begin in first.tolist()]
    blocks = tuple(
        (labels[begin], labels[stop]) for begin, stop in zip(first.tolist(), last, strict=True)
    )
    return first, blocks
