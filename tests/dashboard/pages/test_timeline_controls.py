from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from rankscope.analysis.drawing.raster import Viewport
from rankscope.analysis.drawing.rows import RowLayout
from rankscope.dashboard.address import TIMELINE, View, read_address, write_address
from rankscope.dashboard.pages.timeline_controls import make_scale

if TYPE_CHECKING:
    from collections.abc import Sequence


def rows_of(sizes: Sequence[int], lines: Sequence[int], first_place: int = 0) -> RowLayout:
    return RowLayout(
        blocks=tuple(tuple(range(size)) for size in sizes),
        lines=lines,
        groups=(),
        folded=frozenset(),
        num_ranks=400,
        first_place=first_place,
    )


def test_a_scale_has_the_ranks_above_each_line_where_their_number_changes() -> None:
    # A viewport from the tenth rank on: 2 lines of 24 ranks, a folded group of 96, one line of 24.
    rows = rows_of((24, 24, 96, 24), range(5), first_place=10)

    scale = make_scale(rows, length_ns=5 * 10**6, is_whole=False)

    assert scale.lines == [0, 2, 3, 4]
    assert scale.rows == [10, 58, 154, 178]
    assert (scale.num_ranks, scale.length_ms, scale.is_whole) == (400, 5.0, False)


@pytest.mark.parametrize(
    ("sizes", "lines", "knots", "ranks_above"),
    [
        ((1, 1), [0, 2, 4], [0, 4], [0, 2]),  # two lines a rank
        ((1, 2, 1), [0, 1, 7, 8], [0, 1, 7, 8], [0, 1, 3, 4]),  # a folded group of six lines
    ],
)
def test_a_scale_counts_all_lines_of_a_row(
    sizes: list[int], lines: list[int], knots: list[int], ranks_above: list[int]
) -> None:
    scale = make_scale(rows_of(sizes, lines), length_ns=1, is_whole=True)

    assert (scale.lines, scale.rows) == (knots, ranks_above)


def test_the_address_holds_the_folded_groups() -> None:
    view = View(page=TIMELINE, run="r", folded=(0, 1, 2, 7))

    path, _, query = write_address(view, base_path="/").partition("?")

    assert query == "run=r&fold=0-2,7"
    assert read_address(path, query) == view


def test_the_address_holds_the_viewport() -> None:
    viewport = Viewport(begin_ns=5, end_ns=10**12, first_row=0, end_row=12_288)
    view = View(page=TIMELINE, run="r", epoch=0, step=3, viewport=viewport)

    path, _, query = write_address(view, base_path="/").partition("?")

    assert query.endswith("from=5&to=1000000000000&rows=0-12287")
    assert read_address(path, query) == view


@pytest.mark.parametrize("query", ["from=9&to=5&rows=0-1", "from=1&to=5&rows=3-1", "rows=0-1"])
def test_an_impossible_viewport_in_an_address_is_ignored(query: str) -> None:
    assert read_address("timeline", query).viewport is None
