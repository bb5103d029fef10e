"""What compute would take with micro-batches of equal length."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ..arrays.group_stats import group_medians
from ..arrays.grouping import factorize
from ..arrays.sorting import find_positions, stable_argsort
from ..statistics.baseline import common_step_ratio, medians_by_key
from ..statistics.peers import MIN_PEERS
from .thresholds import MIN_CORRELATION, MIN_ITEMS

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from numpy.typing import NDArray

    from rankscope.tracer.topology import Coords

    from ..replay.model import ComputeItems, ReplayModel
    from ..trace.context import MicrobatchTable

OUTLIER_SHARE = 0.005
"""Share of the items at either end that a fit leaves out: pauses."""

NUM_ROUNDS = 4
"""Of fitting: first against the items' own medians, then against those of evened items. Each round
takes the error to a thirtieth."""


def equalize_durations(
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
    of_span, num = factorize(span)
    first = np.zeros(num, dtype=np.int64)
    first[of_span] = np.arange(len(of_span))
    whole = np.bincount(of_span, weights=duration_ns, minlength=num)
    rank, step, label = rank[first], step[first], label[first]
    usual = medians_by_key(whole, rank, label)
    ratio = np.divide(whole, usual, out=np.ones(num), where=usual > 0)
    common = common_step_ratio(ratio, step)
    even = whole / common
    mean = _means(even, label)
    own = speed[first] if speed is not None else _rank_speed(even, mean, rank=rank, step=step)
    wanted = mean * own * common
    scale = np.divide(wanted, whole, out=np.ones(num), where=whole > 0)
    found: NDArray[np.float64] = duration_ns * scale[of_span]
    return found


def equalize_experts(
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
        float(np.mean(np.abs(took / medians_by_key(took, rank, label) - 1.0)))
        for took in (even, duration_ns[rows])
    ]
    if spreads[0] >= spreads[1]:
        return chosen, evened_ns
    part, found = chosen.copy(), evened_ns.copy()
    part[rows], found[rows] = True, even
    return part, found


def speeds_at_equal_lengths(
    equalized: ComputeItems, model: ReplayModel, blamed: Collection[int]
) -> NDArray[np.float64]:
    """Return how much longer than its stage the rank of each operation computes.

    Args:
        equalized: Compute as if all micro-batches had the same length.
        model: The operations.
        blamed: Ranks that are slow for a while: what they compute says nothing, so they count as
            no slower.

    Returns:
        Shape (ops,).
    """
    ranks, first = np.unique(model.rank, return_index=True)
    rows = np.flatnonzero(~np.isin(equalized.rank, list(blamed)))
    rank, step, kind = equalized.rank[rows], equalized.step[rows], equalized.kind[rows]
    at = find_positions(rank, ranks)
    took = equalized.self_ns[rows].astype(np.float64)
    # Lengths have been taken out, so what is left of a step is the whole job's.
    took /= medians_by_key(took / medians_by_key(took, rank, kind, equalized.chunk[rows]), step)
    mean = _means(took, model.stage[first][at], kind, equalized.chunk[rows])
    of_rank = np.ones(len(ranks))
    of_rank[at] = _rank_speed(took, mean, rank=rank, step=step)
    speed: NDArray[np.float64] = of_rank[find_positions(model.rank, ranks)]
    return speed


def _means(value: NDArray[np.float64], *key: NDArray[np.integer[Any]]) -> NDArray[np.float64]:
    group, num = factorize(*key)
    total = np.bincount(group, weights=value, minlength=num)
    means: NDArray[np.float64] = (total / np.bincount(group, minlength=num))[group]
    return means


def _rank_speed(
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
    of_rank, num_ranks = factorize(rank)
    cell, num_cells = factorize(rank, step)
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


def equalize_declared_lengths(items: ComputeItems, lengths: MicrobatchTable) -> ComputeItems | None:
    """Return the items as if all micro-batches had the same sum of squared lengths.

    Within one (rank, kind, chunk) an item is taken to last ``a + b s``, s being its sum of
    squared lengths; one ``b / a`` is fitted for each kind over all ranks. So neither a slow rank
    nor a long stage counts, and what is left of an item is what its length does not explain.

    Args:
        items: Compute by micro-batch.
        lengths: What the loaders told.

    Returns:
        None where a length is unknown, where all are equal, or where they do not explain compute
        (correlation below `MIN_CORRELATION`): then nothing is known of any item's share.

    Source:
        arXiv 2505.05713, section 5.3: a micro-batch's compute goes with the sum of its squared
        sequence lengths, beside a part that goes with its tokens.
    """
    squares = squared_lengths(items, lengths)
    if len(items) < MIN_ITEMS or np.isnan(squares).any() or not squares.any():
        return None
    relative = squares / squares.mean()
    scale = np.ones(len(items))
    for kind in np.unique(items.kind).tolist():
        rows = np.flatnonzero(items.kind == kind)
        found = _fit_scale(items, rows, relative[rows])
        if found is None:
            return None
        scale[rows] = found
    return replace(items, self_ns=np.rint(items.self_ns / scale).astype(np.int64))


def _fit_scale(
    items: ComputeItems, rows: NDArray[np.int64], relative: NDArray[np.float64]
) -> NDArray[np.float64] | None:
    """Return what each item's length makes of it, 1 for the mean length; None where unclear."""
    scale, correlation = np.ones(len(rows)), 0.0
    key = (items.rank[rows], items.kind[rows], items.chunk[rows])
    for _ in range(NUM_ROUNDS):
        usual = medians_by_key(items.self_ns[rows] / scale, *key)
        if not (usual > 0).all():
            return None
        ratio = items.self_ns[rows] / usual
        # What lengths do not explain of a whole step is the step's: it warms up, say.
        ratio /= medians_by_key(ratio / scale, items.step[rows])
        low, high = np.quantile(ratio, (OUTLIER_SHARE, 1 - OUTLIER_SHARE))
        kept = (ratio >= low) & (ratio <= high)
        x, y = relative[kept], ratio[kept]
        if len(x) < MIN_ITEMS or x.std() == 0 or y.std() == 0:
            return None
        # The first medians are those of whatever lengths a rank had: only the last ones tell.
        correlation = float(np.corrcoef(x, y)[0, 1])
        slope, level = np.polyfit(x, y, 1)
        scale = (level + slope * relative) / (level + slope)
        if not (scale > 0).all():
            return None
    return scale if correlation >= MIN_CORRELATION else None


def equalize_inferred_lengths(
    items: ComputeItems, coords: Mapping[int, Coords]
) -> ComputeItems | None:
    """Return the items as if all micro-batches had the same length.

    A *column* are the ranks of one dp position. A micro-batch is as long as it is on the middle
    rank of its column, against that rank's own median; and a column's median is as long as it is
    on the middle one of its ranks, against the other ranks of that rank's stage.

    Args:
        items: Compute by micro-batch.
        coords: Position of each rank.

    Returns:
        None where a column has fewer ranks than one that is slow could be told from (`MIN_PEERS`),
        or where a rank's compute does not follow its column's (correlation below
        `MIN_CORRELATION`).
    """
    if len(items) < MIN_ITEMS:
        return None
    ranks = np.unique(items.rank)
    at = find_positions(items.rank, ranks)
    column, stage = (
        np.array([getattr(coords[rank], axis) for rank in ranks.tolist()]) for axis in ("dp", "pp")
    )
    if np.unique(column, return_counts=True)[1].min() < MIN_PEERS:
        return None
    usual = medians_by_key(items.self_ns, items.rank, items.kind, items.chunk)
    if not (usual > 0).all():
        return None
    ratio = items.self_ns / usual
    ratio /= common_step_ratio(ratio, items.step)
    length = _column_medians(ratio, items, column[at])
    if not _is_correlated(ratio, length):
        return None
    level = usual / medians_by_key(usual, stage[at], items.kind, items.chunk)
    scale = length * medians_by_key(level, column[at])
    scale /= scale.mean()
    return replace(items, self_ns=np.rint(items.self_ns / scale).astype(np.int64))


def _column_medians(
    ratio: NDArray[np.float64], items: ComputeItems, column: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Return the median over a column's ranks of what each took for a micro-batch, over its usual.

    Args:
        ratio: Shape (items,).
        items: The items.
        column: Shape (items,).
    """
    place, num = factorize(items.step, items.rank, items.microbatch)
    of_rank = np.bincount(place, weights=ratio, minlength=num) / np.bincount(place, minlength=num)
    first = np.zeros(num, dtype=np.int64)
    first[place] = np.arange(len(place))
    shared, num_shared = factorize(items.step[first], column[first], items.microbatch[first])
    middle: NDArray[np.float64] = group_medians(of_rank, shared, num_shared)[0][shared][place]
    return middle


def _is_correlated(ratio: NDArray[np.float64], length: NDArray[np.float64]) -> bool:
    """Tell whether what ranks took follows the lengths, pauses left out."""
    low, high = np.quantile(ratio, (OUTLIER_SHARE, 1 - OUTLIER_SHARE))
    kept = (ratio >= low) & (ratio <= high)
    x, y = length[kept], ratio[kept]
    if len(x) < MIN_ITEMS or x.std() == 0 or y.std() == 0:
        return False
    return float(np.corrcoef(x, y)[0, 1]) >= MIN_CORRELATION


def squared_lengths(items: ComputeItems, lengths: MicrobatchTable) -> NDArray[np.float64]:
    """Return the sum of squared lengths of each item's micro-batch, NaN where nobody told it.

    Args:
        items: Compute by micro-batch.
        lengths: What the loaders told.

    Returns:
        Shape (items,).
    """
    known = lengths.sum_squared_lengths >= 0
    if not known.any() or not len(items):
        return np.full(len(items), np.nan)
    size = int(max(items.microbatch.max(), lengths.microbatch.max())) + 1
    ranks = int(max(items.rank.max(), lengths.rank.max())) + 1

    def keys(table: ComputeItems | MicrobatchTable) -> NDArray[np.int64]:
        return (table.step.astype(np.int64) * ranks + table.rank) * size + table.microbatch

    told = keys(lengths)[known]
    order = stable_argsort(told)
    wanted = keys(items)
    at = np.minimum(np.searchsorted(told[order], wanted), len(told) - 1)
    squares = lengths.sum_squared_lengths[known][order][at].astype(np.float64)
    return np.where(told[order][at] == wanted, squares, np.nan)
