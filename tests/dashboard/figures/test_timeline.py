from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from rankscope.analysis.drawing.raster import draw_picture
from rankscope.analysis.drawing.rows import GroupBy, arrange_rows, row_order
from rankscope.analysis.drawing.timeline import read_timeline
from rankscope.analysis.trace.tables import GroupInfo
from rankscope.dashboard.figures.timeline import hover_texts, timeline_figure
from rankscope.dashboard.figures.timeline_raster import raster_figure, raster_note
from rankscope.dashboard.theme import KIND_COLORS
from rankscope.tracer.span import Span, SpanFlag, SpanKind, UnixNs
from rankscope.tracer.topology import Layout
from tests.support.dashboard.builders import FakeProvider, report, shades_of, span_table, traces
from tests.support.dashboard.training_builder import training_provider

if TYPE_CHECKING:
    from rankscope.analysis.drawing.timeline import StepTimeline

TP = GroupInfo(group_id=7, kind="tp-comm", name="tp", members=(0, 1))


def compute(rank: int, start_ns: int, end_ns: int) -> Span:
    return Span(
        rank=rank,
        step=3,
        kind=SpanKind.FORWARD,
        name="layer",
        start_ns=UnixNs(start_ns),
        duration_ns=end_ns - start_ns,
        track="main",
    )


def comm(rank: int, start_ns: int, end_ns: int) -> Span:
    return replace(
        compute(rank, start_ns, end_ns),
        kind=SpanKind.TP_COMM,
        name="all_reduce",
        track="comm tp",
        group_id=7,
        seq=0,
    )


def step(*spans: Span) -> StepTimeline:
    provider = FakeProvider(
        reports={"r": report(run="r")}, tables={"r": span_table(spans)}, groups={"r": (TP,)}
    )
    return read_timeline(provider, "r", epoch=0, step=3)


def bars(timeline: StepTimeline, name: str) -> list[tuple[float, float]]:
    figure = timeline_figure(timeline, GroupBy.PP)
    trace = next(trace for trace in traces(figure) if trace.name == name)
    return [(float(base), float(size)) for base, size in zip(trace.base, trace.x, strict=True)]


def test_wait_and_transfer_of_one_span_stand_side_by_side_in_milliseconds() -> None:
    timeline = step(
        comm(0, 10_000_000, 40_000_000),
        comm(1, 30_000_000, 40_000_000),
        compute(1, 10_000_000, 30_000_000),
    )

    assert bars(timeline, "tp-comm, waiting") == [(0.0, 20.0)]
    assert bars(timeline, "tp-comm") == [(20.0, 10.0), (20.0, 10.0)]
    assert bars(timeline, "forward") == [(0.0, 20.0)]


def test_a_span_whose_wait_is_unknown_is_drawn_whole() -> None:
    assert bars(step(comm(0, 0, 5_000_000)), "tp-comm") == [(0.0, 5.0)]


def test_a_kind_has_one_trace_however_many_spans() -> None:
    provider = training_provider()
    timeline = read_timeline(provider, "demo-42", epoch=0, step=3)

    figure = timeline_figure(timeline, GroupBy.PP)

    # Six kinds; waits of tp-comm and dp-comm; the sample of hatching in the legend.
    assert len(traces(figure)) == 6 + 2 + 1
    assert sum(len(trace.x) for trace in traces(figure)) == 336 + 16 + 2 + 1
    assert figure.layout.xaxis.title.text.endswith("(ms)")


@pytest.mark.parametrize(
    ("group_by", "ranks"),
    [
        (GroupBy.PP, (0, 1, 2, 3, 4, 5, 6, 7)),
        (GroupBy.DP, (0, 1, 4, 5, 2, 3, 6, 7)),
        (GroupBy.TP, (0, 2, 4, 6, 1, 3, 5, 7)),
        (GroupBy.RANK, (0, 1, 2, 3, 4, 5, 6, 7)),
    ],
)
def test_rows_gather_the_ranks_of_one_position(group_by: GroupBy, ranks: tuple[int, ...]) -> None:
    timeline = step(*(compute(rank, 0, 9) for rank in range(8)))

    assert row_order(timeline, group_by) == ranks


def test_ranks_without_a_known_position_come_last() -> None:
    timeline = step(compute(99, 0, 9), compute(5, 0, 9))

    rows = arrange_rows(timeline, GroupBy.PP)

    assert rows.ranks == (5, 99)
    assert rows.groups == ((0, "PP 1"), (1, "position unknown"))


def test_where_no_position_is_known_ranks_stand_in_order_without_groups() -> None:
    timeline = replace(step(compute(2, 0, 9), compute(1, 0, 9)), coords={})

    rows = arrange_rows(timeline, GroupBy.PP)

    assert (rows.ranks, rows.groups) == ((1, 2), ())


def test_communication_stands_below_compute_in_its_ranks_row() -> None:
    timeline = step(compute(0, 0, 9), comm(0, 9, 12), compute(1, 0, 9), comm(1, 9, 12))

    centers = arrange_rows(timeline, GroupBy.PP).center.tolist()

    assert -0.5 < centers[0] < centers[1] < 0.5 < centers[2] < centers[3] < 1.5


def test_an_importers_single_track_parts_communication_by_kind() -> None:
    timeline = step(
        replace(compute(0, 0, 9), track=""),
        replace(comm(0, 5, 12), track=""),
        replace(comm(0, 6, 12), track="", kind=SpanKind.DP_COMM, seq=1),
    )

    centers = arrange_rows(timeline, GroupBy.PP).center

    assert len(set(centers.tolist())) == 3
    assert centers[0] == centers.min()


def test_one_rank_with_one_track_fills_its_row() -> None:
    timeline = step(compute(0, 0, 9))

    assert arrange_rows(timeline, GroupBy.PP).center.tolist() == pytest.approx([0.0], abs=0.03)
    assert timeline_figure(timeline, GroupBy.PP).layout.yaxis.ticktext == ("rank 0",)


def test_hovering_tells_what_is_known_and_leaves_out_the_rest() -> None:
    timeline = step(
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


def test_hovering_a_p2p_span_names_both_ends_and_an_open_one_its_state() -> None:
    sent = replace(
        comm(0, 0, 9), kind=SpanKind.PP_SEND, src_rank=0, dst_rank=4, flags=SpanFlag.OPEN
    )

    (text,) = hover_texts(step(sent)).tolist()

    assert "rank 0 → rank 4" in text
    assert text.endswith("had not ended when last seen")
    assert "wait" not in text


def test_names_from_outside_are_inert_under_the_pointer() -> None:
    (text,) = hover_texts(step(replace(compute(0, 0, 9), name='<a href="x">&</a>\u202e'))).tolist()

    assert text.startswith('<b>&lt;a href="x"&gt;&amp;&lt;/a&gt;\\u{202e}</b>')


def test_a_crowd_is_drawn_as_areas_and_says_what_a_pixel_is() -> None:
    crowd = report(layout=Layout(pp=8, dp=16, tp=4), slow_rank=77)
    timeline = read_timeline(training_provider(crowd), "demo-42", epoch=0, step=3)
    picture = draw_picture(timeline, GroupBy.PP)

    figure = raster_figure(picture, GroupBy.PP)

    assert len(figure["data"][0]["y"]) == 512
    assert "21,504 spans as a density picture" in raster_note(picture)
    assert "Communication shows where nothing was computed." in raster_note(picture)
    names = {trace["name"] for trace in figure["data"][1:]}
    assert names == {"forward", "backward", "optimizer", "tp-comm", "dp-comm", "wait"}
    assert len(json.dumps(figure)) < 1_000_000  # of the 2 MB that a browser is sent at most


def test_a_pixel_has_the_colour_of_its_kind_and_none_where_nothing_was() -> None:
    # Rank 0 computes 0 to 9 and communicates 9 to 12: three quarters, and the last one.
    picture = draw_picture(step(compute(0, 0, 9_000), comm(0, 9_000, 12_000)), GroupBy.PP)
    figure = raster_figure(picture, GroupBy.PP)
    heatmap, shades = figure["data"][0], shades_of(figure)

    def color(line: int, part: float) -> str:
        value = float(shades[line][int(part * len(shades[line]))])
        place = (value - heatmap["zmin"]) / (heatmap["zmax"] - heatmap["zmin"])
        return next(str(c) for edge, c in reversed(heatmap["colorscale"]) if edge <= place)

    forward, tp_comm = (KIND_COLORS[kind] for kind in (SpanKind.FORWARD, SpanKind.TP_COMM))
    assert color(0, 0.5) == rgba(forward)
    assert color(1, 0.9) == rgba(tp_comm)
    assert color(0, 0.9) == color(1, 0.5) == "rgba(0,0,0,0)"


def rgba(color: str) -> str:
    red, green, blue = (int(color[at : at + 2], 16) for at in (1, 3, 5))
    return f"rgba({red},{green},{blue},1)"


def test_few_ranks_have_two_lines_each_as_areas() -> None:
    picture = draw_picture(step(compute(0, 0, 9), comm(0, 9, 12)), GroupBy.PP)

    labels = raster_figure(picture, GroupBy.PP)["data"][0]["y"]

    assert labels == ["rank 0", "rank 0, communication"]
    assert "the lower communication" in raster_note(picture)
