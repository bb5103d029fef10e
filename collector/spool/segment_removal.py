"""Removal of a process's segments of which all rows are stored."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .folder import remove_spool_file
from .segment import read_open_spans

if TYPE_CHECKING:
    from collections.abc import Set
    from pathlib import Path


class SegmentRemoval:
    """Segments of which all rows are stored, until they are deleted."""

    def __init__(self) -> None:
        self._inodes: dict[Path, int] = {}
        self._kept: set[Path] = set()
        """Segments that can't be deleted."""

    @property
    def paths(self) -> Set[Path]:
        """Segments that are stored and not deleted yet."""
        return self._inodes.keys()

    def add(self, path: Path, inode: int) -> None:
        """Add a segment of which the last row is stored."""
        self._inodes[path] = inode

    def delete(self, *, has_event: bool) -> str | None:
        """Delete the segments; return why the first one can't be deleted, once.

        Those with an open span show what the process was doing. They are kept until the event of
        its end is stored, which has these spans.

        Args:
            has_event: Whether it is stored.
        """
        problem = None
        for path in self._inodes.keys() - self._kept:
            if not has_event and read_open_spans(path):
                continue
            try:
                remove_spool_file(path, inode=self._inodes[path])
            except OSError as error:
                if not self._kept:
                    problem = (
                        f"{path} is stored and can't be deleted ({error.strerror}): run the reader"
                        " as root or as the user of the job, else the spool fills"
                    )
                self._kept.add(path)
            else:
                del self._inodes[path]
        return problem
