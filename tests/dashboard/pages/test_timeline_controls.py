from __future__ import annotations

import pytest

from rankscope.analysis.drawing.raster import Viewport
from rankscope.dashboard.address import TIMELINE, View, read_address, write_address
from rankscope.dashboard.pages.timeline_controls import WHOLE, Relayout, Scale, read_zoom

LINES_OF_24 = Scale(
    first_row=0,
    ranks_per_line=24.0,
    num_lines=512,
    num_ranks=12_288,
    length_ms=900.0,
    is_whole=False,
)
"""A whole step of 12,288 ranks, 900 ms long: 512 lines of 24 ranks."""

PAIRED = Scale(
    first_row=10,
    ranks_per_line=0.5,
    num_lines=8,
    num_ranks=64,
    length_ms=300.0,
    is_whole=False,
)
"""A viewport of 4 ranks from the tenth row on, two lines each, of a step of 64 ranks and 300 ms."""

SHOWN = Viewport(begin_ns=100_000_000, end_ns=200_000_000, first_row=10, end_row=14)
"""It shows 100 to 200 ms."""


def relayout(**changes: object) -> Relayout:
    """Return a change of the axes as plotly reports it: ``x0`` is ``xaxis.range[0]``."""
    names = {
        "x0": "xaxis.range[0]",
        "x1": "xaxis.range[1]",
        "y0": "yaxis.range[0]",
        "y1": "yaxis.range[1]",
    }
    return Relayout.model_validate({names.get(name, name): at for name, at in changes.items()})


def test_a_box_selects_the_ranks_and_the_time_that_it_touches() -> None:
    # Lines 10 and 11 reach from 9.5 to 11.5: ranks 240 to 287.
    assert read_zoom(relayout(x0=300, x1=450.5, y0=11.2, y1=9.6), LINES_OF_24, None) == Viewport(
        begin_ns=300_000_000, end_ns=450_500_000, first_row=240, end_row=288
    )


def test_both_lines_of_a_rank_select_the_rank() -> None:
    assert read_zoom(relayout(y0=3.2, y1=2.8), PAIRED, SHOWN) == Viewport(
        begin_ns=100_000_000, end_ns=200_000_000, first_row=11, end_row=12
    )


def test_a_double_click_selects_the_whole_step() -> None:
    reset = relayout(**{"xaxis.autorange": True, "yaxis.autorange": True})

    assert read_zoom(reset, PAIRED, SHOWN) is WHOLE
    assert read_zoom(relayout(x0=-5, x1=310, y0=130, y1=-99), PAIRED, SHOWN) is WHOLE


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"x0": 50.0, "x1": 150.0}, (50, 150, 10, 14)),  # to the left
        ({"x0": 0.0, "x1": 400.0}, (0, 300, 10, 14)),  # out, beyond the step's end
        ({"y0": 11.5, "y1": -4.5}, (100, 200, 8, 16)),  # four lines up and down
        ({"x0": 140.0, "x1": 150.0, "y0": 1.5, "y1": -0.5}, (140, 150, 10, 11)),  # in
    ],
)
def test_panning_and_zooming_out_ask_for_what_is_not_loaded(
    changes: dict[str, object], expected: tuple[int, int, int, int]
) -> None:
    found = read_zoom(relayout(**changes), PAIRED, SHOWN)

    begin_ms, end_ms, first_row, end_row = expected
    assert found == Viewport(
        begin_ns=begin_ms * 10**6, end_ns=end_ms * 10**6, first_row=first_row, end_row=end_row
    )


@pytest.mark.parametrize(
    ("changes", "scale"),
    [
        ({"autosize": True}, PAIRED),
        ({"x0": 300.0, "x1": 450.0}, None),  # no figure
        ({"x0": 310.0, "x1": 400.0}, PAIRED),  # behind the step's end
        ({"y0": 300.0, "y1": 200.0}, PAIRED),  # below the last rank
    ],
)
def test_other_changes_select_nothing(changes: dict[str, object], scale: Scale | None) -> None:
    assert read_zoom(relayout(**changes), scale, SHOWN) is None


def test_the_address_holds_the_viewport() -> None:
    viewport = Viewport(begin_ns=5, end_ns=10**12, first_row=0, end_row=12_288)
    view = View(page=TIMELINE, run="r", epoch=0, step=3, viewport=viewport)

    path, _, query = write_address(view, base_path="/").partition("?")

    assert query.endswith("from=5&to=1000000000000&rows=0-12287")
    assert read_address(path, query) == view


@pytest.mark.parametrize("query", ["from=9&to=5&rows=0-1", "from=1&to=5&rows=3-1", "rows=0-1"])
def test_an_impossible_viewport_in_an_address_is_ignored(query: str) -> None:
    assert read_address("timeline", query).viewport is None
