from __future__ import annotations

import pytest

from rankscope.dashboard.text import cut_middle, escape, escape_for_plotly, format_place


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
def test_invisible_characters_are_written_out(outside: str, shown: str) -> None:
    assert escape(outside) == shown


def test_a_long_name_is_cut() -> None:
    assert len(escape("x" * 10_000)) == 256


def test_of_a_long_name_begin_and_end_are_kept() -> None:
    assert cut_middle("llama-70b-attempt-1", 11) == "llama…mpt-1"
    assert cut_middle("llama-70b-attempt-1", 10) == "llama…pt-1"
    assert cut_middle("llama", 5) == "llama"


def test_html_is_escaped_for_plotly() -> None:
    assert (
        escape_for_plotly('<a href="javascript:x">&lt;') == '&lt;a href="javascript:x"&gt;&amp;lt;'
    )


def test_a_place_is_in_seconds_from_five_on() -> None:
    assert format_place(12_345_678) == "12.346 ms"
    assert format_place(4_999_999_000) == "4,999.999 ms"
    assert format_place(61_012_345_000) == "61.012345 s"
