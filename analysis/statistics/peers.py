"""How long each rank computed in each step, and how long its peers say it should have."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np

from ..arrays.group_stats import group_medians, row_medians
from ..arrays.grouping import factorize, sorted_unique
from ..arrays.sorting import find_positions

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from rankscope.tracer.topology import Coords

    from ..replay.model import ComputeItems

MIN_PEERS = 3
"""Peers that a verdict on one rank needs. Source: design.md section 5, least evidence."""

EQUAL_WORK_RATIO = 0.10
"""Stages whose typical compute differs by less than this count as doing equal work: any excess
below it would be no finding of `stage-imbalance` either."""

NUM_EARLIER_STEPS = 3
"""Earlier steps that a rank can be compared with when it has too few peers."""


class Basis(Enum):
    """What a rank's compute is compared with."""

    PEERS = "the other ranks of its stage"
    FEW_PEERS = "the few other ranks of its stage, which agree with stages of equal work"
    STAGES = "ranks of stages of equal work"
    EARLIER = "its own earlier steps"
    NOTHING = "nothing"


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeProfile:
    """Compute by rank and step. NaN where a rank computed nothing in a step."""

    ranks: NDArray[np.int32]
    """Ascending, the rows of the matrices."""

    steps: NDArray[np.int32]
    """Ascending, the columns."""

    stage: NDArray[np.int32]
    """Shape (ranks,)."""

    total_ns: NDArray[np.float64]
    """Shape (ranks, steps): the median micro-batch of each kind and chunk, times their number.

    The median keeps a single pause in one micro-batch from looking like a slow rank.
    """

    expected_ns: NDArray[np.float64]
    """Shape (ranks, steps): what the rank is compared with; NaN where there is nothing."""

    basis: tuple[Basis, ...]
    """Shape (ranks,)."""

    is_evened: bool = False
    """Whether compute is told as it would be with micro-batches of equal length."""

    @property
    def excess_ratio(self) -> NDArray[np.float64]:
        """Shape (ranks, steps): how much longer than expected, 0 for equal."""
        ratio: NDArray[np.float64] = self.total_ns / self.expected_ns - 1.0
        return ratio


def compare_with_peers(
    items: ComputeItems, coords: Mapping[int, Coords], *, is_evened: bool = False
) -> ComputeProfile:
    """Compare each rank with its peers, step by step.

    Args:
        items: Compute of each rank by micro-batch, waits cut out.
        coords: Position of each rank; its stage is ``coords[rank].pp``.
        is_evened: Whether the items are those of `analysis.causes.lengths_known`.
    """
    ranks, steps = sorted_unique(items.rank), sorted_unique(items.step)
    total = _totals(items, ranks, steps)
    stage = np.array([coords[int(rank)].pp for rank in ranks], dtype=np.int32)
    expected = np.full_like(total, np.nan)
    basis = [Basis.NOTHING] * len(ranks)
    for number in np.unique(stage).tolist():
        rows = np.flatnonzero(stage == number)
        _compare_stage(rows, stage, total, expected, basis)
    return ComputeProfile(
        ranks=ranks,
        steps=steps,
        stage=stage,
        total_ns=total,
        expected_ns=expected,
        basis=tuple(basis),
        is_evened=is_evened,
    )


def _totals(
    items: ComputeItems, ranks: NDArray[np.int32], steps: NDArray[np.int32]
) -> NDArray[np.float64]:
    """Sum over (kind, chunk) the median item times the number of items."""
    cell = find_positions(items.rank, ranks) * len(steps) + find_positions(items.step, steps)
    group, num_groups = factorize(cell, items.kind, items.chunk)
    median, num = group_medians(items.self_ns, group, num_groups)
    cell_of_group = np.zeros(num_groups, dtype=np.int64)
    cell_of_group[group] = cell
    total = np.full(len(ranks) * len(steps), np.nan)
    seen = sorted_unique(cell)
    total[seen] = 0.0
    np.add.at(total, cell_of_group, median * num)
    return total.reshape(len(ranks), len(steps))


def _compare_stage(
    rows: NDArray[np.int64],
    stage: NDArray[np.int32],
    total: NDArray[np.float64],
    expected: NDArray[np.float64],
    basis: list[Basis],
) -> None:
    """Fill in what the ranks of one stage are compared with."""
    others = np.flatnonzero(stage != stage[rows[0]])
    is_last = bool(stage[rows[0]] == stage.max()) and len(others) > 0
    if len(rows) > MIN_PEERS:
        expected[rows] = median_of_peers(total[rows])
        for row in rows:
            basis[row] = Basis.PEERS
        return
    level = np.nanmedian(total, axis=1)
    for row in rows:
        mates = rows[rows != row]
        peers = _confirmed_mates(level, mates, others) if len(mates) else others[:0]
        basis[row] = Basis.FEW_PEERS
        # A last stage alone may well have more to do (the output head).
        if not len(mates) and not is_last:
            peers = _agreeing(level, others)
            basis[row] = Basis.STAGES
        if len(peers):
            expected[row] = row_medians(total[peers].T)
        elif total.shape[1] > NUM_EARLIER_STEPS:
            expected[row] = _own_earlier(total, row)
            basis[row] = Basis.EARLIER
        else:
            basis[row] = Basis.NOTHING


def _confirmed_mates(
    level: NDArray[np.float64], mates: NDArray[np.int64], others: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the mates that a rank can be held against: one or two alone prove nothing.

    They count when, with the ranks of other stages that do as much work, at
    least `MIN_PEERS` agree.
    """
    fastest = level[mates].min()
    alike = np.abs(level / fastest - 1.0) < EQUAL_WORK_RATIO
    agreeing: NDArray[np.int64] = mates[alike[mates]]
    if len(agreeing) + int(alike[others].sum()) < MIN_PEERS:
        return mates[:0]
    return agreeing


def _own_earlier(total: NDArray[np.float64], row: int) -> NDArray[np.float64]:
    """Return a rank's first steps, scaled by how the job as a whole went on from there."""
    early = row_medians(total[:, :NUM_EARLIER_STEPS])[:, None]
    others = np.delete(total / early, row, axis=0)
    common = row_medians(others.T) if len(others) else np.ones(total.shape[1])
    own: NDArray[np.float64] = early[row] * common
    return own


def _agreeing(level: NDArray[np.float64], rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the rows whose level is that of most of them; all the others' work is unlike."""
    if not len(rows):
        return rows
    typical = np.sort(level[rows])[(len(rows) - 1) // 2]
    agreeing: NDArray[np.int64] = rows[np.abs(level[rows] / typical - 1.0) < EQUAL_WORK_RATIO]
    enough = len(agreeing) >= MIN_PEERS and 2 * len(agreeing) > len(rows)
    return agreeing if enough else rows[:0]


def median_of_peers(value: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return, for each row and column, the median of the other rows of that column.

    Args:
        value: Shape (rows, columns), at least 2 rows; NaN sorts last and counts as absent only
            where a whole row is missing.

    Returns:
        Same shape.
    """
    num = len(value)
    order = np.argsort(value, axis=0)
    ranked = np.take_along_axis(value, order, axis=0)
    place = np.empty_like(order)
    np.put_along_axis(place, order, np.arange(num)[:, None], axis=0)
    low, high = (num - 2) // 2, (num - 1) // 2
    at_low = np.take_along_axis(ranked, low + (place <= low), axis=0)
    at_high = np.take_along_axis(ranked, high + (place <= high), axis=0)
    medians: NDArray[np.float64] = (at_low + at_high) / 2
    return medians
