"""Waits without a record, inferred from a stream that is idle until a communication ends.

Not every wait leaves a record. If a library waits in its own threads (for the gradient buckets of
a data-parallel wrapper), the trace shows a communication that ends and compute that resumes with
it, and nothing that joins the two. Without the inference, the time between looks like a late
launch by the host, on all ranks but the late one.

A module of its own: it is a statistical decision, which `matched_waits` only applies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ...arrays.grouping import cumcount, factorize
from ...arrays.intervals import NOT_FOUND, merge_intervals
from ...arrays.sorting import argsort_rows, is_in_sorted

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ...trace.tables import SpanTable
    from .pieces import RankSteps

RESUME_SLACK_NS = 50_000
"""A stream that waited for a communication resumes within this of its end: the time of a launch.
Source: as `analysis.breakdown.starved.UNEXPLAINED_GAP_NS`."""

MIN_STEPS = 3
"""Steps in which a rank must resume with the end of the same communication, at the same place of
its program. A stalled host resumes at any time: of gaps of 1 ms, one in ten ends within the slack
on either side by chance, and one in a thousand does so three times. A host stall
needs as many."""

MIN_RANKS = 2
"""Ranks of a group that must show it, if several were traced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnwaitedComm:
    """Communications without a recorded wait; all of shape (communications,)."""

    comm: NDArray[np.int64]
    """Rows of the span table."""

    rank_step: NDArray[np.int64]
    """The (step, rank) that launched it, as an index into `RankSteps`."""

    launch: NDArray[np.int64]
    """Positions on the number line."""

    end: NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankActivity:
    """Known activity of all ranks, as positions on the number line."""

    start: NDArray[np.int64]
    """Shape (intervals,): compute, waits for other things, and host spans."""

    end: NDArray[np.int64]

    launches: NDArray[np.int64]
    """Shape (launches,): launches of communications by hosts that compute."""

    uncertain: NDArray[np.int64]
    """Those of them at which the communication may only have left its queue, ascending."""


@dataclass(frozen=True, slots=True)
class _StreamState:
    """State of a rank's stream at the end of each communication; all of shape (communications,)."""

    idle_since: NDArray[np.int64]
    """Begin of its idle time; `NOT_FOUND` if it was busy."""

    place: NDArray[np.int64]
    """Number of the step's next activity, from 0; beyond all if the communication outlasts the
    step."""

    resumes: NDArray[np.int64]
    """Begin of that activity."""

    with_end: NDArray[np.bool_]
    """Whether it resumed with the communication's end."""


def infer_waits(
    spans: SpanTable, rank_steps: RankSteps, unwaited: UnwaitedComm, activity: RankActivity
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Find the waits for communications that have no record of one.

    A rank waits for a communication if, at one place of its program,

    * its stream was idle until the communication ended and resumed with the end, in `MIN_STEPS`
      steps, and in at least half of the steps in which it was idle at that end;
    * it never went past that place before the end;
    * `min_peers` members of a collective show the same.

    Then it waited there in every step, also if it resumed later: the rest of such a gap is its
    own.

    Args:
        unwaited: Asynchronous communications with a known end and no recorded wait.
        activity: Known activity of the ranks, and their other waits.

    Returns:
        For each wait the index into ``unwaited``, and (start, end) on the line: from the begin of
        the idle time to the communication's end.
    """
    if not len(unwaited.comm) or not len(activity.start):
        nothing = np.zeros(0, dtype=np.int64)
        return nothing, nothing, nothing
    state = _observe_streams(rank_steps, unwaited, activity)
    waits = _find_established(spans, rank_steps, unwaited, state)
    rows = np.flatnonzero(waits & (state.idle_since != NOT_FOUND))
    return rows, state.idle_since[rows], np.minimum(unwaited.end, state.resumes)[rows]


def _observe_streams(
    rank_steps: RankSteps, unwaited: UnwaitedComm, activity: RankActivity
) -> _StreamState:
    rank_step, end = unwaited.rank_step, unwaited.end
    begins = np.sort(np.concatenate((activity.start, activity.launches)))
    first = np.searchsorted(begins, rank_steps.start)[rank_step]
    last = np.searchsorted(begins, rank_steps.end)[rank_step]
    after = np.maximum(np.searchsorted(begins, end - RESUME_SLACK_NS), first)
    # A wait until the end of the step resumes with the step's own end.
    resumes = np.where(after < last, np.append(begins, 0)[after], rank_steps.end[rank_step])
    place = np.minimum(after, last) - first
    outlasts = end > rank_steps.end[rank_step] + RESUME_SLACK_NS
    place[outlasts] = len(begins)

    until = np.minimum(end, resumes)
    idle_since = np.maximum(unwaited.launch, rank_steps.start[rank_step])
    busy_start, busy_end = merge_intervals(activity.start, activity.end)
    before = np.searchsorted(busy_start, until) - 1
    idle_since = np.maximum(idle_since, np.where(before >= 0, busy_end[before], NOT_FOUND))
    # What the host launched in the gap, it launched before it waited.
    launches = np.sort(activity.launches)
    launches = launches[~is_in_sorted(launches, activity.uncertain)]
    before = np.searchsorted(launches, until - RESUME_SLACK_NS) - 1
    last_launch = np.where(before >= 0, np.append(launches, 0)[before], NOT_FOUND)
    idle_since = np.maximum(idle_since, last_launch)
    is_gap = ~outlasts & (until - idle_since > RESUME_SLACK_NS)
    is_gap &= ~is_in_sorted(resumes, activity.uncertain)
    return _StreamState(
        idle_since=np.where(is_gap, idle_since, NOT_FOUND),
        place=place,
        resumes=resumes,
        with_end=is_gap & (resumes - end <= RESUME_SLACK_NS),
    )


def _find_established(
    spans: SpanTable, rank_steps: RankSteps, unwaited: UnwaitedComm, state: _StreamState
) -> NDArray[np.bool_]:
    """Return the communications that their rank waits for at the place where it resumes."""
    comm, rank_step = unwaited.comm, unwaited.rank_step
    rank, source, target = spans.rank[comm], spans.src_rank[comm], spans.dst_rank[comm]
    # Members of a group run one program; the two ends of a pair wait at places of their own.
    end_rank = np.where((source >= 0) | (target >= 0), rank, NOT_FOUND)
    link, _ = factorize(spans.group_id[comm].view(np.int64), source, target)
    order = argsort_rows(rank_step, link, spans.seq[comm])
    in_step, _ = factorize(rank_step[order], link[order])
    turn = np.empty(len(comm), dtype=np.int64)
    turn[order] = cumcount(in_step)
    kind, num_kinds = factorize(link, turn, end_rank)
    kind_place, num_kind_places = factorize(kind, state.place)

    with_end = np.flatnonzero(state.with_end)
    support = np.bincount(kind_place[with_end], minlength=num_kind_places)
    idle = np.bincount(kind_place[state.idle_since != NOT_FOUND], minlength=num_kind_places)
    step_index = rank_steps.step_index[rank_step[with_end]]
    steps = _count_distinct(kind_place[with_end], step_index, num_kind_places)
    ranks = _count_distinct(kind_place[with_end], rank[with_end], num_kind_places)
    enough = (steps >= MIN_STEPS) & (2 * support >= idle)
    min_ranks = np.minimum(_count_distinct(kind, rank, num_kinds), MIN_RANKS)
    waits = enough[kind_place] & (ranks[kind_place] >= min_ranks[kind])
    # A rank that went past that place before the end does not wait there.
    place = np.full(num_kinds, NOT_FOUND)
    np.maximum.at(place, kind[waits], state.place[waits])
    went_past = np.bincount(kind[state.place > place[kind]], minlength=num_kinds) > 0
    is_waited: NDArray[np.bool_] = waits & (state.place == place[kind]) & ~went_past[kind]
    return is_waited


def _count_distinct(
    key: NDArray[np.int64], value: NDArray[np.integer], num_keys: int
) -> NDArray[np.int64]:
    pair, num_pairs = factorize(key, value)
    key_of_pair = np.zeros(num_pairs, dtype=np.int64)
    key_of_pair[pair] = key
    return np.bincount(key_of_pair, minlength=num_keys)
