"""Split every communication span into the wait for the last member and the transfer after it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from rankscope.tracer.span import COMM_KINDS, KIND_CODES, NONE, SpanFlag, SpanKind

from ..arrays.group_stats import mean_absolute_deviations
from ..arrays.grouping import factorize, is_one_of, row_keys, sorted_unique
from ..arrays.sorting import stable_argsort

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ..trace.tables import GroupInfo, SpanTable


_NO_RANK = np.iinfo(np.int32).max
_P2P_MEMBERS = 2
ROOTED = frozenset({"broadcast", "scatter", "reduce", "gather"})
"""Collectives with a root, by the operation's name."""

_COMM_CODES = sorted(KIND_CODES[kind] for kind in COMM_KINDS)

P2P_MEMBERS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitSplit:
    """One entry per span of the table that was split, in its order."""

    wait_ns: NDArray[np.int64]
    """Shape (spans,): this rank's start to the last arrival, never negative; -1 where unknown:
    the span is no communication, has not ended, or a member of its instance is missing."""

    transfer_ns: NDArray[np.int64]
    """Shape (spans,): the last arrival to this rank's end, so that both sum to the duration;
    -1 where ``wait_ns`` is. Negative where the clocks disagree, never clamped."""

    last_rank: NDArray[np.int32]
    """Shape (spans,): the member that arrived last, the lowest of several; -1 where unknown."""

    instance: NDArray[np.int64]
    """Shape (spans,): equal for the members of one communication instance; -1 where unknown."""

    negative: NDArray[np.bool_]
    """Shape (spans,): the transfer is negative by more than the clock error, which no clock
    explains: whoever sums transfers leaves the step out and names it in ``quality``."""


def is_communication(spans: SpanTable) -> NDArray[np.bool_]:
    """Tell which spans are communication: by their kind, or `OTHER` with a group.

    Returns:
        Shape (spans,). A `WAIT` span is none, though it carries its collective's group.
    """
    grouped_other = (spans.kind == KIND_CODES[SpanKind.OTHER]) & (spans.group_id != 0)
    found: NDArray[np.bool_] = is_one_of(spans.kind, _COMM_CODES) | grouped_other
    return found


def is_p2p(spans: SpanTable) -> NDArray[np.bool_]:
    """Tell which spans name both ends of a pair, so that their ``seq`` counts that pair's p2p.

    Returns:
        Shape (spans,).
    """
    found: NDArray[np.bool_] = (spans.src_rank != NONE) & (spans.dst_rank != NONE)
    return found


def split_waits(spans: SpanTable, groups: Sequence[GroupInfo], *, clock_error_ns: int) -> WaitSplit:
    """Split each communication span of ``spans`` into wait and transfer.

    The spans of one communication instance, one on each member, have equal
    ``(epoch, group_id, seq)``, p2p ``(epoch, group_id, src_rank, dst_rank, seq)``.
    No byte of a reduction can be final before the last member has arrived, so
    over each instance::

        arrival  = max(start)
        wait     = arrival - start
        transfer = end - arrival
        wait + transfer == duration

    A send that ended before its receive began went into a buffer: it waited
    for nobody, and all of it is transfer (within the clock error only where its
    pair's sends show it, `_is_buffered_send`).

    Args:
        spans: Any spans of one run, in any order.
        groups: The run's groups; a group that is not here has an unknown number
            of members, so its collectives stay unsplit.
        clock_error_ns: Largest error left after clock alignment.

    Returns:
        The split, in the order of ``spans``.

    Source:
        Lin et al., "Understanding Stragglers in Large Model Training Using
        What-if Analysis" (arXiv 2505.05713), the definition of transfer duration.
    """
    num_spans = len(spans)
    wait_ns = np.full(num_spans, -1, dtype=np.int64)
    transfer_ns = np.full(num_spans, -1, dtype=np.int64)
    last_rank = np.full(num_spans, NONE, dtype=np.int32)
    instance = np.full(num_spans, -1, dtype=np.int64)

    rows, first, complete = _join_instances(spans, groups)
    if len(rows):
        start, duration = spans.start_ns[rows], spans.duration_ns[rows]
        sizes = np.diff(first, append=len(rows))
        arrival = np.repeat(np.maximum.reduceat(start, first), sizes)
        candidates = np.where(start == arrival, spans.rank[rows], _NO_RANK)
        last = np.repeat(np.minimum.reduceat(candidates, first), sizes)
        ended = (spans.flags[rows] & SpanFlag.OPEN) == 0
        known = np.repeat(complete, sizes) & ended
        buffered = _is_buffered_send(spans, rows, arrival, first, clock_error_ns=clock_error_ns)
        wait = np.where(buffered, 0, arrival - start)
        wait_ns[rows[known]] = wait[known]
        transfer_ns[rows[known]] = (duration - wait)[known]
        last_rank[rows[known]] = last[known]
        instance[rows[known]] = np.repeat(np.arange(len(first)), sizes)[known]

    negative = (wait_ns >= 0) & (transfer_ns < -clock_error_ns)
    return WaitSplit(
        wait_ns=wait_ns,
        transfer_ns=transfer_ns,
        last_rank=last_rank,
        instance=instance,
        negative=negative,
    )


def is_one_sided(spans: SpanTable, split: WaitSplit) -> NDArray[np.bool_]:
    """Tell the members of rooted collectives that did not wait for all of their members.

    In a broadcast or scatter a member may leave as soon as the root has sent,
    in a reduce or gather as soon as its own part is on its way: that the last
    one had not entered by then is no error of a clock.

    Args:
        spans: The table.
        split: Its split.

    Returns:
        Shape (spans,): all members of an instance in which one left before the last one entered.
    """
    rooted = np.array([name in ROOTED for name in spans.names], dtype=np.bool_)
    of_span = rooted[spans.name] if len(spans) else np.zeros(0, dtype=np.bool_)
    early = of_span & (split.instance >= 0) & (split.transfer_ns < 0)
    return of_span & np.isin(split.instance, sorted_unique(split.instance[early]))


def _join_instances(
    spans: SpanTable, groups: Sequence[GroupInfo]
) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.bool_]]:
    """Bring the spans of each instance together.

    Returns:
        Rows of ``spans`` that can be joined, instance by instance; where each
        instance begins in them; whether it has each of its members once.
    """
    p2p = is_p2p(spans)
    joinable = is_communication(spans) & (spans.group_id != 0) & (spans.seq != NONE)
    rows = np.flatnonzero(joinable)
    if not len(rows):
        return rows, rows, np.zeros(0, dtype=np.bool_)
    instance = instance_keys(spans, rows)
    by_member = stable_argsort(row_keys(instance, spans.rank[rows]))
    rows, instance = rows[by_member], instance[by_member]

    changes = np.diff(instance, prepend=instance[0] - 1) != 0
    first = np.flatnonzero(changes)
    twice = np.zeros(len(rows), dtype=np.bool_)
    twice[1:] = ~changes[1:] & (spans.rank[rows[1:]] == spans.rank[rows[:-1]])
    sizes = np.diff(first, append=len(rows))
    expected = np.where(
        p2p[rows[first]], _P2P_MEMBERS, num_group_members(spans.group_id[rows[first]], groups)
    )
    complete = (sizes == expected) & ~np.logical_or.reduceat(twice, first)
    return rows, first, complete


def instance_keys(spans: SpanTable, rows: NDArray[np.intp]) -> NDArray[np.int64]:
    """Return one number per row, equal for the spans of one communication instance.

    A `WAIT` span shares its communication's number, so the two can be joined.

    Args:
        spans: The table.
        rows: Shape (rows,): which of its spans; numbers of two calls do not compare.
    """
    pair = is_p2p(spans)[rows]
    return row_keys(
        spans.epoch[rows],
        spans.group_id[rows],
        np.where(pair, spans.src_rank[rows], NONE),
        np.where(pair, spans.dst_rank[rows], NONE),
        spans.seq[rows],
    )


def num_group_members(
    group_id: NDArray[np.uint64], groups: Sequence[GroupInfo]
) -> NDArray[np.int64]:
    """Return the size of each group, shape as given; -1 where it is not among ``groups``."""
    if not groups:
        return np.full(len(group_id), -1, dtype=np.int64)
    known = {group.group_id: len(group.members) for group in groups}
    ids = np.array(sorted(known), dtype=np.uint64)
    sizes = np.array([known[int(group)] for group in ids], dtype=np.int64)
    place = np.minimum(np.searchsorted(ids, group_id), len(ids) - 1)
    return np.where(ids[place] == group_id, sizes[place], -1)


def _is_buffered_send(
    spans: SpanTable,
    rows: NDArray[np.intp],
    arrival: NDArray[np.int64],
    first: NDArray[np.intp],
    *,
    clock_error_ns: int,
) -> NDArray[np.bool_]:
    """Tell which rows are p2p sends that had ended before the receive began.

    Clocks that disagree make a send that did wait look so, where its transfer is shorter than
    their error. Such a pair shows itself: both ends end together, however late the receive begins,
    so their ends lie at one distance, while the send lasts now long and now not. A buffered send
    lasts as long each time.

    Args:
        spans: The spans.
        rows: Shape (rows,): rows of the spans, by instance.
        arrival: Shape (rows,): when the last member of its instance began.
        first: Shape (instances,): where each begins in ``rows``.
        clock_error_ns: Largest error left after clock alignment.
    """
    end = spans.start_ns[rows] + spans.duration_ns[rows]
    sends = is_p2p(spans)[rows] & (spans.rank[rows] == spans.src_rank[rows])
    found: NDArray[np.bool_] = sends & (end < arrival)
    unsure = np.flatnonzero(found & (arrival - end <= clock_error_ns))
    if not len(unsure):
        return found
    size = np.diff(first, append=len(rows))
    of_row = np.repeat(np.arange(len(first)), size)
    pair = np.flatnonzero(sends & (size == _P2P_MEMBERS)[of_row])
    other = 2 * first[of_row[pair]] + 1 - pair
    columns = (spans.epoch, spans.group_id, spans.src_rank, spans.dst_rank)
    key, num = factorize(*(column[rows[pair]] for column in columns))
    apart = mean_absolute_deviations((end[other] - end[pair]).astype(np.float64), key, num)
    lasts = mean_absolute_deviations(spans.duration_ns[rows[pair]].astype(np.float64), key, num)
    locked = np.zeros(len(rows), dtype=np.bool_)
    locked[pair] = (apart < lasts)[key]
    found[unsure] &= ~locked[unsure]
    return found


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
    rows, place = _match_arrivals(spans, rows, arrivals)
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


def _match_arrivals(
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
