"""`rankscope control`: requests to running ranks, and their answers."""

from __future__ import annotations

import json
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from rankscope.commands.app import app
from rankscope.commands.control import parse_ranks
from rankscope.errors import BadInputError, FailedError
from rankscope.tracer.job.slow_step_stacks import watch_slow_steps
from tests.support.tracer.recording import recorder_in

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from typer.testing import Result

STEP_S = 0.02


@contextmanager
def running_rank(spool: Path) -> Iterator[None]:
    """A rank of this process, rank 0 of run "test", that takes steps."""
    folder = spool / "test" / "e0-r00000-0123456789ab"
    folder.mkdir(parents=True)
    recorder = recorder_in(folder)
    (folder / "manifest.json").write_text("{}")
    watch_slow_steps(recorder)
    stopping = threading.Event()

    def train() -> None:
        recorder.begin_steps()
        while not stopping.wait(STEP_S):
            recorder.step()

    thread = threading.Thread(target=train)
    thread.start()
    try:
        yield
    finally:
        stopping.set()
        thread.join()
        recorder.shutdown()


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["control", "test", *arguments])


def test_a_running_rank_of_this_host_answers(tmp_path: Path) -> None:
    with running_rank(tmp_path):
        full = call("--spool", str(tmp_path), "--level", "full", "--steps", "7")
        stacks = call(
            "--spool", str(tmp_path), "--ranks", "0", "--level", "stacks", "--steps", "2", "--json"
        )

    assert full.exception is None, full.exception
    asked, accepted, done = full.stdout.splitlines()
    assert asked == "requested of rank 0 for 7 steps: all spans"
    assert accepted == "rank 0: full requested for 7 steps"
    assert done.startswith("rank 0: everything is recorded in steps ")
    document = json.loads(stacks.stdout)
    assert [answer["state"] for answer in document["answers"]] == ["accepted", "done"]
    assert (document["ranks"], document["unanswered"]) == ([0], [])


def test_ranks_that_are_not_there_are_named(tmp_path: Path) -> None:
    with running_rank(tmp_path):
        result = call("--spool", str(tmp_path), "--ranks", "0,7", "--level", "full")

    assert isinstance(result.exception, BadInputError)
    assert str(result.exception).startswith("rank 7 is not running on this host")


def test_a_run_that_has_ended_cannot_answer(tmp_path: Path) -> None:
    with running_rank(tmp_path):
        pass
    result = call("--spool", str(tmp_path), "--level", "full")

    assert isinstance(result.exception, BadInputError)
    assert "no rank of run test is running" in str(result.exception)


def test_a_rank_that_does_not_answer_in_time_fails_the_command(tmp_path: Path) -> None:
    with running_rank(tmp_path):
        result = call("--spool", str(tmp_path), "--level", "profile", "--wait", "0.1")

    assert isinstance(result.exception, FailedError)
    assert str(result.exception).startswith("rank 0 did not answer within 0.1 s")


def test_a_level_must_be_known(tmp_path: Path) -> None:
    result = call("--spool", str(tmp_path), "--level", "all")

    assert "full, profile, stacks" in str(result.exception)


@pytest.mark.parametrize(
    ("text", "ranks"), [(None, ()), ("3,5", (3, 5)), ("7, 0-2,1", (0, 1, 2, 7)), ("4-4", (4,))]
)
def test_ranks_are_read(text: str | None, ranks: tuple[int, ...]) -> None:
    assert parse_ranks(text) == ranks


@pytest.mark.parametrize("text", ["", "x", "3-", "-3", "5-2", "1,,2"])
def test_other_ranks_are_refused(text: str) -> None:
    with pytest.raises(BadInputError):
        parse_ranks(text)
