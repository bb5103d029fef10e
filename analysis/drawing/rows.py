"""Rows of a timeline: the order of the ranks, their groups, and the lanes of their tracks."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from enum import StrEnum
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from rankscope.tracer.span import KINDS, NONE

from .timeline import StepTimeline

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from numpy.typing import NDArray

    from rankscope.tracer.topology import Coords

    from ..report.report import RankStepExcess
    from .raster import StepPicture

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


def useful_orders(step: StepTimeline | StepPicture, *, has_excess: bool) -> tuple[RowOrder, ...]:
    """Return the orders that differ: by rank, and by what has several values."""
    useful = {order for order in RowOrder if len(group_numbers(step, order)) > 1}
    useful |= {RowOrder.RANK, RowOrder.EXCESS} if has_excess else {RowOrder.RANK}
    return tuple(order for order in RowOrder if order in useful)


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
    """Neighbouring rows with one value of the grouped axis, or of one host or section."""

    row: int
    """Its first row."""

    number: int
    """The value of the axis, or the place of the host among all hosts, or of the section among
    those of the step; `NONE` if it is unknown."""

    name: str
    """Of a host: text from outside."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLayout:
    """The rows of a view of a step, from 0 at the top, with the ranks of each.

    It is made once, when the view is read. Everything that is drawn of the view takes it.
    """

    blocks: RankBlocks
    """The ranks of each row; those of a folded group share one."""

    lines: Sequence[int]
    """Shape (rows + 1,): first line of each row in the figure, and the number of all lines."""

    groups: tuple[Group, ...]
    """From the top; empty if nothing is grouped."""

    folded: frozenset[int]
    """Numbers of the folded groups."""

    num_ranks: int
    """Ranks of the whole step."""

    first_place: int
    """Place of the uppermost rank among all ranks of the step."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks from the top."""
        return tuple(itertools.chain.from_iterable(self.blocks))

    @property
    def single_ranks(self) -> list[int]:
        """The ranks that have a row of their own."""
        return [block[0] for block in self.blocks if len(block) == 1]

    @property
    def folded_rows(self) -> list[int]:
        """The rows of folded groups."""
        return [group.row for group in self.groups if group.number in self.folded]

    def row_by_rank(self) -> dict[int, int]:
        """Return the row of each rank."""
        return {rank: row for row, block in enumerate(self.blocks) for rank in block}

    def rows_with(self, ranks: Collection[int]) -> list[int]:
        """Return the rows that have some of these ranks."""
        wanted = frozenset(ranks)
        if not wanted:
            return []
        return [row for row, block in enumerate(self.blocks) if not wanted.isdisjoint(block)]

    def middle(self, row: int) -> float:
        """Return the middle of a row, in lines of the figure."""
        return (self.lines[row] + self.lines[row + 1] - 1) / 2


def lay_out_ranks(
    timeline: StepTimeline, order: RowOrder, folded: Collection[int] = ()
) -> RowLayout:
    """Lay out a row for each rank of a step's spans; see `lay_out_rows`."""
    blocks = split_ranks(order_ranks(timeline, order), 1)
    return lay_out_rows(timeline, order, blocks, folded)


def lay_out_rows(
    step: StepTimeline | StepPicture,
    order: RowOrder,
    blocks: RankBlocks,
    folded: Collection[int] = (),
    *,
    num_ranks: int | None = None,
    first_place: int = 0,
) -> RowLayout:
    """Group rows, and join those of each folded group to one.

    A row with ranks of several groups belongs to that of its first one.

    Args:
        step: The step, with positions and hosts of its ranks.
        blocks: The ranks of each row from the top, before any is folded.
        folded: Numbers of groups.
        num_ranks: Ranks of the whole step; None: those of ``blocks``.
        first_place: As in `RowLayout`.
    """
    rows: list[tuple[int, ...]] = []
    groups = []
    of_row = _find_groups(step, order, [block[0] for block in blocks])
    for group, members in itertools.groupby(zip(of_row, blocks, strict=True), key=itemgetter(0)):
        unfolded = [block for _, block in members]
        if group is not None:
            groups.append(Group(len(rows), *group))
        if group is not None and group[0] in folded:
            rows.append(tuple(itertools.chain.from_iterable(unfolded)))
        else:
            rows += unfolded
    return RowLayout(
        blocks=tuple(rows),
        lines=range(len(rows) + 1),
        groups=tuple(groups),
        folded=frozenset(folded),
        num_ranks=sum(map(len, blocks)) if num_ranks is None else num_ranks,
        first_place=first_place,
    )


def _find_groups(
    step: StepTimeline | StepPicture, order: RowOrder, ranks: Sequence[int]
) -> Sequence[tuple[int, str] | None]:
    """Return number and name of the group of each rank; None for all if they have no groups."""
    found: dict[int, tuple[int, str]] = {}
    if order is RowOrder.EXCESS and isinstance(step, StepTimeline):
        for number, (name, members) in enumerate(step.sections.items()):
            found |= dict.fromkeys(members, (number, name))
    elif len(group_numbers(step, order)) > 1:
        if order is RowOrder.HOST:
            names = dict.fromkeys(step.hosts[rank] for rank in sorted(step.hosts))
            numbers = {name: number for number, name in enumerate(names)}
            hosts = {rank: step.hosts[rank] for rank in ranks if rank in step.hosts}
            found = {rank: (numbers[name], name) for rank, name in hosts.items()}
        else:
            value = attrgetter(order.value)
            values = {rank: value(step.coords[rank]) for rank in ranks if rank in step.coords}
            word = order.value.upper()
            found = {rank: (number, f"{word} {number}") for rank, number in values.items()}
    unknown = (NONE, "position unknown") if found else None
    return [found.get(rank, unknown) for rank in ranks]


def group_numbers(step: StepTimeline | StepPicture, order: RowOrder) -> tuple[int, ...]:
    """Return the numbers of all groups of a step, as in `Group`, ascending."""
    if order in AXES:
        return tuple(sorted(set(map(attrgetter(order.value), step.coords.values()))))
    return tuple(range(len(set(step.hosts.values())))) if order is RowOrder.HOST else ()


def order_ranks(timeline: StepTimeline, order: RowOrder) -> tuple[int, ...]:
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


def split_ranks(ranks: Sequence[int], size: int) -> RankBlocks:
    """Split ranks into blocks of ``size`` neighbours; the last one may be smaller."""
    return tuple(tuple(ranks[at : at + size]) for at in range(0, len(ranks), size))


class Lanes(NamedTuple):
    """The place of every span, in rows; shape (spans,) each."""

    center: NDArray[np.float64]
    height: NDArray[np.float64]


def place_spans(timeline: StepTimeline, rows: RowLayout) -> Lanes:
    """Give each track a lane in the row of its rank, compute above communication.

    Tracks with communication share the lower part of every row in the same order, so that one
    kind of traffic has the same height in all rows.

    Args:
        timeline: Spans of ranks in ``rows``.
    """
    from_top = np.array(rows.ranks, dtype=np.int64)
    row = np.repeat(np.arange(len(rows.blocks)), [len(block) for block in rows.blocks])
    ascending = np.argsort(from_top)
    row = row[ascending[np.searchsorted(from_top[ascending], timeline.spans.rank)]]
    top, height = _lanes(timeline)
    return Lanes(row - _ROW_FILL / 2 + top + height / 2, height)


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
        weights[max(upper, key=lambda code: spans.duration_ns[outer & (lane == code)].sum())] = 2
    top, height = np.zeros(len(spans)), np.zeros(len(spans))
    share = _COMPUTE_SHARE if upper and lower else float(bool(upper))
    for lanes, begin, size in ((upper, 0.0, share), (lower, share, 1 - share)):
        at = begin * _ROW_FILL
        total = sum(weights[code] for code in lanes)
        for code in lanes:
            thickness = size * _ROW_FILL * weights[code] / total
            top[lane == code] = at
            height[lane == code] = thickness * _LANE_FILL
            at += thickness
    return top, height
