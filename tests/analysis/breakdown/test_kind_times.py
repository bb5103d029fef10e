from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope.analysis.breakdown.kind_times import KindTimes, sum_kind_times
from rankscope.analysis.drawing.timeline import read_timeline
from rankscope.tracer.span import KINDS, Span, SpanKind, UnixNs
from tests.support.dashboard.step_builder import PAIR, comm, compute, source_of

if TYPE_CHECKING:
    from tests.support.dashboard.builders import FakeProvider

STEP = 3


def times_of(source: FakeProvider) -> KindTimes:
    return sum_kind_times(read_timeline(source, "r", epoch=0, step=STEP))


def rows(found: KindTimes) -> list[tuple[object, ...]]:
    return [
        (rank, KINDS[kind].value, *numbers)
        for rank, kind, *numbers in zip(
            found.rank.tolist(), found.kind.tolist(), found.num_spans.tolist(),
            found.busy_ns.tolist(), found.wait_ns.tolist(), found.transfer_ns.tolist(),
            found.exposed_ns.tolist(), strict=True,
        )
    ]  # fmt: skip


def one(kind: SpanKind, start_ns: int, end_ns: int, *, seq: int = -1, rank: int = 0) -> Span:
    return Span(
        rank=rank,
        step=STEP,
        kind=kind,
        name="op",
        start_ns=UnixNs(start_ns),
        duration_ns=end_ns - start_ns,
        group_id=0 if seq < 0 else PAIR.group_id,
        seq=seq,
    )


def test_waits_and_transfers_are_summed_by_rank_and_kind() -> None:
    # Rank 0 computes 40 ns and waits 40 ns for rank 1, which computes 70; then both transfer.
    found = times_of(
        source_of(compute(0, 100, 140), comm(0, 140, 200), compute(1, 110, 180), comm(1, 180, 205))
    )

    assert rows(found) == [
        (0, "forward", 1, 40, 0, 0, 0),
        (0, "tp-comm", 1, 60, 40, 20, 60),
        (1, "forward", 1, 70, 0, 0, 0),
        (1, "tp-comm", 1, 25, 0, 25, 25),
    ]
    assert found.num_unsplit.tolist() == [0, 0, 0, 0]


def test_without_its_partner_a_communication_has_no_known_wait() -> None:
    found = times_of(source_of(comm(0, 140, 200)))

    assert rows(found) == [(0, "tp-comm", 1, 60, 0, 0, 60)]
    assert found.num_unsplit.tolist() == [1]


def test_concurrent_compute_covers_a_communication_and_the_enclosing_span_does_not() -> None:
    # Forward 0..100, in it a communication 20..50; another one 40..130 runs concurrently.
    nested = source_of(
        one(SpanKind.FORWARD, 0, 100),
        one(SpanKind.TP_COMM, 20, 50, seq=1),
        one(SpanKind.DP_COMM, 40, 130, seq=2),
        depths=(0, 1, 0),
    )

    assert rows(times_of(nested)) == [
        (0, "forward", 1, 100, 0, 0, 0),
        (0, "tp-comm", 1, 30, 0, 0, 30),
        (0, "dp-comm", 1, 90, 0, 0, 40),  # 40..50 while the rank was blocked, and 100..130
    ]


def test_compute_does_not_cover_while_its_thread_is_blocked_in_a_wait() -> None:
    blocked = source_of(
        one(SpanKind.BACKWARD, 0, 100),
        one(SpanKind.WAIT, 60, 100),
        one(SpanKind.DP_COMM, 50, 100, seq=1),
        depths=(0, 1, 0),
    )

    assert rows(times_of(blocked))[1] == (0, "dp-comm", 1, 50, 0, 0, 40)


def test_overlapping_spans_of_one_kind_count_once() -> None:
    found = times_of(source_of(one(SpanKind.HOST, 0, 10), one(SpanKind.HOST, 5, 20)))

    assert rows(found) == [(0, "host", 2, 20, 0, 0, 0)]


SPANS = st.lists(
    st.builds(
        lambda kind, rank, start, length, seq: one(kind, start, start + length, seq=seq, rank=rank),
        kind=st.sampled_from([SpanKind.FORWARD, SpanKind.TP_COMM, SpanKind.WAIT, SpanKind.HOST]),
        rank=st.integers(0, 2),
        start=st.integers(0, 60),
        length=st.integers(0, 30),
        seq=st.integers(0, 3),
    ),
    min_size=1,
    max_size=20,
)


@pytest.mark.slow
@given(SPANS, st.randoms(use_true_random=False))
def test_the_order_of_spans_changes_nothing_and_exposed_is_within_busy(
    spans: list[Span], random: object
) -> None:
    found = times_of(source_of(*spans))
    shuffled = list(spans)
    random.shuffle(shuffled)  # type: ignore[attr-defined]

    assert rows(times_of(source_of(*shuffled))) == rows(found)
    assert found.num_spans.sum() == len(spans)
    assert (found.exposed_ns <= found.busy_ns).all()
    assert (found.exposed_ns >= 0).all()


@given(SPANS)
def test_busy_and_exposed_equal_a_count_of_single_nanoseconds(spans: list[Span]) -> None:
    # GIVEN a count at every nanosecond, of spans without nesting
    def counted(rank: int, kind: SpanKind) -> tuple[int, int]:
        busy = exposed = 0
        for at in range(100):
            running = {
                one.kind for one in spans
                if one.rank == rank and one.start_ns <= at < one.start_ns + one.duration_ns
            }  # fmt: skip
            covered = SpanKind.FORWARD in running and SpanKind.WAIT not in running
            busy += kind in running
            exposed += kind in running and not covered
        return busy, exposed if kind is SpanKind.TP_COMM else 0

    found = times_of(source_of(*spans))

    for place in range(len(found)):
        kind = KINDS[int(found.kind[place])]
        expected = counted(int(found.rank[place]), kind)
        assert (int(found.busy_ns[place]), int(found.exposed_ns[place])) == expected


def test_sums_are_exact_above_2_to_the_53() -> None:
    huge = 2**53 + 1
    found = times_of(source_of(one(SpanKind.HOST, 0, huge)))

    assert found.busy_ns.dtype == np.int64
    assert found.busy_ns.tolist() == [huge]
