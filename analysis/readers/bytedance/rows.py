"""A ByteDance trace as sorted columns, with the place of each worker's operations in them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ...arrays.sorting import sort_rows
from .blocks import NUM_TYPES, Blocks, place_blocks
from .format import CODE

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ...trace.tables import RunInfo, SpanTable


@dataclass(frozen=True, slots=True)
class Rows:
    """Columns sorted by (step, dp, stage, type, seq), and the blocks of equal (worker, type)."""

    steps: tuple[int, ...]
    """Step numbers, ascending."""

    row: NDArray[np.int64]
    """Row in the span table."""

    step: NDArray[np.int32]
    dp: NDArray[np.int32]
    stage: NDArray[np.int32]
    type: NDArray[np.int8]
    start: NDArray[np.int64]
    end: NDArray[np.int64]
    chunk: NDArray[np.int32]
    worker: NDArray[np.int64]
    """Index of the (step, dp, stage)."""

    worker_dp: NDArray[np.int64]
    """Shape (workers,): index of the (step, dp)."""

    worker_stage: NDArray[np.int32]
    nth: NDArray[np.int64]
    """Position in the block."""

    first: NDArray[np.int64]
    """Shape (workers, types): where the block begins."""

    count: NDArray[np.int64]
    """Shape (workers, types): how many operations it has."""

    def of(self, name: str) -> NDArray[np.int64]:
        """Return the rows of one type, in order."""
        return np.flatnonzero(self.type == CODE[name])


def sorted_rows(run: RunInfo, spans: SpanTable) -> tuple[Rows, Blocks]:
    """Sort a trace's operations; return them and the blocks that they were taken from.

    Raises:
        KeyError: An operation's rank is not in ``run``.
    """
    blocks = place_blocks(run, spans)
    num_stages, num_replicas = blocks.num_stages, len(blocks.replicas)
    count = blocks.count.reshape(-1, NUM_TYPES)
    place = np.flatnonzero(count.any(axis=1))
    count = count[place]
    by_dp, stage = place // num_stages, place % num_stages
    num = count.sum(axis=1)
    per_block = count.ravel()
    first = np.cumsum(per_block) - per_block
    columns, order = blocks.columns, blocks.order
    start = columns.start_ns[order]
    rows = Rows(
        steps=tuple(blocks.steps.tolist()),
        row=(order if blocks.taken is None else blocks.taken[order]).astype(np.int64, copy=False),
        step=np.repeat((by_dp // num_replicas).astype(np.int32), num),
        dp=np.repeat(blocks.replicas[by_dp % num_replicas].astype(np.int32), num),
        stage=np.repeat(stage.astype(np.int32), num),
        type=np.repeat(np.tile(np.arange(NUM_TYPES, dtype=np.int8), len(place)), per_block),
        start=start,
        end=start + columns.duration_ns[order],
        chunk=columns.chunk[order].astype(np.int32, copy=False),
        worker=np.repeat(np.arange(len(place)), num),
        worker_dp=by_dp,
        worker_stage=stage.astype(np.int32),
        nth=np.arange(len(order)) - np.repeat(first, per_block),
        first=first.reshape(count.shape),
        count=count,
    )
    return rows, blocks


def in_start_order(rows: Rows, names: tuple[str, ...]) -> NDArray[np.int64]:
    """Return the rows of some types by worker, then by start."""
    members = np.flatnonzero(np.isin(rows.type, [CODE[name] for name in names]))
    if len(names) == 1:
        return members
    return members[sort_rows(rows.worker[members], rows.start[members], rows.end[members])]
