"""The what-if analysis of a ByteDance trace as a whole, from columns to results.

It gives what `analysis.whatif.what_if` gives, for traces of any size: each
structure's graph is inferred once, and all replicas that share it are
replayed as the lanes of one row.

Source: arXiv 2505.05713.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from analysis.bytedance_blocks import place_blocks
from analysis.bytedance_durations import recorded_durations
from analysis.bytedance_graph import unpaired_warnings
from analysis.bytedance_scenarios import Scenarios
from analysis.bytedance_shapes import sheets_of
from analysis.errors import EmptyRunError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from analysis.bytedance_columns import Columns
    from analysis.bytedance_shapes import Sheet
    from analysis.source import RunInfo
    from analysis.whatif import WhatIf


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceWhatIf:
    """A trace's what-if, and what a reader should know of it."""

    result: WhatIf
    actual_ns: NDArray[np.int64]
    """Shape (steps,): last end - first start, as recorded."""

    num_operations: int
    num_shapes: int
    num_clock_errors: int
    """Transfers that were negative by 10 ms or more, and count as 0."""

    left_out: dict[int, str]
    """Steps that cannot be replayed, and why."""

    warnings: tuple[str, ...]


def what_if_trace(run: RunInfo, columns: Columns) -> TraceWhatIf:
    """Replay a ByteDance trace in every way that the paper names.

    Args:
        run: Its layout and the (dp, stage) of each rank.
        columns: Its operations, in any order; a `analysis.source.SpanTable` will do.

    Raises:
        EmptyRunError: No whole step is left.
        CycleError: Operations wait for each other.
    """
    blocks = place_blocks(run, columns)
    left_out = blocks.incomplete()
    keep = ~np.isin(blocks.steps, list(left_out))
    if not keep.any():
        reason = next(iter(left_out.values()), "it holds no operation of a known type")
        raise EmptyRunError(f"run {run.run_id} has no whole step: {reason}")
    sheets = sheets_of(blocks, run.layout, keep)
    unpaired: Counter[str] = Counter()
    for sheet in sheets:
        unpaired.update({name: num * len(sheet.step) for name, num in sheet.unpaired.items()})
    recorded, num_clock_errors = recorded_durations(sheets, len(blocks.steps))
    return TraceWhatIf(
        result=Scenarios(blocks, sheets, recorded, np.flatnonzero(keep)).what_if(),
        actual_ns=_recorded_times(sheets, len(blocks.steps))[keep],
        num_operations=sum(durations.size for durations in recorded),
        num_shapes=len(sheets),
        num_clock_errors=num_clock_errors,
        left_out=left_out,
        warnings=(*blocks.warnings, *unpaired_warnings(unpaired)),
    )


def _recorded_times(sheets: Sequence[Sheet], num_steps: int) -> NDArray[np.int64]:
    """Return last end - first start of each step."""
    first = np.full(num_steps, np.iinfo(np.int64).max)
    last = np.full(num_steps, np.iinfo(np.int64).min)
    for sheet in sheets:
        np.minimum.at(first, sheet.step, sheet.start_ns.min(axis=0))
        np.maximum.at(last, sheet.step, sheet.end_ns.max(axis=0))
    times: NDArray[np.int64] = last - first
    return times
