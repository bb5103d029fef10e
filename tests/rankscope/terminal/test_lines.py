from __future__ import annotations

from rankscope.terminal.lines import aligned


def test_columns_are_as_wide_as_their_widest_cell() -> None:
    lines = aligned(("rank", "waits"), [("5", "2.0 %"), ("1,024", "31.0 %")], right="rr")

    assert lines == [
        " rank   waits",
        "    5   2.0 %",
        "1,024  31.0 %",
    ]


def test_the_last_column_leaves_no_blanks_behind() -> None:
    assert aligned(("a", "b"), [("1", "long"), ("2", "")]) == ["a  b", "1  long", "2"]
