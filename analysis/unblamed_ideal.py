"""Ideal durations in which what is found to be slow has no share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from analysis.cells import group_medians
from analysis.distinct import distinct, number_rows
from analysis.occupancy import COMPUTE_KINDS, of_kinds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from analysis.candidate import Candidate
    from analysis.model import ReplayModel


def ideal_of_others(
    model: ReplayModel, candidates: Sequence[Candidate], duration_ns: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return ideal durations in which no candidate has a share.

    Compute's ideal is a mean over all ranks. Here it is scaled, kind by kind,
    so that it is the mean over the operations outside of every candidate's
    part; a communication's is the median of the alike ones outside. What has
    none outside keeps its ideal.

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
    return _alike_outside(model, inside & model.on_device & ~is_compute, inside, ideal)


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
