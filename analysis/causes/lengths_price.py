"""What compute would take with micro-batches of equal length."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..arrays.grouping import number_rows
from ..arrays.sorting import places_of
from ..statistics.baseline import common_ratio, own_medians, step_medians

if TYPE_CHECKING:
    from collections.abc import Collection

    from numpy.typing import NDArray

    from ..replay.model import ComputeItems, ReplayModel


def equal_durations(
    duration_ns: NDArray[np.float64],
    *,
    rank: NDArray[np.int32],
    step: NDArray[np.int32],
    label: NDArray[np.int64],
    span: NDArray[np.int64] | None = None,
    speed: NDArray[np.float64] | None = None,
) -> NDArray[np.float64]:
    """Return how long compute would take had all micro-batches the same length.

    Dealing tokens evenly changes who computes them, not how many there are: a span takes the mean
    of those of its label, times what its rank is slower by than others, times what its
    whole step is longer by. Its pieces share that as they shared what it took: how often a span is
    cut goes with who waited for whom, and so with the lengths.

    Args:
        duration_ns: Shape (pieces,), as recorded.
        rank: Shape (pieces,), as all others.
        step: Step number or index.
        label: Pieces of spans of equal label are alike; those of two stages never are.
        span: Pieces of equal number are of one span; None: each is a whole one.
        speed: What its rank is slower by, as far as that is known beside the lengths; None: to be
            told from these pieces.
    """
    if span is None:
        span = np.arange(len(duration_ns))
    of_span, num = number_rows(span)
    first = np.zeros(num, dtype=np.int64)
    first[of_span] = np.arange(len(of_span))
    whole = np.bincount(of_span, weights=duration_ns, minlength=num)
    rank, step, label = rank[first], step[first], label[first]
    usual = own_medians(whole, rank, label)
    ratio = np.divide(whole, usual, out=np.ones(num), where=usual > 0)
    common = common_ratio(ratio, step)
    even = whole / common
    mean = _means(even, label)
    own = speed[first] if speed is not None else _own_speed(even, mean, rank=rank, step=step)
    wanted = mean * own * common
    scale = np.divide(wanted, whole, out=np.ones(num), where=whole > 0)
    found: NDArray[np.float64] = duration_ns * scale[of_span]
    return found


def equal_experts(
    model: ReplayModel,
    experts: NDArray[np.bool_],
    chosen: NDArray[np.bool_],
    evened_ns: NDArray[np.float64],
) -> tuple[NDArray[np.bool_], NDArray[np.float64]]:
    """Add experts' compute, which goes with the micro-batch's length beside what the router sends.

    Each of their pieces would be shorter by as much as what its rank computed outside experts
    right before. Where that does not make them vary less, they are left alone.

    Args:
        model: The operations.
        experts: Shape (ops,): their compute.
        chosen: Shape (ops,): compute outside experts that has been evened.
        evened_ns: Shape (ops,): what that would take.

    Returns:
        Both with the experts' pieces added.
    """
    operations = model.operations
    duration_ns = operations.duration_ns
    rows = np.flatnonzero(chosen | experts)
    rows = rows[np.lexsort((operations.start_ns[rows], model.rank[rows], operations.step[rows]))]
    last = np.maximum.accumulate(np.where(chosen[rows], np.arange(len(rows)), -1))
    before = rows[last]
    mine = experts[rows] & (last >= 0) & (duration_ns[rows] > 0) & (duration_ns[before] > 0)
    mine &= (model.rank[before] == model.rank[rows]) & (model.kind[before] == model.kind[rows])
    mine &= operations.step[before] == operations.step[rows]
    if not mine.any():
        return chosen, evened_ns
    rows, before = rows[mine], before[mine]
    even = duration_ns[rows] * evened_ns[before] / duration_ns[before]
    rank, label = model.rank[rows], operations.label[rows]
    spreads = [
        float(np.mean(np.abs(took / own_medians(took, rank, label) - 1.0)))
        for took in (even, duration_ns[rows])
    ]
    if spreads[0] >= spreads[1]:
        return chosen, evened_ns
    part, found = chosen.copy(), evened_ns.copy()
    part[rows], found[rows] = True, even
    return part, found


def speeds_at_equal_lengths(
    evened: ComputeItems, model: ReplayModel, blamed: Collection[int]
) -> NDArray[np.float64]:
    """Return how much longer than its stage the rank of each operation computes.

    Args:
        evened: Compute as if all micro-batches had the same length.
        model: The operations.
        blamed: Ranks that are slow for a while: what they compute says nothing, so they count as
            no slower.

    Returns:
        Shape (ops,).
    """
    ranks, first = np.unique(model.rank, return_index=True)
    rows = np.flatnonzero(~np.isin(evened.rank, list(blamed)))
    rank, step, kind = evened.rank[rows], evened.step[rows], evened.kind[rows]
    at = places_of(rank, ranks)
    took = evened.self_ns[rows].astype(np.float64)
    # Lengths have been taken out, so what is left of a step is the whole job's.
    took /= step_medians(took / own_medians(took, rank, kind, evened.chunk[rows]), step)
    mean = _means(took, model.stage[first][at], kind, evened.chunk[rows])
    of_rank = np.ones(len(ranks))
    of_rank[at] = _own_speed(took, mean, rank=rank, step=step)
    speed: NDArray[np.float64] = of_rank[places_of(model.rank, ranks)]
    return speed


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
