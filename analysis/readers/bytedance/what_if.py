"""The what-if analysis of a ByteDance trace that is in no store, from columns to results.

Source: arXiv 2505.05713.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ...arrays.sorting import find_positions
from ...replay.step_graph import find_cycles
from ...replay.what_if import Replayer, WhatIf, what_if
from ...trace.errors import CycleError, EmptyRunError
from .format import take_rows
from .graph import build_model, read_trace

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ...trace.tables import RunInfo
    from .format import Columns
    from .graph import Trace

NOTHING_KNOWN = "it has no operation of a known type"
"""Why a step is left out of which no operation is replayed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceWhatIf:
    """The what-if of a trace, with its warnings."""

    result: WhatIf
    actual_ns: NDArray[np.int64]
    """Shape (steps,): last end - first start, as recorded."""

    num_operations: int
    num_clock_errors: int
    """Transfers that were negative by 10 ms or more and count as 0."""

    left_out: dict[int, str]
    """Steps that cannot be replayed, and why."""

    warnings: tuple[str, ...]


def what_if_trace(run: RunInfo, columns: Columns) -> TraceWhatIf:
    """Replay a ByteDance trace in every way that the paper defines.

    Args:
        run: Its layout and the (dp, stage) of each rank.
        columns: Its operations, in any order; may be an `analysis.trace.tables.SpanTable`.

    Raises:
        EmptyRunError: No whole step is left.
        CycleError: Operations depend on each other.
    """
    warnings = read_trace(run, columns).warnings
    trace, columns, replayer, left_out = _find_replayable(run, columns)
    return TraceWhatIf(
        result=what_if(replayer),
        actual_ns=recorded_times(trace.rows.steps, columns),
        num_operations=len(trace.operations),
        num_clock_errors=trace.num_clock_errors,
        left_out=left_out,
        warnings=warnings,
    )


def _find_replayable(
    run: RunInfo, columns: Columns
) -> tuple[Trace, Columns, Replayer, dict[int, str]]:
    """Return the steps that can be replayed, and why the others cannot."""
    left_out: dict[int, str] = {}
    while len(columns.step):
        trace = read_trace(run, columns)
        wrong = find_unreplayable(trace, columns)
        if not wrong:
            model = build_model(trace)
            try:
                return trace, columns, Replayer(model), left_out
            except CycleError:
                wrong = find_cycles(model)
                if not wrong:
                    raise
        left_out |= wrong
        columns = take_rows(columns, np.flatnonzero(~np.isin(columns.step, list(wrong))))
    reason = next(iter(left_out.values()), NOTHING_KNOWN)
    raise EmptyRunError(f"run {run.run_id} has no whole step: {reason}")


def find_unreplayable(trace: Trace, columns: Columns) -> dict[int, str]:
    """Return the steps of a trace whose replay would prove nothing, and why."""
    unknown: list[int] = np.setdiff1d(columns.step, trace.rows.steps).tolist()
    return trace.find_contradictions() | dict.fromkeys(unknown, NOTHING_KNOWN)


def recorded_times(steps: tuple[int, ...], columns: Columns) -> NDArray[np.int64]:
    """Return the last end - first start of each step, over all its operations."""
    index = find_positions(columns.step, np.array(steps))
    first = np.full(len(steps), np.iinfo(np.int64).max)
    last = np.full(len(steps), np.iinfo(np.int64).min)
    np.minimum.at(first, index, columns.start_ns)
    np.maximum.at(last, index, columns.start_ns + columns.duration_ns)
    times: NDArray[np.int64] = last - first
    return times
