"""Marks over a step: its critical path, the selected span, and arrows to what it delayed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from rankscope.analysis.drawing.rows import arrange_rows
from rankscope.tracer.span import NS_PER_MS

from ..theme import PATH, SLOW

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dash import Patch

    from rankscope.analysis.drawing.raster import Stretches
    from rankscope.analysis.drawing.rows import RankBlocks, RowOrder, Rows
    from rankscope.analysis.drawing.selection import Arrow
    from rankscope.analysis.drawing.timeline import StepTimeline
    from rankscope.analysis.report.report import Finding

    FindPlace = Callable[[int, int], float | None]
    """Returns the height of a kind on a rank; None if it is not drawn."""


def bar_places(timeline: StepTimeline, rows: Rows) -> FindPlace:
    """Return the heights of kinds on ranks that are drawn as bars: the lane of each kind."""
    spans = timeline.spans
    from_top = {rank: row for row, block in enumerate(rows.blocks) for rank in block}
    codes, first = np.unique(spans.kind, return_index=True)
    lane = {
        code: float(rows.center[row]) - from_top[int(spans.rank[row])]
        for code, row in zip(codes.tolist(), first.tolist(), strict=True)
    }
    return lambda rank, kind: from_top[rank] + lane.get(kind, 0.0) if rank in from_top else None


def path_trace(path: Stretches, find_place: FindPlace) -> dict[str, Any]:
    """Return the critical path as a line; it is broken where it leaves the shown ranks."""
    x: list[float | None] = []
    y: list[float | None] = []
    times = zip(path.start_ns / NS_PER_MS, path.end_ns / NS_PER_MS, strict=True)
    for rank, kind, (begin, end) in zip(path.rank.tolist(), path.kind.tolist(), times, strict=True):
        place = find_place(rank, kind)
        if place is None:
            x.append(None)
            y.append(None)
        else:
            x += [float(begin), float(end)]
            y += [place, place]
    return {
        "type": "scatter",
        "name": "critical path",
        "x": x,
        "y": y,
        "mode": "lines",
        "line": {"color": PATH, "width": 3},
        "hoverinfo": "skip",
    }


def proof_frame(
    finding: Finding | None, blocks: RankBlocks, lines: Sequence[int]
) -> list[dict[str, Any]]:
    """Return a frame around the proof of a finding, as plotly's shapes; none if it is not shown.

    Args:
        finding: The finding; None: nothing is framed.
        blocks: The ranks of each block of lines, from the top.
        lines: First line of each block, and the number of all lines.
    """
    if finding is None or finding.proof is None:
        return []
    proof = finding.proof
    return [
        {
            "type": "rect",
            "name": "proof",
            "x0": proof.begin_ns / NS_PER_MS,
            "x1": proof.end_ns / NS_PER_MS,
            "xref": "x",
            "y0": lines[block] - 0.5,
            "y1": lines[block + 1] - 0.5,
            "yref": "y",
            "line": {"color": PATH, "width": 2},
        }
        for block, ranks in enumerate(blocks)
        if proof.rank in ranks
    ]


def selection_traces() -> list[dict[str, Any]]:
    """Return the last two traces of bars, in which `mark_selected` draws."""
    line = {
        "type": "scatter",
        "x": [],
        "y": [],
        "mode": "lines",
        "line": {"color": SLOW, "width": 3},
        "showlegend": False,
        "hoverinfo": "skip",
    }
    arrows = {
        **line,
        "mode": "lines+markers",
        "marker": {"symbol": "arrow", "size": 11, "angleref": "previous", "color": SLOW},
        "line": {"color": SLOW, "width": 2},
    }
    return [line, arrows]


def mark_selected(
    figure: Patch,
    timeline: StepTimeline,
    row: int,
    *,
    rows: tuple[RowOrder, RankBlocks],
    arrows: Sequence[Arrow],
) -> None:
    """Draw a frame around a span, and arrows to what it waited for and delayed.

    Args:
        figure: Changed in place.
        timeline: The spans that are drawn.
        row: Row of the span.
        rows: Order of the rows, and the ranks of each from the top.
        arrows: As of `describe_span`.
    """
    order, blocks = rows
    drawn = arrange_rows(timeline, order, blocks)
    begin = (int(timeline.spans.start_ns[row]) - timeline.begin_ns) / NS_PER_MS
    end = begin + int(timeline.spans.duration_ns[row]) / NS_PER_MS
    top = float(drawn.center[row] - drawn.height[row] / 2)
    bottom = float(drawn.center[row] + drawn.height[row] / 2)
    figure["data"][-2]["x"] = [begin, end, end, begin, begin]
    figure["data"][-2]["y"] = [top, top, bottom, bottom, top]
    place = {rank: line for line, block in enumerate(blocks) for rank in block}
    lines = [one for one in arrows if one.from_rank in place and one.to_rank in place]
    figure["data"][-1]["x"] = [
        at for one in lines for at in (one.from_ns / NS_PER_MS, one.to_ns / NS_PER_MS, None)
    ]
    figure["data"][-1]["y"] = [
        at for one in lines for at in (place[one.from_rank], place[one.to_rank], None)
    ]
