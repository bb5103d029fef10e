from __future__ import annotations

import pytest

from rankscope.terminal.lines import aligned, ranges


def test_columns_are_as_wide_as_their_widest_cell() -> None:
    lines = aligned(("rank", "waits"), [("5", "2.0 %"), ("1,024", "31.0 %")], right="rr")

    assert lines == [
        " rank   waits",
        "    5   2.0 %",
        "1,024  31.0 %",
    ]


def test_the_last_column_leaves_no_blanks_behind() -> None:
    assert aligned(("a", "b"), [("1", "long"), ("2", "")]) == ["a  b", "1  long", "2"]


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([], ""),
        ([5], "5"),
        ([5, 6], "5, 6"),
        ([0, 1, 2, 3], "0-3"),
        ([0, 4, 5, 6, 7, 9, 10], "0, 4-7, 9, 10"),
    ],
)
def test_neighbouring_numbers_are_written_as_ranges(numbers: list[int], text: str) -> None:
    assert ranges(numbers) == text
