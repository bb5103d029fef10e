"""Ranks that lack spans of a step: some were dropped, or the rank says that it recorded none."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from rankscope.tracer.span import KIND_CODES, SpanKind, pack_kinds, unpack_kinds

from ...arrays.grouping import is_one_of
from ...arrays.sorting import find_positions
from ...report.text import format_ranks

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ...replay.model import ComputeItems, GapItems
    from ...trace.tables import RunInfo, SpanTable, StepTable

Items = TypeVar("Items", "ComputeItems", "GapItems")

COUNTED_KINDS = [
    KIND_CODES[kind]
    for kind in (SpanKind.FORWARD, SpanKind.BACKWARD, SpanKind.OPTIMIZER, SpanKind.WAIT)
]
"""What a step has the same number of in a job whose steps are alike. A lost forward looks like a
host that stood still, a lost wait like compute."""

RANK_COMPUTE_BITS = pack_kinds((SpanKind.FORWARD, SpanKind.BACKWARD, SpanKind.OPTIMIZER))
"""Bits of the kinds that a rank may not have recorded while the others can be replayed: whoever
waits for it still says so."""

MIN_STEPS = 3
"""Fewer steps tell no usual number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MissingRecords:
    """Which ranks lack records of which steps."""

    ranks: NDArray[np.int32]
    """Ascending."""

    steps: NDArray[np.int32]
    """Numbers, ascending."""

    lacks: NDArray[np.bool_]
    """Shape (ranks, steps)."""

    def beside(self, told: MissingRecords) -> MissingRecords:
        """Return these without those of ``told``, of the same ranks and steps."""
        return replace(self, lacks=self.lacks & ~told.lacks)

    def warnings(self) -> list[str]:
        """Return what a reader should know of it; nothing where nothing is lacking."""
        row, column = np.nonzero(self.lacks)
        if not len(row):
            return []
        first, step = self.ranks[row[0]], self.steps[column[0]]
        told = f"{len(row)} times a rank lacks compute or waits of a step, first {first} in {step}"
        return [f"records were dropped: {told}; what it did in that step is not judged"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NotRecorded:
    """Which ranks say that they recorded no compute of a step."""

    losses: MissingRecords
    kinds: int
    """Bits of the kinds, of all these ranks and steps together."""

    @property
    def mostly(self) -> tuple[int, ...]:
        """The ranks that say so of more than half of the steps, ascending."""
        lacks = self.losses.lacks
        is_mostly = 2 * lacks.sum(axis=1) > lacks.shape[1]
        return tuple(self.losses.ranks[is_mostly].tolist())

    def warnings(self) -> list[str]:
        """Return what a reader should know of it; nothing where nothing is lacking."""
        row, column = np.nonzero(self.losses.lacks)
        if not len(row):
            return []
        ranks = tuple(np.unique(self.losses.ranks[row]).tolist())
        steps = self.losses.steps[column]
        kinds = " and ".join(unpack_kinds(self.kinds))
        told = (
            f"{format_ranks(ranks)} recorded no {kinds} in steps {steps.min()} to {steps.max()}, by"
            " request or because the capture failed (see the run's events): what was done then is"
            " not judged"
        )
        return [told]


@dataclass(frozen=True, slots=True, kw_only=True)
class Remaining:
    """What is left to judge."""

    items: ComputeItems
    gaps: GapItems
    warnings: tuple[str, ...]
    without: tuple[int, ...]
    """Ranks that say that they recorded no compute in more than half of the steps, ascending."""


def drop_incomplete(
    items: ComputeItems,
    gaps: GapItems,
    *,
    run: RunInfo,
    spans: SpanTable,
    steps: StepTable,
    numbers: NDArray[np.int32],
) -> Remaining:
    """Leave out what ranks did in steps of which they lack records.

    Args:
        items: Their compute.
        gaps: What lies between.
        run: Says whether records were dropped.
        spans: All spans of the steps.
        steps: All steps' rows, also of those that take no part.
        numbers: Numbers of those that do, ascending.
    """
    warnings: list[str] = []
    unrecorded = find_not_recorded(steps, numbers)
    if unrecorded.kinds:
        warnings += unrecorded.warnings()
        items = drop_missing(items, unrecorded.losses)
        gaps = drop_missing(gaps, unrecorded.losses)
    if run.num_dropped or run.num_torn:
        losses = find_missing(spans, steps, numbers).beside(unrecorded.losses)
        warnings += losses.warnings()
        items, gaps = drop_missing(items, losses), drop_missing(gaps, losses)
    return Remaining(items=items, gaps=gaps, warnings=tuple(warnings), without=unrecorded.mostly)


def find_not_recorded(steps: StepTable, numbers: NDArray[np.int32]) -> NotRecorded:
    """Return which ranks say that they recorded no compute of a step.

    Args:
        steps: All steps' rows.
        numbers: Numbers of the steps that take part, ascending.
    """
    ranks = np.unique(steps.rank)
    rows = np.flatnonzero(
        np.isin(steps.step, numbers) & ((steps.left_out & RANK_COMPUTE_BITS) != 0)
    )
    lacks = np.zeros((len(ranks), len(numbers)), dtype=np.bool_)
    lacks[find_positions(steps.rank[rows], ranks), find_positions(steps.step[rows], numbers)] = True
    kinds = int(np.bitwise_or.reduce(steps.left_out[rows])) & RANK_COMPUTE_BITS if len(rows) else 0
    return NotRecorded(losses=MissingRecords(ranks=ranks, steps=numbers, lacks=lacks), kinds=kinds)


def find_missing(spans: SpanTable, steps: StepTable, numbers: NDArray[np.int32]) -> MissingRecords:
    """Find the ranks that lack forwards, backwards, optimizers or waits of a step.

    What a rank has is held against the number that it has in more than half of
    the steps that were recorded whole; without one, nothing is known of it. Where most
    ranks have fewer, the step itself was a shorter one.

    Args:
        spans: The spans, of a run that dropped records.
        steps: All steps' rows, also of those that take no part.
        numbers: Numbers of those that do, ascending.
    """
    ranks, recorded = np.unique(steps.rank), np.unique(steps.step[steps.left_out == 0])
    counted = np.union1d(recorded, numbers)
    lacks = np.zeros((len(ranks), len(counted)), dtype=np.bool_)
    rows = np.flatnonzero(is_one_of(spans.kind, COUNTED_KINDS))
    rows = rows[np.isin(spans.step[rows], counted) & np.isin(spans.rank[rows], ranks)]
    row, column = find_positions(spans.rank[rows], ranks), find_positions(spans.step[rows], counted)
    for kind in COUNTED_KINDS if len(counted) >= MIN_STEPS else ():
        mine = spans.kind[rows] == kind
        num = np.zeros(lacks.shape, dtype=np.int64)
        np.add.at(num, (row[mine], column[mine]), 1)
        fewer = _is_below_usual(num)
        lacks |= fewer & (fewer.mean(axis=0) <= 1 / 2)
    return MissingRecords(
        ranks=ranks, steps=numbers, lacks=lacks[:, find_positions(numbers, counted)]
    )


def drop_missing(items: Items, losses: MissingRecords) -> Items:
    """Return the rows of ranks that lack nothing of the row's step.

    Args:
        items: Of the ranks and steps of ``losses``.
        losses: Who lacks what.
    """
    row, column = find_positions(items.rank, losses.ranks), find_positions(items.step, losses.steps)
    keep = ~losses.lacks[row, column]
    columns = {field.name: getattr(items, field.name) for field in fields(items)}
    kept: dict[str, Any] = {
        name: each[keep] for name, each in columns.items() if isinstance(each, np.ndarray)
    }
    return replace(items, **kept)


def _is_below_usual(num: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Tell the cells of (ranks, steps) below the number that most cells of their row have."""
    # A number that more than half of a row have is its median.
    usual = np.median(num, axis=1)[:, None]
    has_usual = (num == usual).mean(axis=1, keepdims=True) > 1 / 2
    fewer: NDArray[np.bool_] = (num < usual) & has_usual
    return fewer
