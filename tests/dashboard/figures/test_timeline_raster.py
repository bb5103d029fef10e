from __future__ import annotations

import json

from rankscope.analysis.drawing.raster import draw_picture
from rankscope.analysis.drawing.rows import GroupBy
from rankscope.analysis.drawing.timeline import read_timeline
from rankscope.dashboard.figures.timeline_raster import raster_figure, raster_note
from rankscope.dashboard.theme import KIND_COLORS, rgba
from rankscope.tracer.span import SpanKind
from rankscope.tracer.topology import Layout
from tests.support.dashboard.builders import report, shades_of
from tests.support.dashboard.step_builder import comm, compute, step_of
from tests.support.dashboard.training_builder import training_provider


def test_a_large_step_has_one_line_for_each_rank_or_block_of_ranks() -> None:
    large = report(layout=Layout(pp=8, dp=16, tp=4), slow_rank=77)
    timeline = read_timeline(training_provider(large), "demo-42", epoch=0, step=3)
    picture = draw_picture(timeline, GroupBy.PP)

    figure = raster_figure(picture, GroupBy.PP)

    assert len(figure["data"][0]["y"]) == 512
    assert "21,504 spans as a density picture." in raster_note(picture)
    assert "Communication shows where nothing was computed." in raster_note(picture)
    names = {trace["name"] for trace in figure["data"][1:]}
    assert names == {"forward", "backward", "optimizer", "tp-comm", "dp-comm", "wait"}
    assert len(json.dumps(figure)) < 1_000_000  # a browser is sent 2 MB at most


def test_a_cell_has_the_colour_of_its_kind_and_none_if_it_is_empty() -> None:
    # Rank 0 computes 0 to 9 and communicates 9 to 12: three quarters, and the last one.
    picture = draw_picture(step_of(compute(0, 0, 9_000), comm(0, 9_000, 12_000)), GroupBy.PP)
    figure = raster_figure(picture, GroupBy.PP)
    heatmap, shades = figure["data"][0], shades_of(figure)

    def color(line: int, part: float) -> str:
        shade = float(shades[line][int(part * len(shades[line]))])
        place = (shade - heatmap["zmin"]) / (heatmap["zmax"] - heatmap["zmin"])
        return next(str(c) for edge, c in reversed(heatmap["colorscale"]) if edge <= place)

    assert color(0, 0.5) == rgba(KIND_COLORS[SpanKind.FORWARD], 1)
    assert color(1, 0.9) == rgba(KIND_COLORS[SpanKind.TP_COMM], 1)
    assert color(0, 0.9) == color(1, 0.5) == "rgba(0,0,0,0)"


def test_few_ranks_have_two_lines_each() -> None:
    picture = draw_picture(step_of(compute(0, 0, 9), comm(0, 9, 12)), GroupBy.PP)

    labels = raster_figure(picture, GroupBy.PP)["data"][0]["y"]

    assert labels == ["rank 0", "rank 0, communication"]
    assert "the lower communication" in raster_note(picture)
