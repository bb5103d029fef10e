"""Where each operation of a ByteDance trace stands: by step, replica, stage, type and number.

The rows of one (step, dp, stage, type) are a *block*. In a block, ``seq``
numbers the operations from 0, so an operation's place in sorted order is the
block's begin plus its ``seq``: counting replaces sorting. Only a trace whose
numbers have gaps or repeats is sorted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from analysis.bytedance_format import CODE, DP_ONLY, OPTIMIZER, TYPES
from analysis.errors import EmptyRunError
from analysis.source import rows_of_spans

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from analysis.source import RunInfo, SpanTable

NUM_TYPES = len(TYPES)
UNKNOWN, NO_PARTNERS = -1, -2
"""In place of a type's code: nobody knows it; or it joins replicas, and there is but one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """The rows of a trace in order of (step, dp, stage, type, seq)."""

    spans: SpanTable
    """The operations that take part."""

    steps: NDArray[np.int64]
    """Shape (steps,): step numbers, ascending."""

    replicas: NDArray[np.int64]
    """Shape (replicas,): dp positions, ascending."""

    num_stages: int
    order: NDArray[np.int64]
    """Shape (ops,): rows of ``spans``."""

    count: NDArray[np.int64]
    """Shape (steps, replicas, stages x types): operations of each block."""

    first: NDArray[np.int64]
    """Shape (steps, replicas): where the replica's operations begin in ``order``."""

    lowest_rank: NDArray[np.int64]
    """Shape (replicas, stages): of the worker's ranks; -1 where the run has no such worker."""

    warnings: tuple[str, ...]

    def incomplete(self) -> dict[int, str]:
        """Name the steps in which a worker has no optimizer operation, which closes a step."""
        shape = (*self.count.shape[:2], self.num_stages, NUM_TYPES)
        count = self.count.reshape(shape)
        traced = count.any(axis=(0, 3))
        missing = (traced & (count[..., CODE[OPTIMIZER]] == 0)).sum(axis=(1, 2))
        num_workers = int(traced.sum())
        return {
            int(self.steps[index]): f"{missing[index]} of {num_workers} workers have no {OPTIMIZER}"
            for index in np.flatnonzero(missing)
        }


def place_blocks(run: RunInfo, spans: SpanTable) -> Blocks:
    """Find each operation's place.

    Args:
        run: Its layout and the (dp, stage) of each rank.
        spans: Its operations, in any order.

    Raises:
        EmptyRunError: No operation takes part.
        KeyError: An operation's rank is not in ``run``.
    """
    type_of_name = np.array([_type_code(run, name) for name in spans.names], dtype=np.int32)
    spans, warnings = _known(spans, type_of_name)
    if not len(spans):
        raise EmptyRunError(f"run {run.run_id} holds no operation of a known type")
    steps, step = _numbered(spans.step)
    replicas, worker_of_rank, lowest_rank = _workers(run)
    num_workers = len(replicas) * run.layout.pp
    block = worker_of_rank[spans.rank]
    if int(block.min()) < 0:
        strange = int(spans.rank[int(block.argmin())])
        raise KeyError(f"run {run.run_id} has operations of rank {strange}, which it does not list")
    block += step * np.int32(num_workers)
    block *= np.int32(NUM_TYPES)
    block += type_of_name[spans.name]
    num_per_block = np.bincount(block, minlength=len(steps) * num_workers * NUM_TYPES)
    count = num_per_block.reshape(len(steps), len(replicas), -1)
    per_replica = count.sum(axis=2)
    return Blocks(
        spans=spans,
        steps=steps,
        replicas=replicas,
        num_stages=run.layout.pp,
        order=_order(spans, block, num_per_block),
        count=count,
        first=(np.cumsum(per_replica) - per_replica.ravel()).reshape(per_replica.shape),
        lowest_rank=lowest_rank,
        warnings=warnings,
    )


def _type_code(run: RunInfo, name: str) -> int:
    """Return the code of an operation's type, or why it takes no part."""
    if run.layout.dp * run.layout.dsp == 1 and name in DP_ONLY:
        return NO_PARTNERS
    return CODE.get(name, UNKNOWN)


def _known(spans: SpanTable, type_of_name: NDArray[np.int32]) -> tuple[SpanTable, tuple[str, ...]]:
    """Leave out what takes no part, and say what nobody knows."""
    if (type_of_name >= 0).all():
        return spans, ()
    per_name = np.bincount(spans.name, minlength=len(spans.names))
    if not per_name[type_of_name < 0].any():
        return spans, ()
    known = rows_of_spans(spans, type_of_name[spans.name] >= 0)
    strange = np.flatnonzero((type_of_name == UNKNOWN) & (per_name > 0))
    if not len(strange):
        return known, ()
    names = ", ".join(sorted(spans.names[code] for code in strange))
    num = int(per_name[strange].sum())
    return known, (f"{num} operations of unknown type are left out of the replay: {names}",)


def _numbered(values: NDArray[np.int32]) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Return the distinct values, ascending, and each row's index into them.

    Rows mostly come in long runs of equal values, so only each run's first is looked up.
    """
    begins = np.flatnonzero(np.concatenate(([True], values[1:] != values[:-1])))
    distinct, index = np.unique(values[begins], return_inverse=True)
    lengths = np.diff(np.append(begins, len(values)))
    return distinct.astype(np.int64), np.repeat(index.astype(np.int32), lengths)


def _workers(run: RunInfo) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.int64]]:
    """Return the dp positions, each rank's worker as a number, and each worker's lowest rank.

    The number is -1 of a rank that the run does not know.
    """
    infos = [info for epoch in run.epochs for info in epoch.ranks]
    rank = np.array([info.rank for info in infos], dtype=np.int64)
    replicas, replica = np.unique([info.coords.dp for info in infos], return_inverse=True)
    worker = replica * run.layout.pp + np.array([info.coords.pp for info in infos])
    worker_of_rank = np.full(int(rank.max()) + 1, -1, dtype=np.int32)
    worker_of_rank[rank] = worker
    lowest = np.full(len(replicas) * run.layout.pp, np.iinfo(np.int64).max)
    np.minimum.at(lowest, worker, rank)
    lowest[lowest == np.iinfo(np.int64).max] = -1
    return replicas.astype(np.int64), worker_of_rank, lowest.reshape(len(replicas), run.layout.pp)


def _order(
    spans: SpanTable, block: NDArray[np.int32], num_per_block: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Sort rows by block, then seq."""
    begins = np.cumsum(num_per_block) - num_per_block
    place = begins[block]
    place += spans.seq
    num = len(spans)
    if int(spans.seq.min()) >= 0 and int(place.max()) < num:
        order = np.full(num, -1, dtype=np.int64)
        order[place] = np.arange(num)
        # Rows of the first block can only lie in it, so if every place is taken it
        # holds just its own; then the same is true of the second, and so on.
        if int(order.min()) >= 0:
            return order
    return np.lexsort((spans.start_ns, spans.seq, block))
