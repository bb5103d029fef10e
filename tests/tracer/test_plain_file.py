from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from tracer.plain_file import open_plain, open_unlinked, read_plain


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
    before = len(list(Path("/proc/self/fd").iterdir()))

    for path in (tmp_path / "fifo", Path("/dev/zero"), tmp_path / "socket", tmp_path):
        with pytest.raises(OSError):  # noqa: PT011  # a socket's own words are the system's
            opened(path)

    assert len(list(Path("/proc/self/fd").iterdir())) == before
    listening.close()


def test_a_link_is_followed_where_a_person_names_the_file_and_not_in_a_spool(
    tmp_path: Path,
) -> None:
    (tmp_path / "real").write_bytes(b"x")
    (tmp_path / "link").symlink_to(tmp_path / "real")

    os.close(open_plain(tmp_path / "link"))
    with pytest.raises(OSError, match="symbolic links"):
        open_unlinked(tmp_path / "link")
