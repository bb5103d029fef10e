"""Detection of changed or replaced files."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

FileStamps = tuple[tuple[int, int, int] | None, ...]


def read_file_stamps(*paths: Path) -> FileStamps:
    """Return time, size and inode of each file, which change with it; None if it is missing."""
    return tuple(_stamp(path) for path in paths)


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
