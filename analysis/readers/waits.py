"""Wait and transfer of each communication span, and the instances that its members share.

`split_traced_waits` is the one split of a traced run: the verdict, the rollups and the timeline
use it. `analysis.readers.bytedance.reader` infers the instances of that format.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from rankscope.tracer.span import COMM_KINDS, KIND_CODES, NONE, SpanFlag, SpanKind

from ..arrays.group_stats import mean_absolute_deviations
from ..arrays.grouping import factorize, is_one_of, row_keys, sorted_unique
from ..arrays.sorting import stable_argsort
from ..trace.tables import traced_groups

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ..trace.tables import GroupInfo, RunInfo, SpanTable

UNMEASURED_CLOCK_ERROR_NS = 10_000_000
"""Tolerance between clocks whose error was never measured. Source: arXiv 2505.05713 takes
transfers of -10 ms and less for clock error."""

ROOTED = frozenset({"broadcast", "scatter", "reduce", "gather"})
"""Collectives with a root, by the operation's name."""

_MAX_RANK = np.iinfo(np.int32).max
_P2P_MEMBERS = 2
_COMM_CODES = sorted(KIND_CODES[kind] for kind in COMM_KINDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitSplit:
    """Wait and transfer of the spans of a table, in its order."""

    wait_ns: NDArray[np.int64]
    """Shape (spans,): own start to the last arrival, never negative. -1 if unknown: the span is
    no communication, has not ended, or a member of its instance is missing."""

    transfer_ns: NDArray[np.int64]
    """Shape (spans,): the last arrival to the own end, so that both sum to the duration; -1 if
    ``wait_ns`` is. Negative if the clocks disagree, never clamped."""

    last_rank: NDArray[np.int32]
    """Shape (spans,): the member that arrived last, the lowest of several; -1 if unknown."""

    instance: NDArray[np.int64]
    """Shape (spans,): equal for the members of one communication instance; -1 if unknown."""

    negative: NDArray[np.bool_]
    """Shape (spans,): the transfer is negative by more than the clock error. A caller that sums
    transfers leaves the step out and names it in ``quality``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """The last arrival of each communication instance of one step; columns of equal length."""

    group_id: NDArray[np.uint64]
    src_rank: NDArray[np.int32]
    """-1 for a collective, like ``dst_rank``."""

    dst_rank: NDArray[np.int32]
    seq: NDArray[np.int64]
    num_spans: NDArray[np.int64]
    num_ranks: NDArray[np.int64]
    """Distinct ranks: fewer than ``num_spans`` if a member occurs twice."""

    latest_ns: NDArray[np.int64]
    """Start of the last member's span."""

    last_rank: NDArray[np.int32]
    """The last member, the lowest of several."""

    def __len__(self) -> int:
        return len(self.seq)


def is_communication(spans: SpanTable) -> NDArray[np.bool_]:
    """Return which spans are communication: by their kind, or `OTHER` with a group.

    Returns:
        Shape (spans,). False for a `WAIT` span, although it carries its collective's group.
    """
    grouped_other = (spans.kind == KIND_CODES[SpanKind.OTHER]) & (spans.group_id != 0)
    is_comm: NDArray[np.bool_] = is_one_of(spans.kind, _COMM_CODES) | grouped_other
    return is_comm


def is_p2p(spans: SpanTable) -> NDArray[np.bool_]:
    """Return which spans name both ends of a pair, whose p2p operations their ``seq`` counts.

    Returns:
        Shape (spans,).
    """
    is_pair: NDArray[np.bool_] = (spans.src_rank != NONE) & (spans.dst_rank != NONE)
    return is_pair


def split_traced_waits(
    run: RunInfo, spans: SpanTable, *, arrivals: Arrivals | None = None
) -> WaitSplit:
    """Split the communication spans of a traced run into wait and transfer.

    Args:
        spans: Any of its spans, in any order.
        arrivals: If given, ``spans`` are those of some ranks of one step, and these are the last
            arrivals over all ranks. If None, ``spans`` hold every member of each instance.
    """
    groups = traced_groups(run)
    if arrivals is None:
        return split_waits(spans, groups, clock_error_ns=run.clock_error_ns)
    return _split_by_arrivals(spans, groups, arrivals, clock_error_ns=run.clock_error_ns)


def split_waits(
    spans: SpanTable, groups: Sequence[GroupInfo], *, clock_error_ns: int | None
) -> WaitSplit:
    """Split each communication span of ``spans`` into wait and transfer.

    The spans of one communication instance, one per member, have equal
    ``(epoch, group_id, seq)``, p2p ``(epoch, group_id, src_rank, dst_rank, seq)``.
    No byte of a reduction can be final before the last member has arrived, so
    over each instance::

        arrival  = max(start)
        wait     = arrival - start
        transfer = end - arrival
        wait + transfer == duration

    A send that ended before its receive began was buffered: it did not wait, and all of it is
    transfer (`_is_buffered_send` decides within the clock error).

    Args:
        spans: Any spans of one run, in any order.
        groups: The run's groups. Collectives of any other group stay unsplit, because its number
            of members is unknown.
        clock_error_ns: Largest error left after clock alignment; None if it was never measured:
            then `UNMEASURED_CLOCK_ERROR_NS` is tolerated.

    Source:
        Lin et al., "Understanding Stragglers in Large Model Training Using
        What-if Analysis" (arXiv 2505.05713), the definition of transfer duration.
    """
    tolerance_ns = _tolerance_ns(clock_error_ns)
    rows, first, complete = _join_instances(spans, groups)
    if not len(rows):
        return split_at_arrivals(spans, rows, rows, last_rank=rows, instance=rows)
    sizes = np.diff(first, append=len(rows))
    start = spans.start_ns[rows]
    arrival = np.repeat(np.maximum.reduceat(start, first), sizes)
    candidates = np.where(start == arrival, spans.rank[rows], _MAX_RANK)
    last = np.repeat(np.minimum.reduceat(candidates, first), sizes)
    buffered = _is_buffered_send(spans, rows, arrival, first, tolerance_ns=tolerance_ns)
    known = np.repeat(complete, sizes) & ((spans.flags[rows] & SpanFlag.OPEN) == 0)
    return split_at_arrivals(
        spans,
        rows[known],
        np.where(buffered, start, arrival)[known],
        last_rank=last[known],
        instance=np.repeat(np.arange(len(first)), sizes)[known],
        tolerance_ns=tolerance_ns,
    )


def _split_by_arrivals(
    spans: SpanTable,
    groups: Sequence[GroupInfo],
    arrivals: Arrivals,
    *,
    clock_error_ns: int | None,
) -> WaitSplit:
    """Split the communication of some ranks of a step, given the arrivals over all of its ranks.

    The result is that of `split_waits` over the whole step, except for a send that seems to have
    ended before its receive within the clock error: without the receive's end it counts as
    buffered.
    """
    joinable = is_communication(spans) & (spans.group_id != 0) & (spans.seq != NONE)
    rows, index = _match_arrivals(spans, np.flatnonzero(joinable), arrivals)
    p2p = is_p2p(spans)[rows]
    expected = np.where(p2p, _P2P_MEMBERS, num_group_members(spans.group_id[rows], groups))
    num_spans = arrivals.num_spans[index]
    known = (num_spans == expected) & (arrivals.num_ranks[index] == num_spans)
    known &= (spans.flags[rows] & SpanFlag.OPEN) == 0
    rows, index, p2p = rows[known], index[known], p2p[known]
    start, arrival = spans.start_ns[rows], arrivals.latest_ns[index]
    sends = p2p & (spans.rank[rows] == spans.src_rank[rows])
    buffered = sends & (start + spans.duration_ns[rows] < arrival)
    return split_at_arrivals(
        spans,
        rows,
        np.where(buffered, start, arrival),
        last_rank=arrivals.last_rank[index],
        instance=index,
        tolerance_ns=_tolerance_ns(clock_error_ns),
    )


def split_at_arrivals(
    spans: SpanTable,
    rows: NDArray[np.intp],
    arrival_ns: NDArray[np.int64],
    *,
    last_rank: NDArray[np.integer],
    instance: NDArray[np.int64],
    tolerance_ns: int = 0,
) -> WaitSplit:
    """Split some spans at given moments and leave the other spans unknown.

    Args:
        rows: Shape (rows,): the spans to split.
        arrival_ns: Shape (rows,): end of the wait.
        last_rank: Shape (rows,): the member that arrived last.
        instance: Shape (rows,): equal for members of one instance.
        tolerance_ns: A transfer below minus this is marked as negative.
    """
    wait_ns = np.full(len(spans), -1, dtype=np.int64)
    transfer_ns, instances = wait_ns.copy(), wait_ns.copy()
    last_ranks = np.full(len(spans), NONE, dtype=np.int32)
    wait_ns[rows] = arrival_ns - spans.start_ns[rows]
    transfer_ns[rows] = spans.duration_ns[rows] - wait_ns[rows]
    last_ranks[rows] = last_rank
    instances[rows] = instance
    return WaitSplit(
        wait_ns=wait_ns,
        transfer_ns=transfer_ns,
        last_rank=last_ranks,
        instance=instances,
        negative=(wait_ns >= 0) & (transfer_ns < -tolerance_ns),
    )


def _tolerance_ns(clock_error_ns: int | None) -> int:
    return UNMEASURED_CLOCK_ERROR_NS if clock_error_ns is None else clock_error_ns


def is_one_sided(spans: SpanTable, split: WaitSplit) -> NDArray[np.bool_]:
    """Return the members of rooted collectives that did not wait for all other members.

    In a broadcast or scatter a member may leave as soon as the root has sent, in a reduce or
    gather as soon as its own part is on its way. Leaving before the last member enters is then
    not a clock error.

    Returns:
        Shape (spans,): all members of an instance in which one left before the last one entered.
    """
    is_rooted_name = np.array([name in ROOTED for name in spans.names], dtype=np.bool_)
    rooted = is_rooted_name[spans.name] if len(spans) else np.zeros(0, dtype=np.bool_)
    early = rooted & (split.instance >= 0) & (split.transfer_ns < 0)
    return rooted & np.isin(split.instance, sorted_unique(split.instance[early]))


def instance_keys(spans: SpanTable, rows: NDArray[np.intp]) -> NDArray[np.int64]:
    """Return one number per row, equal for the spans of one communication instance.

    A `WAIT` span has its communication's number, so the two can be joined.

    Args:
        rows: Shape (rows,): the spans. Numbers of two calls are not comparable.
    """
    pair = is_p2p(spans)[rows]
    return row_keys(
        spans.epoch[rows],
        spans.group_id[rows],
        np.where(pair, spans.src_rank[rows], NONE),
        np.where(pair, spans.dst_rank[rows], NONE),
        spans.seq[rows],
    )


def _join_instances(
    spans: SpanTable, groups: Sequence[GroupInfo]
) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.bool_]]:
    """Sort the spans that can be joined by instance.

    Returns:
        Rows of ``spans``, instance by instance; the index of each instance's first row; whether
        each instance has every member exactly once.
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
    repeats = np.zeros(len(rows), dtype=np.bool_)
    repeats[1:] = ~changes[1:] & (spans.rank[rows[1:]] == spans.rank[rows[:-1]])
    sizes = np.diff(first, append=len(rows))
    expected = np.where(
        p2p[rows[first]], _P2P_MEMBERS, num_group_members(spans.group_id[rows[first]], groups)
    )
    complete = (sizes == expected) & ~np.logical_or.reduceat(repeats, first)
    return rows, first, complete


def num_group_members(
    group_id: NDArray[np.uint64], groups: Sequence[GroupInfo]
) -> NDArray[np.int64]:
    """Return the size of each group, shape as given; -1 if it is not among ``groups``."""
    if not groups:
        return np.full(len(group_id), -1, dtype=np.int64)
    known = {group.group_id: len(group.members) for group in groups}
    ids = np.array(sorted(known), dtype=np.uint64)
    sizes = np.array([known[int(group)] for group in ids], dtype=np.int64)
    index = np.minimum(np.searchsorted(ids, group_id), len(ids) - 1)
    return np.where(ids[index] == group_id, sizes[index], -1)


def _is_buffered_send(
    spans: SpanTable,
    rows: NDArray[np.intp],
    arrival: NDArray[np.int64],
    first: NDArray[np.intp],
    *,
    tolerance_ns: int,
) -> NDArray[np.bool_]:
    """Return which rows are p2p sends that ended before the receive began.

    A send that did wait looks the same if its transfer is shorter than the error of the clocks.
    The pair's other transfers decide: if sends wait, both ends end together, so the difference of
    their ends is constant while the send's duration varies. A buffered send always takes about
    the same time.

    Args:
        rows: Shape (rows,): rows of the spans, by instance.
        arrival: Shape (rows,): start of the last member of the row's instance.
        first: Shape (instances,): index of each instance's first row.
        tolerance_ns: Differences of clocks up to this may be errors.
    """
    end = spans.start_ns[rows] + spans.duration_ns[rows]
    sends = is_p2p(spans)[rows] & (spans.rank[rows] == spans.src_rank[rows])
    buffered: NDArray[np.bool_] = sends & (end < arrival)
    unsure = np.flatnonzero(buffered & (arrival - end <= tolerance_ns))
    if not len(unsure):
        return buffered
    size = np.diff(first, append=len(rows))
    instance = np.repeat(np.arange(len(first)), size)
    pair = np.flatnonzero(sends & (size == _P2P_MEMBERS)[instance])
    other = 2 * first[instance[pair]] + 1 - pair
    columns = (spans.epoch, spans.group_id, spans.src_rank, spans.dst_rank)
    key, num = factorize(*(column[rows[pair]] for column in columns))
    end_spread = mean_absolute_deviations((end[other] - end[pair]).astype(np.float64), key, num)
    duration_ns = spans.duration_ns[rows[pair]].astype(np.float64)
    duration_spread = mean_absolute_deviations(duration_ns, key, num)
    end_together = np.zeros(len(rows), dtype=np.bool_)
    end_together[pair] = (end_spread < duration_spread)[key]
    buffered[unsure] &= ~end_together[unsure]
    return buffered


def _match_arrivals(
    spans: SpanTable, rows: NDArray[np.intp], arrivals: Arrivals
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return the rows whose instance is among ``arrivals``, and its index there."""
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
    index = np.minimum(np.searchsorted(known[order], asked), len(known) - 1)
    is_known = known[order][index] == asked
    return rows[is_known], order[index[is_known]]
