"""Groups of samples and series of steps, reduced to a bounded size."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..report.proof_card import MAX_POINTS, MAX_VALUES, SampleGroup, SampleStrip, StepSeries
from ..report.text import format_count, format_ranks, format_steps

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

MAX_LABEL = 30
"""Characters of a list of ranks in a label."""


def name_ranks(ranks: Sequence[int]) -> str:
    """Return ranks as a label: their numbers, or how many they are if that is long."""
    named = format_ranks(ranks)
    return named if len(named) <= MAX_LABEL else format_count(len(ranks), "rank")


def group_samples(
    label: str, values: NDArray[Any], *, is_culprit: bool = False
) -> tuple[SampleGroup, ...]:
    """Return values as a group; none if all are unknown.

    Args:
        values: Any shape; NaN is unknown.
    """
    known = np.sort(values[np.isfinite(values)].astype(np.float64), axis=None)
    if not len(known):
        return ()
    kept = known[spread(len(known), MAX_VALUES)]
    return (
        SampleGroup(
            label=label,
            is_culprit=is_culprit,
            num=len(known),
            low=float(known[0]),
            median=float(np.median(known)),
            high=float(known[-1]),
            values=tuple(kept.tolist()),
        ),
    )


def compare_samples(
    quantity: str,
    unit: str,
    steps: str,
    *,
    culprits: tuple[str, NDArray[Any]],
    usual: tuple[str, NDArray[Any]],
) -> SampleStrip:
    """Return values of culprits beside those of their peers, each as of `group_samples`.

    Args:
        steps: Steps that they are of, in words.
        culprits: Their label and their values.
        usual: The same of the peers.
    """
    groups = (*group_samples(*culprits, is_culprit=True), *group_samples(*usual))
    return SampleStrip(quantity=quantity, unit=unit, steps=steps, groups=groups)


def spread(num: int, most: int) -> NDArray[np.int64]:
    """Return evenly spaced indices of ``num`` values, the first and the last among them."""
    return np.unique(np.linspace(0, num - 1, min(num, most)).round().astype(np.int64))


def make_series(
    quantity: str,
    unit: str,
    steps: Sequence[int],
    *,
    culprits: tuple[str, NDArray[np.float64]],
    usual: tuple[str, NDArray[np.float64]],
    shown: NDArray[np.bool_],
) -> StepSeries:
    """Return the medians of culprits and peers by step.

    Args:
        culprits: Their label, and their values, shape (members, steps).
        usual: The same of the peers, which may be none.
        shown: Shape (steps,): steps that show the finding.
    """
    of_culprits, of_usual = (column_medians(values) for _, values in (culprits, usual))
    usual_shown = _median(of_usual[shown])
    kept = spread(len(steps), MAX_POINTS)
    return StepSeries(
        quantity=quantity,
        unit=unit,
        steps=tuple(int(steps[column]) for column in kept),
        culprit_label=culprits[0],
        usual_label=usual[0],
        culprit=_optional(of_culprits[kept]),
        usual=_optional(of_usual[kept]),
        culprit_median=_median(of_culprits[shown]),
        usual_median=_median(of_usual) if usual_shown is None else usual_shown,
    )


def column_medians(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the median of each column without its unknown values; NaN if all are."""
    medians = np.full(values.shape[1], np.nan)
    is_known = np.isfinite(values).any(axis=0)
    if is_known.any():
        medians[is_known] = np.nanmedian(values[:, is_known], axis=0)
    return medians


def _median(values: NDArray[np.float64]) -> float | None:
    known = values[np.isfinite(values)]
    return float(np.median(known)) if len(known) else None


def _optional(values: NDArray[np.float64]) -> tuple[float | None, ...]:
    return tuple(value if np.isfinite(value) else None for value in values.tolist())


def shown_columns(steps: Sequence[int], bounds: tuple[int, int] | None) -> NDArray[np.bool_]:
    """Return which steps are from the first to the last of ``bounds``. Shape (steps,)."""
    first, last = bounds or (0, -1)
    numbers = np.array(steps, dtype=np.int64)
    return (numbers >= first) & (numbers <= last)


def name_steps(steps: Sequence[int], shown: NDArray[np.bool_]) -> str:
    """Return the first to the last of the shown steps: "steps 3 to 9"."""
    numbers = np.array(steps)[shown]
    return format_steps((int(numbers[0]), int(numbers[-1]))) if len(numbers) else ""
