"""Rows of a timeline: the order of the ranks, their groups, and the lanes of their tracks."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from operator import attrgetter
from typing import TYPE_CHECKING

import numpy as np

from rankscope.tracer.span import KINDS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from rankscope.tracer.topology import Coords

    from ..report.report import RankStepExcess
    from .timeline import StepTimeline

_ROW_FILL = 0.86
_COMPUTE_SHARE = 0.5
_LANE_FILL = 0.94


class RowOrder(StrEnum):
    """Order of the rows from the top: by rank, by excess, or grouped by an axis or by host."""

    PP = "pp"
    DP = "dp"
    TP = "tp"
    CP = "cp"
    EP = "ep"
    RANK = "rank"
    HOST = "host"
    EXCESS = "excess"
    """The slowest rank on top."""


AXES = (RowOrder.PP, RowOrder.DP, RowOrder.TP, RowOrder.CP, RowOrder.EP)
TILED = (*AXES, RowOrder.RANK)
"""Orders that depend on the layout alone: the ones of stored tiles."""


def useful_orders(
    coords: Iterable[Coords], hosts: Iterable[str] = (), *, has_excess: bool = False
) -> tuple[RowOrder, ...]:
    """Return the orders that differ: by rank, and by what has several values.

    Args:
        coords: Positions of the ranks.
        hosts: Their hosts.
        has_excess: Whether their excess is known.
    """
    places = tuple(coords)
    useful = [order for order in AXES if _differ(attrgetter(order.value), places)]
    useful.append(RowOrder.RANK)
    if len(set(hosts)) > 1:
        useful.append(RowOrder.HOST)
    return (*useful, RowOrder.EXCESS) if has_excess else tuple(useful)


def _differ(value: Callable[[Coords], int], places: Sequence[Coords]) -> bool:
    return any(value(at) != value(places[0]) for at in places)


def rank_by_excess(excess: RankStepExcess, step: int) -> tuple[int, ...]:
    """Return the ranks of a heat-map, the one with the largest excess in a step first.

    The members of a link follow each other. If the step is not in the heat-map, the sum over all
    its steps counts. Unknown excess comes last.
    """
    values = excess.excess_ns
    if step in excess.steps:
        values = values[:, [excess.steps.index(step)]]
    sums = np.where(np.isfinite(values).any(axis=1), np.nansum(values, axis=1), -np.inf)
    rows = np.argsort(-sums, kind="stable").tolist()
    if not excess.links:
        return tuple(excess.ranks[row] for row in rows)
    return tuple(dict.fromkeys(rank for row in rows for rank in excess.links[row]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The rows, numbered from 0 at the top, and the place of every span on them."""

    ranks: tuple[int, ...]
    """From the top; the ranks of a group are neighbours."""

    center: NDArray[np.float64]
    """Shape (spans,): middle of the span's lane, in rows."""

    height: NDArray[np.float64]
    """Shape (spans,): thickness of the lane, in rows."""

    groups: tuple[tuple[int, str], ...]
    """First row and name of each group; empty if nothing is grouped."""


def row_order(timeline: StepTimeline, order: RowOrder) -> tuple[int, ...]:
    """Return the ranks of the step from the top; see `rank_order`."""
    ranks = np.unique(timeline.spans.rank).tolist()
    if order is RowOrder.EXCESS:
        place = {rank: number for number, rank in enumerate(timeline.ranking)}
        return tuple(sorted(ranks, key=lambda rank: (place.get(rank, len(place)), rank)))
    if order is RowOrder.HOST:
        hosts = timeline.hosts
        first = {hosts.get(rank, ""): rank for rank in reversed(ranks)}
        return tuple(sorted(ranks, key=lambda rank: (first[hosts.get(rank, "")], rank)))
    return rank_order(ranks, timeline.coords, order)


def rank_order(ranks: Iterable[int], coords: dict[int, Coords], order: RowOrder) -> tuple[int, ...]:
    """Return ranks from the top: by the grouped axis, then the others, then rank.

    Ranks of unknown position come last. Orders that do not depend on the layout are by rank.
    """

    def place(rank: int) -> tuple[int, ...]:
        at = coords.get(rank)
        if order not in AXES or at is None:
            return (at is None, 0, 0, 0, 0, rank)
        return (0, getattr(at, order.value), at.pp, at.dp, at.tp, rank)

    return tuple(sorted(ranks, key=place))


def group_starts(
    ranks: tuple[int, ...],
    coords: dict[int, Coords],
    order: RowOrder,
    hosts: Mapping[int, str] | None = None,
) -> tuple[tuple[int, str], ...]:
    """Return the first row and the name of each group; nothing if nothing can be grouped.

    The name of a host is text from outside.
    """
    names = dict(hosts or {}) if order is RowOrder.HOST else {}
    if order in AXES:
        word = order.value.upper()
        value = attrgetter(order.value)
        names = {rank: f"{word} {value(coords[rank])}" for rank in ranks if rank in coords}
    if names.keys().isdisjoint(ranks):
        return ()
    groups: list[tuple[int, str]] = []
    for row, rank in enumerate(ranks):
        label = names.get(rank, "position unknown")
        if not groups or groups[-1][1] != label:
            groups.append((row, label))
    return tuple(groups)


def arrange_rows(
    timeline: StepTimeline, order: RowOrder, ranks: tuple[int, ...] | None = None
) -> Rows:
    """Give each rank a row and each of its tracks a lane, compute above communication.

    Tracks with communication share the lower part of every row in the same order, so that one
    kind of traffic has the same height in all rows.

    Args:
        timeline: The spans.
        order: What the rows are grouped by.
        ranks: The ranks from the top, at least those of the spans; None: those of the spans.
    """
    ranks = row_order(timeline, order) if ranks is None else ranks
    from_top = np.array(ranks, dtype=np.int64)
    ascending = np.argsort(from_top)
    row = ascending[np.searchsorted(from_top[ascending], timeline.spans.rank)]
    top, height = _lanes(timeline)
    return Rows(
        ranks=ranks,
        center=row - _ROW_FILL / 2 + top + height / 2,
        height=height,
        groups=group_starts(ranks, timeline.coords, order, timeline.hosts),
    )


def _lanes(timeline: StepTimeline) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return top and height of each span's lane within its row, shape (spans,) each."""
    spans = timeline.spans
    comm = timeline.communication & (spans.depth == 0)
    # An imported trace without tracks has one for everything: split its communication by kind.
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
