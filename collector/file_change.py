"""Tell that a file was changed, or that another has taken its place."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

FileStamps = tuple[tuple[int, int, int] | None, ...]


def read_file_stamps(*paths: Path) -> FileStamps:
    """Return what changes with any of these files: time, size and inode; None of one not there."""
    return tuple(_mark(path) for path in paths)


def _mark(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
