"""Where each rank and each of its tracks stands on the timeline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from analysis.waits import is_communication
from dashboard.address import GroupBy

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from analysis.timeline import StepTimeline
    from tracer.topology import Coords

_ROW_FILL = 0.86
_COMPUTE_SHARE = 0.5
_MOST_TICKS = 64


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
    """Return the ranks of the step from the top: by the grouped axis, then the others, then rank.

    Ranks whose position nobody told come last.
    """
    ranks = np.unique(timeline.spans.rank).tolist()

    def place(rank: int) -> tuple[int, ...]:
        coords = timeline.coords.get(rank)
        if group_by is GroupBy.RANK or coords is None:
            return (coords is None, 0, 0, 0, 0, rank)
        first = getattr(coords, group_by.value)
        return (0, first, coords.pp, coords.dp, coords.tp, rank)

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
        center=row - _ROW_FILL / 2 + top[spans.track] + height[spans.track] / 2,
        height=height[spans.track],
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
    """Return top and height of each track within a row, shape (tracks,) each."""
    spans = timeline.spans
    num_tracks = len(spans.tracks)
    present = np.unique(spans.track)
    comm = np.unique(spans.track[is_communication(spans) & (spans.depth == 0)])
    lower = sorted(comm.tolist(), key=lambda track: spans.tracks[track])
    upper = sorted(set(present.tolist()) - set(lower), key=lambda track: spans.tracks[track])
    top, height = np.zeros(num_tracks), np.full(num_tracks, _ROW_FILL)
    share = _COMPUTE_SHARE if upper and lower else float(bool(upper))
    for tracks, begin, size in ((upper, 0.0, share), (lower, share, 1 - share)):
        for place, track in enumerate(tracks):
            lane = size * _ROW_FILL / len(tracks)
            top[track] = begin * _ROW_FILL + place * lane
            height[track] = lane * 0.94
    return top, height


def _ticks(num_rows: int) -> tuple[int, ...]:
    """Return the rows that are named: all, or evenly spaced ones when there are many."""
    return tuple(range(0, num_rows, max(1, -(-num_rows // _MOST_TICKS))))


def group_starts(
    ranks: tuple[int, ...], coords: dict[int, Coords], group_by: GroupBy
) -> tuple[tuple[int, str], ...]:
    """Return the first row and the name of each group; nothing where nothing is grouped."""
    if group_by is GroupBy.RANK:
        return ()
    groups: list[tuple[int, str]] = []
    for row, rank in enumerate(ranks):
        label = group_label(coords.get(rank), group_by)
        if not groups or groups[-1][1] != label:
            groups.append((row, label))
    return tuple(groups)
