from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path

import pytest

from rankscope.tracer.plain_file import open_plain, open_unlinked, read_plain


def test_a_plain_file_is_read_whole_up_to_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"12345")

    assert read_plain(path, max_bytes=5) == b"12345"
    with pytest.raises(OSError, match="longer than 4 bytes"):
        read_plain(path, max_bytes=4)


@pytest.mark.parametrize("opened", [open_plain, open_unlinked])
def test_a_fifo_a_device_a_socket_and_a_folder_are_refused_at_once(
    tmp_path: Path, opened: object
) -> None:
    assert callable(opened)
    os.mkfifo(tmp_path / "fifo")
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(tmp_path / "socket"))
    paths = [tmp_path / "fifo", Path("/dev/zero"), tmp_path / "socket", tmp_path]
    before = num_held(paths)

    for path in paths:
        with pytest.raises(OSError):  # noqa: PT011  # a socket's own words are the system's
            opened(path)

    assert num_held(paths) == before
    listening.close()


def num_held(paths: list[Path]) -> int:
    """Return how many descriptors of this process lead to one of these; others have others."""
    num = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            num += descriptor.readlink() in paths
    return num


def test_a_descriptor_that_is_held_is_counted(tmp_path: Path) -> None:
    with (tmp_path / "held").open("w"):
        assert num_held([tmp_path / "held"]) == 1


def test_a_link_is_followed_where_a_person_names_the_file_and_not_in_a_spool(
    tmp_path: Path,
) -> None:
    (tmp_path / "real").write_bytes(b"x")
    (tmp_path / "link").symlink_to(tmp_path / "real")

    os.close(open_plain(tmp_path / "link"))
    with pytest.raises(OSError, match="symbolic links"):
        open_unlinked(tmp_path / "link")
