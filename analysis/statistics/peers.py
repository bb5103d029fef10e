"""Comparison with peers: how long each rank computed, and how long its peers needed."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np

from ..arrays.group_stats import group_medians, lower_medians, row_medians, sum_cells
from ..arrays.grouping import factorize, sorted_unique
from ..arrays.sorting import argsort_rows, find_positions
from .baseline import clear_levels
from .noise import find_slow_together, required_deviations
from .thresholds import THRESHOLDS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from rankscope.tracer.topology import Coords

    from ..replay.model import ComputeItems


class Basis(Enum):
    """The baseline that the compute of a rank is compared with."""

    PEERS = "the other ranks of its stage"
    FEW_PEERS = "the few other ranks of its stage, which other stages confirm"
    STAGES = "ranks of stages of equal work"
    EARLIER = "its own first steps"
    NOTHING = "nothing"


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeProfile:
    """Compute by rank and step, and what it is compared with."""

    ranks: NDArray[np.int32]
    """Ascending, the rows of the matrices."""

    steps: NDArray[np.int32]
    """Ascending, the columns."""

    stage: NDArray[np.int32]
    """Shape (ranks,)."""

    total_ns: NDArray[np.float64]
    """Shape (ranks, steps): for each kind and chunk the median micro-batch times their number,
    summed; NaN if the rank computed nothing in the step.

    With the median, a single pause in one micro-batch does not make a rank look slow. What a rank
    computes because it has more micro-batches or tokens than others of its stage is not counted.
    """

    expected_ns: NDArray[np.float64]
    """Shape (ranks, steps): the baseline of the rank; NaN if there is none."""

    basis: tuple[Basis, ...]
    """Shape (ranks,)."""

    is_equalized: bool = False
    """Whether the compute is as it would be if all micro-batches had equal length."""

    @property
    def excess_ratio(self) -> NDArray[np.float64]:
        """Shape (ranks, steps): how much longer than expected, 0 for equal."""
        ratio: NDArray[np.float64] = self.total_ns / self.expected_ns - 1.0
        return ratio


def compare_with_peers(
    items: ComputeItems,
    coords: Mapping[int, Coords],
    *,
    calls: ComputeItems | None = None,
    work: Sequence[NDArray[np.float64]] = (),
    is_equalized: bool = False,
) -> ComputeProfile:
    """Compare the compute of each rank with that of its peers, step by step.

    A stage with more than `min_peers` ranks has peers enough: each rank is compared with the median
    of the others. In a smaller one the few peers count if stages of equal work confirm them; a rank
    alone in its stage is compared with those stages; and if neither is possible, with its own first
    steps.

    A slow device is slow in all that it does. So a rank that runs more forwards without gradients
    than its peers, each as long as theirs, generates longer sequences, has longer micro-batches,
    and is not slow. (As many of them show nothing: those of a small frozen model take as long as
    their launches, on any device.) Nor is one that runs more micro-batches, or larger ones.

    Args:
        items: Compute of each rank by micro-batch, without waits.
        calls: The same of forwards without gradients, of which each rank may have another number.
        coords: Position of each rank; its stage is ``coords[rank].pp``.
        work: Measures of how much each item is, shape (items,) each. Compute grows with one or the
            other. Empty: all items are alike.
        is_equalized: Whether the items are as if all micro-batches had equal length.
    """
    ranks, steps = sorted_unique(items.rank), sorted_unique(items.step)
    total = _totals(items, ranks, steps)
    row, column = find_positions(items.rank, ranks), find_positions(items.step, steps)
    amounts = [sum_cells(total.shape, row, column, each) for each in work or (np.ones(len(items)),)]
    stage = np.array([coords[int(rank)].pp for rank in ranks], dtype=np.int32)
    share = _share_of_usual_work(total, amounts, stage)
    total = total * share
    expected, basis = expect_from_peers(total, stage, work=[each * share for each in amounts])
    if calls is not None:
        has_more = _has_more_calls(calls, ranks, steps, stage)
        most = expected * np.where(has_more, call_ratio(calls, ranks, steps, stage), np.inf)
        total = np.where(total > most, np.maximum(most, np.minimum(total, expected)), total)
    return ComputeProfile(
        ranks=ranks,
        steps=steps,
        stage=stage,
        total_ns=total,
        expected_ns=expected,
        basis=basis,
        is_equalized=is_equalized,
    )


def expect_from_peers(
    total: NDArray[np.float64],
    stage: NDArray[np.int32],
    *,
    work: Sequence[NDArray[np.float64]] = (),
) -> tuple[NDArray[np.float64], tuple[Basis, ...]]:
    """Return what is expected of each rank and step, NaN if nothing is, and each rank's basis.

    Args:
        total: Shape (ranks, steps).
        stage: Shape (ranks,).
        work: Measures of the work, shape (ranks, steps) each. A rank's earlier steps may have had
            more or less of it, and its compute grows with one or the other. Empty: all are alike.
    """
    work = work or (np.ones_like(total),)
    expected = np.full_like(total, np.nan)
    basis = [Basis.NOTHING] * len(stage)
    for each in np.unique(stage).tolist():
        rows = np.flatnonzero(stage == each)
        _compare_stage(rows, stage, total, work, expected, basis)
    return expected, tuple(basis)


def _totals(
    items: ComputeItems, ranks: NDArray[np.int32], steps: NDArray[np.int32]
) -> NDArray[np.float64]:
    """Return, for each rank and step, the sum over (kind, chunk) of median times number."""
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


def _share_of_usual_work(
    total: NDArray[np.float64], work: Sequence[NDArray[np.float64]], stage: NDArray[np.int32]
) -> NDArray[np.float64]:
    """Return how much of its compute a rank would do with as much work as others.

    How much work it has says nothing of its speed. As much as others have is the lower median of
    its stage. Where it has more, what is left of its compute is not below the lower median of the
    stage's, by the median of these steps: a fast device that gets more work for it makes no other
    one slow, and keeps its noise.

    Args:
        total: Shape (ranks, steps): compute.
        work: Measures of the work, shape (ranks, steps) each; 0 where a rank has none.
        stage: Shape (ranks,).

    Returns:
        Shape (ranks, steps), at most 1.
    """
    share = np.ones_like(total)
    for each in np.unique(stage).tolist():
        rows = stage == each
        least = np.ones_like(total[rows])
        for amount in work:
            known = np.where(amount[rows] > 0, amount[rows], np.nan)
            least = np.fmin(least, lower_medians(known) / known)
        has_more = least < 1.0
        if has_more.any():
            longer = np.where(has_more, total[rows] / lower_medians(total[rows]), np.nan)
            level = np.maximum(row_medians(longer), 1.0)[:, None]
            share[rows] = np.where(has_more, np.fmax(least, 1.0 / level), 1.0)
    return share


def _cells_of_calls(
    calls: ComputeItems, ranks: NDArray[np.int32], steps: NDArray[np.int32]
) -> tuple[NDArray[np.bool_], NDArray[np.int64], NDArray[np.int64]]:
    """Return which calls are of these ranks and steps, shape (calls,), and row and column of each
    of those.
    """
    known = np.isin(calls.rank, ranks) & np.isin(calls.step, steps)
    row, column = find_positions(calls.rank[known], ranks), find_positions(calls.step[known], steps)
    return known, row, column


def _has_more_calls(
    calls: ComputeItems,
    ranks: NDArray[np.int32],
    steps: NDArray[np.int32],
    stage: NDArray[np.int32],
) -> NDArray[np.bool_]:
    """Return whether each rank has more calls in a step than its stage. Shape (ranks, steps)."""
    _, row, column = _cells_of_calls(calls, ranks, steps)
    num = sum_cells((len(ranks), len(steps)), row, column, np.ones(len(row)))
    has_more = np.zeros(num.shape, dtype=np.bool_)
    for each in np.unique(stage).tolist():
        rows = stage == each
        has_more[rows] = num[rows] > lower_medians(num[rows])
    return has_more


def call_ratio(
    calls: ComputeItems,
    ranks: NDArray[np.int32],
    steps: NDArray[np.int32],
    stage: NDArray[np.int32],
) -> NDArray[np.float64]:
    """Return how long the calls of each rank take, over those of its stage.

    The n-th call of a step is compared with the n-th ones of the other ranks, because calls that
    generate text take longer from one to the next, and with the lower median of these, because a
    fault only adds time.

    Returns:
        Shape (ranks, steps): the median over the calls; infinite where most ranks have none.
    """
    known, row, column = _cells_of_calls(calls, ranks, steps)
    took, place = calls.self_ns[known], calls.microbatch[known]
    alike, num_alike = factorize(column, stage[row], place)
    order = argsort_rows(alike, took)
    size = np.bincount(alike, minlength=num_alike)
    lower = took[order][np.cumsum(size) - size + (size - 1) // 2]
    is_common = 2 * size[alike] > np.bincount(stage)[stage[row]]
    ratio = (took / np.maximum(lower[alike], 1))[is_common]
    cell = (row * len(steps) + column)[is_common]
    median, _ = group_medians(ratio, cell, len(ranks) * len(steps))
    return np.where(np.isnan(median), np.inf, median).reshape(len(ranks), len(steps))


def _compare_stage(
    rows: NDArray[np.int64],
    stage: NDArray[np.int32],
    total: NDArray[np.float64],
    work: Sequence[NDArray[np.float64]],
    expected: NDArray[np.float64],
    basis: list[Basis],
) -> None:
    """Fill in ``expected`` and ``basis`` for the ranks of one stage."""
    others = np.flatnonzero(stage != stage[rows[0]])
    is_last = bool(stage[rows[0]] == stage.max()) and len(others) > 0
    if len(rows) > THRESHOLDS.min_peers:
        expected[rows] = _median_of_usual_peers(total[rows])
        for row in rows:
            basis[row] = Basis.PEERS
        return
    level = np.nanmedian(total, axis=1)
    for row in rows:
        few = rows[rows != row]
        peers = _confirmed_peers(level, stage, few, others) if len(few) else others[:0]
        basis[row] = Basis.FEW_PEERS
        # The last stage may have more work than the others: the output head.
        if not len(few) and not is_last:
            peers = _majority(level, others)
            basis[row] = Basis.STAGES
        if len(peers):
            expected[row] = row_medians(total[peers].T)
        elif total.shape[1] > THRESHOLDS.min_lasting_steps:
            expected[row] = np.maximum.reduce(
                [_earlier_baseline(total / each, row) * each[row] for each in work]
            )
            basis[row] = Basis.EARLIER
        else:
            basis[row] = Basis.NOTHING


def _median_of_usual_peers(total: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the median of each row's peers, without those that are slow together.

    Slow ranks below half of a stage do not hide themselves in the median, but they shift it to the
    upper end of the healthy ranks, by as much as these differ. Half of a stage shifts it to the
    slow ones.
    """
    expected = median_of_peers(total)
    slow = find_slow_together(total / expected - 1.0)
    for step in np.flatnonzero(slow.any(axis=0)).tolist():
        others = total[~slow[:, step], step]
        expected[~slow[:, step], step] = median_of_peers(others[:, None])[:, 0]
        expected[slow[:, step], step] = np.median(others)
    return expected


def _confirmed_peers(
    level: NDArray[np.float64],
    stage: NDArray[np.int32],
    few: NDArray[np.int64],
    others: NDArray[np.int64],
) -> NDArray[np.int64]:
    """Return the few peers that are confirmed: one or two ranks alone prove nothing.

    The ranks of a stage do the same work, whatever other stages do, and a device is slower than its
    kind but not faster. So a rank of another stage that is as fast as the fastest there confirms
    that ranks of one stage agree in this job. One that is alone confirms only stages of equal work.

    Returns:
        The peers that agree with the fastest of them; none unless `min_peers` ranks confirm them,
        these peers included.
    """
    fastest = np.full(len(level), level[few].min())
    for number in np.unique(stage[others]).tolist():
        rows = others[stage[others] == number]
        if len(rows) > 1:
            fastest[rows] = level[rows].min()
    is_alike = np.abs(level / fastest - 1.0) < THRESHOLDS.min_excess_ratio
    agreeing: NDArray[np.int64] = few[is_alike[few]]
    if len(agreeing) + int(is_alike[others].sum()) < THRESHOLDS.min_peers:
        return few[:0]
    return agreeing


def _earlier_baseline(total: NDArray[np.float64], row: int) -> NDArray[np.float64]:
    """Return the median of a rank's first steps, scaled by how all other ranks changed since.

    Of a rank that takes turns between two levels the faster one counts: its first steps may be
    slow.
    """
    early = row_medians(total[:, : THRESHOLDS.min_lasting_steps])[:, None]
    low, high, noise = clear_levels(total)
    is_slow_first = high - low >= required_deviations(total.size) * noise
    is_slow_first &= early[:, 0] > (low + high) / 2
    early[is_slow_first, 0] = low[is_slow_first]
    others = np.delete(total / early, row, axis=0)
    common = lower_medians(others) if len(others) else np.ones(total.shape[1])
    # A fault only adds time: that others are faster than at first makes no rank slow.
    common = np.maximum(common, 1.0)
    own: NDArray[np.float64] = early[row] * common
    return own


def _majority(level: NDArray[np.float64], rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the rows whose level is that of most of them; none if they have no majority."""
    if not len(rows):
        return rows
    typical = np.sort(level[rows])[(len(rows) - 1) // 2]
    agreeing: NDArray[np.int64] = rows[
        np.abs(level[rows] / typical - 1.0) < THRESHOLDS.min_excess_ratio
    ]
    enough = len(agreeing) >= THRESHOLDS.min_peers and 2 * len(agreeing) > len(rows)
    return agreeing if enough else rows[:0]


def median_of_peers(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return, for each row and column, the median of the other rows of that column.

    Args:
        values: Shape (rows, columns), at least 2 rows. NaN counts as the largest value of its
            column.

    Returns:
        Same shape.
    """
    num = len(values)
    order = np.argsort(values, axis=0)
    ranked = np.take_along_axis(values, order, axis=0)
    place = np.empty_like(order)
    np.put_along_axis(place, order, np.arange(num)[:, None], axis=0)
    low, high = (num - 2) // 2, (num - 1) // 2
    at_low = np.take_along_axis(ranked, low + (place <= low), axis=0)
    at_high = np.take_along_axis(ranked, high + (place <= high), axis=0)
    medians: NDArray[np.float64] = (at_low + at_high) / 2
    return medians
