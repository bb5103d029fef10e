from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope.collector.names import MAX_NAME_BYTES, storable_name


@pytest.mark.parametrize("text", ["forward", "", "größe 😀", "a b/c", "e\u0301", "日本語"])
def test_a_harmless_text_is_unchanged(text: str) -> None:
    assert storable_name(text) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\nb", "a\\nb"),
        ("\x1b[2J", "\\x1b[2J"),
        ("nul\0", "nul\\x00"),
        ("\u202eright to left", "\\u202eright to left"),
        ("zero\u200bwidth", "zero\\u200bwidth"),
        ("\ud800", "\\ud800"),
        ("line\u2028", "line\\u2028"),
    ],
)
def test_an_invisible_character_is_escaped(text: str, shown: str) -> None:
    assert storable_name(text) == shown


def test_long_names_that_differ_at_the_end_stay_distinct() -> None:
    one, other = storable_name("x" * 300 + "a"), storable_name("x" * 300 + "b")

    assert one != other
    assert len(one) == len(other) == MAX_NAME_BYTES


def test_a_name_is_cut_between_characters() -> None:
    # 255 bytes would end in the middle of a two-byte character.
    cut = storable_name("é" * 200)

    assert len(cut.encode()) <= MAX_NAME_BYTES
    assert cut.partition("~")[0] == "é" * 123


@given(st.text(alphabet=st.characters(exclude_categories=[])))
def test_any_text_becomes_short_utf8_and_a_second_pass_changes_nothing(text: str) -> None:
    name = storable_name(text)

    assert len(name.encode("utf-8")) <= MAX_NAME_BYTES
    assert storable_name(name) == name
