from __future__ import annotations

from base64 import b64decode
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import plotly.graph_objects as go

from rankscope.analysis.drawing.raster import draw_raster
from rankscope.analysis.drawing.rows import Group, RowOrder, lay_out_ranks
from rankscope.analysis.drawing.timeline import read_timeline
from rankscope.dashboard.figures.timeline import hover_texts, raster_shades, timeline_figure
from rankscope.dashboard.figures.timeline_axes import short_name, time_axis
from rankscope.dashboard.figures.timeline_canvas import HATCHED, SOLID, Bars
from rankscope.dashboard.theme import KIND_COLORS
from rankscope.tracer.span import KINDS, SpanFlag, SpanKind, UnixNs
from tests.support.dashboard.builders import traces
from tests.support.dashboard.step_builder import PAIR, comm, compute, step_of
from tests.support.dashboard.training_builder import training_provider

if TYPE_CHECKING:
    from rankscope.analysis.drawing.timeline import StepTimeline


def drawn(
    timeline: StepTimeline, order: RowOrder = RowOrder.PP, folded: tuple[int, ...] = ()
) -> tuple[go.Figure, list[Bars]]:
    figure, bars = timeline_figure(timeline, lay_out_ranks(timeline, order, folded))
    return go.Figure(figure), bars


def bars_of(timeline: StepTimeline, kind: SpanKind, look: str = SOLID) -> list[tuple[float, float]]:
    """Return begin and length of the bars of a kind and look, in ms."""
    _, bars = drawn(timeline)
    (found,) = (one for one in bars if (one.kind, one.look) == (kind, look))
    return list(zip(found.begin_ms.tolist(), found.length_ms.tolist(), strict=True))


def test_wait_and_transfer_of_a_span_are_drawn_side_by_side_in_milliseconds() -> None:
    timeline = step_of(
        comm(0, 10_000_000, 40_000_000),
        comm(1, 30_000_000, 40_000_000),
        compute(1, 10_000_000, 30_000_000),
    )

    assert bars_of(timeline, SpanKind.TP_COMM, HATCHED) == [(0.0, 20.0)]
    assert bars_of(timeline, SpanKind.TP_COMM) == [(20.0, 10.0), (20.0, 10.0)]
    assert bars_of(timeline, SpanKind.FORWARD) == [(0.0, 20.0)]


def test_a_span_of_unknown_wait_is_drawn_whole() -> None:
    assert bars_of(step_of(comm(0, 0, 5_000_000)), SpanKind.TP_COMM) == [(0.0, 5.0)]


def test_every_span_is_a_bar_and_every_kind_an_entry_of_the_legend() -> None:
    timeline = read_timeline(training_provider(), "demo-42", epoch=0, step=3)

    figure, bars = drawn(timeline)

    # Waits of tp-comm and dp-comm: rank 4 waits before 16 all-reduces, ranks 6 and 7 before one
    # reduce-scatter.
    waits = [one for one in bars if one.look == HATCHED and one.kind is not SpanKind.WAIT]
    assert [len(one.spans) for one in waits] == [16, 2]
    spans = np.concatenate([one.spans for one in bars])
    assert np.unique(spans).tolist() == list(range(336))
    # Six kinds, and the sample of hatching.
    assert len(traces(figure)) == 6 + 1
    assert figure.layout.xaxis.ticksuffix == " ms"


def test_a_document_of_bars_has_their_arrays() -> None:
    _, (bars,) = drawn(step_of(compute(0, 0, 2_000_000)))

    found = bars.document()

    assert np.frombuffer(b64decode(found["length"]), "<f8").tolist() == [2.0]
    assert np.frombuffer(b64decode(found["spans"]), "<i4").tolist() == [0]
    assert (found["kind"], found["color"]) == ("forward", KIND_COLORS[SpanKind.FORWARD])


def test_every_row_is_labelled_with_its_rank() -> None:
    figure, _ = drawn(step_of(compute(5, 0, 9), compute(2, 0, 9)), RowOrder.RANK)

    assert figure.layout.yaxis.ticktext == ("2", "5")


def test_a_hover_text_has_what_is_known_of_the_span() -> None:
    timeline = step_of(
        replace(comm(0, 0, 40_000_000), num_bytes=4 << 20, microbatch=2),
        comm(1, 30_000_000, 40_000_000),
    )

    first, second = hover_texts(timeline)

    assert first.split("\n") == [
        "all_reduce",
        "tp-comm, micro-batch 2",
        "rank 0 (PP 0 · DP 0 · TP 0)",
        "duration 40.0 ms, from 0.000 ms",
        "wait 30.0 ms for rank 1",
        "transfer 10.0 ms",
        "4.00 MiB",
    ]
    assert "wait 0 ns\ntransfer 10.0 ms" in second
    assert "MiB" not in second


def test_a_blocked_thread_waits_until_the_last_member_arrives_and_then_transfers() -> None:
    # GIVEN an all-reduce of 5 to 40 ms on rank 0, which rank 1 enters at 10 ms, and the waits of
    # both main threads for it
    ms = 1_000_000
    wait = replace(compute(0, 5 * ms, 40 * ms, SpanKind.WAIT), group_id=PAIR.group_id, seq=0)
    late = replace(wait, rank=1, start_ns=UnixNs(20 * ms), duration_ns=20 * ms)
    spans = (comm(0, 5 * ms, 40 * ms), comm(1, 10 * ms, 40 * ms))
    timeline = step_of(*spans, wait, late, depths=(0, 0, 1, 1))

    # THEN bars, their texts and pixels have the wait hatched, and the transfer in its own colour
    of_waits = [
        (bar.kind, bar.look, begin, length)
        for bar in drawn(timeline)[1]
        for begin, length, row in zip(bar.begin_ms, bar.length_ms, bar.spans, strict=True)
        if row in (2, 3)
    ]
    assert sorted(of_waits) == [
        (SpanKind.TP_COMM, SOLID, 5.0, 30.0),
        (SpanKind.TP_COMM, SOLID, 15.0, 20.0),
        (SpanKind.WAIT, HATCHED, 0.0, 5.0),
    ]
    texts = hover_texts(timeline)
    assert "wait 5.00 ms for rank 1\ntransfer 30.0 ms" in texts[2]
    assert "wait 0 ns\ntransfer 20.0 ms" in texts[3]
    raster = draw_raster(timeline, (0, 1), max_lines=2, num_bins=7)
    moves, waits = KINDS.index(SpanKind.TP_COMM), KINDS.index(SpanKind.WAIT)
    assert raster.compute.kind.tolist() == [[waits] + [moves] * 6, [-1] * 3 + [moves] * 4]
    assert np.unique(raster_shades(raster)[0, 1:]).tolist() == [2 * moves + 2]


def test_a_hover_text_of_an_open_p2p_span_has_both_ranks_and_its_state() -> None:
    sent = replace(
        comm(0, 0, 9), kind=SpanKind.PP_SEND, src_rank=0, dst_rank=4, flags=SpanFlag.OPEN
    )

    (text,) = hover_texts(step_of(sent))

    assert "rank 0 → rank 4" in text
    assert text.endswith("still open when last seen")
    assert "wait" not in text


def test_a_hover_text_escapes_the_name_of_the_span() -> None:
    hostile = replace(compute(0, 0, 9), name='<a href="x">&</a>\u202e')

    (text,) = hover_texts(step_of(hostile))

    assert text.startswith('<a href="x">&</a>\\u{202e}\n')  # the assets show it as text


def test_a_folded_group_is_one_row_of_cells_and_its_spans_are_not_drawn() -> None:
    timeline = step_of(*(compute(rank, 0, 9_000_000) for rank in range(8)))

    figure, (single, cells) = drawn(timeline, folded=(0,))

    assert np.rint(np.sort(single.center)).tolist() == [1, 2, 3, 4]
    assert [one.tolist() for one in (cells.center, cells.begin_ms, cells.length_ms)] == [
        [0.0], [0.0], [9.0]
    ]  # fmt: skip
    assert list(cells.texts) == ["forward, most of 4 ranks"]
    assert cells.spans.size == 0
    assert figure.layout.yaxis.ticktext == ("4 ranks", "4", "5", "6", "7")
    texts = [one.text for one in figure.layout.annotations]
    assert texts == ["▸ <b>PP 0</b>", "▾ <b>PP 1</b>", "rank"]


def test_the_times_of_a_long_step_are_in_seconds() -> None:
    axis = time_axis(60_100.0)

    assert axis["labelalias"]["10000"] == axis["labelalias"]["10000 ms"] == "10 s"
    assert axis["tickformatstops"] == [{"dtickrange": [1000, None], "value": "d"}]
    assert len(axis["labelalias"]) == 2 * 61  # 1 to 61 s: zero has no unit, at any zoom
    assert "labelalias" not in time_axis(4_999.0)


def test_a_long_name_of_a_host_is_cut_in_its_middle() -> None:
    cut = short_name(Group(0, 0, "trainer-worker-of-the-large-run-0017"))

    assert cut == "trainer-wo…-run-0017"
    assert short_name(Group(0, 0, "node-0")) == "node-0"
