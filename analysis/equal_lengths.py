"""What compute would take with micro-batches of equal length."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from analysis.distinct import number_rows
from analysis.sequence import common_ratio, own_medians

if TYPE_CHECKING:
    from numpy.typing import NDArray


def equal_durations(
    duration_ns: NDArray[np.float64],
    *,
    rank: NDArray[np.int32],
    stage: NDArray[np.int32],
    step: NDArray[np.int32],
    label: NDArray[np.int64],
) -> NDArray[np.float64]:
    """Return how long compute would take had all micro-batches the same length.

    Dealing tokens evenly changes who computes them, not how many there are: a piece takes the mean
    of those of its stage and label, times what its rank is slower by than others, times what its
    whole step is longer by.

    Args:
        duration_ns: Shape (pieces,), as recorded.
        rank: Shape (pieces,), as all others.
        stage: Its rank's.
        step: Step number or index.
        label: Pieces of equal label are alike.
    """
    usual = own_medians(duration_ns, rank, label)
    ratio = np.divide(duration_ns, usual, out=np.ones(len(usual)), where=usual > 0)
    common = common_ratio(ratio, step)
    even = duration_ns / common
    mean = _means(even, stage, label)
    return mean * _own_speed(even, mean, rank=rank, step=step) * common


def _means(value: NDArray[np.float64], *key: NDArray[np.integer[Any]]) -> NDArray[np.float64]:
    group, num = number_rows(*key)
    total = np.bincount(group, weights=value, minlength=num)
    means: NDArray[np.float64] = (total / np.bincount(group, minlength=num))[group]
    return means


def _own_speed(
    value: NDArray[np.float64],
    mean: NDArray[np.float64],
    *,
    rank: NDArray[np.int32],
    step: NDArray[np.int32],
) -> NDArray[np.float64]:
    """Return how much longer than its stage each row's rank computes, as far as that is no luck.

    A rank's mean over few steps differs from the others' by the lengths that it happened to get.
    With ``e`` that mean's variance by how the rank's steps vary, and ``v`` the variance of the
    ranks' means, ``max(0, 1 - e / v)`` of a rank's difference is its own.

    Args:
        value: Shape (rows,): compute.
        mean: Shape (rows,): that of its stage and label.
        rank: Shape (rows,).
        step: Shape (rows,).

    Source:
        The best linear predictor of a one-way random effects model (Henderson 1950).
    """
    of_rank, num_ranks = number_rows(rank)
    cell, num_cells = number_rows(rank, step)
    owner = np.zeros(num_cells, dtype=np.int64)
    owner[cell] = of_rank
    expected = np.bincount(cell, weights=mean, minlength=num_cells)
    got = np.bincount(cell, weights=value, minlength=num_cells)
    ratio = np.divide(got, expected, out=np.ones(num_cells), where=expected > 0)
    num_steps = np.bincount(owner, minlength=num_ranks)
    own = np.bincount(owner, weights=ratio, minlength=num_ranks) / num_steps
    freedom = num_cells - num_ranks
    between = float(own.var(ddof=1)) if num_ranks > 1 else 0.0
    if freedom < 1 or between == 0.0:
        return np.ones(len(value))
    error = float(((ratio - own[owner]) ** 2).sum()) / freedom * float((1.0 / num_steps).mean())
    kept = max(0.0, 1.0 - error / between)
    speed: NDArray[np.float64] = (1.0 + kept * (own - own.mean()))[of_rank]
    return speed
