"""Garbage collection: pauses that ranks take in turn."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..arrays.group_stats import group_medians, sum_cells
from ..breakdown.waterfall import Part
from ..replay.model import Place
from ..report.text import format_count, format_duration, format_percent
from ..statistics.phases import find_period
from ..statistics.thresholds import THRESHOLDS
from .candidate import Candidate, explained_gaps
from .detector import INSUFFICIENT_EVIDENCE, Cause, HostTime, ProofForm, Subject

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .detector import Case
    from .host_gaps import HostGaps


INSIDE_PLACES = (Place.FORWARD, Place.BACKWARD)
"""Places in which a rank loses time only if its host stopped: neither input nor a reduction is
due there."""


CAUSE = Cause(
    name="gc-pause",
    subject=Subject.JOB,
    sentence="Garbage collection pauses ranks in turn, and each pause holds up all others",
    shown_in=HostTime("garbage collection and gaps of the host", (Part.GC, Part.HOST_GAP)),
    proof_form=ProofForm.HOST,
)


def detect(case: Case, candidates: tuple[Candidate, ...]) -> tuple[Candidate, ...]:
    """Add the pauses that ranks take in turn, and a pause that is too rare to have a name."""
    gaps, common = case.gaps, case.common_pauses.covers_gap
    pauses = find_gc_pauses(gaps, ~common)
    allowed = ~(common | explained_gaps(pauses, len(gaps.gaps)))
    return (*candidates, *pauses, *find_rare_pauses(gaps, allowed))


def find_gc_pauses(gaps: HostGaps, allowed: NDArray[np.bool_]) -> tuple[Candidate, ...]:
    """Find ``gc`` spans, and long gaps that ranks have in turn.

    The collector stops a host at any launch, so some of the gaps must be before a forward or
    backward inside a step. Then gaps before a step's first compute, its optimizer or its
    reductions are pauses too; without the others, these are missing input or launch skew. A rank
    that loses time at the begin of `min_lasting_steps` consecutive steps does not pause there. A
    host that runs ahead of its device hides part of each pause: if two are as long as
    `min_pause_ns`, half of that is enough for the others.

    Args:
        allowed: Shape (gaps,): gaps that are not part of a common pause.
    """
    gap_ns = gaps.gaps.gap_ns
    # The usual gap before a forward is the median over ranks and steps of their medians. A rank and
    # step without gaps counts as 0: if hosts launch in time, the only gaps are pauses.
    forward, (num_ranks, num_steps) = gaps.is_at(Place.FORWARD), gaps.profile.total_ns.shape
    cell = gaps.row[forward] * num_steps + gaps.column[forward]
    medians, _ = group_medians(gap_ns[forward], cell, num_ranks * num_steps)
    usual_ns = THRESHOLDS.pause_factor * float(np.median(np.nan_to_num(medians)))
    is_long = gap_ns >= max(THRESHOLDS.min_pause_ns, usual_ns)
    is_pause = gap_ns >= max(THRESHOLDS.min_pause_ns / 2, usual_ns)
    inside, starts = allowed & gaps.is_at(*INSIDE_PLACES), allowed & gaps.is_at(Place.INPUT)
    considered = inside | (starts & ~_in_consecutive_steps(gaps, starts & is_pause))
    paused = considered & is_pause
    several = np.count_nonzero(considered & is_long) > 1 and (paused & inside).any()
    if several and _is_in_turn(gaps, paused):
        paused |= allowed & gaps.is_at(Place.LAUNCH, Place.OTHER) & is_long
    else:
        paused[:] = False
    recorded = gaps.is_at(Place.GC) & (gap_ns > 0)
    candidates = (
        _pause_candidate(gaps, recorded, "in gc spans") if recorded.any() else None,
        _pause_candidate(gaps, paused, "before a launch") if paused.any() else None,
    )
    return tuple(candidate for candidate in candidates if candidate is not None)


def find_rare_pauses(gaps: HostGaps, allowed: NDArray[np.bool_]) -> tuple[Candidate, ...]:
    """Find pauses inside steps that are too rare for garbage collection.

    Args:
        allowed: Shape (gaps,): gaps that nothing explains.
    """
    items, gap_ns = gaps.gaps, gaps.gaps.gap_ns
    least_ns = THRESHOLDS.min_excess_ratio * gaps.compute_ns[gaps.row]
    chosen = allowed & gaps.is_at(*INSIDE_PLACES)
    chosen &= gap_ns >= np.maximum(least_ns, THRESHOLDS.min_pause_ns)
    if not chosen.any() or len(gaps.profile.ranks) == 1:  # Single steps of a rank alone are noise.
        return ()
    worst = int(np.argmax(np.where(chosen, gap_ns, 0)))
    return (
        Candidate(
            cause=INSUFFICIENT_EVIDENCE,
            ranks=tuple(np.unique(items.rank[chosen]).tolist()),
            steps=(int(items.step[chosen].min()), int(items.step[chosen].max())),
            part=gaps.part(chosen),
            excess_ratio=float(gap_ns[worst] / gaps.compute_ns[gaps.row[worst]]),
            threshold=THRESHOLDS.min_excess_ratio,
            evidence=(
                f"rank {items.rank[worst]} paused for {format_duration(float(gap_ns[worst]))}"
                f" inside step {items.step[worst]} and waited for no other rank; a pause this rare"
                " may be garbage collection or anything else on its host"
            ),
            on_host=True,
        ),
    )


def _in_consecutive_steps(gaps: HostGaps, chosen: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return the gaps of ranks and steps that have a chosen gap in `min_lasting_steps` in a row."""
    shape = gaps.profile.total_ns.shape
    has_one = np.zeros(shape, dtype=np.bool_)
    has_one[gaps.row[chosen], gaps.column[chosen]] = True
    lasts = np.zeros(shape, dtype=np.bool_)
    for first in range(shape[1] - THRESHOLDS.min_lasting_steps + 1):
        columns = slice(first, first + THRESHOLDS.min_lasting_steps)
        lasts[:, columns] |= has_one[:, columns].all(axis=1, keepdims=True)
    return lasts[gaps.row, gaps.column]


def _is_in_turn(gaps: HostGaps, chosen: NDArray[np.bool_]) -> bool:
    """Return whether several ranks have the chosen gaps at irregular steps, and none has most."""
    rank, step = gaps.gaps.rank[chosen], gaps.gaps.step[chosen]
    ranks, counts = np.unique(rank, return_counts=True)
    several = len(ranks) > 1 and counts.max() <= THRESHOLDS.one_rank_share * counts.sum()
    if not several or len(np.unique(step)) == 1:
        return False
    return not all(find_period(np.unique(step[rank == number])) for number in ranks.tolist())


def _pause_candidate(gaps: HostGaps, chosen: NDArray[np.bool_], where: str) -> Candidate | None:
    """Return pauses as a candidate; None if they cost too little."""
    gap_ns = gaps.gaps.gap_ns
    lost = sum_cells(
        gaps.profile.total_ns.shape, gaps.row[chosen], gaps.column[chosen], gap_ns[chosen]
    )
    ratio = lost / gaps.compute_ns[:, None]
    # A step waits for the longest of the pauses that its ranks take at different times.
    worst = ratio.max(axis=0)
    level = float(worst.mean())
    if level < THRESHOLDS.min_loss_ratio and float(worst.max()) < THRESHOLDS.min_excess_ratio:
        return None
    long = chosen & (gap_ns >= np.median(gap_ns[chosen]) / 2)
    steps = np.unique(gaps.gaps.step[long])
    ranks = tuple(np.unique(gaps.gaps.rank[long]).tolist())
    times = gap_ns[long]
    return Candidate(
        cause=CAUSE,
        ranks=ranks,
        steps=(int(steps[0]), int(steps[-1])),
        part=gaps.part(chosen),
        gaps=chosen,
        excess_ratio=max(level, float(worst.max())),
        threshold=THRESHOLDS.min_loss_ratio
        if level >= THRESHOLDS.min_loss_ratio
        else THRESHOLDS.min_excess_ratio,
        evidence=(
            f"{format_count(len(times), 'pause')} of {format_duration(float(np.median(times)))}"
            f" {where} on {format_count(len(ranks), 'rank')} in turn, in"
            f" {format_count(len(steps), 'step')}; the longest pause of a step takes"
            f" {format_percent(level, digits=1)} of the compute on average"
        ),
        on_host=True,
        # The ideal of these gaps is their median: if hosts launch in time, that is a pause itself.
        fixed_ns=gaps.fixed_ns(chosen),
    )
