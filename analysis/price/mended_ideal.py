"""Ideal durations in which what is found to be slow has no share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..arrays.group_stats import group_medians
from ..arrays.grouping import distinct, number_rows
from ..replay.model import COMPUTE_KINDS, of_kinds
from ..statistics.baseline import common_ratio, own_medians

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ..causes.candidate import Candidate
    from ..replay.model import ReplayModel


def ideal_of_others(
    model: ReplayModel, candidates: Sequence[Candidate], duration_ns: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return ideal durations in which no candidate has a share.

    Compute's ideal is a mean over all ranks. Here it is scaled, kind by kind,
    so that it is the mean over the operations outside of every candidate's
    part, and in steps in which these are all longer, or shorter, over those of
    that step: a first step that warms up would have been long without any
    fault. A communication's ideal is the median of the alike ones outside.
    What has none outside keeps its ideal.

    Args:
        model: The operations.
        candidates: What they say themselves of the usual does not count.
        duration_ns: Shape (ops,): what operations took.

    Returns:
        Shape (ops,), ns.
    """
    inside = np.zeros(len(model.rank), dtype=np.bool_)
    for each in candidates:
        if each.part is not None:
            inside |= each.part if each.usual_ns is None else each.part & np.isnan(each.usual_ns)
    ideal = model.ideal_ns.astype(np.float64)
    is_compute = of_kinds(model, COMPUTE_KINDS)
    for code in distinct(model.kind[is_compute]).tolist():
        of_kind = model.kind == code
        others = of_kind & model.on_device & ~inside
        expected = float(model.ideal_ns[others].sum())
        if expected > 0:
            ideal[of_kind] *= float(duration_ns[others].sum()) / expected
            ideal[of_kind] *= _by_step(model, others, duration_ns, ideal)[
                model.operations.step[of_kind]
            ]
    return _alike_outside(model, inside & model.on_device & ~is_compute, inside, ideal)


def _by_step(
    model: ReplayModel,
    others: NDArray[np.bool_],
    duration_ns: NDArray[np.float64],
    ideal_ns: NDArray[np.float64],
) -> NDArray[np.float64]:
    """Return by how much compute outside was longer in each step, 1 where not nearly all was.

    Shape (steps,).
    """
    rows = np.flatnonzero(others & (ideal_ns > 0))
    step = model.operations.step[rows]
    found = np.ones(len(model.operations.steps))
    usual = own_medians(duration_ns[rows], model.rank[rows], model.operations.label[rows])
    ratio = np.divide(duration_ns[rows], usual, out=np.ones(len(rows)), where=usual > 0)
    is_common = common_ratio(ratio, step) != 1.0
    if is_common.any():
        took = np.bincount(step, weights=duration_ns[rows], minlength=len(found))
        expected = np.bincount(step, weights=ideal_ns[rows], minlength=len(found))
        # The steps that are as usual make up for what the others had in the mean of all.
        found = np.divide(took, expected, out=found, where=expected > 0)
    return found


def _alike_outside(
    model: ReplayModel,
    wanted: NDArray[np.bool_],
    inside: NDArray[np.bool_],
    ideal: NDArray[np.float64],
) -> NDArray[np.float64]:
    """Return ideals with those wanted as the median of what is alike and not inside."""
    label = model.operations.label
    concerned = np.flatnonzero(np.isin(label, distinct(label[wanted])))
    number, num = number_rows(label[concerned])
    outside = ~inside[concerned]
    duration_ns = model.operations.duration_ns[concerned]
    median, _ = group_medians(duration_ns[outside], number[outside], num)
    found = np.where(wanted[concerned], median[number], np.nan)
    ideal[concerned] = np.where(np.isnan(found), ideal[concerned], found)
    return ideal
