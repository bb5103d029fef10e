"""Garbage collection: pauses that ranks take now one and now another."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from analysis.candidate import Candidate
from analysis.cells import group_medians, summed
from analysis.evidence import Place
from analysis.phases import DUE_RATIO
from analysis.stalls import ONE_RANK_SHARE
from analysis.words import count_text, duration_text

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from analysis.stalls import Stalls

LEAST_PAUSE_NS = 50_000_000
"""A gap this long before compute may be garbage collection. Source: design.md section 5."""

PAUSE_FACTOR = 10.0
"""A pause stands out of the usual gaps before the same kind of compute by this much."""

LEAST_LOSS_RATIO = 0.01
"""Pauses in turn on many ranks are told from this share of the job's time: each may be short
beside its step, but all wait for every one of them."""


def gc_pauses(
    stalls: Stalls, usual: NDArray[np.bool_], blamed: frozenset[int]
) -> tuple[tuple[Candidate, ...], NDArray[np.bool_]]:
    """Find garbage collection: ``gc`` spans, or long gaps before forward compute, rank by rank.

    Args:
        stalls: The run's gaps.
        usual: Shape (steps,): steps that take part.
        blamed: Ranks whose gaps are explained already.

    Returns:
        The candidates, and which gaps they explain, shape (gaps,).
    """
    recorded = stalls.among(Place.GC) & (stalls.gaps.gap_ns > 0)
    longest = max(LEAST_PAUSE_NS, PAUSE_FACTOR * _typical(stalls))
    # The step's first forward pauses like any other.
    paused = stalls.among(Place.FORWARD, Place.INPUT) & (stalls.gaps.gap_ns >= longest)
    paused &= usual[np.minimum(stalls.column, len(usual) - 1)]
    paused &= ~np.isin(stalls.gaps.rank, list(blamed))
    if not _in_turn(stalls, paused & (stalls.gaps.place == Place.FORWARD)):
        paused[:] = False
    found = (
        _pauses(stalls, recorded, "in gc spans") if recorded.any() else None,
        _pauses(stalls, paused, "before forward compute") if paused.any() else None,
    )
    explained = paused if found[1] is not None else np.zeros(len(paused), dtype=np.bool_)
    return tuple(candidate for candidate in found if candidate is not None), explained


def _typical(stalls: Stalls) -> float:
    """Return the usual gap before forward compute, in ns: the median rank and step's own median.

    A rank and step without any counts as 0: where hosts launch in time, pauses are all there is.
    """
    chosen = stalls.among(Place.FORWARD)
    shape = stalls.profile.total_ns.shape
    cell = stalls.row[chosen] * shape[1] + stalls.column[chosen]
    median, _ = group_medians(stalls.gaps.gap_ns[chosen], cell, shape[0] * shape[1])
    return float(np.median(np.nan_to_num(median)))


def _in_turn(stalls: Stalls, chosen: NDArray[np.bool_]) -> bool:
    """Tell whether several ranks have these gaps, now one and now another."""
    if not chosen.any():
        return False
    ranks, counts = np.unique(stalls.gaps.rank[chosen], return_counts=True)
    several = len(ranks) > 1 and counts.max() <= ONE_RANK_SHARE * counts.sum()
    return several and len(np.unique(stalls.gaps.step[chosen])) > 1


def _pauses(stalls: Stalls, chosen: NDArray[np.bool_], where: str) -> Candidate | None:
    profile = stalls.profile
    lost = summed(
        profile.total_ns.shape,
        stalls.row[chosen],
        stalls.column[chosen],
        stalls.gaps.gap_ns[chosen],
    )
    ratio = lost / stalls.compute_ns[:, None]
    # A step waits for the longest of the pauses that its ranks take at different times.
    worst = ratio.max(axis=0)
    level = float(worst.mean())
    if level < LEAST_LOSS_RATIO and float(worst.max()) < DUE_RATIO:
        return None
    long = chosen & (stalls.gaps.gap_ns >= np.median(stalls.gaps.gap_ns[chosen]) / 2)
    steps = np.unique(stalls.gaps.step[long])
    ranks = tuple(np.unique(stalls.gaps.rank[long]).tolist())
    times = stalls.gaps.gap_ns[long]
    return Candidate(
        cause="gc-pause",
        ranks=ranks,
        steps=(int(steps[0]), int(steps[-1])),
        part=stalls.part(chosen),
        excess_ratio=max(level, float(worst.max())),
        threshold=LEAST_LOSS_RATIO if level >= LEAST_LOSS_RATIO else DUE_RATIO,
        evidence=(
            f"{count_text(len(times), 'pause')} of {duration_text(float(np.median(times)))}"
            f" {where} on {count_text(len(ranks), 'rank')} in turn, in"
            f" {count_text(len(steps), 'step')}: the longest of a step take {level:.1%} of the"
            " compute on average"
        ),
        on_host=True,
    )
