"""The pipeline bubble: waiting that the schedule alone causes, even if no rank is slow."""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np

from rankscope.tracer.span import KIND_CODES, SpanKind

from ..arrays.grouping import factorize
from ..arrays.intervals import Line
from ..arrays.sorting import stable_argsort
from ..replay.model import BACKWARD_KINDS, FORWARD_KINDS, P2P_KINDS, has_kind
from ..replay.replayer import ratio
from ..report.report import PipelineBubble

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from rankscope.tracer.topology import Layout

    from ..replay.model import Reading, ReplayModel, WaitIntervals
    from ..replay.program import OperationTimes


class SchedulePart(IntEnum):
    """Part of a rank's step in the pipeline schedule."""

    WARM_UP = 0
    """Before the rank's first backward."""

    STEADY = 1
    COOL_DOWN = 2
    """After the rank's last forward."""


def ideal_wait_ns(
    model: ReplayModel, waits: WaitIntervals, ideal: OperationTimes
) -> NDArray[np.int64]:
    """Return how long each wait would be if nothing in the run were slow.

    In the ideal full replay, such a wait begins when the rank has ended its last operation before
    the wait and has entered the communication. It ends at the communication's arrival.

    Returns:
        Shape (waits,).
    """
    # The operation that the rank ended last in the step before the wait. Sends and receives do not
    # count: they run concurrently with the rank's other operations.
    operations = model.operations
    rows = np.flatnonzero(~has_kind(model, P2P_KINDS))
    line = Line.over(model.rank, operations.start_ns, operations.end_ns)
    end = line.place(model.rank[rows], operations.end_ns[rows])
    order = stable_argsort(end)
    index = np.searchsorted(end[order], line.place(waits.rank, waits.start_ns), side="right") - 1
    before = rows[order[np.maximum(index, 0)]] if len(rows) else np.zeros(len(index), np.int64)
    known = (index >= 0) & (model.rank[before] == waits.rank)
    known &= operations.step[before] == operations.step[waits.operation]
    begin = np.where(known, ideal.end_ns[before], 0.0)
    begin = np.maximum(begin, ideal.start_ns[waits.operation])
    waited = np.maximum(ideal.gate_ns[waits.operation] - begin, 0.0)
    whole: NDArray[np.int64] = np.rint(waited).astype(np.int64)
    return whole


def schedule_parts(model: ReplayModel, waits: WaitIntervals) -> NDArray[np.int8]:
    """Return the `SchedulePart` of each wait; steady if its rank lacks forward or backward.

    Returns:
        Shape (waits,).
    """
    operations = model.operations
    num_ranks = int(model.rank.max(initial=0)) + 1
    cell = operations.step.astype(np.int64) * num_ranks + model.rank
    num_cells = len(operations.steps) * num_ranks
    latest, earliest = np.iinfo(np.int64).max, np.iinfo(np.int64).min
    first_backward = np.full(num_cells, latest)
    last_forward = np.full(num_cells, earliest)
    backward = np.flatnonzero(has_kind(model, BACKWARD_KINDS))
    forward = np.flatnonzero(has_kind(model, FORWARD_KINDS))
    np.minimum.at(first_backward, cell[backward], operations.start_ns[backward])
    np.maximum.at(last_forward, cell[forward], operations.end_ns[forward])
    both = (first_backward < latest) & (last_forward > earliest)
    wait_cell = cell[waits.operation]
    part = np.full(len(wait_cell), SchedulePart.STEADY, dtype=np.int8)
    part[both[wait_cell] & (waits.start_ns >= last_forward[wait_cell])] = SchedulePart.COOL_DOWN
    part[both[wait_cell] & (waits.end_ns <= first_backward[wait_cell])] = SchedulePart.WARM_UP
    return part


def bubble_ratio(
    num_stages: int, num_chunks: int, num_microbatches: int, *, deferred_ratio: float
) -> float:
    """Return the bubble of a pipeline schedule as a share of the useful compute.

    Args:
        num_stages: p.
        num_chunks: v, model chunks per rank.
        num_microbatches: m.
        deferred_ratio: W / (F + B + W), the share of compute in deferred weight gradients; 0 if
            the backward is not split.

    Source:
        Narayanan et al., arXiv 2104.04473, section 2.2: ``(p - 1) / (v m)``. Qi et al., arXiv
        2401.10241, table 2: if the weight gradients W are deferred (ZB-H1), ``F + B - W`` remains
        of each ``F + B + W``. With ``F = B = W`` it is the bubble of torch's ZB-V and DualPipeV
        too, if the step ends on all stages together.
    """
    left = max(1 - 2 * deferred_ratio, 0.0)
    return left * (num_stages - 1) / (num_chunks * num_microbatches)


def measure_bubble(
    reading: Reading, layout: Layout, *, bubble_ns: int, compute_ns: int
) -> PipelineBubble | None:
    """Return the bubble by formula and as measured; None without a pipeline.

    Args:
        bubble_ns: Bubble of all ranks and steps.
        compute_ns: Useful forward and backward compute of all ranks and steps.
    """
    items = reading.items
    forward = items.kind == KIND_CODES[SpanKind.FORWARD]
    if layout.pp == 1 or not forward.any():
        return None
    num_microbatches = int(items.microbatch[forward].max()) + 1
    rank_chunk, num_pairs = factorize(items.rank[forward], items.chunk[forward])
    rank_of = np.empty(num_pairs, dtype=np.int64)
    rank_of[rank_chunk] = items.rank[forward]
    num_chunks = int(np.bincount(rank_of).max())
    return PipelineBubble(
        num_stages=layout.pp,
        num_chunks=num_chunks,
        num_microbatches=num_microbatches,
        deferred_ratio=items.deferred_ratio,
        formula_ratio=bubble_ratio(
            layout.pp, num_chunks, num_microbatches, deferred_ratio=items.deferred_ratio
        ),
        measured_ratio=ratio(bubble_ns, compute_ns),
    )
