"""Draw how much each worker slows the job, over the parallel layout."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import plotly.graph_objects as go

from rankscope.analysis.report.text import format_slowdown

from ..theme import DIVERGING, dressed

if TYPE_CHECKING:
    from rankscope.analysis.report.report import RunReport

_LEAST_RANGE = 0.1
_MOST_LABELLED = 64
_MOST_LABELLED_WIDE = 12


def worker_figure(report: RunReport) -> go.Figure:
    """Draw slowdown by worker: x its DP position, y its pipeline stage, neutral at 1.

    Of a run whose layout is unknown each rank is a worker, in one row.

    An isolated cell is a worker, a row is a stage, a column a data-parallel
    replica. A cell without a value is unknown. The scale spans at least
    +-0.1, so that noise looks like noise.

    Source:
        arXiv 2505.05713, the worker heat-map.
    """
    workers = report.slowdown_by_worker
    dps = sorted({dp for dp, _ in workers})
    stages = sorted({stage for _, stage in workers})
    slowdown = np.full((len(stages), len(dps)), np.nan)
    exact = np.full((len(stages), len(dps)), np.nan)
    for (dp, stage), value in workers.items():
        cell = stages.index(stage), dps.index(dp)
        slowdown[cell] = np.nan if value is None else value
        other = report.exact_slowdown_by_worker.get((dp, stage))
        exact[cell] = np.nan if other is None else other
    spread = max(_LEAST_RANGE, _spread(slowdown))
    column, hover = ("DP position", "DP %{x}, stage %{y}")
    if not report.has_layout:
        column, hover = ("rank (parallel layout unknown)", "rank %{x}")
    labelled = len(workers) <= _MOST_LABELLED and len(dps) <= _MOST_LABELLED_WIDE
    figure = go.Figure(
        go.Heatmap(
            x=[f"{dp}" for dp in dps],
            y=[f"{stage}" for stage in stages],
            z=slowdown,
            customdata=_texts(exact),
            colorscale=DIVERGING,
            zmin=1 - spread,
            zmax=1 + spread,
            xgap=2 if labelled else 0,
            ygap=2 if labelled else 0,
            hoverongaps=False,
            hovertemplate=(
                f"{hover}<br>slowdown %{{z:.3f}}x"
                "<br>this worker alone %{customdata}<extra></extra>"
            ),
            colorbar={"title": {"text": "slowdown", "side": "right"}, "thickness": 10},
        )
    )
    if labelled:
        figure.update_traces(text=_texts(slowdown), texttemplate="%{text}")
    dressed(figure, height=340, keep=f"workers {report.run}")
    figure.update_layout(margin={"l": 50, "r": 8, "t": 12, "b": 44})
    figure.update_xaxes(type="category", title_text=column, showgrid=False)
    figure.update_yaxes(
        type="category",
        title_text="PP position (stage)" if report.has_layout else None,
        showticklabels=report.has_layout,
        showgrid=False,
        autorange="reversed",
    )
    return figure


def _spread(slowdown: np.ndarray[tuple[int, int], np.dtype[np.float64]]) -> float:
    known = slowdown[np.isfinite(slowdown)]
    return float(np.abs(known - 1).max()) if known.size else 0.0


def _texts(values: np.ndarray[tuple[int, int], np.dtype[np.float64]]) -> list[list[str]]:
    return [
        [format_slowdown(None if np.isnan(value) else value) for value in row]
        for row in values.tolist()
    ]
