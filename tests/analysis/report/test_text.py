from __future__ import annotations

import pytest

from rankscope.analysis.report.text import count_text, name_ranks, percent_text


@pytest.mark.parametrize(
    ("num", "text"),
    [(0, "0 ranks"), (1, "1 rank"), (2, "2 ranks"), (999, "999 ranks"), (12_288, "12,288 ranks")],
)
def test_a_count_has_a_separator_from_a_thousand_on(num: int, text: str) -> None:
    assert count_text(num, "rank") == text


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ((4, 5), "ranks 4 and 5"),
        ((4, 5, 6), "ranks 4 to 6"),
        (tuple(range(6_144, 6_152)), "ranks 6144 to 6151"),
        ((3, 8, 9, 10, 11), "ranks 3 and 8 to 11"),
        ((0, 1, 2, 5, 6, 9), "ranks 0 to 2, 5, 6 and 9"),
        (tuple(range(12_288)), "ranks 0 to 12287"),
    ],
)
def test_three_ranks_in_a_row_are_a_range(ranks: tuple[int, ...], text: str) -> None:
    assert name_ranks(ranks) == text


def test_the_ranks_that_are_not_named_are_counted_with_a_separator() -> None:
    ranks = (*range(8), *range(10, 12_288, 2))

    assert name_ranks(ranks) == "ranks 0 to 7, 10, 12, 14, 16, 18, 20, 22 and 6,132 more"


def test_a_ranks_own_number_has_no_separator() -> None:
    assert name_ranks((12_287,)) == "rank 12287"


@pytest.mark.parametrize(("ratio", "text"), [(0.0, "0 %"), (0.264, "26 %"), (1.0, "100 %")])
def test_a_share_is_written_as_the_pages_do(ratio: float, text: str) -> None:
    assert percent_text(ratio) == text
