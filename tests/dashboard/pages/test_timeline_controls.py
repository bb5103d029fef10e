from __future__ import annotations

from rankscope.analysis.drawing.raster import Window
from rankscope.dashboard.address import Page, View, read_address, write_address
from rankscope.dashboard.pages.timeline_controls import WHOLE, zoomed

LINES_OF_24 = [0, 24.0, 512, 0.0, 900.0]
"""A whole step of 12,288 ranks, 900 ms long: from the first rank, 24 a line, 512 lines."""

PAIRED = [10, 0.5, 8, 100.0, 200.0]
"""A window of 4 ranks from the tenth, two lines each, 100 to 200 ms."""


def test_a_box_is_the_ranks_and_the_time_that_it_touches() -> None:
    moved = {
        "xaxis.range[0]": 300.0, "xaxis.range[1]": 450.5,
        "yaxis.range[0]": 11.2, "yaxis.range[1]": 9.6,
    }  # fmt: skip

    # Lines 10 and 11 reach from 9.5 to 11.5: ranks 240 to 287.
    assert zoomed(moved, LINES_OF_24) == Window(
        begin_ns=300_000_000, end_ns=450_500_000, first_row=240, end_row=288
    )


def test_of_two_lines_a_rank_either_is_the_rank() -> None:
    moved = {"yaxis.range[0]": 3.2, "yaxis.range[1]": 2.8}

    assert zoomed(moved, PAIRED) == Window(
        begin_ns=100_000_000, end_ns=200_000_000, first_row=11, end_row=12
    )


def test_a_double_click_asks_for_the_whole_step_and_nothing_else_moves() -> None:
    assert zoomed({"xaxis.autorange": True, "yaxis.autorange": True}, PAIRED) is WHOLE
    assert zoomed({"autosize": True}, PAIRED) is None
    assert zoomed({"xaxis.range[0]": 300.0, "xaxis.range[1]": 450.0}, None) is None


def test_the_address_holds_the_window() -> None:
    window = Window(begin_ns=5, end_ns=10**12, first_row=0, end_row=12_288)
    view = View(page=Page.TIMELINE, run="r", epoch=0, step=3, window=window)

    path, _, query = write_address(view, base_path="/").partition("?")

    assert query.endswith("from=5&to=1000000000000&rows=0-12287")
    assert read_address(path, query) == view
    for broken in ("from=9&to=5&rows=0-1", "from=1&to=5&rows=3-1", "from=1&to=5", "rows=0-1"):
        assert read_address("timeline", broken).window is None
