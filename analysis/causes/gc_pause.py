"""Garbage collection: pauses that ranks take now one and now another."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..arrays.group_stats import group_medians, sum_cells
from ..replay.model import Place
from ..report.text import format_count, format_duration, format_percent
from ..statistics.phases import MIN_EXCESS_RATIO
from . import host_stall
from .candidate import Candidate, named_ranks
from .detector import INSUFFICIENT_EVIDENCE, Cause, Subject
from .thresholds import HOST_STALL_STEPS, ONE_RANK_SHARE

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .detector import Case
    from .host_gaps import HostGaps

MIN_PAUSE_NS = 50_000_000
"""A gap this long before what a host launches may be garbage collection. Source: design.md
section 5."""

PAUSE_FACTOR = 10.0
"""A pause stands out of the usual gaps before the same kind of compute by this much."""

INSIDE_PLACES = (Place.FORWARD, Place.BACKWARD)
"""Where only a host that stopped makes a rank lose time: neither input nor a reduction is due."""

MIN_LOSS_RATIO = 0.01
"""Pauses in turn on many ranks are told from this share of the job's time: each may be short
beside its step, but all wait for every one of them."""


CAUSE = Cause(
    name="gc-pause",
    subject=Subject.JOB,
    sentence="Garbage collection pauses ranks in turn, and each pause holds up all others",
)


def detect(case: Case, found: tuple[Candidate, ...]) -> tuple[Candidate, ...]:
    """Add the pauses that ranks take in turn, and a pause that is too rare to be named."""
    in_common = case.common_pauses.in_gaps
    blamed = named_ranks(found, {host_stall.CAUSE})
    pauses = find_gc_pauses(case.gaps, ~in_common, blamed)
    allowed = ~in_common
    for each in pauses:
        if each.gaps is not None:
            allowed &= ~each.gaps
    return (*found, *pauses, *find_rare_pauses(case.gaps, allowed, blamed))


def find_gc_pauses(
    stalls: HostGaps, allowed: NDArray[np.bool_], blamed: frozenset[int]
) -> tuple[Candidate, ...]:
    """Find garbage collection: ``gc`` spans, or long gaps before what hosts launch, rank by rank.

    A collector stops a host at any launch: some pauses must lie before a
    forward or backward inside a step. Then those before a step's first
    compute, its optimizer or its reductions are pauses too; alone, these would
    be missing input or launch skew. What one rank loses at its step's begin in
    `HOST_STALL_STEPS` steps on end is no pause. A host that runs ahead makes up for part of each:
    where two are as long as `MIN_PAUSE_NS`, half of that counts.

    Args:
        stalls: The run's gaps.
        allowed: Shape (gaps,): gaps that no common dip explains.
        blamed: Ranks whose gaps are explained already.
    """
    recorded = stalls.among(Place.GC) & (stalls.gaps.gap_ns > 0)
    paused = _find_pauses_in_turn(stalls, allowed & ~np.isin(stalls.gaps.rank, list(blamed)))
    found = (
        _pause_candidate(stalls, recorded, "in gc spans") if recorded.any() else None,
        _pause_candidate(stalls, paused, "before what its host launched next")
        if paused.any()
        else None,
    )
    return tuple(candidate for candidate in found if candidate is not None)


def find_rare_pauses(
    stalls: HostGaps, allowed: NDArray[np.bool_], blamed: frozenset[int]
) -> tuple[Candidate, ...]:
    """Find what looks like a pause, but is too rare to be told as one: no alarm, and no health.

    Args:
        stalls: The run's gaps.
        allowed: Shape (gaps,): gaps that nothing explains.
        blamed: Ranks whose gaps are explained already.
    """
    longest = max(MIN_PAUSE_NS, PAUSE_FACTOR * _usual_gap_ns(stalls))
    chosen = allowed & stalls.among(*INSIDE_PLACES) & (stalls.gaps.gap_ns >= longest)
    chosen &= ~np.isin(stalls.gaps.rank, list(blamed))
    chosen &= stalls.gaps.gap_ns >= MIN_EXCESS_RATIO * stalls.compute_ns[stalls.row]
    if not chosen.any():
        return ()
    worst = int(np.argmax(np.where(chosen, stalls.gaps.gap_ns, 0)))
    rank, step = int(stalls.gaps.rank[worst]), int(stalls.gaps.step[worst])
    steps = np.unique(stalls.gaps.step[chosen])
    return (
        Candidate(
            cause=INSUFFICIENT_EVIDENCE,
            ranks=tuple(np.unique(stalls.gaps.rank[chosen]).tolist()),
            steps=(int(steps[0]), int(steps[-1])),
            part=stalls.part(chosen),
            excess_ratio=float(stalls.gaps.gap_ns[worst] / stalls.compute_ns[stalls.row[worst]]),
            threshold=MIN_EXCESS_RATIO,
            evidence=(
                f"rank {rank} stood still for {format_duration(float(stalls.gaps.gap_ns[worst]))}"
                f" inside step {step}, and nobody held it up; so rare, it may be garbage"
                " collection or anything else on its host"
            ),
            on_host=True,
        ),
    )


def _find_pauses_in_turn(stalls: HostGaps, allowed: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Tell which gaps are pauses that ranks take in turn; none where they do not. Shape (gaps,)."""
    longest = max(MIN_PAUSE_NS, PAUSE_FACTOR * _usual_gap_ns(stalls))
    shortest = max(MIN_PAUSE_NS / 2, PAUSE_FACTOR * _usual_gap_ns(stalls))
    gap_ns = stalls.gaps.gap_ns
    inside = allowed & stalls.among(*INSIDE_PLACES)
    starts = allowed & stalls.among(Place.INPUT)
    starts &= ~_in_consecutive_steps(stalls, starts & (gap_ns >= shortest))
    known = inside | starts
    if np.count_nonzero(known & (gap_ns >= longest)) < 2:  # noqa: PLR2004  # one is no turn
        longest = shortest = np.inf
    paused = known & (gap_ns >= shortest)
    told = (paused & inside).any() and _is_in_turn(stalls, paused)
    if not told:
        return np.zeros(len(gap_ns), dtype=np.bool_)
    return paused | (allowed & stalls.among(Place.LAUNCH, Place.OTHER) & (gap_ns >= longest))


def _in_consecutive_steps(stalls: HostGaps, chosen: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Tell which chosen gaps lie in `HOST_STALL_STEPS` steps on end of one rank. Shape (gaps,)."""
    shape = stalls.profile.total_ns.shape
    num = sum_cells(shape, stalls.row[chosen], stalls.column[chosen], np.ones(chosen.sum()))
    lasts = np.zeros(shape, dtype=np.bool_)
    for first in range(shape[1] - HOST_STALL_STEPS + 1):
        columns = slice(first, first + HOST_STALL_STEPS)
        lasts[:, columns] |= num[:, columns].min(axis=1, keepdims=True) > 0
    return chosen & lasts[stalls.row, stalls.column]


def _usual_gap_ns(stalls: HostGaps) -> float:
    """Return the usual gap before forward compute, in ns: the median rank and step's own median.

    A rank and step without any counts as 0: where hosts launch in time, pauses are all there is.
    """
    chosen = stalls.among(Place.FORWARD)
    shape = stalls.profile.total_ns.shape
    cell = stalls.row[chosen] * shape[1] + stalls.column[chosen]
    median, _ = group_medians(stalls.gaps.gap_ns[chosen], cell, shape[0] * shape[1])
    return float(np.median(np.nan_to_num(median)))


def _is_in_turn(stalls: HostGaps, chosen: NDArray[np.bool_]) -> bool:
    """Tell whether several ranks have these gaps, now one and now another."""
    if not chosen.any():
        return False
    ranks, counts = np.unique(stalls.gaps.rank[chosen], return_counts=True)
    several = len(ranks) > 1 and counts.max() <= ONE_RANK_SHARE * counts.sum()
    return several and len(np.unique(stalls.gaps.step[chosen])) > 1


def _pause_candidate(stalls: HostGaps, chosen: NDArray[np.bool_], where: str) -> Candidate | None:
    profile = stalls.profile
    lost = sum_cells(
        profile.total_ns.shape,
        stalls.row[chosen],
        stalls.column[chosen],
        stalls.gaps.gap_ns[chosen],
    )
    ratio = lost / stalls.compute_ns[:, None]
    # A step waits for the longest of the pauses that its ranks take at different times.
    worst = ratio.max(axis=0)
    level = float(worst.mean())
    if level < MIN_LOSS_RATIO and float(worst.max()) < MIN_EXCESS_RATIO:
        return None
    long = chosen & (stalls.gaps.gap_ns >= np.median(stalls.gaps.gap_ns[chosen]) / 2)
    steps = np.unique(stalls.gaps.step[long])
    ranks = tuple(np.unique(stalls.gaps.rank[long]).tolist())
    times = stalls.gaps.gap_ns[long]
    return Candidate(
        cause=CAUSE,
        ranks=ranks,
        steps=(int(steps[0]), int(steps[-1])),
        part=stalls.part(chosen),
        gaps=chosen,
        excess_ratio=max(level, float(worst.max())),
        threshold=MIN_LOSS_RATIO if level >= MIN_LOSS_RATIO else MIN_EXCESS_RATIO,
        evidence=(
            f"{format_count(len(times), 'pause')} of {format_duration(float(np.median(times)))}"
            f" {where} on {format_count(len(ranks), 'rank')} in turn, in"
            f" {format_count(len(steps), 'step')}: the longest of a step take"
            f" {format_percent(level, digits=1)} of the compute on average"
        ),
        on_host=True,
        # Where hosts launch in time there are no gaps but pauses: their median is no usual gap.
        fixed_ns=stalls.usual(chosen, None),
    )
