from __future__ import annotations

import json
from base64 import b64decode
from dataclasses import replace
from typing import Any

import numpy as np
import plotly.graph_objects as go
import pytest

from rankscope.analysis.drawing.raster import StepPicture, Viewport, draw_picture
from rankscope.analysis.drawing.rows import (
    RowLayout,
    RowOrder,
    lay_out_ranks,
    lay_out_rows,
    order_ranks,
    split_ranks,
)
from rankscope.analysis.drawing.timeline import StepTimeline, cut_timeline, read_timeline
from rankscope.dashboard.figures.timeline import timeline_figure
from rankscope.dashboard.figures.timeline_canvas import HATCHED
from rankscope.dashboard.figures.timeline_raster import raster_figure, raster_note, raster_rows
from rankscope.dashboard.theme import KIND_COLORS, rgba
from rankscope.tracer.span import NS_PER_MS, SpanFlag, SpanKind
from rankscope.tracer.topology import Layout
from tests.support.dashboard.builders import report
from tests.support.dashboard.step_builder import comm, compute, step_of
from tests.support.dashboard.training_builder import training_provider


def pictured(
    timeline: StepTimeline,
    order: RowOrder = RowOrder.RANK,
    viewport: Viewport | None = None,
    folded: tuple[int, ...] = (),
) -> tuple[StepPicture, RowLayout]:
    picture = draw_picture(timeline, order_ranks(timeline, order), viewport)
    return picture, raster_rows(picture, order, folded)


def test_a_large_step_has_one_line_for_each_rank_or_block_of_ranks() -> None:
    large = report(layout=Layout(pp=8, dp=16, tp=4), slow_rank=77)
    timeline = read_timeline(training_provider(large), "demo-42", epoch=0, step=3)
    picture, rows = pictured(timeline, RowOrder.PP)

    figure, cells = raster_figure(picture, rows)

    assert len(cells["labels"]) == cells["num_lines"] == 512
    assert "21,504 spans as a density picture." in raster_note(picture, rows)
    assert "Communication shows where nothing was computed." in raster_note(picture, rows)
    names = {trace["name"] for trace in figure["data"]}
    assert names == {
        "forward", "backward", "optimizer", "tp-comm", "dp-comm", "wait (thread blocked)"
    }  # fmt: skip
    assert len(json.dumps([figure, cells])) < 1_000_000  # a browser is sent 2 MB at most


def test_a_cell_has_the_colour_of_its_kind_and_none_if_it_is_empty() -> None:
    # Rank 0 computes 0 to 9 and communicates 9 to 12: three quarters, and the last one.
    _, cells = raster_figure(*pictured(step_of(compute(0, 0, 9_000), comm(0, 9_000, 12_000))))

    assert color(cells, 0, 0.5) == rgba(KIND_COLORS[SpanKind.FORWARD], 1)
    assert color(cells, 1, 0.9) == rgba(KIND_COLORS[SpanKind.TP_COMM], 1)
    assert color(cells, 0, 0.9) == color(cells, 1, 0.5) == "rgba(0,0,0,0)"


@pytest.mark.parametrize("num_ranks", [2, 200])
def test_partners_of_a_slow_rank_have_the_colour_of_waiting(num_ranks: int) -> None:
    # Rank 1 computes 0 to 9; rank 0 computes 0 to 3 and waits for it in an all-reduce until 10.
    step = step_of(
        compute(0, 0, 10_000), comm(0, 3_000, 10_000), compute(0, 3_000, 10_000, SpanKind.WAIT),
        compute(1, 0, 10_000), comm(1, 9_000, 10_000), compute(1, 9_000, 10_000, SpanKind.WAIT),
        *(compute(rank, 0, 10_000) for rank in range(2, num_ranks)),
        depths=(0, 1, 2, 0, 1, 2, *(0 for _ in range(2, num_ranks))),
    )  # fmt: skip
    picture, rows = pictured(step)
    _, cells = raster_figure(picture, rows)
    slow = rows.lines[1]  # the line of rank 1

    forward, wait, transfer = (
        rgba(KIND_COLORS[kind], 1) for kind in (SpanKind.FORWARD, SpanKind.WAIT, SpanKind.TP_COMM)
    )
    assert [color(cells, 0, at) for at in (0.2, 0.5, 0.8)] == [forward, wait, wait]
    assert [color(cells, slow, at) for at in (0.2, 0.5, 0.8)] == [forward, forward, forward]
    last_line = slow - 1  # rank 0's communication, or its only line
    assert color(cells, last_line, 0.95) == transfer


def color(cells: dict[str, Any], line: int, part: float) -> str:
    """Return the colour of a line's pixel at a share of its width."""
    shades = np.frombuffer(b64decode(cells["shades"]), np.uint8).reshape(cells["num_lines"], -1)
    return str(cells["colors"][shades[line, int(part * shades.shape[1])]])


def test_few_ranks_have_two_lines_each() -> None:
    picture, rows = pictured(step_of(compute(0, 0, 9), comm(0, 9, 12)))

    labels = raster_figure(picture, rows)[1]["labels"]

    assert labels == ["rank 0", "rank 0, communication"]
    assert "the lower communication" in raster_note(picture, rows)


def test_what_a_viewport_does_not_have_is_drawn_as_not_loaded() -> None:
    step = step_of(*(compute(rank, 0, 100 * NS_PER_MS) for rank in range(8)))
    viewport = Viewport(begin_ns=20 * NS_PER_MS, end_ns=60 * NS_PER_MS, first_row=2, end_row=5)
    picture, rows = pictured(step, viewport=viewport)

    boxes = [
        shape
        for shape in raster_figure(picture, rows)[0]["layout"]["shapes"]
        if shape.get("name") == "not loaded"
    ]

    assert picture.ranks == (2, 3, 4)
    assert [(box["x0"], box["x1"]) for box in boxes[:2]] == [(0.0, 20.0), (60.0, 100.0)]
    # Two lines a rank: above the first of six, and below the last.
    assert (boxes[2]["y1"], boxes[3]["y0"]) == (-0.5, 5.5)
    part = cut_timeline(step, viewport, picture.ranks)
    rows = lay_out_rows(step, RowOrder.RANK, split_ranks(picture.ranks, 1))
    bars = go.Figure(timeline_figure(part, rows, viewport=viewport, is_whole=False)[0])
    assert [shape.x0 for shape in bars.layout.shapes if shape.name == "not loaded"][:2] == [0, 60]
    assert list(bars.layout.yaxis.ticktext) == ["2", "3", "4"]


def test_the_picture_of_a_whole_step_has_everything() -> None:
    figure, _ = raster_figure(*pictured(step_of(compute(0, 0, 9))))

    assert figure["layout"]["shapes"] == []


def test_an_open_communication_is_drawn_as_waiting() -> None:
    hung = replace(comm(0, 0, 10_000), flags=SpanFlag.OPEN)
    step = step_of(hung, compute(1, 0, 1_000))

    _, cells = raster_figure(*pictured(step))
    _, bars = timeline_figure(step, lay_out_ranks(step, RowOrder.RANK))

    assert color(cells, 1, 0.5) == rgba(KIND_COLORS[SpanKind.WAIT], 1)
    (waiting,) = [one for one in bars if one.look == HATCHED]
    assert waiting.length_ms.tolist() == [0.01]


def test_a_folded_group_is_as_high_as_its_name() -> None:
    large = report(layout=Layout(pp=8, dp=16, tp=4), slow_rank=77)
    timeline = read_timeline(training_provider(large), "demo-42", epoch=0, step=3)
    folded = (0, 1, 2)
    picture, rows = pictured(timeline, RowOrder.PP, folded=folded)

    figure, cells = raster_figure(picture, rows)
    layout = figure["layout"]

    # 798 px for 320 ranks and three groups: a line is 2.4 px high, and six of them 14 px.
    assert rows.lines == [0, 6, 12, *range(18, 339)]
    shades = np.frombuffer(b64decode(cells["shades"]), np.uint8).reshape(338, -1)
    assert (shades[:6] == shades[0]).all()
    assert cells["labels"][5:7] == ["ranks 0-63", "ranks 64-127"]
    assert layout["yaxis"]["ticktext"][:4] == ["64 ranks", "64 ranks", "64 ranks", "211"]
    assert layout["yaxis"]["tickvals"][:2] == [2.5, 8.5]
    names = [one["text"] for one in layout["annotations"]]
    unfolded = (f"▾ <b>PP {stage}</b>" for stage in range(3, 8))
    assert names == [*(f"▸ <b>PP {stage}</b>" for stage in folded), *unfolded, "rank"]
