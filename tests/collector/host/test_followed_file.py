from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from rankscope.collector.host.followed_file import MAX_LINE_BYTES, MAX_TURN_BYTES, FollowedFile

if TYPE_CHECKING:
    from pathlib import Path


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def test_new_lines_are_read_once_and_whole(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("before\n")
    file = FollowedFile(path, from_end=True)

    assert file.read_lines() == []
    append(path, "one\ntw")
    assert file.read_lines() == ["one"]
    append(path, "o\n")
    assert file.read_lines() == ["two"]
    assert file.read_lines() == []


@pytest.mark.parametrize("way", ["renamed", "truncated"])
def test_a_rotated_log_is_followed(tmp_path: Path, way: str) -> None:
    path = tmp_path / "log"
    path.write_text("old\n")
    file = FollowedFile(path, from_end=False)
    assert file.read_lines() == ["old"]

    if way == "renamed":
        append(path, "last of old")
        path.rename(tmp_path / "log.1")
    path.write_text("a\n")

    lines = file.read_lines()
    assert lines == (["last of old", "a"] if way == "renamed" else ["a"])


def test_of_a_flood_only_the_end_is_read_and_the_rest_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("x" * 9 + "\n")
    file = FollowedFile(path, from_end=True)
    file.read_lines()
    append(path, ("y" * 9 + "\n") * (MAX_TURN_BYTES // 5) + "the end\n")

    lines = file.read_lines()

    assert lines[-1] == "the end"
    assert sum(map(len, lines)) <= MAX_TURN_BYTES
    assert file.num_gaps == 1


def test_a_line_without_an_end_takes_bounded_memory(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("")
    file = FollowedFile(path, from_end=False)
    for _ in range(8):
        append(path, "z" * 10_000)
        assert file.read_lines() == []
    append(path, "\nnext\n")

    assert [len(line) for line in file.read_lines()] == [MAX_LINE_BYTES, 4]


def test_a_pipe_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")

    with pytest.raises(OSError, match="neither a file nor a device"):
        FollowedFile(tmp_path / "pipe", from_end=False).read_lines()


def test_a_missing_log_is_read_when_it_appears(tmp_path: Path) -> None:
    file = FollowedFile(tmp_path / "log", from_end=False)
    with pytest.raises(FileNotFoundError):
        file.read_lines()

    (tmp_path / "log").write_bytes(b"\xff\xfe\nlater\n")

    assert file.read_lines()[-1] == "later"
