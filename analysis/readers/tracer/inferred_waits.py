"""Waits that nobody recorded: a stream that stands until a communication ends was waiting for it.

Not every wait leaves a record: where a library waits in its own threads (the
gradient buckets of a data-parallel wrapper), the trace shows a communication
that ends and compute that goes on with it, and nothing that joins the two.
Left alone, the time between looks like a host that launches late, on all ranks
but the late one.
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
"""What waited for a communication goes on within this of its end. Source: as
`analysis.breakdown.starved.UNEXPLAINED_GAP_NS`, what launching takes."""

MIN_STEPS = 3
"""Steps in which a rank must go on with the end of the same communication, at the same place of
its program. A host that stalls goes on at any time: of gaps of 1 ms one in ten ends within the
slack on either side by chance, and one in a thousand three times. Source: design.md section 5 asks
as much of a host stall."""

MIN_RANKS = 2
"""Ranks of a group (of several that were traced) that must show it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnwaitedComm:
    """Communications of which it is asked who waits; all of shape (communications,)."""

    comm: NDArray[np.int64]
    """Rows of the span table."""

    window: NDArray[np.int64]
    """The (step, rank) that launched each."""

    launch: NDArray[np.int64]
    """Positions on the line."""

    end: NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankActivity:
    """What ranks are known to do; positions on the line."""

    start: NDArray[np.int64]
    """Shape (intervals,): compute, waits for something else, and what a host did itself."""

    end: NDArray[np.int64]

    marks: NDArray[np.int64]
    """Shape (marks,): when a host that computes launched a communication."""

    unsure: NDArray[np.int64]
    """Those of the marks at which it may only have come out of its queue, ascending."""


@dataclass(frozen=True, slots=True)
class _StreamState:
    """What a rank did as each communication ended; all of shape (communications,)."""

    stood: NDArray[np.int64]
    """From when its stream stood; `NOT_FOUND` where it did something then."""

    place: NDArray[np.int64]
    """Which of the step's doings came next, from 0; beyond all where it outlasts the step."""

    goes_on: NDArray[np.int64]
    """When that was."""

    with_end: NDArray[np.bool_]
    """Whether it went on with that end."""


def infer_waits(
    spans: SpanTable, windows: RankSteps, launched: UnwaitedComm, busy: RankActivity
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Find the waits for communications that have no record of one.

    A rank waited for a communication where, in `MIN_STEPS` steps, its
    stream stood until that communication ended and went on with the end, at
    the same place of its program; where it was as often as not that end with
    which it went on, if it stood at all as the communication ended; and where
    it never went past that place before. Of a collective, `MIN_RANKS`
    members must show it. Then it waited there in every step, also where it
    went on later: the rest of such a gap is its own.

    Args:
        spans: The spans.
        windows: Each (step, rank)'s step.
        launched: Asynchronous communications whose end is known and for which no wait is
            recorded.
        busy: What ranks are known to do, or to wait for otherwise.

    Returns:
        For each wait the index into ``launched`` of what was waited for, and (start, end) on the
        line: from when the stream stood to the communication's end.
    """
    if not len(launched.comm) or not len(busy.start):
        nothing = np.zeros(0, dtype=np.int64)
        return nothing, nothing, nothing
    seen = _observe_streams(windows, launched, busy)
    waits = _find_established(spans, windows, launched, seen) & (seen.stood != NOT_FOUND)
    found = np.flatnonzero(waits)
    return found, seen.stood[found], np.minimum(launched.end, seen.goes_on)[found]


def _observe_streams(
    windows: RankSteps, launched: UnwaitedComm, busy: RankActivity
) -> _StreamState:
    window, end = launched.window, launched.end
    begins = np.sort(np.concatenate((busy.start, busy.marks)))
    first = np.searchsorted(begins, windows.start)[window]
    last = np.searchsorted(begins, windows.end)[window]
    after = np.maximum(np.searchsorted(begins, end - RESUME_SLACK_NS), first)
    # What waits to the end of its step goes on with the step's own end.
    goes_on = np.where(after < last, np.append(begins, 0)[after], windows.end[window])
    place = np.minimum(after, last) - first
    outlasts = end > windows.end[window] + RESUME_SLACK_NS
    place[outlasts] = len(begins)

    until = np.minimum(end, goes_on)
    stood = np.maximum(launched.launch, windows.start[window])
    whole_start, whole_end = merge_intervals(busy.start, busy.end)
    before = np.searchsorted(whole_start, until) - 1
    stood = np.maximum(stood, np.where(before >= 0, whole_end[before], NOT_FOUND))
    # What its host did in the gap it did before it waited.
    marks = np.sort(busy.marks)
    marks = marks[~is_in_sorted(marks, busy.unsure)]
    before = np.searchsorted(marks, until - RESUME_SLACK_NS) - 1
    stood = np.maximum(stood, np.where(before >= 0, np.append(marks, 0)[before], NOT_FOUND))
    is_gap = ~outlasts & (until - stood > RESUME_SLACK_NS)
    is_gap &= ~is_in_sorted(goes_on, busy.unsure)
    return _StreamState(
        stood=np.where(is_gap, stood, NOT_FOUND),
        place=place,
        goes_on=goes_on,
        with_end=is_gap & (goes_on - end <= RESUME_SLACK_NS),
    )


def _find_established(
    spans: SpanTable, windows: RankSteps, launched: UnwaitedComm, seen: _StreamState
) -> NDArray[np.bool_]:
    """Tell which communications their rank waits for at the place where it goes on."""
    comm, window = launched.comm, launched.window
    rank, source, target = spans.rank[comm], spans.src_rank[comm], spans.dst_rank[comm]
    # Members of a group run one program; the two ends of a pair wait in places of their own.
    of_rank = np.where((source >= 0) | (target >= 0), rank, NOT_FOUND)
    carrier, _ = factorize(spans.group_id[comm].view(np.int64), source, target)
    order = argsort_rows(window, carrier, spans.seq[comm])
    in_step, _ = factorize(window[order], carrier[order])
    turn = np.empty(len(comm), dtype=np.int64)
    turn[order] = cumcount(in_step)
    what, num = factorize(carrier, turn, of_rank)
    there, num_there = factorize(what, seen.place)

    with_end = np.flatnonzero(seen.with_end)
    support = np.bincount(there[with_end], minlength=num_there)
    stood = np.bincount(there[seen.stood != NOT_FOUND], minlength=num_there)
    steps = _count_distinct(there[with_end], windows.step_index[window[with_end]], num_there)
    ranks = _count_distinct(there[with_end], rank[with_end], num_there)
    enough = (steps >= MIN_STEPS) & (2 * support >= stood)
    members = np.minimum(_count_distinct(what, rank, num), MIN_RANKS)
    waits = enough[there] & (ranks[there] >= members[what])
    # Whoever went past that place before the end does not wait there.
    place = np.full(num, NOT_FOUND)
    np.maximum.at(place, what[waits], seen.place[waits])
    past = np.bincount(what[seen.place > place[what]], minlength=num) > 0
    found: NDArray[np.bool_] = waits & (seen.place == place[what]) & ~past[what]
    return found


def _count_distinct(
    key: NDArray[np.int64], value: NDArray[np.integer], num: int
) -> NDArray[np.int64]:
    """Count the distinct values of each key."""
    pair, num_pairs = factorize(key, value)
    first = np.zeros(num_pairs, dtype=np.int64)
    first[pair] = key
    found: NDArray[np.int64] = np.bincount(first, minlength=num)
    return found
