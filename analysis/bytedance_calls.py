"""How the workers of a ByteDance trace wait for their sends and receives, and when they leave them.

The format records no calls: they are read off what begins and ends together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from analysis.bytedance_format import (
    BACKWARD_COMPUTE,
    CLOCK_ERROR_TRANSFER_NS,
    CODE,
    FORWARD_COMPUTE,
    NO_OP_SLACK_NS,
    PEER_TO_PEER,
)
from analysis.cells import mean_distances
from analysis.distinct import number_rows
from analysis.intervals import Line
from analysis.ordering import sort_rows

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from analysis.bytedance import Trace

LEAST_TOGETHER = 0.05
"""Share of the transfers that begin and end with another one where a call posts several.

With few micro-batches to a stage most are posted alone, before the first backward and after the
last forward. By chance none is: times are exact to a microsecond.
"""

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
    if not _in_one_call(trace, transfers) and _run_beside(trace, np.sort(start[transfers]), end):
        return since
    last = np.searchsorted(end, start + NO_OP_SLACK_NS, side="right") - 1
    held = np.flatnonzero((last >= 0) & (end[last] // line.stride_ns == start // line.stride_ns))
    since[held] = np.maximum(start[held] - end[last[held]], 0)
    return since


def hidden_by_call(
    trace: Trace, members: NDArray[np.int64], arrival: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Tell the members whose end is that of a call with a transfer whose partner came later.

    Args:
        trace: The trace.
        members: Shape (members,): operations that are members of a group.
        arrival: Shape (members,): when the last of each one's group was there.
    """
    rows = trace.rows
    pairs = np.isin(rows.type[members], [CODE[name] for name in PEER_TO_PEER])
    transfers = members[pairs]
    hidden = np.zeros(len(members), dtype=np.bool_)
    if not _in_one_call(trace, transfers):
        return hidden
    call, num = number_rows(rows.worker[transfers], rows.start[transfers], rows.end[transfers])
    latest = np.zeros(num, dtype=np.int64)
    np.maximum.at(latest, call, arrival[pairs])
    hidden[pairs] = latest[call] > arrival[pairs] + NO_OP_SLACK_NS
    return hidden


def _in_one_call(trace: Trace, transfers: NDArray[np.int64]) -> bool:
    """Tell whether sends and receives of one worker begin and end together more than by chance."""
    rows = trace.rows
    order = transfers[sort_rows(rows.worker[transfers], rows.start[transfers], rows.end[transfers])]
    before, after = order[:-1], order[1:]
    together = rows.worker[before] == rows.worker[after]
    together &= rows.start[before] == rows.start[after]
    together &= (rows.end[before] == rows.end[after]) & (rows.type[before] != rows.type[after])
    return bool(together.sum() > LEAST_TOGETHER * len(transfers))


def _run_beside(trace: Trace, start: NDArray[np.int64], end: NDArray[np.int64]) -> bool:
    """Tell whether transfers run beside computes: a host that waits for each at once computes
    nothing while one is open.

    Args:
        trace: The trace.
        start: Shape (transfers,): when they begin on the line of all workers, ascending.
        end: Shape (transfers,): when they end, ascending.
    """
    rows = trace.rows
    computes = np.flatnonzero(
        (rows.type == CODE[FORWARD_COMPUTE]) | (rows.type == CODE[BACKWARD_COMPUTE])
    )
    worker = rows.worker.astype(np.int32)
    line = Line.over(worker, rows.start, rows.end)
    begins = line.place(worker[computes], rows.start[computes]) + NO_OP_SLACK_NS
    ends = line.place(worker[computes], rows.end[computes]) - NO_OP_SLACK_NS
    num_open = np.searchsorted(start, ends) - np.searchsorted(end, begins)
    beside = (num_open > 0) & (ends > begins)
    return bool(beside.sum() > MOST_BESIDE * len(computes))


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
