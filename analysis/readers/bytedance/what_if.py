"""The what-if analysis of a ByteDance trace that is in no store, from columns to results.

Source: arXiv 2505.05713.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ...replay.step_graph import find_cycles
from ...replay.what_if import Replayer, WhatIf, what_if
from ...trace.errors import CycleError, EmptyRunError
from .format import take_rows
from .graph import (
    NOTHING_KNOWN,
    build_model,
    find_unreplayable,
    read_trace,
    recorded_times,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ...trace.tables import RunInfo
    from .format import Columns
    from .graph import Trace


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
    left_out: dict[int, str] = {}
    warnings: tuple[str, ...] | None = None
    while len(columns.step):
        trace = read_trace(run, columns)
        warnings = trace.warnings if warnings is None else warnings  # those of the whole trace
        replayer, wrong = _try_to_compile(trace, columns)
        if replayer is not None:
            return TraceWhatIf(
                result=what_if(replayer),
                actual_ns=recorded_times(trace.rows.steps, columns),
                num_operations=len(trace.operations),
                num_clock_errors=trace.num_clock_errors,
                left_out=left_out,
                warnings=warnings,
            )
        left_out |= wrong
        columns = take_rows(columns, np.flatnonzero(~np.isin(columns.step, list(wrong))))
    reason = next(iter(left_out.values()), NOTHING_KNOWN)
    raise EmptyRunError(f"run {run.run_id} has no whole step: {reason}")


def _try_to_compile(trace: Trace, columns: Columns) -> tuple[Replayer | None, dict[int, str]]:
    """Return the replay of a trace, or the steps to leave out of it first, and why."""
    wrong = find_unreplayable(trace, columns)
    if wrong:
        return None, wrong
    model = build_model(trace)
    try:
        return Replayer(model), {}
    except CycleError:
        cyclic = find_cycles(model)
        if not cyclic:
            raise
        return None, cyclic
