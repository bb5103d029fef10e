"""Ranks with missing records of a step: dropped by the tracer, or declared as not recorded.

A module of its own: a rule about records, which needs no graph.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from rankscope.tracer.span import KIND_CODES, KINDS, SpanKind, pack_kinds, unpack_kinds

from ...arrays.grouping import is_one_of
from ...arrays.sorting import find_positions
from ...replay.model import COMPUTE_CODES, Items, select_items
from ...report.text import format_ranks
from ...trace.account import TORN

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ...replay.model import ComputeItems, GapItems, Items
    from ...trace.tables import RunInfo, SpanTable, StepTable

COUNTED_CODES = (*COMPUTE_CODES, KIND_CODES[SpanKind.WAIT])
"""Kinds of which equal steps have equal numbers. A lost forward looks like a host that stalled, a
lost wait like compute."""

RANK_COMPUTE_BITS = pack_kinds(KINDS[code] for code in COMPUTE_CODES)
"""Bits of the kinds that a rank may not have recorded while the others are still replayed: ranks
that wait for it still show it."""

MIN_STEPS = 3
"""With fewer steps there is no usual number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MissingRecords:
    """Ranks that miss records of steps."""

    ranks: NDArray[np.int32]
    """Ascending."""

    steps: NDArray[np.int32]
    """Numbers, ascending."""

    is_missing: NDArray[np.bool_]
    """Shape (ranks, steps)."""


def drop_incomplete(
    items: ComputeItems,
    gaps: GapItems,
    *,
    run: RunInfo,
    spans: SpanTable,
    steps: StepTable,
    numbers: NDArray[np.int32],
) -> tuple[ComputeItems, GapItems, list[str], tuple[int, ...]]:
    """Drop the compute and gaps of ranks in steps with missing records.

    Args:
        run: The numbers of dropped and torn records.
        steps: Rows of all steps, also of those that are not replayed.
        numbers: Numbers of the steps that are replayed, ascending.

    Returns:
        Compute and gaps that are left; warnings; the ranks that declared that they recorded no
        compute in more than half of the steps, ascending.
    """
    warnings: list[str] = []
    declared, kinds = _find_not_recorded(steps, numbers)
    row, column = np.nonzero(declared.is_missing)
    if len(row):
        ranks, at = tuple(np.unique(declared.ranks[row]).tolist()), numbers[column]
        warnings.append(
            f"{format_ranks(ranks)} recorded no {' and '.join(unpack_kinds(kinds))} in steps"
            f" {at.min()} to {at.max()}, by request or because the capture failed (see the run's"
            " events): not compared there"
        )
        items, gaps = drop_missing(items, declared), drop_missing(gaps, declared)
    if run.num_dropped or TORN in run.account.dropped:
        lost = find_missing(spans, steps, numbers)
        lost = replace(lost, is_missing=lost.is_missing & ~declared.is_missing)
        row, column = np.nonzero(lost.is_missing)
        if len(row):
            warnings.append(
                f"records were dropped: {len(row)} times a rank misses compute or waits of a step,"
                f" first rank {lost.ranks[row[0]]} in step {numbers[column[0]]}; it is not compared"
                " in that step"
            )
        items, gaps = drop_missing(items, lost), drop_missing(gaps, lost)
    is_mostly = 2 * declared.is_missing.sum(axis=1) > len(numbers)
    return items, gaps, warnings, tuple(declared.ranks[is_mostly].tolist())


def _find_not_recorded(steps: StepTable, numbers: NDArray[np.int32]) -> tuple[MissingRecords, int]:
    """Return the ranks that declared that they recorded no compute, and the bits of its kinds."""
    ranks = np.unique(steps.rank)
    rows = np.flatnonzero(
        np.isin(steps.step, numbers) & ((steps.left_out & RANK_COMPUTE_BITS) != 0)
    )
    is_missing = np.zeros((len(ranks), len(numbers)), dtype=np.bool_)
    row, column = find_positions(steps.rank[rows], ranks), find_positions(steps.step[rows], numbers)
    is_missing[row, column] = True
    kinds = int(np.bitwise_or.reduce(steps.left_out[rows])) & RANK_COMPUTE_BITS if len(rows) else 0
    return MissingRecords(ranks=ranks, steps=numbers, is_missing=is_missing), kinds


def find_missing(spans: SpanTable, steps: StepTable, numbers: NDArray[np.int32]) -> MissingRecords:
    """Find the ranks that miss forwards, backwards, optimizers or waits of a step.

    A rank's number is compared with the number that it has in more than half of the completely
    recorded steps; without such a number nothing is known. If most ranks have fewer, the step
    itself was shorter.

    Args:
        steps: Rows of all steps, also of those that are not replayed.
        numbers: Numbers of the steps that are replayed, ascending.
    """
    ranks, recorded = np.unique(steps.rank), np.unique(steps.step[steps.left_out == 0])
    counted = np.union1d(recorded, numbers)
    is_missing = np.zeros((len(ranks), len(counted)), dtype=np.bool_)
    rows = np.flatnonzero(is_one_of(spans.kind, COUNTED_CODES))
    rows = rows[np.isin(spans.step[rows], counted) & np.isin(spans.rank[rows], ranks)]
    row, column = find_positions(spans.rank[rows], ranks), find_positions(spans.step[rows], counted)
    for code in COUNTED_CODES if len(counted) >= MIN_STEPS else ():
        has_kind = spans.kind[rows] == code
        num = np.zeros(is_missing.shape, dtype=np.int64)
        np.add.at(num, (row[has_kind], column[has_kind]), 1)
        # A number that more than half of a row have is its median.
        usual = np.median(num, axis=1)[:, None]
        fewer = (num < usual) & ((num == usual).mean(axis=1, keepdims=True) > 1 / 2)
        is_missing |= fewer & (fewer.mean(axis=0) <= 1 / 2)
    return MissingRecords(
        ranks=ranks, steps=numbers, is_missing=is_missing[:, find_positions(numbers, counted)]
    )


def drop_missing(items: Items, missing: MissingRecords) -> Items:
    """Return the rows of (rank, step) without missing records."""
    row = find_positions(items.rank, missing.ranks)
    column = find_positions(items.step, missing.steps)
    return select_items(items, ~missing.is_missing[row, column])
