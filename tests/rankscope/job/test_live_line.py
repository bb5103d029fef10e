"""The live line: beneath the output of a job, and gone at its end."""

from __future__ import annotations

import fcntl
import os
import struct
import sys
import termios
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING

import pytest

from rankscope.job import live_line
from rankscope.job.live_line import LiveLine
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

ROWS, COLUMNS = 24, 40


@contextmanager
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Make a terminal stderr of this process; yield the side that a person sees."""
    screen, side = os.openpty()
    os.set_blocking(screen, False)
    fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(live_line, "PAUSE_S", 0.01)
    with os.fdopen(side, "w") as stderr, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", stderr)
        yield screen
    os.close(screen)


def read_until(screen: int, text: str) -> str:
    shown = ""

    def is_shown() -> bool:
        nonlocal shown
        with suppress(BlockingIOError):
            shown += os.read(screen, 1 << 16).decode()
        return text in shown

    wait_until(is_shown)
    return shown


def test_the_line_is_in_the_last_row_and_cut_to_the_width(monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal(monkeypatch) as screen, LiveLine(lambda: "step 7 " + 60 * "x"):
        shown = read_until(screen, "step 7")

    text = shown.partition(f"\x1b[{ROWS};1H\x1b[2K")[2].partition("\x1b8")[0]
    assert text == ("step 7 " + 60 * "x")[: COLUMNS - 2] + "…"


def test_the_job_scrolls_above_the_line_and_gets_all_rows_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with terminal(monkeypatch) as screen:
        with LiveLine(lambda: "step 7"):
            during = read_until(screen, "step 7")
        after = during + read_until(screen, "\x1b[r")

    assert f"\x1b[1;{ROWS - 1}r" in during
    assert "\x1b[r" not in during
    assert after.count("\x1b7") == after.count("\x1b8")


def test_control_characters_of_a_verdict_stay_text(monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal(monkeypatch) as screen, LiveLine(lambda: "a\x1b[2Jb"):
        assert "\x1b[2J" not in read_until(screen, "a\\x1b[2Jb")


@pytest.mark.parametrize("name", ["dumb", "none"])
def test_without_a_terminal_nothing_is_asked_or_written(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], name: str
) -> None:
    with ExitStack() as stack:
        if name == "dumb":
            stack.enter_context(terminal(monkeypatch))
            monkeypatch.setenv("TERM", "dumb")
        line = LiveLine(lambda: "step 7")
        with line:
            assert not line.is_shown

    assert capfd.readouterr().err == ""
