from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import plotly.graph_objects as go

from rankscope.analysis.drawing.rows import RowOrder
from rankscope.analysis.drawing.timeline import read_timeline
from rankscope.dashboard.figures.timeline import hover_texts, timeline_figure
from rankscope.tracer.span import SpanFlag, SpanKind
from tests.support.dashboard.builders import traces
from tests.support.dashboard.step_builder import comm, compute, step_of
from tests.support.dashboard.training_builder import training_provider

if TYPE_CHECKING:
    from rankscope.analysis.drawing.timeline import StepTimeline


def drawn(*step: Any, **shown: Any) -> go.Figure:  # noqa: ANN401
    return go.Figure(timeline_figure(*step, **shown))


def bars(timeline: StepTimeline, name: str) -> list[tuple[float, float]]:
    """Return begin and length of the bars of one trace, in ms."""
    figure = drawn(timeline, RowOrder.PP)
    trace = next(trace for trace in traces(figure) if trace.name == name)
    return [(float(base), float(size)) for base, size in zip(trace.base, trace.x, strict=True)]


def test_wait_and_transfer_of_a_span_are_drawn_side_by_side_in_milliseconds() -> None:
    timeline = step_of(
        comm(0, 10_000_000, 40_000_000),
        comm(1, 30_000_000, 40_000_000),
        compute(1, 10_000_000, 30_000_000),
    )

    assert bars(timeline, "tp-comm, waiting") == [(0.0, 20.0)]
    assert bars(timeline, "tp-comm") == [(20.0, 10.0), (20.0, 10.0)]
    assert bars(timeline, "forward") == [(0.0, 20.0)]


def test_a_span_of_unknown_wait_is_drawn_whole() -> None:
    assert bars(step_of(comm(0, 0, 5_000_000)), "tp-comm") == [(0.0, 5.0)]


def test_a_kind_is_one_trace_for_any_number_of_spans() -> None:
    timeline = read_timeline(training_provider(), "demo-42", epoch=0, step=3)

    figure = drawn(timeline, RowOrder.PP)

    # Six kinds; waits of tp-comm and dp-comm; the sample of hatching in the legend; the selected
    # span, and arrows.
    assert len(traces(figure)) == 6 + 2 + 1 + 2
    assert sum(len(trace.x) for trace in traces(figure)) == 336 + 16 + 2 + 1
    assert figure.layout.xaxis.ticksuffix == " ms"


def test_every_row_is_labelled_with_its_rank() -> None:
    figure = drawn(step_of(compute(5, 0, 9), compute(2, 0, 9)), RowOrder.RANK)

    assert figure.layout.yaxis.ticktext == ("rank 2", "rank 5")


def test_a_hover_text_has_what_is_known_of_the_span() -> None:
    timeline = step_of(
        replace(comm(0, 0, 40_000_000), num_bytes=4 << 20, microbatch=2),
        comm(1, 30_000_000, 40_000_000),
    )

    first, second = hover_texts(timeline).tolist()

    assert first.split("<br>") == [
        "<b>all_reduce</b>",
        "tp-comm, micro-batch 2",
        "rank 0 (PP 0 · DP 0 · TP 0)",
        "duration 40.0 ms, from 0.000 ms",
        "wait 30.0 ms for rank 1",
        "transfer 10.0 ms",
        "4.00 MiB",
    ]
    assert "wait 0 ns<br>transfer 10.0 ms" in second
    assert "MiB" not in second


def test_a_hover_text_of_an_open_p2p_span_has_both_ranks_and_its_state() -> None:
    sent = replace(
        comm(0, 0, 9), kind=SpanKind.PP_SEND, src_rank=0, dst_rank=4, flags=SpanFlag.OPEN
    )

    (text,) = hover_texts(step_of(sent)).tolist()

    assert "rank 0 → rank 4" in text
    assert text.endswith("still open when last seen")
    assert "wait" not in text


def test_a_hover_text_escapes_the_name_of_the_span() -> None:
    hostile = replace(compute(0, 0, 9), name='<a href="x">&</a>\u202e')

    (text,) = hover_texts(step_of(hostile)).tolist()

    assert text.startswith('<b>&lt;a href="x"&gt;&amp;&lt;/a&gt;\\u{202e}</b>')


def test_a_folded_group_is_one_row_of_cells_and_its_spans_are_not_drawn() -> None:
    timeline = step_of(*(compute(rank, 0, 9_000_000) for rank in range(8)))

    figure = drawn(timeline, RowOrder.PP, folded=(0,))

    bars_drawn, cells = (trace for trace in traces(figure) if trace.name == "forward")
    assert sorted(round(float(y)) for y in bars_drawn.y) == [1, 2, 3, 4]
    assert (list(cells.y), list(cells.base), list(cells.x)) == ([0], [0.0], [9.0])
    assert cells.hovertext == ("forward, most of 4 ranks",)
    assert figure.layout.yaxis.ticktext == ("4 ranks", "rank 4", "rank 5", "rank 6", "rank 7")
    texts = [one.text for one in figure.layout.annotations]
    assert texts == ["▸ <b>PP 0</b>", "▾ <b>PP 1</b>"]
