"""How long the schedule alone makes each wait, and in which phase of the step it lies."""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np

from rankscope.tracer.span import KIND_CODES, SpanKind

from ..arrays.grouping import factorize
from ..arrays.intervals import Line
from ..arrays.sorting import stable_argsort
from ..replay.model import BACKWARD_KINDS, FORWARD_KINDS, P2P_KINDS, has_kind
from ..replay.program import compile_program, operation_times
from ..replay.what_if import ratio
from ..report.report import BubbleShape

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from rankscope.tracer.topology import Layout

    from ..replay.model import Reading, ReplayModel, WaitIntervals
    from ..replay.program import OperationTimes


class Phase(IntEnum):
    """Where in a rank's step a wait lies."""

    WARM_UP = 0
    """It ended before the rank's first backward began."""

    STEADY = 1
    COOL_DOWN = 2
    """It began after the rank's last forward had ended."""


def ideal_wait_ns(
    model: ReplayModel, waits: WaitIntervals, ideal: OperationTimes | None = None
) -> NDArray[np.int64]:
    """Return how long the rank would wait at the same place if nothing in the run were slow.

    That is, in the ideal full replay, from when the rank had ended what it did
    last before the wait (and had entered the communication) to the arrival of
    the communication's last member.

    Args:
        model: A run's operations.
        waits: Its waits.
        ideal: That replay's times; None: replay it.

    Returns:
        Shape (waits,).
    """
    if ideal is None:
        program = compile_program(model.operations, host_gaps=True)
        ideal = operation_times(program, model.operations, model.ideal_ns, model.ideal_gap_ns)
    before = _done_before(model, waits)
    free = np.where(before >= 0, ideal.end_ns[before], 0.0)
    free = np.maximum(free, ideal.start_ns[waits.operation])
    waited = np.maximum(ideal.gate_ns[waits.operation] - free, 0.0)
    whole: NDArray[np.int64] = np.rint(waited).astype(np.int64)
    return whole


def phases_of(model: ReplayModel, waits: WaitIntervals) -> NDArray[np.int8]:
    """Return each wait's `Phase`; steady on a rank without both forward and backward.

    Args:
        model: A run's operations.
        waits: Its waits.
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
    of_wait = cell[waits.operation]
    phase = np.full(len(of_wait), Phase.STEADY, dtype=np.int8)
    phase[both[of_wait] & (waits.start_ns >= last_forward[of_wait])] = Phase.COOL_DOWN
    phase[both[of_wait] & (waits.end_ns <= first_backward[of_wait])] = Phase.WARM_UP
    return phase


def bubble_ratio(
    num_stages: int, num_chunks: int, num_microbatches: int, *, deferred_ratio: float
) -> float:
    """Return how much of the ideal time a pipeline's schedule costs by itself.

    Args:
        num_stages: p.
        num_chunks: v, model chunks a rank.
        num_microbatches: m.
        deferred_ratio: W / (F + B + W), the share of compute that weights' gradients put off
            take; 0 where the backward is not split.

    Source:
        Narayanan et al., arXiv 2104.04473, section 2.2: ``(p - 1) / (v m)``. Qi et al., arXiv
        2401.10241, table 2: where the weights' gradients W come later (ZB-H1), ``F + B - W``
        remains of each ``F + B + W``.
    """
    left = max(1 - 2 * deferred_ratio, 0.0)
    return left * (num_stages - 1) / (num_chunks * num_microbatches)


def schedule_of(
    reading: Reading, layout: Layout, *, bubble_ns: int, compute_ns: int
) -> BubbleShape | None:
    """Return what the pipeline's shape says of its bubble; None without a pipeline.

    Args:
        reading: A run with its compute by micro-batch.
        layout: Its number of stages.
        bubble_ns: Bubble of all ranks and steps.
        compute_ns: Their useful forward and backward compute.
    """
    items = reading.items
    forward = items.kind == KIND_CODES[SpanKind.FORWARD]
    if layout.pp == 1 or not forward.any():
        return None
    num_microbatches = int(items.microbatch[forward].max()) + 1
    held, num_held = factorize(items.rank[forward], items.chunk[forward])
    rank_of = np.empty(num_held, dtype=np.int64)
    rank_of[held] = items.rank[forward]
    num_chunks = int(np.bincount(rank_of).max())
    return BubbleShape(
        num_stages=layout.pp,
        num_chunks=num_chunks,
        num_microbatches=num_microbatches,
        formula_ratio=bubble_ratio(
            layout.pp, num_chunks, num_microbatches, deferred_ratio=items.deferred_ratio
        ),
        measured_ratio=ratio(bubble_ns, compute_ns),
    )


def _done_before(model: ReplayModel, waits: WaitIntervals) -> NDArray[np.int64]:
    """Return what each waiting rank had ended last in that step before its wait, -1 if nothing.

    Sends and receives do not count: they run beside the rank's own line.
    """
    operations = model.operations
    rows = np.flatnonzero(~has_kind(model, P2P_KINDS))
    line = Line.over(model.rank, operations.start_ns, operations.end_ns)
    end = line.place(model.rank[rows], operations.end_ns[rows])
    order = stable_argsort(end)
    index = np.searchsorted(end[order], line.place(waits.rank, waits.start_ns), side="right") - 1
    found = rows[order[np.maximum(index, 0)]] if len(rows) else np.zeros(len(index), np.int64)
    known = (index >= 0) & (model.rank[found] == waits.rank)
    known &= operations.step[found] == operations.step[waits.operation]
    return np.where(known, found, -1)
