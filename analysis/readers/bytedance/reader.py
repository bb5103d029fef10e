"""Read a run in the ByteDance format: its groups and dependencies are inferred."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ...replay.model import ReplayModel
from ...replay.operations import Operations, latest_by_group
from .format import (
    CLOCK_ERROR_TRANSFER_NS,
    CODE,
    COMMUNICATION,
    FOLDED,
    OPTIMIZER,
    SEPARATE_GRADS,
    TYPES,
)
from .graph import infer
from .rows import Rows, sorted_rows
from .validation import unpaired_transfers

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ...trace.tables import RunInfo, SpanTable


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """The operations of a ByteDance trace, with what the replay's groups of them need."""

    operations: Operations
    rows: Rows
    rank: NDArray[np.int32]
    """Shape (ops,): as the trace names its ranks."""

    num_clock_errors: int
    """Transfers that were negative by 10 ms or more, and count as 0."""

    unpaired: NDArray[np.int64]
    """Sends and receives without a partner though its worker has operations in the step."""

    uneven: dict[int, str]
    """Steps in which an operation is missing, or is one too many, and which."""

    warnings: tuple[str, ...]

    def contradictions(self) -> dict[int, str]:
        """Name the steps that contradict themselves: their replay would prove nothing."""
        steps, num = np.unique(self.rows.step[self.unpaired], return_counts=True)
        numbers = (self.rows.steps[step] for step in steps.tolist())
        alone = dict(zip(numbers, num.tolist(), strict=True))
        return unpaired_transfers(alone) | self.uneven


def read_trace(run: RunInfo, spans: SpanTable) -> Trace:
    """Infer groups and dependencies of a ByteDance trace.

    Args:
        run: Its layout and the (dp, stage) of each rank.
        spans: Its operations; ``name`` is the operation's type, ``seq`` numbers
            the operations of one type on one worker in one step.

    Returns:
        The operations, sorted by (step, dp, stage, type, seq).
    """
    rows, blocks = sorted_rows(run, spans)
    overlapped = bool((rows.type == CODE[SEPARATE_GRADS]).any())
    edges, group, unpaired = infer(rows, run.layout, overlapped=overlapped)
    is_comm = np.isin(rows.type, [CODE[name] for name in COMMUNICATION])
    transfer = rows.end - latest_by_group(group, rows.start)
    duration = np.where(is_comm, transfer, rows.end - rows.start)
    clock_error = is_comm & (transfer <= CLOCK_ERROR_TRANSFER_NS)
    duration[clock_error] = 0
    src, dst = edges.arrays()
    operations = Operations(
        steps=rows.steps,
        step=rows.step,
        replica=rows.dp,
        label=rows.type.astype(np.int64) * run.layout.pp + rows.stage,
        group=group,
        duration_ns=duration.astype(np.float64),
        gap_ns=_gaps(rows, src, dst),
        start_ns=rows.start,
        end_ns=rows.end,
        closes_step=rows.type == CODE[OPTIMIZER],
        src=src,
        dst=dst,
    )
    return Trace(
        operations=operations,
        rows=rows,
        rank=spans.rank[rows.row],
        num_clock_errors=int(clock_error.sum()),
        unpaired=unpaired,
        uneven=blocks.contradictions(),
        warnings=blocks.warnings,
    )


def model_of(trace: Trace) -> ReplayModel:
    """Give each operation its ideal: by type over all dp positions, stages and steps.

    The mean duration for compute, the median transfer for communication, the
    median launch gap.
    """
    operations = trace.operations
    kinds = tuple(dict.fromkeys(FOLDED.get(name, name) for name in TYPES))
    kind_of_type = np.array([kinds.index(FOLDED.get(name, name)) for name in TYPES])
    ideal, ideal_gap = np.empty(len(operations)), np.empty(len(operations))
    for code, name in enumerate(TYPES):
        rows = trace.rows.type == code
        if rows.any():
            typical = np.median if name in COMMUNICATION else np.mean
            ideal[rows] = typical(operations.duration_ns[rows])
            ideal_gap[rows] = np.median(operations.gap_ns[rows])
    return ReplayModel(
        operations=operations,
        ideal_ns=ideal,
        ideal_gap_ns=ideal_gap,
        kind=kind_of_type[trace.rows.type].astype(np.int16),
        kinds=kinds,
        rank=trace.rank,
        dp=trace.rows.dp,
        stage=trace.rows.stage,
        on_device=np.ones(len(operations), dtype=np.bool_),
    )


def _gaps(rows: Rows, src: NDArray[np.int64], dst: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return how long each compute operation began after all that it waits for had ended.

    Only compute tells of a launch delay: a communication that begins late may
    have waited for something that the format does not record (a barrier, or
    the host in another receive). A compute operation that began before (the
    model's dependency did not hold there) has no gap; the full replay's error
    shows what that costs.
    """
    first_of_step = np.full(int(rows.step.max(initial=-1)) + 1, np.iinfo(np.int64).max)
    np.minimum.at(first_of_step, rows.step, rows.start)
    ready = first_of_step[rows.step]
    np.maximum.at(ready, dst, rows.end[src])
    gaps = np.maximum(rows.start - ready, 0)
    gaps[np.isin(rows.type, [CODE[name] for name in COMMUNICATION])] = 0
    in_ns: NDArray[np.float64] = gaps.astype(np.float64)
    return in_ns
