from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from rankscope.analysis.drawing.rows import RowLayout
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
