"""Compute of ranks whose communication with each other is not traced."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..arrays.grouping import cumcount, factorize
from ..replay.model import COMPUTE_KINDS, has_kind

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from numpy.typing import NDArray

    from ..replay.model import ReplayModel
    from ..trace.tables import RankInfo


def remove_partner_waits(
    model: ReplayModel, workers: Mapping[int, tuple[int, ...]]
) -> NDArray[np.float64]:
    """Return durations without the waits for partners that compute holds.

    Where the communication inside a worker is not traced, its ranks leave each
    piece of compute together, so only the one that entered last shows what the
    piece took. Ranks that differ in their number of pieces keep theirs.

    Args:
        model: The operations.
        workers: What each rank shares with the partners that look just like it.

    Returns:
        Shape (ops,), ns.
    """
    duration_ns = model.operations.duration_ns.copy()
    number = {worker: place for place, worker in enumerate(sorted(set(workers.values())))}
    if len(number) == len(workers):
        return duration_ns
    rows = np.flatnonzero(model.on_device & has_kind(model, COMPUTE_KINDS))
    order = np.lexsort(
        (model.operations.start_ns[rows], model.rank[rows], model.operations.step[rows])
    )
    rows = rows[order]
    rank, step = model.rank[rows], model.operations.step[rows]
    of_rank = np.zeros(max(workers) + 1, dtype=np.int64)
    for each, worker in workers.items():
        of_rank[each] = number[worker]
    rank_step, num_rank_steps = factorize(step, rank)
    length = np.bincount(rank_step, minlength=num_rank_steps)[rank_step]
    piece, num = factorize(step, of_rank[rank], length, cumcount(rank_step), model.kind[rows])
    shortest = np.full(num, np.inf)
    np.minimum.at(shortest, piece, duration_ns[rows])
    duration_ns[rows] = shortest[piece]
    return duration_ns


AXES_INSIDE_COMPUTE = (("tp", "tp-comm"), ("cp", "cp-comm"), ("ep", "ep-comm"))
"""Axes whose communication lies inside compute, and its span kind: where it is not traced, a
rank's wait for its partner cannot be cut out."""


def find_workers(
    ranks: Mapping[int, RankInfo], traced_kinds: Iterable[str]
) -> dict[int, tuple[int, ...]]:
    """Return, for each rank, what it shares with the partners that look just like it.

    Args:
        ranks: Where each rank stands.
        traced_kinds: Span kinds of communication that the trace holds.
    """
    kinds = set(traced_kinds)
    axes = ["dp", "pp", *(axis for axis, kind in AXES_INSIDE_COMPUTE if kind in kinds)]
    return {
        rank: tuple(getattr(info.coords, axis) for axis in axes) for rank, info in ranks.items()
    }


def number_workers(
    ranks: Mapping[int, RankInfo], traced_kinds: Iterable[str], rows: NDArray[np.int32]
) -> NDArray[np.int64]:
    """Return one number for each rank of ``rows``, equal for partners that look alike."""
    workers = find_workers(ranks, traced_kinds)
    number: dict[tuple[int, ...], int] = {}
    found = [number.setdefault(workers[rank], len(number)) for rank in rows.tolist()]
    return np.array(found, dtype=np.int64)
