"""How the workers of a ByteDance trace wait for their sends and receives, and when they leave them.

The format records no calls: they are read off what begins and ends together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ...arrays.group_stats import mean_distances
from ...arrays.grouping import number_rows
from ...arrays.intervals import Line
from ...arrays.sorting import sort_rows
from .format import (
    BACKWARD_COMPUTE,
    CLOCK_ERROR_TRANSFER_NS,
    CODE,
    FORWARD_COMPUTE,
    NO_OP_SLACK_NS,
    PEER_TO_PEER,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .reader import Trace

ONE_END_NS = 10_000
"""Transfers of one worker that end within this of each other end with one call, whenever each was
posted. Start and duration are rounded apart: as 32-bit floats by 2 us each, 40 s into a step."""

TIGHT_TRANSFERS = 3
"""Clocks of two ranks are known where they are bounded to within so many of their transfers: two,
and the difference between the shortest each way."""

MAX_NS = np.iinfo(np.int64).max // 4

MOST_BESIDE = 0.05
"""Share of the computes that may run beside an open transfer of a worker that waits for each."""


def since_held_up(trace: Trace) -> NDArray[np.int64]:
    """Return how long before each operation its worker's last send or receive had ended.

    Shape (ops,). The largest number where there was none, and everywhere if transfers run beside
    the computes.
    """
    rows = trace.rows
    since = np.full(len(rows.row), np.iinfo(np.int64).max)
    transfers = np.flatnonzero(np.isin(rows.type, [CODE[name] for name in PEER_TO_PEER]))
    if not len(transfers):
        return since
    worker = rows.worker.astype(np.int32)
    line = Line.over(worker, rows.start, rows.end)
    start = line.place(worker, rows.start)
    end = np.sort(line.place(worker[transfers], rows.end[transfers]))
    if _run_beside(trace, line, np.sort(start[transfers]), end):
        return since
    last = np.searchsorted(end, start + NO_OP_SLACK_NS, side="right") - 1
    held = np.flatnonzero((last >= 0) & (end[last] // line.stride_ns == start // line.stride_ns))
    since[held] = np.maximum(start[held] - end[last[held]], 0)
    return since


def hidden_by_call(
    trace: Trace, members: NDArray[np.int64], group: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Tell the members whose end is that of a call with a transfer whose partner came later.

    Args:
        trace: The trace.
        members: Shape (members,): operations that are members of a group.
        group: Shape (members,): their groups.
    """
    rows = trace.rows
    pairs = np.isin(rows.type[members], [CODE[name] for name in PEER_TO_PEER])
    transfers = members[pairs]
    arrival = arrivals(trace, transfers, group[pairs])
    call, num = _calls(trace, transfers)
    latest = np.full(num, np.iinfo(np.int64).min)
    np.maximum.at(latest, call, arrival)
    hidden = np.zeros(len(members), dtype=np.bool_)
    hidden[pairs] = latest[call] > arrival + NO_OP_SLACK_NS
    return hidden


def arrivals(
    trace: Trace, transfers: NDArray[np.int64], group: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return when both ends of each transfer were there, by its own worker's clock.

    Neither end leaves before the other is there, which bounds how far their clocks are apart.
    Within the bounds clocks are taken to agree. Where they cannot, and either end was the last at
    some time, the bounds are a transfer away on both sides, and the middle is taken; else the
    nearer bound.

    Args:
        trace: The trace.
        transfers: Shape (transfers,).
        group: Shape (transfers,): equal for the two ends of one.
    """
    start, end = trace.rows.start[transfers], trace.rows.end[transfers]
    if not len(transfers):
        return start
    order = np.argsort(group, kind="stable")
    other = np.empty(len(order), dtype=np.int64)
    other[order[::2]], other[order[1::2]] = order[1::2], order[::2]
    rank = trace.rank[transfers].astype(np.int64)
    pair, num = number_rows(rank, rank[other])
    least, most = np.full(num, -MAX_NS), np.full(num, MAX_NS)
    shortest = np.full(num, MAX_NS)
    np.maximum.at(least, pair, start[other] - end)
    np.minimum.at(most, pair, end[other] - start)
    np.minimum.at(shortest, pair, np.minimum(end - start, (end - start)[other]))
    apart = np.clip(0, least, most)
    tight = (apart != 0) & (most - least <= TIGHT_TRANSFERS * shortest)
    apart[tight] = (least[tight] + most[tight]) // 2
    apart[most < least] = 0  # sends were buffered: they bound nothing
    found: NDArray[np.int64] = np.maximum(start, start[other] - apart[pair])
    return found


def _calls(trace: Trace, transfers: NDArray[np.int64]) -> tuple[NDArray[np.int64], int]:
    """Return the call of each transfer, shape (transfers,), and how many there are."""
    rows = trace.rows
    order = sort_rows(rows.worker[transfers], rows.end[transfers])
    worker, end = rows.worker[transfers[order]], rows.end[transfers[order]]
    begins = np.ones(len(order), dtype=np.bool_)
    begins[1:] = (worker[1:] != worker[:-1]) | (end[1:] - end[:-1] > ONE_END_NS)
    call = np.empty(len(order), dtype=np.int64)
    call[order] = np.cumsum(begins) - 1
    return call, int(begins.sum())


def _run_beside(trace: Trace, line: Line, start: NDArray[np.int64], end: NDArray[np.int64]) -> bool:
    """Tell whether transfers run beside computes: one is open in the middle of some.

    A host that waits for each at once computes nothing while one is open. At their ends both
    overlap even so: in a published trace by more than 50 us.

    Args:
        trace: The trace.
        line: Holds all workers' times.
        start: Shape (transfers,): when they begin on it, ascending.
        end: Shape (transfers,): when they end, ascending.
    """
    rows = trace.rows
    computes = np.flatnonzero(
        (rows.type == CODE[FORWARD_COMPUTE]) | (rows.type == CODE[BACKWARD_COMPUTE])
    )
    middle = (rows.start[computes] + rows.end[computes]) // 2
    at = line.place(rows.worker[computes].astype(np.int32), middle)
    is_open = np.searchsorted(start, at) > np.searchsorted(end, at, side="right")
    return bool(is_open.sum() > MOST_BESIDE * len(computes))


def left_early(
    trace: Trace,
    members: NDArray[np.int64],
    arrival: NDArray[np.int64],
    *,
    group: NDArray[np.int64],
    carrier: NDArray[np.int64],
) -> NDArray[np.bool_]:
    """Tell the members that left before the last one entered.

    Clocks that disagree make it look so wherever the transfer is shorter than their error: left
    out for that, the shortest instances of some links would go and those links look slow. Members
    that leave together show themselves: their ends lie at one distance, however long they wait.

    Args:
        trace: The trace.
        members: Shape (members,): operations that are members of a group.
        arrival: Shape (members,): when the last of each one's group was there.
        group: Shape (members,): their groups.
        carrier: Shape (keys, members): columns of members of one link are equal.
    """
    rows = trace.rows
    end = rows.end[members]
    early = end < arrival
    unsure = early & (end - arrival > CLOCK_ERROR_TRANSFER_NS)
    if not unsure.any():
        return early
    of_group, num = number_rows(group)
    others = np.bincount(of_group, minlength=num)[of_group] - 1
    since = end - int(end.min())  # sums of it are exact
    total = np.zeros(num, dtype=np.int64)
    np.add.at(total, of_group, since)
    apart = since - (total[of_group] - since) / np.maximum(others, 1)
    key, num_keys = number_rows(*carrier, trace.rank[members].astype(np.int64))
    lasts = (end - rows.start[members]).astype(np.float64)
    together = mean_distances(apart, key, num_keys) < mean_distances(lasts, key, num_keys)
    early[unsure] &= ~together[key[unsure]]
    return early
