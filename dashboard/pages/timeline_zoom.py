"""Turn what a reader zoomed to in a kept picture into the window that is drawn next."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from rankscope.analysis.drawing.raster import Window
from rankscope.tracer.span import NS_PER_MS

from ..figures.timeline_raster import lines_per_block

if TYPE_CHECKING:
    from rankscope.analysis.drawing.raster import StepPicture

WHOLE = Window(begin_ns=0, end_ns=0, first_row=0, end_row=0)
"""What a double-click asks for."""


def zooms_of(picture: StepPicture) -> list[float]:
    """Return what turns places of the figure into a window.

    These are the place of the uppermost rank, ranks per line, the lines, and the bounds in ms.
    """
    raster, window = picture.raster, picture.window
    num_lines = len(raster.rank_blocks) * lines_per_block(picture)
    # A window's first line may begin above it: lines of several ranks are shown whole.
    line_ranks = len(raster.rank_blocks[0])
    first_row = 0 if window is None else window.first_row // line_ranks * line_ranks
    bounds = raster.edges_ns[[0, -1]] / NS_PER_MS
    return [
        first_row, line_ranks / lines_per_block(picture), num_lines, float(bounds[0]),
        float(bounds[1]),
    ]  # fmt: skip


def zoomed(moved: dict[str, Any], zooms: list[float] | None) -> Window | None:
    """Return what a reader zoomed to in a picture; `WHOLE` on a double-click, None: nothing."""
    if zooms is None:
        return None
    if moved.get("xaxis.autorange") or moved.get("yaxis.autorange"):
        return WHOLE
    first_row, line_ranks, num_lines, left, right = zooms
    x = sorted((moved.get("xaxis.range[0]", left), moved.get("xaxis.range[1]", right)))
    y = sorted((moved.get("yaxis.range[0]", -0.5), moved.get("yaxis.range[1]", num_lines - 0.5)))
    lines = (max(math.floor(y[0] + 0.5), 0), min(math.ceil(y[1] + 0.5), num_lines))
    begin, end = max(x[0], left), min(x[1], right)
    whole = (lines[0] <= 0 and lines[1] >= num_lines) and (begin <= left and end >= right)
    if whole or begin >= end or lines[0] >= lines[1]:
        return None
    return Window(
        begin_ns=round(begin * NS_PER_MS),
        end_ns=max(round(end * NS_PER_MS), round(begin * NS_PER_MS) + 1),
        first_row=int(first_row + lines[0] * line_ranks),
        end_row=math.ceil(first_row + lines[1] * line_ranks),
    )
