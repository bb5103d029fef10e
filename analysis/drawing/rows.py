"""Rows of a timeline: the order of the ranks, their groups, and the lanes of their tracks."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from rankscope.tracer.span import KINDS, NONE

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from numpy.typing import NDArray

    from rankscope.tracer.topology import Coords

    from ..report.report import RankStepExcess
    from .timeline import StepTimeline

    RankBlocks = tuple[tuple[int, ...], ...]

_ROW_FILL = 0.86
_COMPUTE_SHARE = 0.6
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
    """Return the orders that differ: by rank, and by what has several values."""
    places, names = tuple(coords), tuple(hosts)
    useful = [order for order in AXES if is_useful(order, places, names)]
    useful.append(RowOrder.RANK)
    if is_useful(RowOrder.HOST, places, names):
        useful.append(RowOrder.HOST)
    return (*useful, RowOrder.EXCESS) if has_excess else tuple(useful)


def is_useful(order: RowOrder, coords: Iterable[Coords], hosts: Iterable[str]) -> bool:
    """Return whether an order makes several groups."""
    if order is RowOrder.HOST:
        return len(set(hosts)) > 1
    return order in AXES and len(set(map(attrgetter(order.value), coords))) > 1


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


class Group(NamedTuple):
    """Neighbouring rows with one value of the grouped axis, or of one host."""

    line: int
    """Its first line."""

    number: int
    """The value of the axis, or the place of the host among all hosts; `NONE` if it is unknown."""

    name: str
    """Of a host: text from outside."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The rows, numbered from 0 at the top, and the place of every span on them."""

    blocks: RankBlocks
    """The ranks of each row, from the top; those of a folded group share one."""

    center: NDArray[np.float64]
    """Shape (spans,): middle of the span's lane, in rows."""

    height: NDArray[np.float64]
    """Shape (spans,): thickness of the lane, in rows."""

    groups: tuple[Group, ...]
    """From the top; empty if nothing is grouped."""


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


def find_groups(
    ranks: Iterable[int], coords: Mapping[int, Coords], order: RowOrder, hosts: Mapping[int, str]
) -> dict[int, tuple[int, str]]:
    """Return number and name of the group of each rank that has one, as in `Group`."""
    if order in AXES:
        value, word = attrgetter(order.value), order.value.upper()
        found = {rank: value(coords[rank]) for rank in ranks if rank in coords}
        groups = {number: (number, f"{word} {number}") for number in set(found.values())}
        return {rank: groups[number] for rank, number in found.items()}
    if order is not RowOrder.HOST:
        return {}
    in_order = dict.fromkeys(hosts[one] for one in sorted(hosts))
    numbers = {name: place for place, name in enumerate(in_order)}
    return {rank: (numbers[hosts[rank]], hosts[rank]) for rank in ranks if rank in hosts}


def group_numbers(
    coords: Mapping[int, Coords], order: RowOrder, hosts: Mapping[int, str]
) -> tuple[int, ...]:
    """Return the numbers of all groups, as in `Group`, ascending."""
    if order in AXES:
        return tuple(sorted(set(map(attrgetter(order.value), coords.values()))))
    return tuple(range(len(set(hosts.values())))) if order is RowOrder.HOST else ()


def group_lines(
    blocks: RankBlocks, coords: Mapping[int, Coords], order: RowOrder, hosts: Mapping[int, str]
) -> tuple[Group, ...]:
    """Return the groups of lines; nothing if there is only one group.

    A line with ranks of several groups belongs to that of its first one.
    """
    of = find_groups((block[0] for block in blocks), coords, order, hosts)
    if not is_useful(order, coords.values(), hosts.values()):
        return ()
    groups: list[Group] = []
    for line, block in enumerate(blocks):
        number, name = of.get(block[0], (NONE, "position unknown"))
        if not groups or groups[-1].name != name:
            groups.append(Group(line, number, name))
    return tuple(groups) if of else ()


def fold_groups(
    blocks: RankBlocks, groups: Iterable[Group], folded: Collection[int]
) -> tuple[RankBlocks, tuple[int, ...]]:
    """Join the lines of each folded group.

    Args:
        blocks: The ranks of each line, from the top.
        folded: Numbers of groups.

    Returns:
        The ranks of each line afterwards, and the first of the lines that it was made of.
    """
    starts, is_folded = [], False
    group_at = {group.line: group.number in folded for group in groups}
    for line in range(len(blocks)):
        begins = line in group_at
        is_folded = group_at.get(line, is_folded)
        if begins or not is_folded:
            starts.append(line)
    ends = [*starts[1:], len(blocks)]
    joined = tuple(
        tuple(rank for block in blocks[first:end] for rank in block)
        for first, end in zip(starts, ends, strict=True)
    )
    return joined, tuple(starts)


def arrange_rows(timeline: StepTimeline, order: RowOrder, blocks: RankBlocks | None = None) -> Rows:
    """Give each rank a row and each of its tracks a lane, compute above communication.

    Tracks with communication share the lower part of every row in the same order, so that one
    kind of traffic has the same height in all rows.

    Args:
        blocks: The ranks of each row from the top, at least those of the spans; None: a row for
            each rank of the spans.
    """
    if blocks is None:
        blocks = tuple((rank,) for rank in row_order(timeline, order))
    from_top = np.array([rank for block in blocks for rank in block], dtype=np.int64)
    lines = np.repeat(np.arange(len(blocks)), [len(block) for block in blocks])
    ascending = np.argsort(from_top)
    row = lines[ascending[np.searchsorted(from_top[ascending], timeline.spans.rank)]]
    top, height = _lanes(timeline)
    return Rows(
        blocks=blocks,
        center=row - _ROW_FILL / 2 + top + height / 2,
        height=height,
        groups=group_lines(blocks, timeline.coords, order, timeline.hosts),
    )


def _lanes(timeline: StepTimeline) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return top and height of each span's lane within its row, shape (spans,) each.

    Tracks that only communicate are below those that compute. Of the latter, the one that computes
    most is twice as high as any other.
    """
    spans = timeline.spans
    comm = timeline.communication & (spans.depth == 0)
    # An imported trace without tracks has one for everything: split its communication by kind.
    mixed = np.isin(spans.track, np.intersect1d(spans.track[comm], spans.track[~comm]))
    lane = spans.track.astype(np.int64) * (len(KINDS) + 1)
    lane += np.where(comm & mixed, spans.kind.astype(np.int64) + 1, 0)
    computes = set(lane[~timeline.communication].tolist())
    upper = sorted(computes)
    lower = sorted(set(lane.tolist()) - computes)
    weights = dict.fromkeys((*upper, *lower), 1)
    if upper:
        outer = spans.depth == 0
        weights[max(upper, key=lambda one: spans.duration_ns[outer & (lane == one)].sum())] = 2
    top, height = np.zeros(len(spans)), np.zeros(len(spans))
    share = _COMPUTE_SHARE if upper and lower else float(bool(upper))
    for lanes, begin, size in ((upper, 0.0, share), (lower, share, 1 - share)):
        at = begin * _ROW_FILL
        total = sum(weights[one] for one in lanes)
        for one in lanes:
            thickness = size * _ROW_FILL * weights[one] / total
            top[lane == one] = at
            height[lane == one] = thickness * _LANE_FILL
            at += thickness
    return top, height
