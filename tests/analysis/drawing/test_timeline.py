from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rankscope.analysis.drawing.timeline import make_timeline, read_timeline
from rankscope.analysis.readers.waits import split_traced_waits
from rankscope.analysis.trace.errors import EmptyRunError, UnknownRunError
from rankscope.analysis.trace.tables import GroupInfo
from rankscope.tracer.span import Span, SpanKind, UnixNs
from rankscope.tracer.topology import Coords
from tests.support.dashboard.builders import FakeProvider, report, span_table

TP = GroupInfo(group_id=7, kind="tp-comm", name="tp", members=(0, 1))


def span(rank: int, start_ns: int, end_ns: int, *, step: int = 3, seq: int = -1) -> Span:
    return Span(
        rank=rank,
        step=step,
        kind=SpanKind.FORWARD if seq < 0 else SpanKind.TP_COMM,
        name="op",
        start_ns=UnixNs(start_ns),
        duration_ns=end_ns - start_ns,
        group_id=0 if seq < 0 else TP.group_id,
        seq=seq,
    )


def provider(*spans: Span) -> FakeProvider:
    return FakeProvider(
        reports={"r": report(run="r")}, tables={"r": span_table(spans)}, groups={"r": (TP,)}
    )


def test_a_step_is_cut_out_of_its_run_and_its_communication_split() -> None:
    source = provider(
        span(0, 100, 140),
        span(0, 140, 200, seq=5),
        span(1, 110, 180),
        span(1, 180, 205, seq=5),
        span(1, 900, 950, step=4),
    )

    timeline = read_timeline(source, "r", epoch=0, step=3)

    assert (timeline.begin_ns, timeline.end_ns) == (100, 205)
    assert timeline.spans.rank.tolist() == [0, 0, 1, 1]
    assert timeline.wait_ns.tolist() == [-1, 40, -1, 0]
    assert timeline.transfer_ns.tolist() == [-1, 20, -1, 25]
    assert timeline.last_rank.tolist() == [-1, 1, -1, 1]
    assert timeline.coords[5] == Coords(pp=1, dp=0, tp=1)


def test_the_split_of_the_page_is_that_of_the_verdict() -> None:
    # GIVEN clocks whose error is unknown
    source = provider(*(span(rank, 9 * rank, 40, seq=5) for rank in (0, 1)))
    info = replace(source.run_info("r"), clock_error_ns=None)
    spans = source.tables["r"]

    timeline = make_timeline(info, spans, epoch=0, step=3)

    split = split_traced_waits(info, spans)
    assert timeline.wait_ns.tolist() == split.wait_ns.tolist() == [9, 0]
    assert timeline.transfer_ns.tolist() == split.transfer_ns.tolist()


def test_spans_of_another_epoch_of_the_same_step_stay_out() -> None:
    source = provider(span(0, 100, 140), span(1, 100, 150))
    source.tables["r"] = replace(source.tables["r"], epoch=np.array([0, 1], dtype=np.int32))

    assert read_timeline(source, "r", epoch=1, step=3).spans.rank.tolist() == [1]
    assert read_timeline(source, "r", epoch=1, step=3).coords == {}


def test_a_step_without_spans_is_named() -> None:
    with pytest.raises(EmptyRunError, match="no spans of step 9 in epoch 0"):
        read_timeline(provider(span(0, 0, 1)), "r", epoch=0, step=9)


def test_an_unknown_run_is_named_with_those_there_are() -> None:
    with pytest.raises(UnknownRunError, match=r"no run 'x' in this store \(runs: r\)"):
        read_timeline(provider(), "x", epoch=0, step=3)
