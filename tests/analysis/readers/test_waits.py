from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope.analysis.readers.waits import Arrivals, split_traced_waits, split_waits
from rankscope.analysis.trace.rows import concatenate, select_rows
from rankscope.analysis.trace.tables import GroupInfo, SpanTable
from rankscope.tracer.span import NONE, Span, SpanFlag, SpanKind, UnixNs
from tests.support.analysis.exit_builders import run_of
from tests.support.dashboard.builders import span_table

if TYPE_CHECKING:
    import random

TP = GroupInfo(group_id=7, kind="tp-comm", name="tp", members=(0, 1, 2))
PP = GroupInfo(group_id=9, kind="other", name="pp", members=(0, 4))

ERROR_NS = 10
MS = 1_000_000


def collective(rank: int, start_ns: int, end_ns: int, *, seq: int = 0, group: int = 7) -> Span:
    return Span(
        rank=rank,
        step=3,
        kind=SpanKind.TP_COMM,
        name="all_reduce",
        start_ns=UnixNs(start_ns),
        duration_ns=end_ns - start_ns,
        group_id=group,
        seq=seq,
    )


def p2p(rank: int, start_ns: int, end_ns: int, *, src: int, dst: int, seq: int = 0) -> Span:
    return Span(
        rank=rank,
        step=3,
        kind=SpanKind.PP_SEND if rank == src else SpanKind.PP_RECV,
        name="p2p",
        start_ns=UnixNs(start_ns),
        duration_ns=end_ns - start_ns,
        group_id=9,
        seq=seq,
        src_rank=src,
        dst_rank=dst,
    )


def test_early_ranks_wait_for_the_last_one() -> None:
    # Rank 2 comes 70 ns late; all leave together at 100.
    spans = span_table([collective(0, 0, 100), collective(1, 10, 100), collective(2, 70, 100)])

    split = split_waits(spans, [TP], clock_error_ns=0)

    assert split.wait_ns.tolist() == [70, 60, 0]
    assert split.transfer_ns.tolist() == [30, 30, 30]
    assert split.last_rank.tolist() == [2, 2, 2]
    assert split.negative.tolist() == [False, False, False]


def test_instances_are_distinguished_by_sequence_not_by_time() -> None:
    # Rank 0 enters its second all-reduce before rank 2 has entered the first.
    spans = span_table(
        [
            collective(0, 0, 5, seq=0),
            collective(0, 6, 40, seq=1),
            collective(1, 0, 5, seq=0),
            collective(1, 6, 40, seq=1),
            collective(2, 3, 5, seq=0),
            collective(2, 30, 40, seq=1),
        ]
    )

    split = split_waits(spans, [TP], clock_error_ns=0)

    assert split.wait_ns.tolist() == [3, 24, 3, 24, 0, 0]


def test_equal_sequences_of_two_epochs_or_groups_are_different_instances() -> None:
    spans = span_table([collective(rank, rank, 10) for rank in (0, 1, 2)])
    again = replace(
        span_table([collective(rank, 100 * rank, 300, group=8) for rank in (0, 1, 2)]),
        epoch=np.array([1, 1, 1], dtype=np.int32),
    )
    both = concatenate(spans, again)
    other = GroupInfo(group_id=8, kind="tp-comm", name="tp", members=(0, 1, 2))

    split = split_waits(both, [TP, other], clock_error_ns=0)

    assert split.wait_ns.tolist() == [2, 1, 0, 200, 100, 0]


def test_missing_member_makes_only_its_instance_unknown() -> None:
    spans = span_table(
        [collective(0, 0, 9), collective(1, 4, 9)]  # rank 2 dropped its span
        + [collective(rank, rank, 50, seq=1) for rank in (0, 1, 2)]
    )

    split = split_waits(spans, [TP], clock_error_ns=0)

    assert split.wait_ns.tolist() == [-1, -1, 2, 1, 0]
    assert split.last_rank.tolist() == [NONE, NONE, 2, 2, 2]


@pytest.mark.parametrize(
    ("ranks", "groups"),
    [((0, 1, 2), []), ((0, 1, 2), [PP]), ((0, 0, 2), [TP])],
    ids=["no group", "another group", "rank 0 twice and no rank 1"],
)
def test_instance_without_exactly_the_known_members_is_unknown(
    ranks: tuple[int, ...], groups: list[GroupInfo]
) -> None:
    spans = span_table([collective(rank, number, 9) for number, rank in enumerate(ranks)])

    assert split_waits(spans, groups, clock_error_ns=0).wait_ns.tolist() == [-1, -1, -1]


def test_open_span_counts_as_arrived_but_has_no_split() -> None:
    hung = replace(collective(2, 40, 45), flags=SpanFlag.OPEN)
    spans = span_table([collective(0, 0, 60), collective(1, 10, 60), hung])

    split = split_waits(spans, [TP], clock_error_ns=0)

    assert split.wait_ns.tolist() == [40, 30, -1]
    assert split.last_rank.tolist() == [2, 2, NONE]


def test_compute_and_wait_spans_have_no_split() -> None:
    wait = replace(collective(0, 0, 9), kind=SpanKind.WAIT)
    spans = span_table(
        [wait, replace(collective(0, 0, 9), kind=SpanKind.FORWARD, group_id=0)]
        + [collective(rank, 0, 9) for rank in (0, 1, 2)]
    )

    assert split_waits(spans, [TP], clock_error_ns=0).wait_ns.tolist() == [-1, -1, 0, 0, 0]


def test_collective_of_kind_other_is_split_too() -> None:
    spans = span_table(
        [replace(collective(rank, 5 * rank, 20), kind=SpanKind.OTHER) for rank in (0, 1, 2)]
    )

    assert split_waits(spans, [TP], clock_error_ns=0).wait_ns.tolist() == [10, 5, 0]


def test_each_direction_of_a_pair_has_its_own_sequence() -> None:
    spans = span_table(
        [
            p2p(0, 0, 30, src=0, dst=4),
            p2p(0, 50, 60, src=4, dst=0),
            p2p(4, 20, 30, src=0, dst=4),
            p2p(4, 52, 60, src=4, dst=0),
        ]
    )

    split = split_waits(spans, [PP], clock_error_ns=0)

    assert split.wait_ns.tolist() == [20, 2, 0, 0]
    assert split.transfer_ns.tolist() == [10, 8, 10, 8]
    assert split.last_rank.tolist() == [4, 4, 4, 4]


def test_buffered_send_does_not_wait() -> None:
    # The send is over at 8; the receive begins at 20.
    spans = span_table([p2p(0, 0, 8, src=0, dst=4), p2p(4, 20, 23, src=0, dst=4)])

    split = split_waits(spans, [PP], clock_error_ns=0)

    assert split.wait_ns.tolist() == [0, 0]
    assert split.transfer_ns.tolist() == [8, 3]
    assert split.negative.tolist() == [False, False]


def test_receive_waits_for_a_late_send() -> None:
    spans = span_table([p2p(0, 20, 23, src=0, dst=4), p2p(4, 0, 25, src=0, dst=4)])

    split = split_waits(spans, [PP], clock_error_ns=0)

    assert split.wait_ns.tolist() == [0, 20]
    assert split.transfer_ns.tolist() == [3, 5]


@pytest.mark.parametrize("before_ns", [2, 10])
def test_transfer_negative_beyond_the_clock_error_is_reported_not_clamped(before_ns: int) -> None:
    # Rank 0 seems to leave before rank 1 arrives at 50.
    pair = GroupInfo(group_id=7, kind="tp-comm", name="tp", members=(0, 1))
    spans = span_table([collective(0, 0, 50 - before_ns), collective(1, 50, 90)])

    split = split_waits(spans, [pair], clock_error_ns=5)

    assert split.transfer_ns.tolist() == [-before_ns, 40]
    assert split.negative.tolist() == [before_ns > 5, False]


def test_an_unknown_clock_error_is_not_taken_for_zero() -> None:
    # GIVEN rank 0 seems to leave 9 ms before rank 1 arrives, and 11 ms before in the next one
    pair = GroupInfo(group_id=7, kind="tp-comm", name="tp", members=(0, 1))
    spans = span_table(
        [
            collective(rank, start_ms * MS, end_ms * MS, seq=seq)
            for rank, start_ms, end_ms, seq in (
                (0, 0, 41, 0), (1, 50, 90, 0), (0, 100, 139, 1), (1, 150, 190, 1),
            )
        ]
    )  # fmt: skip

    split = split_waits(spans, [pair], clock_error_ns=None)

    # THEN up to 10 ms may be the clocks'
    assert split.negative.tolist() == [False, False, True, False]


def test_receive_that_ends_before_its_send_begins_is_reported() -> None:
    spans = span_table([p2p(0, 20, 30, src=0, dst=4), p2p(4, 0, 12, src=0, dst=4)])

    split = split_waits(spans, [PP], clock_error_ns=3)

    assert split.negative.tolist() == [False, True]


def test_sequences_near_the_end_of_their_range_are_different_instances() -> None:
    far = 2**62
    spans = span_table(
        [collective(rank, 10 * rank, 50, seq=seq) for seq in (0, far) for rank in (0, 1, 2)]
    )

    assert split_waits(spans, [TP], clock_error_ns=0).wait_ns.tolist() == [20, 10, 0] * 2


def some_spans() -> st.SearchStrategy[list[Span]]:
    moment = st.integers(0, 1_000)
    both = st.tuples(st.sampled_from([0, 1, 2]), moment, moment, st.integers(0, 3))
    gathered = both.map(lambda p: collective(p[0], p[1], p[1] + p[2], seq=p[3]))
    pair = st.tuples(st.sampled_from([0, 4]), moment, moment, st.integers(0, 2)).map(
        lambda p: p2p(p[0], p[1], p[1] + p[2], src=0, dst=4, seq=p[3])
    )
    return st.lists(gathered | pair, max_size=30)


@given(some_spans())
def test_wait_and_transfer_sum_to_the_duration(some: list[Span]) -> None:
    spans = span_table(some)

    split = split_waits(spans, [TP, PP], clock_error_ns=0)

    known = split.wait_ns >= 0
    assert (split.wait_ns + split.transfer_ns == spans.duration_ns)[known].all()
    assert (split.wait_ns[~known] == -1).all()
    assert ((split.last_rank == NONE) == ~known).all()


@pytest.mark.slow
@given(some_spans(), st.randoms(use_true_random=False))
def test_the_order_of_the_spans_does_not_matter(some: list[Span], chance: random.Random) -> None:
    order = list(range(len(some)))
    chance.shuffle(order)

    plain = split_waits(span_table(some), [TP, PP], clock_error_ns=0)
    mixed = split_waits(span_table([some[row] for row in order]), [PP, TP], clock_error_ns=0)

    assert mixed.wait_ns.tolist() == [int(plain.wait_ns[row]) for row in order]
    assert mixed.last_rank.tolist() == [int(plain.last_rank[row]) for row in order]


def arrivals_of(spans: SpanTable) -> Arrivals:
    """Return the arrivals of each instance, one by one."""
    rows: dict[tuple[int, ...], list[int]] = {}
    for row in range(len(spans)):
        key = (spans.group_id[row], spans.src_rank[row], spans.dst_rank[row], spans.seq[row])
        rows.setdefault(tuple(map(int, key)), []).append(row)
    last = [max(found, key=lambda row: (spans.start_ns[row], -spans.rank[row]))
            for found in rows.values()]  # fmt: skip
    group, source, target, seq = np.array(list(rows), dtype=np.int64).reshape(-1, 4).T
    return Arrivals(
        group_id=group.astype(np.uint64),
        src_rank=source.astype(np.int32),
        dst_rank=target.astype(np.int32),
        seq=seq,
        num_spans=np.array([len(found) for found in rows.values()], dtype=np.int64),
        num_ranks=np.array(
            [len({int(spans.rank[row]) for row in found}) for found in rows.values()],
            dtype=np.int64,
        ),
        latest_ns=spans.start_ns[last],
        last_rank=spans.rank[last],
    )


@pytest.mark.slow
@given(some_spans(), st.sets(st.sampled_from([0, 1, 2, 4])))
def test_some_ranks_with_all_arrivals_split_like_the_whole_step(
    some: list[Span], ranks: set[int]
) -> None:
    run = run_of(5, groups=(TP, PP), clock_error_ns=0)
    spans = span_table(some)
    chosen = np.isin(spans.rank, list(ranks))

    whole = split_traced_waits(run, spans)
    part = split_traced_waits(run, select_rows(spans, chosen), arrivals=arrivals_of(spans))

    assert part.wait_ns.tolist() == whole.wait_ns[chosen].tolist()
    assert part.transfer_ns.tolist() == whole.transfer_ns[chosen].tolist()
    assert part.last_rank.tolist() == whole.last_rank[chosen].tolist()


@given(some_spans(), st.integers(-(10**18), 10**18))
def test_shifting_every_clock_changes_nothing(some: list[Span], shift_ns: int) -> None:
    moved = [replace(span, start_ns=UnixNs(span.start_ns + shift_ns)) for span in some]

    plain = split_waits(span_table(some), [TP, PP], clock_error_ns=0)
    shifted = split_waits(span_table(moved), [TP, PP], clock_error_ns=0)

    assert shifted.wait_ns.tolist() == plain.wait_ns.tolist()
    assert shifted.transfer_ns.tolist() == plain.transfer_ns.tolist()


@pytest.mark.slow
@given(some_spans())
def test_relabelling_the_ranks_changes_only_the_labels(some: list[Span]) -> None:
    def new(rank: int) -> int:
        # Keeps the order, so that the lowest of several last arrivals stays the lowest.
        return rank if rank == NONE else 10 * rank + 3

    relabelled = [
        replace(span, rank=new(span.rank), src_rank=new(span.src_rank), dst_rank=new(span.dst_rank))
        for span in some
    ]
    groups = [replace(group, members=tuple(map(new, group.members))) for group in (TP, PP)]

    plain = split_waits(span_table(some), [TP, PP], clock_error_ns=0)
    other = split_waits(span_table(relabelled), groups, clock_error_ns=0)

    assert other.wait_ns.tolist() == plain.wait_ns.tolist()
    assert other.last_rank.tolist() == [new(int(rank)) for rank in plain.last_rank]


@pytest.mark.parametrize("error_ns", [ERROR_NS, 0])
def test_send_that_ends_with_its_receive_is_not_buffered_within_the_clock_error(
    error_ns: int,
) -> None:
    # GIVEN transfers of 5 ns after receives that begin 20, 40 and 30 ns after their sends, and a
    # receiver whose clock is 8 ns ahead: sends seem to end 3 ns before the receives begin
    spans = span_table(
        [
            span
            for number, late in enumerate((20, 40, 30))
            for begin in [100 * number]
            for span in (
                p2p(0, begin, begin + late + 5, src=0, dst=4, seq=number),
                p2p(4, begin + late + 8, begin + late + 13, src=0, dst=4, seq=number),
            )
        ]
    )

    split = split_waits(spans, [PP], clock_error_ns=error_ns)

    # THEN with clocks of that error the sends waited, with exact clocks they were buffered
    waits = [28, 0, 48, 0, 38, 0] if error_ns else [0] * 6
    assert split.wait_ns.tolist() == waits
    assert split.transfer_ns.tolist() == ([-3, 5] * 3 if error_ns else [25, 5, 45, 5, 35, 5])


def test_send_of_constant_duration_is_buffered_within_the_clock_error_too() -> None:
    spans = span_table(
        [
            span
            for number, late_begin in enumerate((8, 114, 210))
            for span in (
                p2p(0, 100 * number, 100 * number + 5, src=0, dst=4, seq=number),
                p2p(4, late_begin, late_begin + 3, src=0, dst=4, seq=number),
            )
        ]
    )

    split = split_waits(spans, [PP], clock_error_ns=ERROR_NS)

    assert split.wait_ns.tolist() == [0] * 6
    assert split.transfer_ns.tolist() == [5, 3] * 3
