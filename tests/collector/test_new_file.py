from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from rankscope.collector.new_file import new_file


def test_a_file_appears_whole_and_replaces_a_link_instead_of_following_it(tmp_path: Path) -> None:
    victim, path = tmp_path / "victim", tmp_path / ("n" * 255)
    victim.write_text("precious")
    path.symlink_to(victim)

    with new_file(path, mode=0o600) as file:
        file.write(b"new")
        assert path.is_symlink()

    assert (path.read_bytes(), victim.read_text()) == (b"new", "precious")
    assert stat.S_IMODE(path.lstat().st_mode) == 0o600
    assert {each.name for each in tmp_path.iterdir()} == {path.name, "victim"}


def test_the_name_before_it_is_whole_is_another_each_time(tmp_path: Path) -> None:
    names = []
    for _ in range(2):
        with new_file(tmp_path / "x"):
            names += [each.name for each in tmp_path.iterdir() if each.name != "x"]

    assert len(set(names)) == 2


def test_nothing_is_left_of_a_file_that_is_not_finished(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("before")

    with pytest.raises(KeyboardInterrupt), new_file(tmp_path / "x"):
        raise KeyboardInterrupt

    assert [each.name for each in tmp_path.iterdir()] == ["x"]
    assert (tmp_path / "x").read_text() == "before"


def test_a_device_is_written_to_and_stays() -> None:
    master, slave = os.openpty()
    path = Path(os.ttyname(slave))
    try:
        with new_file(path) as file:
            file.write(b"new")

        assert os.read(master, 16) == b"new"
        assert stat.S_ISCHR(path.lstat().st_mode)
    finally:
        os.close(master)
        os.close(slave)
