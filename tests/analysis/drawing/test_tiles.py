from __future__ import annotations

import itertools

from rankscope.analysis.drawing.tiles import finest_zooms


def test_a_finer_level_is_made_if_several_spans_fall_on_each_of_its_pixels() -> None:
    # 12,288 ranks on 512 lines of 24 have 460,800 pixels. A finer zoom or lines of six have four
    # times as many, lines of two twelve times.
    assert finest_zooms(num_spans=7_372_799, num_ranks=12_288) == {24: 0}
    assert finest_zooms(num_spans=7_372_800, num_ranks=12_288) == {24: 1, 6: 0}
    assert finest_zooms(num_spans=24_576_000, num_ranks=12_288) == {24: 1, 6: 0, 2: 0}
    assert finest_zooms(num_spans=20_000, num_ranks=1) == {1: 1}


def test_finer_lines_are_inside_coarser_ones_for_any_number_of_ranks() -> None:
    for num_ranks in range(1, 9_000, 7):
        sizes = list(finest_zooms(num_spans=10**9, num_ranks=num_ranks))
        assert all(coarse % fine == 0 for coarse, fine in itertools.pairwise(sizes))
        assert sizes[-1] == 1
