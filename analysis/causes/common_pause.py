"""Planned steps in which all ranks pause at once, without a recorded save: a log, a gather."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rankscope.tracer.span import NS_PER_S

from ..arrays.group_stats import lower_medians, row_medians, sum_cells
from ..breakdown.waterfall import Part
from ..replay.model import Place
from ..report.network import CommonPause
from ..report.text import format_count, format_duration, format_ranks, format_steps
from ..statistics.thresholds import THRESHOLDS
from .candidate import Candidate
from .detector import Cause, HostTime, ProofForm, Subject

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .detector import Case
    from .host_gaps import CommonPauses, HostGaps

CAUSE = Cause(
    name="common-pause",
    subject=Subject.JOB,
    sentence="All ranks pause together",
    shown_in=HostTime(
        "gaps of the host", (Part.HOST_GAP, Part.INPUT, Part.UNKNOWN), is_of_all=True
    ),
    is_alarm=False,
    proof_form=ProofForm.HOST,
)


def detect(case: Case, candidates: tuple[Candidate, ...]) -> tuple[Candidate, ...]:
    """Add the planned common pauses in which nothing recorded a save."""
    pauses = case.common_pauses
    is_other = pauses.is_planned & ~pauses.is_saved & ~pauses.in_evaluation
    return (*candidates, *pause_candidates(CAUSE, case.gaps, pauses, is_other))


def list_pauses(pauses: CommonPauses, steps: NDArray[np.int32]) -> tuple[CommonPause, ...]:
    """Return the steps with a common pause, each with what it is as far as it is known."""
    seconds = (np.median(pauses.lost_ns, axis=0) / NS_PER_S).tolist()
    names = np.where(pauses.is_planned, "pause", "late input")
    names = np.where(pauses.in_evaluation, "evaluation", names)
    names = np.where(pauses.is_saved, "checkpoint", names)
    return tuple(
        CommonPause(step=int(steps[column]), name=str(name), seconds=seconds[column])
        for column, name in zip(pauses.columns.tolist(), names.tolist(), strict=True)
    )


def format_period(steps: NDArray[np.integer]) -> str:
    """Return "every 5 steps"; "" without two equal distances: one agrees with itself."""
    distances = np.unique(np.diff(steps))
    is_regular = len(steps) > 2 and len(distances) == 1 and distances[0] > 1  # noqa: PLR2004
    return f"every {int(distances[0])} steps" if is_regular else ""


def name_ranks(ranks: NDArray[np.integer], num_ranks: int, verbs: tuple[str, str]) -> str:
    """Return "all ranks save", or "rank 0 of 8 saves, the others wait," if not most of them do.

    Args:
        ranks: Who does it, ascending.
        num_ranks: All ranks of the job.
        verbs: Of one rank, and of several.
    """
    one, several = verbs
    if len(ranks) >= THRESHOLDS.whole_share * num_ranks:
        return f"all ranks {several}"
    who = format_ranks(tuple(ranks.tolist()))
    return f"{who} of {num_ranks:,} {one if len(ranks) == 1 else several}, the others wait,"


def find_longest(took_ns: NDArray[np.float64]) -> int | None:
    """Return which rank takes longest in most steps: its disk is slow, or its share is largest.

    The others wait for it at the end. None if there is none.

    Args:
        took_ns: Shape (ranks, steps), ns: what the pause takes of each.

    Returns:
        Its row.
    """
    num_ranks, num_steps = took_ns.shape
    if num_ranks == 1 or num_steps == 1:
        return None
    first = np.bincount(took_ns.argmax(axis=0), minlength=num_ranks)
    worst = int(first.argmax())
    own_ns, others_ns = _own_and_others(took_ns, worst)
    is_one = first[worst] > THRESHOLDS.one_rank_share * num_steps
    is_longer = own_ns >= (1.0 + THRESHOLDS.critical_share) * others_ns
    return worst if is_one and is_longer else None


def describe_longest(ranks: NDArray[np.integer], took_ns: NDArray[np.float64]) -> str:
    """Return the rank of `find_longest` and its time in words, "" if there is none."""
    worst = find_longest(took_ns)
    if worst is None:
        return ""
    own_ns, others_ns = _own_and_others(took_ns, worst)
    return (
        f"; rank {int(ranks[worst])} for {format_duration(own_ns)}, the others for"
        f" {format_duration(others_ns)} and wait for it"
    )


def _own_and_others(took_ns: NDArray[np.float64], row: int) -> tuple[float, float]:
    """Return the median of one rank, and that of all others."""
    return float(np.median(took_ns[row])), float(np.median(np.delete(took_ns, row, axis=0)))


def pause_candidates(
    cause: Cause,
    gaps: HostGaps,
    pauses: CommonPauses,
    chosen: NDArray[np.bool_],
    *,
    where: str = "outside any compute",
) -> tuple[Candidate, ...]:
    """Return some of the common pauses as one candidate, if there are any.

    Args:
        chosen: Shape (pauses,): those that have this cause.
        where: Where in the step they are, in words.
    """
    columns = pauses.columns[chosen]
    if not len(columns):
        return ()
    lost_ns = pauses.lost_ns
    places = [place for place in Place if place not in (Place.EVALUATION, Place.COMPILATION)]
    # Where the others lose nothing, a rank pauses on its own; but one may save for all.
    mine = gaps.is_at(*places) & np.isin(gaps.column, columns)
    saved = np.isin(gaps.column, pauses.columns[chosen & pauses.is_saved])
    mine &= pauses.covers_gap | (saved & gaps.is_at(Place.CHECKPOINT))
    total_ns = {place: gaps.total_ns(place) for place in places}
    usual = {
        place: np.broadcast_to(row_medians(total)[:, None], total.shape)
        for place, total in total_ns.items()
    }
    # What one rank takes longer in the same span of the job's own is no pause of all.
    of_job = total_ns[Place.SPAN]
    usual[Place.SPAN] = np.maximum(usual[Place.SPAN], of_job - lower_medians(of_job))
    expected = [((place,), level) for place, level in usual.items()]
    steps = gaps.profile.steps[columns]
    how_often = format_period(columns) or format_count(len(columns), "time")
    typical = format_duration(float(np.median(lower_medians(lost_ns[:, columns]))))
    took_ns = sum_cells(lost_ns.shape, gaps.row[mine], gaps.column[mine], gaps.gaps.gap_ns[mine])
    longest = describe_longest(gaps.profile.ranks, took_ns[:, columns])
    pause = Candidate(
        cause=cause,
        ranks=tuple(gaps.profile.ranks.tolist()),
        steps=(int(steps[0]), int(steps[-1])),
        part=gaps.part(mine),
        fixed_ns=gaps.fixed_ns(mine, expected),
        excess_ratio=float(
            np.median(lower_medians((lost_ns / gaps.compute_ns[:, None])[:, columns]))
        ),
        threshold=THRESHOLDS.min_excess_ratio,
        evidence=(
            f"{'all ranks pause together' if len(lost_ns) > 1 else 'the rank pauses'}"
            f" for {typical} {where}, {how_often},"
            f" in {format_steps((int(steps[0]), int(steps[-1])))}{longest}"
        ),
        on_host=True,
    )
    return (pause,)
