"""Workers: ranks whose communication with each other is not traced.

Such partners wait for each other inside their compute, so they cannot be compared one by one.
"""

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


AXES_INSIDE_COMPUTE = (("tp", "tp-comm"), ("cp", "cp-comm"), ("ep", "ep-comm"))
"""Axes whose communication is inside compute, and its span kind. If it is not traced, the waits
for partners cannot be subtracted from compute."""


def remove_partner_waits(
    model: ReplayModel, workers: Mapping[int, tuple[int, ...]]
) -> NDArray[np.float64]:
    """Return the durations of all operations without the waits for partners inside compute.

    The ranks of a worker leave each piece of compute together, so the shortest piece, of the rank
    that entered last, is the compute without waits. Ranks that differ in their number of pieces
    keep their durations.

    Returns:
        Shape (ops,), ns; the operations' own column if no worker has partners.
    """
    duration_ns = model.operations.duration_ns
    number = {worker: index for index, worker in enumerate(sorted(set(workers.values())))}
    if len(number) == len(workers):
        return duration_ns
    rows = np.flatnonzero(model.on_device & has_kind(model, COMPUTE_KINDS))
    order = np.lexsort(
        (model.operations.start_ns[rows], model.rank[rows], model.operations.step[rows])
    )
    rows = rows[order]
    rank, step = model.rank[rows], model.operations.step[rows]
    worker_by_rank = np.zeros(max(workers) + 1, dtype=np.int64)
    for each, worker in workers.items():
        worker_by_rank[each] = number[worker]
    rank_step, num_rank_steps = factorize(step, rank)
    num_pieces = np.bincount(rank_step, minlength=num_rank_steps)[rank_step]
    piece, num = factorize(
        step, worker_by_rank[rank], num_pieces, cumcount(rank_step), model.kind[rows]
    )
    shortest = np.full(num, np.inf)
    np.minimum.at(shortest, piece, duration_ns[rows])
    duration_ns = duration_ns.copy()
    duration_ns[rows] = shortest[piece]
    return duration_ns


def find_workers(
    ranks: Mapping[int, RankInfo], traced_kinds: Iterable[str]
) -> dict[int, tuple[int, ...]]:
    """Return the worker of each rank: its positions on the axes that are traced."""
    kinds = set(traced_kinds)
    axes = ["dp", "pp", *(axis for axis, kind in AXES_INSIDE_COMPUTE if kind in kinds)]
    return {
        rank: tuple(getattr(info.coords, axis) for axis in axes) for rank, info in ranks.items()
    }


def number_workers(
    ranks: Mapping[int, RankInfo], traced_kinds: Iterable[str], rows: NDArray[np.int32]
) -> NDArray[np.int64]:
    """Return the number of the worker of each rank in ``rows``."""
    workers = find_workers(ranks, traced_kinds)
    number: dict[tuple[int, ...], int] = {}
    numbers = [number.setdefault(workers[rank], len(number)) for rank in rows.tolist()]
    return np.array(numbers, dtype=np.int64)
