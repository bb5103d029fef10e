"""A file of checksummed lines that only grows, and survives a kill or a power cut at any byte."""

from __future__ import annotations

import json
import os
import zlib
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

Line = dict[str, Any]

CHECK_LETTERS = 8


class Storage(Protocol):
    """The few things that a journal asks of a disk."""

    def append(self, descriptor: int, data: bytes) -> None:
        """Write all of ``data`` at the end of the file."""

    def sync(self, descriptor: int) -> None:
        """Return once the file is on disk."""


class Disk:
    """The real one."""

    def append(self, descriptor: int, data: bytes) -> None:
        """Write all of ``data`` at the end of the file."""
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(descriptor, rest) :]

    def sync(self, descriptor: int) -> None:
        """Return once the file is on disk."""
        os.fsync(descriptor)


class JournalFile:
    """Lines of JSON, each with its checksum.

    Opening it reads what is there. A torn last line is cut off; a damaged line in the
    middle is passed over and counted.

    After a write or a sync that failed nobody knows what is on disk, so nothing is
    appended behind it: the next `append` raises until `rewrite` made a new file.

    Args:
        path: The file; made if it is not there.
        storage: What writes; another one in tests.
        check: Shown the lines before anything is cut off; what it raises leaves the file as it is.

    Raises:
        OSError: It can't be opened, read or made whole.
    """

    def __init__(
        self,
        path: Path,
        *,
        storage: Storage | None = None,
        check: Callable[[Sequence[Line]], None] = lambda _lines: None,
    ) -> None:
        self._path = path
        self._storage = storage or Disk()
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self.is_sound = True
        """Whether the file may be appended to."""

        self.num_damaged = 0
        """Lines that were passed over when it was opened."""

        self.num_bytes = 0
        try:
            self.lines = self._read(check)
            sync_folder(path.parent)
        except BaseException:
            self.close()
            raise

    def append(self, lines: Iterable[Line], *, durable: bool) -> None:
        """Add lines.

        Args:
            lines: What to add.
            durable: Whether to return only once they are on disk.

        Raises:
            OSError: They may or may not be there.
        """
        if not self.is_sound:
            raise OSError("an earlier write failed")
        data = b"".join(_packed(line) for line in lines)
        try:
            self._storage.append(self._descriptor, data)
            if durable:
                self._storage.sync(self._descriptor)
        except OSError:
            self.is_sound = False
            raise
        self.num_bytes += len(data)

    def rewrite(self, lines: Iterable[Line]) -> None:
        """Put a new file with these lines into the place of the old one.

        Raises:
            OSError: The old file is still there, and as unsound as it was.
        """
        scratch = self._path.with_suffix(".tmp")
        data = b"".join(_packed(line) for line in lines)
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        descriptor = os.open(scratch, flags, 0o600)
        try:
            self._storage.append(descriptor, data)
            self._storage.sync(descriptor)
            scratch.replace(self._path)
            sync_folder(self._path.parent)
        except BaseException:
            os.close(descriptor)
            raise
        self.close()
        self._descriptor, self.num_bytes, self.is_sound = descriptor, len(data), True

    def close(self) -> None:
        """Let go of the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _read(self, check: Callable[[Sequence[Line]], None]) -> Sequence[Line]:
        data = b""
        while piece := os.read(self._descriptor, 1 << 20):
            data += piece
        found: list[Line] = []
        whole = data.rfind(b"\n") + 1
        raw_lines = data[:whole].splitlines(keepends=True)
        unpacked = [_unpacked(raw) for raw in raw_lines]
        while unpacked and unpacked[-1] is None:  # torn: a sector of zeros may end in anything
            whole -= len(raw_lines[len(unpacked) - 1])
            unpacked.pop()
        for line in unpacked:
            if line is None:
                self.num_damaged += 1
            else:
                found.append(line)
        check(found)
        if whole < len(data):
            os.ftruncate(self._descriptor, whole)
            os.fsync(self._descriptor)
        os.lseek(self._descriptor, whole, os.SEEK_SET)
        self.num_bytes = whole
        return found


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _packed(line: Line) -> bytes:
    body = json.dumps(line, separators=(",", ":")).encode()
    return b"%08x %s\n" % (zlib.crc32(body), body)


def _unpacked(raw: bytes) -> Line | None:
    """Return the line; None where it is not what was written."""
    check, space, body = raw[:CHECK_LETTERS], raw[CHECK_LETTERS : CHECK_LETTERS + 1], raw[9:-1]
    if space != b" " or check != b"%08x" % zlib.crc32(body):
        return None
    line = json.loads(body)
    return line if isinstance(line, dict) else None
