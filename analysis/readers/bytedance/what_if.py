"""The what-if analysis of a ByteDance trace that is in no store, from columns to results.

Source: arXiv 2505.05713.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...replay.replayer import Replayer, WhatIf, what_if
from ...replay.step_graph import find_cycles
from ...trace.errors import CycleError, EmptyRunError
from .blocks import NOTHING_KNOWN, sort_rows
from .graph import build_model, infer_trace

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ...trace.tables import RunInfo
    from .format import Columns


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
        columns: Its operations, in any order; may be an `analysis.trace.tables.SpanTable`.

    Raises:
        EmptyRunError: No whole step is left.
        CycleError: Operations depend on each other.
    """
    left_out: dict[int, str] = {}
    rows = sort_rows(run, columns)
    while len(rows):
        trace = infer_trace(run, rows)
        wrong = trace.find_contradictions()
        if not wrong:
            model = build_model(trace)
            try:
                replayer = Replayer(model)
            except CycleError:
                wrong = find_cycles(model)
                if not wrong:
                    raise
            else:
                return TraceWhatIf(
                    result=what_if(replayer),
                    actual_ns=rows.bounds_ns[1] - rows.bounds_ns[0],
                    num_operations=len(trace.operations),
                    num_clock_errors=trace.num_clock_errors,
                    left_out=left_out,
                    warnings=rows.warnings,
                )
        left_out |= wrong
        rows = rows.without(wrong)
    left_out |= rows.uneven
    reason = next(iter(left_out.values()), NOTHING_KNOWN)
    raise EmptyRunError(f"run {run.run_id} has no whole step: {reason}")
