from __future__ import annotations

import pytest

from rankscope.analysis.drawing.raster import Viewport
from rankscope.dashboard.address import TIMELINE, View, read_address, write_address
from rankscope.dashboard.pages.timeline_controls import WHOLE, Relayout, Scale, read_zoom

LINES_OF_24 = Scale(first_row=0, ranks_per_line=24.0, num_lines=512, begin_ms=0.0, end_ms=900.0)
"""A whole step of 12,288 ranks, 900 ms long: 512 lines of 24 ranks."""

PAIRED = Scale(first_row=10, ranks_per_line=0.5, num_lines=8, begin_ms=100.0, end_ms=200.0)
"""A viewport of 4 ranks from the tenth row on, two lines each, 100 to 200 ms."""


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
    assert read_zoom(relayout(x0=300, x1=450.5, y0=11.2, y1=9.6), LINES_OF_24) == Viewport(
        begin_ns=300_000_000, end_ns=450_500_000, first_row=240, end_row=288
    )


def test_both_lines_of_a_rank_select_the_rank() -> None:
    assert read_zoom(relayout(y0=3.2, y1=2.8), PAIRED) == Viewport(
        begin_ns=100_000_000, end_ns=200_000_000, first_row=11, end_row=12
    )


def test_a_double_click_selects_the_whole_step() -> None:
    reset = relayout(**{"xaxis.autorange": True, "yaxis.autorange": True})

    assert read_zoom(reset, PAIRED) is WHOLE


@pytest.mark.parametrize(
    ("changes", "scale"),
    [
        ({"autosize": True}, PAIRED),
        ({"x0": 300.0, "x1": 450.0}, None),  # bars: the browser zooms them
        ({"x0": 90.0, "x1": 210.0}, PAIRED),  # all that is shown
        ({"x0": 300.0, "x1": 400.0}, PAIRED),  # nothing that is shown
    ],
)
def test_other_changes_select_nothing(changes: dict[str, object], scale: Scale | None) -> None:
    assert read_zoom(relayout(**changes), scale) is None


def test_the_address_holds_the_viewport() -> None:
    viewport = Viewport(begin_ns=5, end_ns=10**12, first_row=0, end_row=12_288)
    view = View(page=TIMELINE, run="r", epoch=0, step=3, viewport=viewport)

    path, _, query = write_address(view, base_path="/").partition("?")

    assert query.endswith("from=5&to=1000000000000&rows=0-12287")
    assert read_address(path, query) == view


@pytest.mark.parametrize(
    "query", ["from=9&to=5&rows=0-1", "from=1&to=5&rows=3-1", "from=1&to=5", "rows=0-1"]
)
def test_an_impossible_viewport_in_an_address_is_ignored(query: str) -> None:
    assert read_address("timeline", query).viewport is None
