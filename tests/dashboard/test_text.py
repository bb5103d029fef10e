from __future__ import annotations

import pytest

from rankscope.dashboard.text import plotly_text, visible


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
