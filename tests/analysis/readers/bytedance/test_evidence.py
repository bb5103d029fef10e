"""What a worker's sends and receives hold up, and who left them before the other was there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from rankscope.analysis.arrays.grouping import NO_GROUP, max_over_group
from rankscope.analysis.readers.bytedance.evidence import (
    arrival_times,
    is_delayed_in_call,
    is_left_early,
    time_since_last_transfer,
)
from rankscope.analysis.readers.bytedance.format import CODE
from rankscope.analysis.readers.bytedance.graph import read_trace
from rankscope.analysis.trace.tables import EpochInfo, RankInfo, RunInfo
from rankscope.tracer.span import Span, SpanKind, UnixNs
from rankscope.tracer.topology import Coords, Layout
from tests.support.dashboard.builders import span_table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankscope.analysis.readers.bytedance.graph import Trace

MS = 1_000_000
NEVER = np.iinfo(np.int64).max
RUN = RunInfo(
    run_id="r",
    source_format="bytedance",
    layout=Layout(pp=2),
    world_size=2,
    epochs=(
        EpochInfo(epoch=0, ranks=tuple(RankInfo(rank=pp, coords=Coords(pp=pp)) for pp in (0, 1))),
    ),
)


def operation(
    name: str, rank: int, start_ms: float, end_ms: float, *, seq: int = 0, step: int = 7
) -> Span:
    return Span(
        rank=rank,
        step=step,
        kind=SpanKind.FORWARD if name.startswith("forward") else SpanKind.BACKWARD,
        name=name,
        start_ns=UnixNs(int(start_ms * MS)),
        duration_ns=int((end_ms - start_ms) * MS),
        seq=seq,
        microbatch=seq,
        chunk=0,
    )


def two_microbatches(*, first_send_ends_ms: float, second_forward_ms: float) -> Trace:
    """Two stages, in ms; the first sends, and computes its second micro-batch."""
    return read_trace(
        RUN,
        span_table(
            [
                operation("forward-compute", 0, 0, 10),
                operation("forward-send", 0, 10, first_send_ends_ms),
                operation("forward-compute", 0, second_forward_ms, second_forward_ms + 10, seq=1),
                operation("forward-send", 0, 45, 69, seq=1),
                operation("backward-recv", 0, 45, 70),
                operation("backward-compute", 0, 70, 90),
                operation("backward-recv", 0, 90, 110, seq=1),
                operation("backward-compute", 0, 110, 130, seq=1),
                operation("forward-recv", 1, 0, 30),
                operation("forward-compute", 1, 30, 40),
                operation("backward-compute", 1, 40, 60),
                operation("backward-send", 1, 60, 70),
                operation("forward-recv", 1, 60, 69, seq=1),
                operation("forward-compute", 1, 70, 80, seq=1),
                operation("backward-compute", 1, 80, 100, seq=1),
                operation("backward-send", 1, 100, 110, seq=1),
            ]
        ),
    )


def held_up_ms(trace: Trace) -> float:
    """Of the first stage's second forward-compute."""
    found = time_since_last_transfer(trace)
    row = np.flatnonzero(
        (trace.rank == 0)
        & (trace.rows.type == CODE["forward-compute"])
        & (trace.rows.start > trace.rows.start.min())
    )
    return float(found[row[0]] / MS)


def test_a_worker_that_waits_for_each_send_is_held_up_by_it() -> None:
    # GIVEN a host that computes nothing while a transfer is open, though no two end together
    trace = two_microbatches(first_send_ends_ms=30, second_forward_ms=32)

    # THEN only what follows the send is its own, not the 22 ms since its last compute
    assert held_up_ms(trace) == pytest.approx(2)


def test_transfers_that_run_beside_computes_hold_nobody_up() -> None:
    # GIVEN a send that lasts to 30 while the next compute runs from 22 on
    trace = two_microbatches(first_send_ends_ms=30, second_forward_ms=22)

    assert held_up_ms(trace) == pytest.approx(NEVER / MS)


def test_a_call_ends_for_all_that_it_posted_one_after_the_other() -> None:
    # GIVEN a send and a receive posted 10 us apart that end together (8 us of rounding), though
    # the send's partner was there from 60 and the receive's from 60.5
    trace = read_trace(
        RUN,
        span_table(
            [
                operation("forward-compute", 0, 0, 10),
                operation("forward-send", 0, 45, 69.992),
                operation("backward-recv", 0, 45.010, 70),
                operation("backward-compute", 0, 70, 90),
                operation("forward-recv", 1, 60, 61),
                operation("forward-compute", 1, 61, 65),
                operation("backward-compute", 1, 65, 66),
                operation("backward-send", 1, 60.5, 70),
            ]
        ),
    )
    group = trace.operations.group
    members = np.flatnonzero(group != NO_GROUP)

    hidden = is_delayed_in_call(trace, members, group[members])

    # THEN the send's end is not that of its own transfer; the others' are
    names = [(int(trace.rank[row]), int(trace.rows.type[row])) for row in members[hidden]]
    assert names == [(0, CODE["forward-send"])]


def pairs(times_ms: Sequence[tuple[tuple[float, float], tuple[float, float]]]) -> Trace:
    """One send and its receive in each step, as (start, end) of either."""
    spans: list[Span] = []
    for step, (send, recv) in enumerate(times_ms):
        spans += [
            operation("forward-compute", 0, send[0] - 5, send[0], step=step),
            operation("forward-send", 0, *send, step=step),
            operation("forward-recv", 1, *recv, step=step),
            operation("forward-compute", 1, recv[1], recv[1] + 5, step=step),
        ]
    return read_trace(RUN, span_table(spans))


def early_sends(trace: Trace) -> list[bool]:
    group = trace.operations.group
    members = np.flatnonzero(group != NO_GROUP)
    arrival = max_over_group(group, trace.rows.start)[members]
    found = is_left_early(
        trace,
        members,
        arrival,
        group=group[members],
        carrier=np.zeros((1, len(members)), dtype=np.int64),
    )
    early: list[bool] = found[trace.rank[members] == 0].tolist()
    return early


def test_a_send_that_only_a_clock_ends_too_early_waited() -> None:
    # GIVEN transfers of 3 ms between a sender and a receiver whose clock is 5 ms ahead
    trace = pairs(
        [
            ((100, 111), (113, 116)),
            ((102, 105), (106, 110)),
            ((109, 112), (108, 117)),
            ((104, 113), (115, 118)),
        ]
    )

    # THEN the three that seem to end before the receiver is there do count
    assert early_sends(trace) == [False, False, False, False]


def test_a_send_that_takes_as_long_each_time_was_buffered() -> None:
    # GIVEN sends of 1 ms, however late the receive
    trace = pairs(
        [
            ((100, 101), (108, 109)),
            ((102, 103), (106, 111)),
            ((109, 110), (108, 118)),
            ((104, 105), (112, 116)),
        ]
    )

    assert early_sends(trace) == [True, True, False, True]


def arrivals_ms(trace: Trace) -> tuple[list[float], list[float]]:
    """Of the sends and of the receives."""
    group = trace.operations.group
    members = np.flatnonzero(group != NO_GROUP)
    found = (arrival_times(trace, members, group[members]) - trace.rows.start[0]) / MS + 95
    first, second = (found[trace.rank[members] == rank].tolist() for rank in (0, 1))
    return first, second


def test_when_both_were_there_is_told_by_each_ones_own_clock() -> None:
    # GIVEN transfers of 3 ms, and a receiver whose clock is 5 ms ahead: it came before a sender
    # left (2 ms at least) and the sender before it left (8 ms at most)
    trace = pairs(
        [
            ((100, 111), (113, 116)),
            ((102, 105), (106, 110)),
            ((109, 112), (108, 117)),
            ((104, 113), (115, 118)),
        ]
    )

    sends, recvs = arrivals_ms(trace)

    assert sends == pytest.approx([108, 102, 109, 110])
    assert recvs == pytest.approx([113, 107, 114, 115])


def test_clocks_that_nothing_tells_apart_agree() -> None:
    # GIVEN a receiver that is always there long before
    trace = pairs([((100, 103), (50, 103)), ((110, 113), (40, 113))])

    sends, recvs = arrivals_ms(trace)

    assert sends == recvs == pytest.approx([100, 110])
