"""A cause found in the evidence, before the replay has priced it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from ..arrays.grouping import sorted_unique
from ..arrays.sorting import stable_argsort
from ..report.text import format_ranks
from ..statistics.thresholds import THRESHOLDS

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from ..replay.model import ReplayModel
    from ..trace.tables import RankInfo
    from .detector import Cause


ALONE = "; its peers lose none"
"""End of the evidence about one rank, left out where several are named."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Candidate:
    """One cause, the ranks and steps that show it, and how clearly. Equal to itself alone."""

    cause: Cause

    ranks: tuple[int, ...]
    """Global ranks at fault, ascending."""

    steps: tuple[int, int]
    """First and last step that show it."""

    part: NDArray[np.int64] | None
    """Operations that fixing it would change, ascending; None if the replay has none."""

    excess_ratio: float
    threshold: float
    """Least excess that would have been reported."""

    evidence: str
    """One sentence with numbers."""

    on_host: bool = False
    """Whether its time is lost in launch gaps, which only the full replay has."""

    fixed_ns: NDArray[np.float64] | None = None
    """Shape (ops,): what each operation of the part takes once the cause is fixed; NaN, or None
    for all operations: what it takes on the ranks outside the part."""

    is_everywhere: bool = False
    """Whether all ranks show it, so that no gap between steps is normal."""

    certainty: float = 1.0
    """Factor of the confidence: below 1 if the evidence fits another cause as well."""

    shown_steps: tuple[int, ...] | None = None
    """Steps that show it, if not all between the first and the last do; None: all."""

    gaps: NDArray[np.bool_] | None = None
    """Shape (gaps,): host gaps that it explains; None: none."""

    explained_by: Cause | None = None
    """The cause that accounts for it, so that it is not reported; None: reported."""


def named_ranks(candidates: Iterable[Candidate], causes: Collection[Cause]) -> frozenset[int]:
    """Return the ranks that candidates of some causes name."""
    return frozenset(
        rank for candidate in candidates if candidate.cause in causes for rank in candidate.ranks
    )


def explained_gaps(candidates: Iterable[Candidate], num_gaps: int) -> NDArray[np.bool_]:
    """Return the host gaps that candidates explain. Shape (num_gaps,)."""
    explained = np.zeros(num_gaps, dtype=np.bool_)
    for candidate in candidates:
        if candidate.gaps is not None:
            explained |= candidate.gaps
    return explained


def shows_in(candidate: Candidate, steps: Sequence[int]) -> NDArray[np.bool_]:
    """Return in which steps a candidate shows. Shape (steps,)."""
    numbers = np.array(steps)
    shows: NDArray[np.bool_] = (numbers >= candidate.steps[0]) & (numbers <= candidate.steps[1])
    if candidate.shown_steps is not None:
        shows &= np.isin(numbers, candidate.shown_steps)
    return shows


def in_shown_steps(model: ReplayModel, candidate: Candidate) -> NDArray[np.bool_]:
    """Return which operations are in steps that show a candidate. Shape (ops,)."""
    inside: NDArray[np.bool_] = shows_in(candidate, model.operations.steps)[model.operations.step]
    return inside


def rows_of_ranks(
    model: ReplayModel, ranks: Sequence[tuple[int, ...]]
) -> dict[tuple[int, ...], NDArray[np.int64]]:
    """Return the operations of several sets of ranks, ascending, in one pass over all."""
    wanted = np.zeros(int(model.rank.max(initial=0)) + 1, dtype=np.bool_)
    wanted[[rank for some in ranks for rank in some if rank < len(wanted)]] = True
    rows = np.flatnonzero(wanted[model.rank])
    rows = rows[stable_argsort(model.rank[rows])]
    of_rank = model.rank[rows]

    def rows_of(rank: int) -> NDArray[np.int64]:
        return rows[slice(*np.searchsorted(of_rank, (rank, rank + 1)))]

    return {some: np.sort(np.concatenate([rows_of(rank) for rank in some])) for some in ranks}


def merge_hosts(
    candidates: Sequence[Candidate], ranks: Mapping[int, RankInfo]
) -> tuple[Candidate, ...]:
    """Merge candidates of one cause that cover (nearly) all ranks of a host."""
    size = Counter(info.host for info in ranks.values())
    if len(size) == 1:
        return tuple(candidates)
    kept = list(candidates)
    for cause in sorted(
        {candidate.cause for candidate in candidates}, key=lambda cause: cause.name
    ):
        slow: Counter[str] = Counter()
        for candidate in candidates:
            if candidate.cause == cause:
                slow.update(ranks[rank].host for rank in candidate.ranks)
        for host, num in sorted(slow.items()):
            if not host or num < max(THRESHOLDS.min_several, THRESHOLDS.whole_share * size[host]):
                continue
            mine = [
                candidate
                for candidate in kept
                if candidate.cause == cause
                and {ranks[rank].host for rank in candidate.ranks} == {host}
            ]
            if len(mine) > 1:
                kept = [candidate for candidate in kept if candidate not in mine]
                kept.append(merge_alike(mine, f", all on host {host}"))
    return tuple(kept)


def merge_equal(candidates: Sequence[Candidate], cause: Cause) -> tuple[Candidate, ...]:
    """Merge candidates of one cause that are equally slow at the same time.

    Fixing one of them alone wins nothing, because the others hold the job up as long: within what
    is reported at all (`persistent_ratio`) they are one finding. So they are if noise makes one of
    them begin or end some steps later.
    """
    kept: list[Candidate] = []
    left = sorted(candidates, key=lambda candidate: -candidate.excess_ratio)
    while left:
        worst = left[0]
        least = worst.excess_ratio - THRESHOLDS.persistent_ratio
        equal = [
            candidate
            for candidate in left
            if candidate is worst
            or (
                candidate.cause == worst.cause == cause
                and _are_at_once(candidate, worst)
                and candidate.excess_ratio >= least
            )
        ]
        kept.append(worst if len(equal) == 1 else merge_alike(equal, ", equally slow"))
        left = [candidate for candidate in left if candidate not in equal]
    return tuple(kept)


def _are_at_once(one: Candidate, other: Candidate) -> bool:
    """Return whether most steps (`whole_share`) that one of two candidates shows, both show."""
    if (one.shown_steps is None) != (other.shown_steps is None):
        return False
    if one.shown_steps is not None and other.shown_steps is not None:
        mine, theirs = set(one.shown_steps), set(other.shown_steps)
        return len(mine & theirs) >= THRESHOLDS.whole_share * len(mine | theirs)
    first, last = (sorted(ends) for ends in zip(one.steps, other.steps, strict=True))
    num_both, num_either = last[0] - first[1] + 1, last[1] - first[0] + 1
    return num_both >= THRESHOLDS.whole_share * num_either


def merge_recurring(
    candidates: Sequence[Candidate], num_ranks: int, *, in_turn: Cause | None = None
) -> tuple[Candidate, ...]:
    """Merge candidates of one cause that recur in the same steps, or on most ranks in turn.

    Args:
        in_turn: Cause if most ranks take turns; None: the same.
    """
    kept = [candidate for candidate in candidates if candidate.shown_steps is None]
    left, merged = [candidate for candidate in candidates if candidate.shown_steps is not None], []
    while left:
        steps = set(left[0].shown_steps or ())
        least = THRESHOLDS.whole_share * len(steps)
        same = [
            candidate
            for candidate in left
            if len(steps & set(candidate.shown_steps or ())) >= least
        ]
        merged.append(same[0] if len(same) == 1 else merge_alike(same, " in the same steps"))
        left = [candidate for candidate in left if candidate not in same]
    num_turns = sum(len(candidate.ranks) for candidate in merged)
    if len(merged) > 1 and num_turns > THRESHOLDS.majority_share * num_ranks:
        whole = merge_alike(merged, " in turn")
        merged = [whole if in_turn is None else replace(whole, cause=in_turn)]
    return (*kept, *merged)


def merge_alike(candidates: Sequence[Candidate], how: str) -> Candidate:
    """Return several candidates of a cause as one.

    Args:
        candidates: At least one.
        how: What they have in common, after their ranks in the evidence.
    """
    worst = max(candidates, key=lambda candidate: candidate.excess_ratio)
    whole = join_candidates(candidates, worst)
    return replace(
        whole,
        excess_ratio=float(np.median([candidate.excess_ratio for candidate in candidates])),
        evidence=(
            f"{format_ranks(whole.ranks)}{how}; the worst: {worst.evidence.removesuffix(ALONE)}"
        ),
    )


def join_candidates(candidates: Sequence[Candidate], worst: Candidate) -> Candidate:
    """Return one of several candidates of a cause, with the ranks, steps, gaps and parts of all.

    If two give a ``fixed_ns`` for the same operation, the smaller one counts.
    """
    parts = [candidate.part for candidate in candidates if candidate.part is not None]
    fixed_ns: NDArray[np.float64] | None = None
    for candidate in candidates:
        part = candidate.part
        if part is not None and candidate.fixed_ns is not None:
            fixed_ns = np.full(len(candidate.fixed_ns), np.nan) if fixed_ns is None else fixed_ns
            fixed_ns[part] = np.fmin(fixed_ns[part], candidate.fixed_ns[part])
    gaps = [candidate.gaps for candidate in candidates if candidate.gaps is not None]
    return replace(
        worst,
        gaps=np.logical_or.reduce(gaps) if gaps else None,
        ranks=tuple(sorted({rank for candidate in candidates for rank in candidate.ranks})),
        steps=(
            min(candidate.steps[0] for candidate in candidates),
            max(candidate.steps[1] for candidate in candidates),
        ),
        shown_steps=None
        if any(candidate.shown_steps is None for candidate in candidates)
        else tuple(
            sorted({step for candidate in candidates for step in candidate.shown_steps or ()})
        ),
        part=sorted_unique(np.concatenate(parts)) if parts else None,
        fixed_ns=fixed_ns,
    )
