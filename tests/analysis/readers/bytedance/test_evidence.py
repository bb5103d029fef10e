"""Waits of a worker for its sends and receives."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from rankscope.analysis.arrays.grouping import NO_GROUP
from rankscope.analysis.readers.bytedance.evidence import (
    arrival_times,
    is_delayed_in_call,
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
    """Return two stages of two micro-batches; stage 0 sends, then computes its second one."""
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


def since_last_transfer_ms(trace: Trace) -> float:
    """Return the time before the first stage's second forward-compute."""
    found = time_since_last_transfer(trace, np.arange(len(trace.rows)))
    row = np.flatnonzero(
        (trace.rows.rank == 0)
        & (trace.rows.type == CODE["forward-compute"])
        & (trace.rows.start > trace.rows.start.min())
    )
    return float(found[row[0]] / MS)


def test_gap_of_a_worker_that_waits_for_each_send_begins_after_the_send() -> None:
    # GIVEN a host that computes nothing while a transfer is open, and no two that end together
    trace = two_microbatches(first_send_ends_ms=30, second_forward_ms=32)

    # THEN the gap is the 2 ms after the send, not the 22 ms after its last compute
    assert since_last_transfer_ms(trace) == pytest.approx(2)


def test_transfers_that_overlap_computes_do_not_block_the_worker() -> None:
    # GIVEN a send until 30 while the next compute begins at 22
    trace = two_microbatches(first_send_ends_ms=30, second_forward_ms=22)

    assert since_last_transfer_ms(trace) == pytest.approx(NEVER / MS)


def test_all_transfers_of_a_call_end_with_the_last_one() -> None:
    # GIVEN a send and a receive posted within 10 us that end together (but for 8 us of rounding),
    # although the other end of the send arrived at 60 and that of the receive at 60.5
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

    delayed = is_delayed_in_call(trace, members, group[members])

    # THEN the send ended later than its own transfer, the others did not
    names = [(int(trace.rows.rank[row]), int(trace.rows.type[row])) for row in members[delayed]]
    assert names == [(0, CODE["forward-send"])]


def pairs(times_ms: Sequence[tuple[tuple[float, float], tuple[float, float]]]) -> Trace:
    """Return one send and its receive in each step, given (start, end) of both."""
    spans: list[Span] = []
    for step, (send, recv) in enumerate(times_ms):
        spans += [
            operation("forward-compute", 0, send[0] - 5, send[0], step=step),
            operation("forward-send", 0, *send, step=step),
            operation("forward-recv", 1, *recv, step=step),
            operation("forward-compute", 1, recv[1], recv[1] + 5, step=step),
        ]
    return read_trace(RUN, span_table(spans))


def arrivals_ms(trace: Trace) -> tuple[list[float], list[float]]:
    """Return the arrival times of the sends and of the receives."""
    group = trace.operations.group
    members = np.flatnonzero(group != NO_GROUP)
    found = (arrival_times(trace, members, group[members]) - trace.rows.start[0]) / MS + 95
    first, second = (found[trace.rows.rank[members] == rank].tolist() for rank in (0, 1))
    return first, second


def test_arrivals_are_in_the_clock_of_each_worker() -> None:
    # GIVEN transfers of 3 ms and a receiver whose clock is 5 ms ahead: it arrived before a sender
    # left (so at least 2 ms) and the sender arrived before it left (so at most 8 ms)
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


def test_clocks_without_evidence_of_an_offset_agree() -> None:
    # GIVEN a receiver that always arrives long before
    trace = pairs([((100, 103), (50, 103)), ((110, 113), (40, 113))])

    sends, recvs = arrivals_ms(trace)

    assert sends == recvs == pytest.approx([100, 110])
