"""What each operation of a traced run would take in a straggler-free step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rankscope.tracer.span import KIND_CODES, SpanKind

from ...arrays.group_stats import group_medians
from ...arrays.grouping import is_one_of, number_rows
from ...arrays.intervals import NOWHERE
from .segments import Pieces, own_compute
from .split_backward import MOST_PORTIONS

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .match_waits import Joined

FREE_HOST_KINDS = (KIND_CODES[SpanKind.GC], KIND_CODES[SpanKind.CHECKPOINT])
"""Host kinds that an ideal step has none of; all other host time has its median."""


def ideal_durations(
    joined: Joined,
    pieces: Pieces,
    *,
    kind: NDArray[np.int16],
    label: NDArray[np.int64],
    portion: NDArray[np.int64],
    duration_ns: NDArray[np.float64],
) -> NDArray[np.float64]:
    """Return what each operation would take in a straggler-free step.

    Communications and host gaps take the median of their label, pauses take
    nothing. A compute span takes the mean self time of its (kind, chunk, portion)
    over all ranks and stages, shared among its pieces as spans of its stage share
    theirs on average.

    Args:
        joined: The run.
        pieces: Its pieces, the first rows of the arrays that follow.
        kind: Shape (ops,): codes into `tracer.span.KINDS`.
        label: Shape (ops,): operations of equal label have one ideal.
        portion: Shape (spans,): which portion of its micro-batch a compute span is.
        duration_ns: Shape (ops,): as recorded.

    Source:
        design.md section 5; the means and medians are arXiv 2505.05713's.
    """
    ideal = _median_by(label, duration_ns)
    ideal[is_one_of(kind, FREE_HOST_KINDS)] = 0.0
    own = np.flatnonzero(own_compute(pieces, len(pieces.start)))
    if not len(own):
        return ideal
    span = pieces.compute[own]
    chunk = joined.spans.chunk[span].astype(np.int64)
    of_kind = kind[own].astype(np.int64) * MOST_PORTIONS**2 + portion[span]
    of_kind = of_kind * (int(chunk.max()) + 2) + chunk + 1
    typical = _mean_by(label[own], duration_ns[own])
    span_typical = np.bincount(span, weights=typical)
    share = np.divide(typical, span_typical[span], out=np.zeros(len(own)), where=typical > 0)
    ideal[own] = share * _mean_span(of_kind, span, duration_ns[own])
    return ideal


def ideal_gaps(pieces: Pieces, gap_ns: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return how late a rank would begin a step: the median over all ranks and steps.

    Args:
        pieces: The first rows of ``gap_ns``.
        gap_ns: Shape (ops,): 0 but at each rank's first piece of a step.
    """
    ideal = np.zeros_like(gap_ns)
    first = np.flatnonzero(np.diff(pieces.window, prepend=NOWHERE))
    if len(first):
        ideal[first] = np.median(gap_ns[first])
    return ideal


def _mean_span(
    of_kind: NDArray[np.int64], span: NDArray[np.int64], duration: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return, for each piece, the mean self time of the spans of its kind."""
    index, num = number_rows(of_kind)
    a_piece = np.full(int(span.max()) + 1, NOWHERE)
    a_piece[span] = np.arange(len(span))
    spans_of_kind = np.bincount(index[a_piece[a_piece != NOWHERE]], minlength=num)
    mean = np.bincount(index, weights=duration) / spans_of_kind
    of_piece: NDArray[np.float64] = mean[index]
    return of_piece


def _mean_by(label: NDArray[np.int64], value: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the mean of each row's label."""
    index, _ = number_rows(label)
    mean: NDArray[np.float64] = (np.bincount(index, weights=value) / np.bincount(index))[index]
    return mean


def _median_by(label: NDArray[np.int64], value: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the median of each row's label."""
    index, num = number_rows(label)
    return group_medians(value, index, num)[0][index]
