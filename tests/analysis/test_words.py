from __future__ import annotations

import pytest

from analysis.words import count_text, name_ranks


@pytest.mark.parametrize(
    ("num", "text"),
    [(0, "0 ranks"), (1, "1 rank"), (2, "2 ranks"), (999, "999 ranks"), (12_288, "12,288 ranks")],
)
def test_a_count_has_a_separator_from_a_thousand_on(num: int, text: str) -> None:
    assert count_text(num, "rank") == text


def test_the_ranks_that_are_not_named_are_counted_with_a_separator() -> None:
    ranks = tuple(range(12_288))

    assert name_ranks(ranks) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 12,280 more"


def test_a_ranks_own_number_has_no_separator() -> None:
    assert name_ranks((12_287,)) == "rank 12287"
