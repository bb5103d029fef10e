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

from ...arrays.grouping import number_rows, positions_in_runs
from ...arrays.intervals import NOWHERE, union
from ...arrays.sorting import is_among, sort_rows

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ...trace.tables import SpanTable
    from .pieces import Windows

RESUME_SLACK_NS = 50_000
"""What waited for a communication goes on within this of its end. Source: as
`analysis.breakdown.starved.UNEXPLAINED_GAP_NS`, what launching takes."""

LEAST_STEPS = 3
"""Steps in which a rank must go on with the end of the same communication, at the same place of
its program. A host that stalls goes on at any time: of gaps of 1 ms one in ten ends within the
slack on either side by chance, and one in a thousand three times. Source: design.md section 5 asks
as much of a host stall."""

LEAST_RANKS = 2
"""Ranks of a group (of several that were traced) that must show it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """Communications of which it is asked who waits; all of shape (communications,)."""

    comm: NDArray[np.int64]
    """Rows of the span table."""

    window: NDArray[np.int64]
    """The (step, rank) that launched each."""

    launch: NDArray[np.int64]
    """Positions on the line."""

    end: NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Busy:
    """What ranks are known to do; positions on the line."""

    start: NDArray[np.int64]
    """Shape (intervals,): compute, waits for something else, and what a host did itself."""

    end: NDArray[np.int64]

    marks: NDArray[np.int64]
    """Shape (marks,): when a host that computes launched a communication."""

    unsure: NDArray[np.int64]
    """Those of the marks at which it may only have come out of its queue, ascending."""


@dataclass(frozen=True, slots=True)
class _Seen:
    """What a rank did as each communication ended; all of shape (communications,)."""

    stood: NDArray[np.int64]
    """From when its stream stood; `NOWHERE` where it did something then."""

    place: NDArray[np.int64]
    """Which of the step's doings came next, from 0; beyond all where it outlasts the step."""

    goes_on: NDArray[np.int64]
    """When that was."""

    with_end: NDArray[np.bool_]
    """Whether it went on with that end."""


def unrecorded_waits(
    spans: SpanTable, windows: Windows, launched: Launched, busy: Busy
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Find the waits for communications that have no record of one.

    A rank waited for a communication where, in `LEAST_STEPS` steps, its
    stream stood until that communication ended and went on with the end, at
    the same place of its program; where it was as often as not that end with
    which it went on, if it stood at all as the communication ended; and where
    it never went past that place before. Of a collective, `LEAST_RANKS`
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
    seen = _seen(windows, launched, busy)
    waits = _established(spans, windows, launched, seen) & (seen.stood != NOWHERE)
    found = np.flatnonzero(waits)
    return found, seen.stood[found], np.minimum(launched.end, seen.goes_on)[found]


def _seen(windows: Windows, launched: Launched, busy: Busy) -> _Seen:
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
    whole_start, whole_end = union(busy.start, busy.end)
    before = np.searchsorted(whole_start, until) - 1
    stood = np.maximum(stood, np.where(before >= 0, whole_end[before], NOWHERE))
    # What its host did in the gap it did before it waited.
    marks = np.sort(busy.marks)
    marks = marks[~is_among(marks, busy.unsure)]
    before = np.searchsorted(marks, until - RESUME_SLACK_NS) - 1
    stood = np.maximum(stood, np.where(before >= 0, np.append(marks, 0)[before], NOWHERE))
    is_gap = ~outlasts & (until - stood > RESUME_SLACK_NS)
    is_gap &= ~is_among(goes_on, busy.unsure)
    return _Seen(
        stood=np.where(is_gap, stood, NOWHERE),
        place=place,
        goes_on=goes_on,
        with_end=is_gap & (goes_on - end <= RESUME_SLACK_NS),
    )


def _established(
    spans: SpanTable, windows: Windows, launched: Launched, seen: _Seen
) -> NDArray[np.bool_]:
    """Tell which communications their rank waits for at the place where it goes on."""
    comm, window = launched.comm, launched.window
    rank, source, target = spans.rank[comm], spans.src_rank[comm], spans.dst_rank[comm]
    # Members of a group run one program; the two ends of a pair wait in places of their own.
    of_rank = np.where((source >= 0) | (target >= 0), rank, NOWHERE)
    carrier, _ = number_rows(spans.group_id[comm].view(np.int64), source, target)
    order = sort_rows(window, carrier, spans.seq[comm])
    in_step, _ = number_rows(window[order], carrier[order])
    turn = np.empty(len(comm), dtype=np.int64)
    turn[order] = positions_in_runs(in_step)
    what, num = number_rows(carrier, turn, of_rank)
    there, num_there = number_rows(what, seen.place)

    with_end = np.flatnonzero(seen.with_end)
    support = np.bincount(there[with_end], minlength=num_there)
    stood = np.bincount(there[seen.stood != NOWHERE], minlength=num_there)
    steps = _num_distinct(there[with_end], windows.step_index[window[with_end]], num_there)
    ranks = _num_distinct(there[with_end], rank[with_end], num_there)
    enough = (steps >= LEAST_STEPS) & (2 * support >= stood)
    members = np.minimum(_num_distinct(what, rank, num), LEAST_RANKS)
    waits = enough[there] & (ranks[there] >= members[what])
    # Whoever went past that place before the end does not wait there.
    place = np.full(num, NOWHERE)
    np.maximum.at(place, what[waits], seen.place[waits])
    past = np.bincount(what[seen.place > place[what]], minlength=num) > 0
    found: NDArray[np.bool_] = waits & (seen.place == place[what]) & ~past[what]
    return found


def _num_distinct(
    key: NDArray[np.int64], value: NDArray[np.integer], num: int
) -> NDArray[np.int64]:
    """Count the distinct values of each key."""
    pair, num_pairs = number_rows(key, value)
    first = np.zeros(num_pairs, dtype=np.int64)
    first[pair] = key
    found: NDArray[np.int64] = np.bincount(first, minlength=num)
    return found
