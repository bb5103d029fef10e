"""Split the communication of some ranks by what is known of all members' arrivals.

`analysis.readers.waits` needs every member's span in one table. Of a step too large for that, one
portion of its ranks is looked at after the other; of the other members it is enough to
know, for each communication instance, how many came and who came last.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from rankscope.tracer.span import NONE, SpanFlag

from ..arrays.grouping import row_keys
from .waits import WaitSplit, is_communication, is_p2p, num_group_members

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ..trace.tables import GroupInfo, SpanTable

P2P_MEMBERS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """One entry for each communication instance of one step; columns of equal length."""

    group_id: NDArray[np.uint64]
    src_rank: NDArray[np.int32]
    """-1 for a collective, as ``dst_rank``."""

    dst_rank: NDArray[np.int32]
    seq: NDArray[np.int64]
    num_spans: NDArray[np.int64]
    num_ranks: NDArray[np.int64]
    """Distinct ones: fewer than spans where a member is there twice."""

    latest_ns: NDArray[np.int64]
    """Start of the last member's span."""

    last_rank: NDArray[np.int32]
    """Whose it was, the lowest of several."""

    def __len__(self) -> int:
        return len(self.seq)


def split_by_arrivals(
    spans: SpanTable, groups: Sequence[GroupInfo], arrivals: Arrivals, *, clock_error_ns: int
) -> WaitSplit:
    """Split the communication of ``spans`` as `readers.waits.split_waits` does the whole step.

    Args:
        spans: Spans of one step, of any of its ranks.
        groups: The run's groups.
        arrivals: Of the step's instances, those that these spans belong to at least.
        clock_error_ns: Largest error left after clock alignment.
    """
    num = len(spans)
    wait_ns = np.full(num, -1, dtype=np.int64)
    transfer_ns, instance = wait_ns.copy(), wait_ns.copy()
    last_rank = np.full(num, NONE, dtype=np.int32)
    joinable = is_communication(spans) & (spans.group_id != 0) & (spans.seq != NONE)
    rows = np.flatnonzero(joinable)
    rows, place = _matched(spans, rows, arrivals)
    if len(rows):
        p2p = is_p2p(spans)[rows]
        expected = np.where(p2p, P2P_MEMBERS, num_group_members(spans.group_id[rows], groups))
        num_spans = arrivals.num_spans[place]
        complete = (num_spans == expected) & (arrivals.num_ranks[place] == num_spans)
        known = complete & ((spans.flags[rows] & SpanFlag.OPEN) == 0)
        rows, place, p2p = rows[known], place[known], p2p[known]
        start, duration = spans.start_ns[rows], spans.duration_ns[rows]
        arrival = arrivals.latest_ns[place]
        sends = p2p & (spans.rank[rows] == spans.src_rank[rows])
        wait_ns[rows] = np.where(sends & (start + duration < arrival), 0, arrival - start)
        transfer_ns[rows] = duration - wait_ns[rows]
        last_rank[rows] = arrivals.last_rank[place]
        instance[rows] = place
    return WaitSplit(
        wait_ns=wait_ns,
        transfer_ns=transfer_ns,
        last_rank=last_rank,
        instance=instance,
        negative=(wait_ns >= 0) & (transfer_ns < -clock_error_ns),
    )


def _matched(
    spans: SpanTable, rows: NDArray[np.intp], arrivals: Arrivals
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return the rows whose instance is known, and the place of each among ``arrivals``."""
    if not len(rows) or not len(arrivals):
        return rows[:0], rows[:0]
    pair = is_p2p(spans)[rows]
    key = row_keys(
        np.concatenate([arrivals.group_id, spans.group_id[rows]]),
        np.concatenate([arrivals.src_rank, np.where(pair, spans.src_rank[rows], NONE)]),
        np.concatenate([arrivals.dst_rank, np.where(pair, spans.dst_rank[rows], NONE)]),
        np.concatenate([arrivals.seq, spans.seq[rows]]),
    )
    known, asked = key[: len(arrivals)], key[len(arrivals) :]
    order = np.argsort(known, kind="stable")
    place = np.minimum(np.searchsorted(known[order], asked), len(known) - 1)
    found = known[order][place] == asked
    return rows[found], order[place[found]]
