"""A cause found in the evidence, before the replay has priced it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from ..report.text import format_ranks
from ..statistics.phases import MIN_LASTING_STEPS

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from ..replay.model import ReplayModel
    from ..trace.tables import RankInfo
    from .clock_throttle import ClockDrop
    from .detector import Cause

WHOLE_HOST_SHARE = 0.8
"""Share of a host's ranks that must show a cause for the host to be the common place."""

MIN_HOST_RANKS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One cause, where and when it showed, and how clearly."""

    cause: Cause

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

    fixed_ns: NDArray[np.float64] | None = None
    """Shape (ops,): what each operation of the part takes where the cause is absent; NaN, or None
    for all: what the ranks outside the part take."""

    is_everywhere: bool = False
    """Whether no rank is free of it, so that no gap between steps is usual."""

    certainty: float = 1.0
    """Share of such cases in which this is the cause: less where the evidence fits several."""

    sample: ClockDrop | None = None
    """The reading of a device that tells the cause."""

    shown_steps: tuple[int, ...] | None = None
    """Steps that show it, where others between the first and the last do not; None: all."""

    gaps: NDArray[np.bool_] | None = None
    """Shape (gaps,): host gaps that it explains; None: none."""

    explained_by: Cause | None = None
    """The cause that accounts for it, so that it is not reported; None: reported."""


def named_ranks(found: Iterable[Candidate], causes: Collection[Cause]) -> frozenset[int]:
    """Return the ranks that candidates of some causes name."""
    return frozenset(rank for each in found if each.cause in causes for rank in each.ranks)


def merge_parts(
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
        np.where(each.part, each.fixed_ns, np.nan)
        for each in found
        if each.part is not None and each.fixed_ns is not None
    ]
    part = np.logical_or.reduce(parts) if parts else None
    return part, np.fmin.reduce(usual) if usual else None


def in_steps(model: ReplayModel, steps: tuple[int, int]) -> NDArray[np.bool_]:
    """Tell which operations lie between two steps, these included; shape (ops,)."""
    numbers = np.array(model.operations.steps)
    shows = (numbers >= steps[0]) & (numbers <= steps[1])
    inside: NDArray[np.bool_] = shows[model.operations.step]
    return inside


def in_shown_steps(model: ReplayModel, candidate: Candidate) -> NDArray[np.bool_]:
    """Tell which operations lie in steps that show a candidate; shape (ops,)."""
    inside = in_steps(model, candidate.steps)
    if candidate.shown_steps is None:
        return inside
    shows = np.isin(model.operations.steps, candidate.shown_steps)
    found: NDArray[np.bool_] = inside & shows[model.operations.step]
    return found


def is_brief(candidate: Candidate) -> bool:
    """Tell whether a candidate shows in a step or two, or in some now and then."""
    is_short = candidate.steps[1] - candidate.steps[0] + 1 < MIN_LASTING_STEPS
    return is_short or candidate.shown_steps is not None


def share_steps(one: Candidate, other: Candidate) -> bool:
    """Tell whether two candidates show in steps in common."""
    return one.steps[0] <= other.steps[1] and other.steps[0] <= one.steps[1]


def merge_hosts(found: Sequence[Candidate], ranks: Mapping[int, RankInfo]) -> tuple[Candidate, ...]:
    """Tell candidates of one cause as one where they are (nearly) all of a host's ranks."""
    size = Counter(info.host for info in ranks.values())
    if len(size) == 1:
        return tuple(found)
    kept = list(found)
    for cause in sorted({each.cause for each in found}, key=lambda cause: cause.name):
        slow: Counter[str] = Counter()
        for each in found:
            if each.cause == cause:
                slow.update(ranks[rank].host for rank in each.ranks)
        for host, num in sorted(slow.items()):
            if not host or num < max(MIN_HOST_RANKS, WHOLE_HOST_SHARE * size[host]):
                continue
            mine = [
                each
                for each in kept
                if each.cause == cause and {ranks[rank].host for rank in each.ranks} == {host}
            ]
            if len(mine) > 1:
                kept = [each for each in kept if each not in mine]
                kept.append(_joined(mine, f"all of host {host}"))
    return tuple(kept)


def _joined(found: Sequence[Candidate], why: str) -> Candidate:
    worst = max(found, key=lambda each: each.excess_ratio)
    ranks = tuple(sorted({rank for each in found for rank in each.ranks}))
    part, fixed_ns = merge_parts(found)
    text = worst.evidence.removeprefix("the worst, ").split(": the worst, ")[-1]
    return replace(
        worst,
        ranks=ranks,
        steps=(min(each.steps[0] for each in found), max(each.steps[1] for each in found)),
        shown_steps=_shown_by_any(found),
        part=part,
        fixed_ns=fixed_ns,
        excess_ratio=float(np.median([each.excess_ratio for each in found])),
        evidence=f"{format_ranks(ranks)}, {why}: the worst, {text}",
    )


def _shown_by_any(found: Sequence[Candidate]) -> tuple[int, ...] | None:
    """Return the steps that show one of several candidates; None where one shows throughout."""
    steps: set[int] = set()
    for each in found:
        if each.shown_steps is None:
            return None
        steps.update(each.shown_steps)
    return tuple(sorted(steps))
