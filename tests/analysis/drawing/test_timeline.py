from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rankscope.analysis.drawing.timeline import make_timeline, read_timeline
from rankscope.analysis.readers.waits import split_traced_waits
from rankscope.analysis.trace.context import EventRecord
from rankscope.analysis.trace.errors import EmptyRunError, UnknownRunError
from rankscope.tracer.span import SpanFlag
from rankscope.tracer.topology import Coords
from tests.support.dashboard.step_builder import PAIR, comm, compute, source_of


def test_a_timeline_has_the_spans_of_one_step_with_wait_and_transfer() -> None:
    source = source_of(
        compute(0, 100, 140),
        comm(0, 140, 200),
        compute(1, 110, 180),
        comm(1, 180, 205),
        replace(compute(1, 900, 950), step=4),
    )

    timeline = read_timeline(source, "r", epoch=0, step=3)

    assert (timeline.begin_ns, timeline.end_ns) == (100, 205)
    assert timeline.spans.rank.tolist() == [0, 0, 1, 1]
    assert timeline.wait_ns.tolist() == [-1, 40, -1, 0]
    assert timeline.transfer_ns.tolist() == [-1, 20, -1, 25]
    assert timeline.last_rank.tolist() == [-1, 1, -1, 1]
    assert timeline.coords[5] == Coords(pp=1, dp=0, tp=1)


def test_timeline_and_verdict_split_waits_alike() -> None:
    # GIVEN clocks whose error is unknown
    source = source_of(comm(0, 0, 40), comm(1, 9, 40))
    info = replace(source.run_info("r"), clock_error_ns=None)
    spans = source.tables["r"]

    timeline = make_timeline(info, spans, epoch=0, step=3)

    split = split_traced_waits(info, spans)
    assert timeline.wait_ns.tolist() == split.wait_ns.tolist() == [9, 0]
    assert timeline.transfer_ns.tolist() == split.transfer_ns.tolist()


def test_spans_of_the_same_step_in_another_epoch_are_left_out() -> None:
    source = source_of(compute(0, 100, 140), compute(1, 100, 150))
    source.tables["r"] = replace(source.tables["r"], epoch=np.array([0, 1], dtype=np.int32))

    timeline = read_timeline(source, "r", epoch=1, step=3)

    assert timeline.spans.rank.tolist() == [1]
    assert timeline.coords == {}


def test_a_step_without_spans_is_an_error_that_names_it() -> None:
    with pytest.raises(EmptyRunError, match="no spans of step 9 in epoch 0"):
        read_timeline(source_of(compute(0, 0, 1)), "r", epoch=0, step=9)


def test_an_unknown_run_is_an_error_that_names_the_known_runs() -> None:
    with pytest.raises(UnknownRunError, match=r"no run 'x' in this store \(runs: r\)"):
        read_timeline(source_of(), "x", epoch=0, step=3)


def stalled(rank: int, **changes: object) -> EventRecord:
    """Return the event of a rank that is inside all-reduce 7 since 300 ns."""
    entry = {
        "name": "all_reduce", "kind": "tp-comm", "step": 3, "start_ns": 300,
        "group_id": f"{PAIR.group_id:016x}", "seq": 7,
    } | changes  # fmt: skip
    return EventRecord(
        epoch=0, rank=rank, at_ns=310, kind="stalled", text="", data={"open": [entry]}
    )


def test_what_a_hung_rank_is_in_is_drawn_until_now() -> None:
    source = source_of(compute(0, 100, 300), compute(1, 100, 140))

    timeline = read_timeline(source, "r", epoch=0, step=3, events=[stalled(0)], now_ns=1_000)

    spans = timeline.spans
    assert spans.rank.tolist() == [0, 1, 0]
    assert (int(spans.start_ns[2]), int(spans.duration_ns[2])) == (300, 700)
    assert spans.flags.tolist() == [0, 0, SpanFlag.OPEN]
    assert timeline.communication.tolist() == [False, False, True]
    assert timeline.wait_ns.tolist() == [-1, -1, -1]
    assert (timeline.begin_ns, timeline.end_ns) == (100, 1_000)


@pytest.mark.parametrize(
    "event",
    [
        stalled(0, step=2),
        stalled(0, kind="no such kind"),
        stalled(0, group_id=None),
        stalled(0, start_ns=2_000),
        stalled(0, start_ns=-(1 << 70)),
        stalled(0, group_id="f" * 17),
        stalled(0, seq=1 << 63),
        replace(stalled(0), kind="exit"),
        replace(stalled(0), epoch=1),
        replace(stalled(0), data={"open": 7}),
        replace(stalled(0), data={"open": ["x"]}),
        replace(stalled(0), data={}),
        stalled(1, start_ns=140),
    ],
)
def test_other_open_spans_and_malformed_ones_are_left_out(event: EventRecord) -> None:
    source = source_of(compute(0, 100, 300), comm(1, 140, 200))

    timeline = read_timeline(source, "r", epoch=0, step=3, events=[event], now_ns=1_000)

    assert len(timeline.spans) == 2
