from __future__ import annotations

import time

import pytest

from rankscope.trainer.simulator.scenario_file import MAX_KEY_PARTS, parse_document


def test_the_suffix_of_a_file_decides_between_toml_and_json() -> None:
    assert parse_document("a.b = [1, 2.5]", suffix=".toml") == {"a": {"b": [1, 2.5]}}
    assert parse_document('{"a": 1}', suffix=".json") == {"a": 1}


def test_a_key_of_many_parts_is_refused_before_parsing() -> None:
    text = '\'=\' . "b\\"" . a-1.' * 20_000 + "c = 1"
    began = time.process_time()

    with pytest.raises(ValueError, match="more than 32 parts"):
        parse_document(text, suffix=".toml")
    assert time.process_time() - began < 1


def test_a_long_word_without_dots_is_searched_in_linear_time() -> None:
    began = time.process_time()

    assert parse_document(f'x = "{"a" * 2_000_000}"', suffix=".toml") == {"x": "a" * 2_000_000}
    assert time.process_time() - began < 5


def test_host_names_and_lists_of_numbers_are_not_long_keys() -> None:
    text = f'[hosts."a.b.c.example.org"]\nw = {[0.5] * 5000}\n' + "a." * (MAX_KEY_PARTS - 1) + "b=1"

    document = parse_document(text, suffix=".toml")

    assert isinstance(document, dict)
    assert len(document["hosts"]["a.b.c.example.org"]["w"]) == 5000


@pytest.mark.parametrize("suffix", [".json", ".toml"])
def test_a_document_nested_too_deeply_is_a_value_error(suffix: str) -> None:
    with pytest.raises(ValueError, match="nested too deep"):
        parse_document(("a = " if suffix == ".toml" else "") + "[" * 100_000, suffix=suffix)
