"""Steps in which a rank lacks spans that it has in all others: some of them were dropped."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from analysis.distinct import is_one_of
from analysis.ordering import places_of
from tracer.span import KIND_CODES, SpanKind

if TYPE_CHECKING:
    from collections.abc import Collection

    from numpy.typing import NDArray

    from analysis.source import SpanTable, StepTable

COUNTED = [
    KIND_CODES[kind]
    for kind in (SpanKind.FORWARD, SpanKind.BACKWARD, SpanKind.OPTIMIZER, SpanKind.WAIT)
]
"""What a step has the same number of in a job whose steps are alike. A lost forward looks like a
host that stood still, a lost wait like compute."""

LEAST_STEPS = 3
"""Fewer steps tell no usual number."""


def steps_with_losses(
    spans: SpanTable, steps: StepTable, usable: Collection[int]
) -> tuple[int, ...]:
    """Return the steps in which some rank lacks forwards, backwards, optimizers or waits.

    What it lacks is held against the number that it has in more than half of
    its steps; without one, nothing is known of it. Where most ranks have fewer,
    the step itself was a shorter one.

    Args:
        spans: The spans, of a run that dropped records.
        steps: The steps' rows.
        usable: Numbers of the steps that count.

    Returns:
        Their numbers, ascending.
    """
    numbers = np.array(sorted(usable), dtype=np.int32)
    if len(numbers) < LEAST_STEPS:
        return ()
    ranks = np.unique(steps.rank)
    rows = np.flatnonzero(is_one_of(spans.kind, COUNTED))
    rows = rows[np.isin(spans.step[rows], numbers) & np.isin(spans.rank[rows], ranks)]
    row, column = places_of(spans.rank[rows], ranks), places_of(spans.step[rows], numbers)
    lacks = np.zeros(len(numbers), dtype=np.bool_)
    for kind in COUNTED:
        mine = spans.kind[rows] == kind
        num = np.zeros((len(ranks), len(numbers)), dtype=np.int64)
        np.add.at(num, (row[mine], column[mine]), 1)
        fewer = _fewer_than_usual(num)
        lacks |= fewer.any(axis=0) & (fewer.mean(axis=0) <= 1 / 2)
    return tuple(numbers[lacks].tolist())


def _fewer_than_usual(num: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Tell the cells of (ranks, steps) below the number that most cells of their row have."""
    # A number that more than half of a row have is its median.
    usual = np.median(num, axis=1)[:, None]
    has_usual = (num == usual).mean(axis=1, keepdims=True) > 1 / 2
    fewer: NDArray[np.bool_] = (num < usual) & has_usual
    return fewer
