"""A cause found in the evidence, before the replay has priced it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..statistics.phases import SHORT_STEPS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ..replay.model import ReplayModel
    from .counters import Drop


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One cause, where and when it showed, and how clearly."""

    cause: str
    """One of design.md section 5."""

    ranks: tuple[int, ...]
    """Global ranks at fault, ascending."""

    steps: tuple[int, int]
    """First and last step that show it."""

    part: NDArray[np.bool_] | None
    """Shape (ops,): operations that mending it would make ideal; None where the replay holds
    none of it."""

    excess_ratio: float
    threshold: float
    """What the excess had to exceed."""

    evidence: str
    """One sentence with numbers."""

    on_host: bool = False
    """Whether it lies in launch gaps, which only the full replay knows."""

    usual_ns: NDArray[np.float64] | None = None
    """Shape (ops,): what each operation of the part takes where the cause is absent; NaN, or None
    for all: what the ranks outside the part take."""

    is_everywhere: bool = False
    """Whether no rank is free of it, so that no gap between steps is usual."""

    certainty: float = 1.0
    """Share of such cases in which this is the cause: less where the evidence fits several."""

    sample: Drop | None = None
    """The reading of a device that tells the cause."""

    shown_steps: tuple[int, ...] | None = None
    """Steps that show it, where others between the first and the last do not; None: all."""

    is_alarm: bool = True
    """False for what is only told beside the verdict (a checkpoint)."""


def joined_parts(
    found: Sequence[Candidate],
) -> tuple[NDArray[np.bool_] | None, NDArray[np.float64] | None]:
    """Return the operations of several candidates, and what these usually take.

    Args:
        found: At least one.

    Returns:
        ``part`` and ``usual_ns`` of one candidate that stands for them all; the smaller where two
        say what an operation usually takes.
    """
    parts = [each.part for each in found if each.part is not None]
    usual = [
        np.where(each.part, each.usual_ns, np.nan)
        for each in found
        if each.part is not None and each.usual_ns is not None
    ]
    part = np.logical_or.reduce(parts) if parts else None
    return part, np.fmin.reduce(usual) if usual else None


def in_steps(model: ReplayModel, steps: tuple[int, int]) -> NDArray[np.bool_]:
    """Tell which operations lie between two steps, these included; shape (ops,)."""
    numbers = np.array(model.operations.steps)
    shows = (numbers >= steps[0]) & (numbers <= steps[1])
    inside: NDArray[np.bool_] = shows[model.operations.step]
    return inside


def while_shown(model: ReplayModel, candidate: Candidate) -> NDArray[np.bool_]:
    """Tell which operations lie in steps that show a candidate; shape (ops,)."""
    inside = in_steps(model, candidate.steps)
    if candidate.shown_steps is None:
        return inside
    shows = np.isin(model.operations.steps, candidate.shown_steps)
    found: NDArray[np.bool_] = inside & shows[model.operations.step]
    return found


def is_brief(candidate: Candidate) -> bool:
    """Tell whether a candidate shows in a step or two, or in some now and then."""
    is_short = candidate.steps[1] - candidate.steps[0] + 1 < SHORT_STEPS
    return is_short or candidate.shown_steps is not None
