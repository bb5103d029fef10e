"""A ByteDance trace as sorted columns, with the place of each worker's operations in them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from analysis.bytedance_format import CODE, DP_ONLY, TYPES
from analysis.operations import positions_in_runs

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from analysis.source import RunInfo, SpanTable


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


def sorted_rows(run: RunInfo, spans: SpanTable) -> tuple[Rows, list[str]]:
    """Sort a trace's operations; return them and what a reader should know."""
    warnings: list[str] = []
    of_rank = {info.rank: info.coords for epoch in run.epochs for info in epoch.ranks}
    ranks, rank_index = np.unique(spans.rank, return_inverse=True)
    dp = np.array([of_rank[int(rank)].dp for rank in ranks], dtype=np.int32)[rank_index]
    stage = np.array([of_rank[int(rank)].pp for rank in ranks], dtype=np.int32)[rank_index]
    code_of_name = np.array([CODE.get(name, -1) for name in spans.names], dtype=np.int8)
    types = code_of_name[spans.name]
    taken = types >= 0
    if not taken.all():
        strange = sorted({spans.names[code] for code in np.unique(spans.name[~taken])})
        warnings.append(
            f"{int((~taken).sum())} operations of unknown type are left out of the replay:"
            f" {', '.join(strange)}"
        )
    if run.layout.dp * run.layout.dsp == 1:
        taken &= ~np.isin(types, [CODE[name] for name in DP_ONLY])
    order = np.flatnonzero(taken)
    order = order[
        np.lexsort(
            (spans.start_ns[order], spans.seq[order], types[order], stage[order], dp[order],
             spans.step[order])
        )
    ]  # fmt: skip
    numbers, step = np.unique(spans.step[order], return_inverse=True)
    dp, stage, types = dp[order], stage[order], types[order]
    by_dp = step.astype(np.int64) * (int(dp.max(initial=0)) + 1) + dp
    workers, worker = np.unique(by_dp * run.layout.pp + stage, return_inverse=True)
    block = worker * len(TYPES) + types
    size = len(workers) * len(TYPES)
    return (
        Rows(
            steps=tuple(numbers.tolist()),
            row=order,
            step=step.astype(np.int32),
            dp=dp,
            stage=stage,
            type=types,
            start=spans.start_ns[order],
            end=spans.start_ns[order] + spans.duration_ns[order],
            chunk=spans.chunk[order],
            worker=worker.astype(np.int64),
            worker_dp=workers // run.layout.pp,
            worker_stage=(workers % run.layout.pp).astype(np.int32),
            nth=positions_in_runs(block),
            first=np.searchsorted(block, np.arange(size)).reshape(-1, len(TYPES)),
            count=np.bincount(block, minlength=size).reshape(-1, len(TYPES)),
        ),
        warnings,
    )


def in_start_order(rows: Rows, names: tuple[str, ...]) -> NDArray[np.int64]:
    """Return the rows of some types by worker, then by start."""
    members = np.flatnonzero(np.isin(rows.type, [CODE[name] for name in names]))
    if len(names) == 1:
        return members
    return members[np.lexsort((rows.end[members], rows.start[members], rows.worker[members]))]
