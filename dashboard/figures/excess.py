"""Heat-map of excess: time of each rank or link above its baseline, step by step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import plotly.graph_objects as go

from rankscope.analysis.report.report import Severity
from rankscope.analysis.report.text import format_link, format_range
from rankscope.tracer.span import NS_PER_S

from ..theme import DIVERGING, apply_style, axis_unit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from rankscope.analysis.report.report import RankStepExcess, RunReport

MAX_ROWS = 768
MAX_COLUMNS = 1500

MIN_SCALE_RATIO = 0.05
"""Share of a mean step that a scale of colours has at least, so that noise stays pale."""
REACHED = 90
"""Percentile of the top finding's cells that the scale reaches: a single pause among them may be
far above, and would leave them pale."""

_PIXELS_PER_ROW = 42
_MIN_HEIGHT = 220
_MAX_HEIGHT = 560
_MAX_SPACED = 48
"""Rows and columns up to which cells have a gap between them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExcessBlocks:
    """Excess with neighbouring ranks and steps joined."""

    rank_blocks: tuple[tuple[int, int], ...]
    """First and last rank of each row."""

    step_blocks: tuple[tuple[int, int], ...]
    """First and last step of each column."""

    excess_ns: NDArray[np.float64]
    """Shape (rank blocks, step blocks): the largest excess of the block; NaN if unknown."""


def shown_excess(report: RunReport) -> RankStepExcess:
    """Return the excess in which the top finding is seen: by default that of compute."""
    return report.excess if report.evidence is None else report.evidence


def excess_title(excess: RankStepExcess) -> str:
    """Return what a heat-map shows, as its title."""
    return f"Excess of {excess.quantity} by {'link' if excess.links else 'rank'} and step"


def row_labels(excess: RankStepExcess, blocks: ExcessBlocks) -> list[str]:
    """Return the label of each row, from the top: ranks, or the members of a link."""
    if not excess.links:
        return [format_range(block) for block in blocks.rank_blocks]
    return [format_link(members) for members in excess.links]


def ranks_of_row(excess: RankStepExcess, label: str) -> tuple[int, ...]:
    """Return the ranks of the row with this label; nothing if there is none."""
    blocks = join_neighbours(excess, max_rows=MAX_ROWS, max_columns=MAX_COLUMNS)
    labels = row_labels(excess, blocks)
    if label not in labels:
        return ()
    row = labels.index(label)
    if excess.links:
        return tuple(sorted(set(excess.links[row])))
    first, last = blocks.rank_blocks[row]
    return tuple(rank for rank in excess.ranks if first <= rank <= last)


def excess_figure(report: RunReport) -> go.Figure:
    """Draw the excess of `shown_excess` in ms or s: x step, y rank or link, neutral at 0.

    Above `MAX_ROWS` ranks or `MAX_COLUMNS` steps, neighbours share a cell, which shows the largest
    excess; the labels are then ranges. The colour scale ends at the 99th percentile of the values,
    and reaches those of the top finding in its steps, which may be fewer cells than that. It does
    not end below 5 % of the mean step time, so that noise stays pale.
    """
    excess = shown_excess(report)
    blocks = join_neighbours(excess, max_rows=MAX_ROWS, max_columns=MAX_COLUMNS)
    row_word = "link" if excess.links else "rank"
    step_s = report.step_time_s.actual or 0.0
    known_ns = np.abs(blocks.excess_ns[np.isfinite(blocks.excess_ns)])
    high_ns = float(np.percentile(known_ns, 99)) if known_ns.size else 0.0
    limit_ns = max(MIN_SCALE_RATIO * step_s * NS_PER_S, high_ns, _excess_of_finding(report))
    unit, unit_ns = axis_unit(limit_ns)
    num_rows, num_columns = len(blocks.rank_blocks), len(blocks.step_blocks)
    gap = int(num_rows <= _MAX_SPACED and num_columns <= _MAX_SPACED)
    figure = go.Figure(
        go.Heatmap(
            x=[format_range(block) for block in blocks.step_blocks],
            y=row_labels(excess, blocks),
            z=(blocks.excess_ns / unit_ns).astype(np.float32),
            colorscale=DIVERGING,
            zmin=-limit_ns / unit_ns,
            zmax=limit_ns / unit_ns,
            xgap=gap,
            ygap=gap,
            hoverongaps=False,
            hovertemplate=(
                f"{row_word} %{{y}}, step %{{x}}<br>{excess.quantity}: %{{z:+,.2f}} {unit}"
                f" compared with {excess.baseline}<extra></extra>"
            ),
            colorbar={"title": {"text": f"excess ({unit})", "side": "right"}, "thickness": 10},
        )
    )
    height = min(max(_PIXELS_PER_ROW * num_rows + 80, _MIN_HEIGHT), _MAX_HEIGHT)
    apply_style(figure, height=height, zoom_key=f"excess {report.run}")
    figure.update_layout(margin={"l": 50, "r": 8, "t": 12, "b": 44})
    figure.update_xaxes(type="category", title_text="step", showgrid=False, nticks=6)
    figure.update_yaxes(
        type="category", title_text=row_word, showgrid=False, autorange="reversed", nticks=24
    )
    return figure


def _excess_of_finding(report: RunReport) -> float:
    """Return the `REACHED` percentile of the excess of the top finding's ranks or links, in ns.

    0 if the finding is no problem, or nothing of it is known.
    """
    top, excess = report.top_finding, shown_excess(report)
    if top.severity is Severity.NONE or top.steps is None or not top.ranks:
        return 0.0
    members = excess.links or tuple((rank,) for rank in excess.ranks)
    is_named = [not set(top.ranks).isdisjoint(ranks) for ranks in members]
    is_shown = [top.steps[0] <= step <= top.steps[1] for step in excess.steps]
    cells = excess.excess_ns[np.ix_(is_named, is_shown)]
    if excess.links and cells.size:  # of the links of a rank, few may be slow
        cells = np.fmax.reduce(cells, axis=0)
    known = cells[np.isfinite(cells)]
    return float(np.percentile(known, REACHED)) if known.size else 0.0


def excess_note(excess: RankStepExcess) -> str:
    """Return a note if neighbours share a cell; "" if each rank and step has its own."""
    blocks = join_neighbours(excess, max_rows=MAX_ROWS, max_columns=MAX_COLUMNS)
    parts = []
    if len(blocks.rank_blocks) < len(excess.ranks):
        parts.append(f"{len(excess.ranks):,} ranks in {len(blocks.rank_blocks):,} rows")
    if len(blocks.step_blocks) < len(excess.steps):
        parts.append(f"{len(excess.steps):,} steps in {len(blocks.step_blocks):,} columns")
    return f"{' and '.join(parts)}. Each cell shows its largest excess." if parts else ""


def join_neighbours(excess: RankStepExcess, *, max_rows: int, max_columns: int) -> ExcessBlocks:
    """Join neighbouring ranks and steps until they fit; a block has its largest excess.

    A mean would hide one slow rank among its neighbours.

    Args:
        excess: Shape (ranks, steps).
        max_rows: Rows of the result, at least 1.
        max_columns: Columns of the result, at least 1.
    """
    rows, rank_blocks = split_blocks(excess.ranks, max_rows)
    columns, step_blocks = split_blocks(excess.steps, max_columns)
    largest = excess.excess_ns
    if largest.size:
        largest = np.fmax.reduceat(np.fmax.reduceat(largest, rows, axis=0), columns, axis=1)
    return ExcessBlocks(rank_blocks=rank_blocks, step_blocks=step_blocks, excess_ns=largest)


def split_blocks(
    labels: Sequence[int], max_blocks: int
) -> tuple[NDArray[np.intp], tuple[tuple[int, int], ...]]:
    """Split labels into blocks of equal size; return each one's begin, and its end labels."""
    size = max(1, -(-len(labels) // max_blocks))
    begins = np.arange(0, len(labels), size)
    blocks = [labels[begin : begin + size] for begin in begins.tolist()]
    return begins, tuple((block[0], block[-1]) for block in blocks)
