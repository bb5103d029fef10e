"""The what-if analysis of a ByteDance trace as a whole, from columns to results.

It gives what `analysis.replay.what_if.what_if` gives, for traces of any size: each
structure's graph is inferred once, and all replicas that share it are
replayed as the lanes of one row.

Source: arXiv 2505.05713.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ...arrays.grouping import distinct
from ...arrays.sorting import places_of
from ...replay.batched_program import compile_lanes
from ...trace.errors import CycleError, EmptyRunError
from .blocks import place_blocks
from .durations import recorded_durations
from .scenarios import Scenarios
from .shapes import sheets_of
from .validation import unpaired_transfers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ...replay.what_if import WhatIf
    from ...trace.tables import RunInfo
    from .blocks import Blocks
    from .columns import Columns
    from .shapes import Sheet


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
        columns: Its operations, in any order; a `analysis.trace.tables.SpanTable` will do.

    Raises:
        EmptyRunError: No whole step is left.
        CycleError: Operations wait for each other.
    """
    blocks = place_blocks(run, columns)
    sheets, left_out = _whole_steps(run, blocks)
    try:
        programs = compile_lanes([sheet.shape for sheet in sheets])
    except CycleError:
        circling = _circling(sheets, blocks.steps)
        if not circling:
            raise
        left_out = left_out | circling
        sheets = _sheets(run, blocks, left_out)
        programs = compile_lanes([sheet.shape for sheet in sheets])
    keep = ~np.isin(blocks.steps, list(left_out))
    recorded, num_clock_errors = recorded_durations(sheets, len(blocks.steps))
    scenarios = Scenarios(blocks, sheets, programs, recorded, np.flatnonzero(keep))
    return TraceWhatIf(
        result=scenarios.what_if(),
        actual_ns=_recorded_times(sheets, blocks, columns)[keep],
        num_operations=sum(durations.size for durations in recorded),
        num_shapes=len(sheets),
        num_clock_errors=num_clock_errors,
        left_out=left_out,
        warnings=blocks.warnings,
    )


def _whole_steps(run: RunInfo, blocks: Blocks) -> tuple[list[Sheet], dict[int, str]]:
    """Return the structures of the steps that can be replayed, and why the others cannot."""
    left_out = blocks.contradictions()
    sheets = _sheets(run, blocks, left_out)
    alone = _unpaired(sheets, blocks.steps)
    if alone:
        left_out = left_out | alone
        sheets = _sheets(run, blocks, left_out)
    return sheets, left_out


def _sheets(run: RunInfo, blocks: Blocks, left_out: dict[int, str]) -> list[Sheet]:
    keep = ~np.isin(blocks.steps, list(left_out))
    if not keep.any():
        reason = next(iter(left_out.values()), "it holds no operation of a known type")
        raise EmptyRunError(f"run {run.run_id} has no whole step: {reason}")
    return sheets_of(blocks, run.layout, keep)


def _unpaired(sheets: Sequence[Sheet], steps: NDArray[np.int64]) -> dict[int, str]:
    """Name the steps with sends and receives that have no partner."""
    num = np.zeros(len(steps), dtype=np.int64)
    for sheet in sheets:
        np.add.at(num, sheet.step, sheet.num_unpaired)
    return unpaired_transfers(dict(zip(steps.tolist(), num.tolist(), strict=True)))


def _circling(sheets: Sequence[Sheet], steps: NDArray[np.int64]) -> dict[int, str]:
    """Name the steps with a replica whose operations wait for each other."""
    found: dict[int, str] = {}
    for sheet in sheets:
        try:
            compile_lanes([sheet.shape])
        except CycleError as error:
            why = f"{error.num_nodes} operations depend on each other in a circle"
            found |= dict.fromkeys(steps[distinct(sheet.step)].tolist(), why)
    return found


def _recorded_times(sheets: Sequence[Sheet], blocks: Blocks, columns: Columns) -> NDArray[np.int64]:
    """Return last end - first start of each step, over all operations, replayed or not."""
    num_steps = len(blocks.steps)
    first = np.full(num_steps, np.iinfo(np.int64).max)
    last = np.full(num_steps, np.iinfo(np.int64).min)
    for sheet in sheets:
        np.minimum.at(first, sheet.step, sheet.start_ns.min(axis=0))
        np.maximum.at(last, sheet.step, sheet.end_ns.max(axis=0))
    if blocks.taken is not None:
        rest = np.ones(len(columns.step), dtype=np.bool_)
        rest[blocks.taken] = False
        rest &= np.isin(columns.step, blocks.steps)
        step, start = places_of(columns.step[rest], blocks.steps), columns.start_ns[rest]
        np.minimum.at(first, step, start)
        np.maximum.at(last, step, start + columns.duration_ns[rest])
    times: NDArray[np.int64] = last - first
    return times
