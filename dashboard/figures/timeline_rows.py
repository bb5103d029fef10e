"""Where each rank and each of its tracks stands on the timeline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from rankscope.tracer.span import KINDS

from ..address import GroupBy

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from rankscope.analysis.drawing.timeline import StepTimeline
    from rankscope.tracer.topology import Coords

_ROW_FILL = 0.86
_COMPUTE_SHARE = 0.5
_LANE_FILL = 0.94
_MOST_TICKS = 64
MOST_NAMES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The rows, numbered from 0 at the top, and the place of every span on them."""

    ranks: tuple[int, ...]
    """From the top; neighbours stand in one group."""

    center: NDArray[np.float64]
    """Shape (spans,): height of the span's lane on the axis of rows."""

    height: NDArray[np.float64]
    """Shape (spans,): thickness of the lane, in rows."""

    tick_rows: tuple[int, ...]
    tick_texts: tuple[str, ...]
    groups: tuple[tuple[int, str], ...]
    """First row and name of each group; empty where nothing is grouped."""


def row_order(timeline: StepTimeline, group_by: GroupBy) -> tuple[int, ...]:
    """Return the ranks of the step from the top; see `rank_order`."""
    return rank_order(np.unique(timeline.spans.rank).tolist(), timeline.coords, group_by)


def rank_order(
    ranks: Iterable[int], coords: dict[int, Coords], group_by: GroupBy
) -> tuple[int, ...]:
    """Return ranks from the top: by the grouped axis, then the others, then rank.

    Ranks whose position nobody told come last.
    """

    def place(rank: int) -> tuple[int, ...]:
        at = coords.get(rank)
        if group_by is GroupBy.RANK or at is None:
            return (at is None, 0, 0, 0, 0, rank)
        return (0, getattr(at, group_by.value), at.pp, at.dp, at.tp, rank)

    return tuple(sorted(ranks, key=place))


def lay_rows(timeline: StepTimeline, group_by: GroupBy) -> Rows:
    """Give each rank a row and each of its tracks a lane, compute above communication.

    Tracks that hold communication share the lower part of every row in the
    same order, so that one kind of traffic stands at one height throughout.
    """
    ranks = row_order(timeline, group_by)
    spans = timeline.spans
    from_top = np.array(ranks, dtype=np.int64)
    ascending = np.argsort(from_top)
    row = ascending[np.searchsorted(from_top[ascending], spans.rank)]
    top, height = _lanes(timeline)
    return Rows(
        ranks=ranks,
        center=row - _ROW_FILL / 2 + top + height / 2,
        height=height,
        tick_rows=_ticks(len(ranks)),
        tick_texts=tuple(f"rank {ranks[row]}" for row in _ticks(len(ranks))),
        groups=group_starts(ranks, timeline.coords, group_by),
    )


def group_label(coords: Coords | None, group_by: GroupBy) -> str:
    """Return the name of the group that these coordinates fall in."""
    if coords is None:
        return "position unknown"
    return f"{group_by.value.upper()} {getattr(coords, group_by.value)}"


def _lanes(timeline: StepTimeline) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return top and height of each span's lane within its row, shape (spans,) each."""
    spans = timeline.spans
    comm = timeline.communication & (spans.depth == 0)
    # Importers without tracks have one for everything: its communication parts by kind.
    mixed = np.isin(spans.track, np.intersect1d(spans.track[comm], spans.track[~comm]))
    lane = spans.track.astype(np.int64) * (len(KINDS) + 1)
    lane += np.where(comm & mixed, spans.kind.astype(np.int64) + 1, 0)
    lower = np.unique(lane[comm]).tolist()
    upper = sorted(set(lane.tolist()) - set(lower))
    top, height = np.zeros(len(spans)), np.zeros(len(spans))
    share = _COMPUTE_SHARE if upper and lower else float(bool(upper))
    for lanes, begin, size in ((upper, 0.0, share), (lower, share, 1 - share)):
        for place, one in enumerate(lanes):
            thickness = size * _ROW_FILL / len(lanes)
            top[lane == one] = begin * _ROW_FILL + place * thickness
            height[lane == one] = thickness * _LANE_FILL
    return top, height


def _ticks(num_rows: int) -> tuple[int, ...]:
    """Return the rows that are named: all, or evenly spaced ones when there are many."""
    return tuple(range(0, num_rows, max(1, -(-num_rows // _MOST_TICKS))))


def group_starts(
    ranks: tuple[int, ...], coords: dict[int, Coords], group_by: GroupBy
) -> tuple[tuple[int, str], ...]:
    """Return the first row and the name of each group; nothing where nothing can be grouped."""
    if group_by is GroupBy.RANK or coords.keys().isdisjoint(ranks):
        return ()
    groups: list[tuple[int, str]] = []
    for row, rank in enumerate(ranks):
        label = group_label(coords.get(rank), group_by)
        if not groups or groups[-1][1] != label:
            groups.append((row, label))
    return tuple(groups)


def group_lines(rows: Iterable[float], line: dict[str, object]) -> list[dict[str, object]]:
    """Return lines across the figure at these heights, as plotly's shapes.

    Plotly's own ``add_hline`` takes a time that grows with the square of their number.
    """
    return [
        {
            "type": "line",
            "x0": 0,
            "x1": 1,
            "xref": "x domain",
            "y0": row,
            "y1": row,
            "yref": "y",
            "line": line,
        }
        for row in rows
    ]


def group_names(groups: Sequence[tuple[float, str]], **place: object) -> list[dict[str, object]]:
    """Return the names of groups in the left margin, as plotly's annotations.

    Beyond `MOST_NAMES` only evenly spaced ones have room.

    Args:
        groups: Height and name of each.
        place: How a name stands at its height.
    """
    every = max(1, -(-len(groups) // MOST_NAMES))
    return [
        {
            "text": f"<b>{label}</b>",
            "x": 0,
            "xref": "paper",
            "xanchor": "left",
            "xshift": -126,
            "y": at,
            "yref": "y",
            "showarrow": False,
            **place,
        }
        for at, label in groups[::every]
    ]
