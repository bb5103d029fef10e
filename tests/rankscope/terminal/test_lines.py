from __future__ import annotations

import io
import sys

import pytest

from rankscope.terminal.lines import Progress, emphasize, format_table, say, wrap_text


class FakeTerminal(io.StringIO):
    """A stderr that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_columns_are_as_wide_as_their_widest_cell() -> None:
    lines = format_table(("rank", "waits"), [("5", "2.0 %"), ("1,024", "31.0 %")], right="rr")

    assert lines == [
        " rank   waits",
        "    5   2.0 %",
        "1,024  31.0 %",
    ]


def test_lines_of_a_table_have_no_trailing_blanks() -> None:
    assert format_table(("a", "b"), [("1", "long"), ("2", "")]) == ["a  b", "1  long", "2"]


def test_the_widest_left_column_is_wrapped_to_the_width() -> None:
    rows = [("a run", "12", "a text of several words that is long"), ("b", "3", "short")]

    lines = format_table(("name", "num", "text"), rows, right="lrl", width=30)

    assert lines == [
        "name   num  text",
        "a run   12  a text of several",
        "            words that is long",
        "b        3  short",
    ]


def test_a_word_of_a_table_is_broken_at_its_hyphen_only() -> None:
    lines = format_table(("run", "verdict"), [("a", "network-degradation on 0-63")], width=18)

    assert lines == ["run  verdict", "a    network-", "     degradation", "     on 0-63"]


def test_a_number_stays_on_the_line_of_its_unit() -> None:
    text = "Fixing it saves 318 ms per step (63 %), or 4.03 GB/s in 12 steps."

    lines = wrap_text(text, 20, first="! ")

    assert lines == [
        "! Fixing it saves",
        "  318 ms per step",
        "  (63 %), or",
        "  4.03 GB/s in 12",
        "  steps.",
    ]


@pytest.mark.parametrize("variable", ["NO_COLOR", ""])
def test_only_a_terminal_without_no_color_shows_colour(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert emphasize("slow", "red") == "slow"

    monkeypatch.setattr(sys, "stdout", FakeTerminal())
    if variable:
        monkeypatch.setenv(variable, "1")
        assert emphasize("slow", "red") == "slow"
        return
    assert emphasize("slow\nrank", "red") == "\x1b[1;31mslow\x1b[0m\n\x1b[1;31mrank\x1b[0m"


def test_without_a_terminal_progress_is_one_line_for_every_few_calls(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with Progress(every=2) as progress:
        for step in range(4):
            progress.show(f"step {step}")
    with Progress() as progress:
        progress.show("never written")

    assert capsys.readouterr().err == "step 0\nstep 2\n"


def test_on_a_terminal_progress_is_one_line_that_vanishes(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = FakeTerminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")

    with Progress() as progress:
        progress.show("step [1] of 2")
        say("a line of its own")

    written = terminal.getvalue()
    assert "step [1] of 2" in written
    assert "rankscope: a line of its own\n" in written
    assert written.endswith("\x1b[2K")  # the terminal's sequence that clears the line
    assert sys.stderr is terminal
