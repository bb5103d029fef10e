from __future__ import annotations

import pytest

from rankscope.dashboard.text import (
    bytes_text,
    plotly_text,
    ranks_text,
    ratio_text,
    seconds_text,
    slowdown_text,
    steps_text,
    time_text,
    visible,
)


@pytest.mark.parametrize(
    ("outside", "shown"),
    [
        ("forward layers.3", "forward layers.3"),
        ("a\nb\tc", r"a\u{a}b\u{9}c"),
        ("safe\u202egnp.exe", r"safe\u{202e}gnp.exe"),
        ("zero\u200bwidth", r"zero\u{200b}width"),
        ("\x1b[31mred", r"\u{1b}[31mred"),
        ("名前 é", "名前 é"),
    ],
)
def test_marks_that_nobody_sees_are_spelled_out(outside: str, shown: str) -> None:
    assert visible(outside) == shown


def test_a_name_without_end_is_cut() -> None:
    assert len(visible("x" * 10_000)) == 256


def test_plotlys_own_html_is_inert() -> None:
    assert plotly_text('<a href="javascript:x">&lt;') == '&lt;a href="javascript:x"&gt;&amp;lt;'


@pytest.mark.parametrize(
    ("duration_ns", "text"),
    [
        (0, "0 ns"),
        (999, "999 ns"),
        (1_500, "1.50 µs"),
        (43_210_000, "43.2 ms"),
        (812_000_000, "812 ms"),
        (2_345_000_000, "2.35 s"),
        (-1_500, "-1.50 µs"),
        (None, "n/a"),
    ],
)
def test_times_choose_their_unit(duration_ns: float | None, text: str) -> None:
    assert time_text(duration_ns) == text


def test_what_is_unknown_is_not_a_number() -> None:
    assert seconds_text(None) == ratio_text(None) == slowdown_text(None) == "n/a"


def test_ranks_are_joined_and_a_crowd_is_counted() -> None:
    assert ranks_text((7, 4, 5, 6, 0)) == "0, 4-7"
    assert ranks_text(()) == "none"
    assert ranks_text(tuple(range(0, 40, 2)), most=2) == "0, 2 … (20 ranks)"


def test_numbers_read_with_their_units() -> None:
    assert seconds_text(0.61) == "610 ms"
    assert ratio_text(0.4567) == "45.7 %"
    assert slowdown_text(1.3841) == "1.38x"
    assert bytes_text(4 << 20) == "4.00 MiB"
    assert bytes_text(12) == "12 B"
    assert steps_text((3, 3)) == "3"
    assert steps_text((3, 9)) == "3-9"
    assert steps_text(None) == "none"
