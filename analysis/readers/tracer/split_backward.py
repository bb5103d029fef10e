"""Which portion of its micro-batch's work a compute span is: some schedules split the backward.

A zero-bubble schedule computes the gradients of a micro-batch's input first and
those of its weights later, in a span of their own. The two are different work:
what one of them should take says nothing of the other. They are told apart by
their order in the micro-batch, not by their names, which are the tracer's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rankscope.tracer.span import KIND_CODES, NONE, SpanKind

from ...arrays.grouping import number_rows
from ...arrays.intervals import NOWHERE
from ...arrays.sorting import sort_rows
from ...replay.operations import positions_in_runs

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ...trace.tables import SpanTable

FORWARD, BACKWARD = KIND_CODES[SpanKind.FORWARD], KIND_CODES[SpanKind.BACKWARD]
WHOLE = 0
"""The one span of its micro-batch, or nobody knows its micro-batch."""

MOST_PORTIONS = 4
"""More spans of one kind in what is said to be one micro-batch are several micro-batches under
one number."""


def portions_of(spans: SpanTable, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Tell the backwards of one micro-batch apart by their order.

    Where forwards share numbers too, a number says nothing of the micro-batch.

    Args:
        spans: The table.
        rows: Shape (rows,): compute spans, none inside another.

    Returns:
        Shape (rows,): `WHOLE`, or one number for each (how many there are, place among them):
        1 and 2 for the halves of a split in two.
    """
    found = np.full(len(rows), WHOLE, dtype=np.int64)
    known = spans.microbatch[rows] != NONE
    backward = np.flatnonzero(known & (spans.kind[rows] == BACKWARD))
    work, num = _microbatches(spans, rows[backward])
    if num == len(backward):
        return found
    forward = rows[known & (spans.kind[rows] == FORWARD)]
    if _microbatches(spans, forward)[1] != len(forward):
        return found
    size = np.bincount(work, minlength=num)[work]
    order = sort_rows(work, spans.start_ns[rows[backward]])
    place = np.empty(len(backward), dtype=np.int64)
    place[order] = positions_in_runs(work[order])
    number = size * (size - 1) // 2 + place
    found[backward] = np.where(size > MOST_PORTIONS, WHOLE, number)
    return found


def _microbatches(spans: SpanTable, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], int]:
    """Number what is said to be one micro-batch's work on one chunk of a rank."""
    if not len(rows):
        return rows, 0
    columns = (spans.epoch, spans.step, spans.rank, spans.chunk, spans.microbatch)
    return number_rows(*(column[rows] for column in columns))


def is_deferred(portion: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Tell the portions that are not the first of their micro-batch. Shape as given."""
    first = [size * (size - 1) // 2 for size in range(1, MOST_PORTIONS + 1)]
    return ~np.isin(portion, first)


def portions_by_span(spans: SpanTable, compute: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return `portions_of` the spans that ``compute`` names, `WHOLE` elsewhere. Shape (spans,)."""
    portion = np.full(len(spans), WHOLE, dtype=np.int64)
    named = np.zeros(len(spans), dtype=np.bool_)
    named[compute[compute != NOWHERE]] = True
    rows = np.flatnonzero(named)
    portion[rows] = portions_of(spans, rows)
    return portion
