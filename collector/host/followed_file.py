"""New lines of a log that grows, is rotated or is a device, bounded in bytes."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

OPEN_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
"""Without O_NONBLOCK a read of the kernel's log would wait for its next message."""

READ_BYTES = 8192
"""Bytes of one read: a record of the kernel's log has at most as many, and a shorter buffer fails.
"""

MAX_TURN_BYTES = 256 << 10
"""Bytes of a file that are read at once; of more only the end is."""

MAX_RECORDS = 2_000
"""Records of the kernel's log that are read at once; the others wait in its own buffer."""

MAX_LINE_BYTES = 4096


class FollowedFile:
    """A cursor over a text file or the kernel's log, used by one thread.

    Args:
        path: A regular file, or a character device whose reads return whole records.
        from_end: Whether what it has now is skipped.
    """

    def __init__(self, path: Path, *, from_end: bool) -> None:
        self._path = path
        self._from_end = from_end
        self._descriptor: int | None = None
        self._is_device = False
        self._identity = (0, 0)
        self._rest = b""
        self.num_gaps = 0
        """Times at which lines were lost: too many came at once, or the kernel overwrote them."""

    def read_lines(self) -> list[str]:
        """Return the new complete lines.

        Raises:
            OSError: The file is missing, not permitted, or neither a file nor a device.
        """
        descriptor = self._open() if self._descriptor is None else self._descriptor
        data = self._read_device(descriptor) if self._is_device else self._read_file(descriptor)
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()[:MAX_LINE_BYTES]
        return [line[:MAX_LINE_BYTES].decode("utf-8", "replace") for line in lines]

    def close(self) -> None:
        """Close the file. A later reading opens it again, and reads it from its begin."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)
        self._from_end = False
        self._rest = b""

    def _open(self) -> int:
        descriptor = os.open(self._path, OPEN_FLAGS)
        found = os.fstat(descriptor)
        self._is_device = stat.S_ISCHR(found.st_mode)
        if not self._is_device and not stat.S_ISREG(found.st_mode):
            os.close(descriptor)
            raise OSError(errno.EINVAL, "neither a file nor a device", str(self._path))
        self._descriptor, self._identity = descriptor, (found.st_dev, found.st_ino)
        if self._from_end:
            os.lseek(descriptor, 0, os.SEEK_END)
        return descriptor

    def _read_device(self, descriptor: int) -> bytes:
        records = []
        for _ in range(MAX_RECORDS):
            try:
                record = os.read(descriptor, READ_BYTES)
            except BlockingIOError:
                break
            except BrokenPipeError:  # overwritten: the next read returns the oldest that is left
                self.num_gaps += 1
                continue
            if not record:
                break
            records.append(record)
        return b"".join(records)

    def _read_file(self, descriptor: int) -> bytes:
        data = self._read_to_end(descriptor)
        replaced = None
        with suppress(OSError):
            replaced = os.stat(self._path)  # noqa: PTH116  # a string is a third faster
        if replaced is not None and (replaced.st_dev, replaced.st_ino) != self._identity:
            rest = self._rest
            self.close()
            if rest + data and not (rest + data).endswith(b"\n"):
                data += b"\n"  # the last line of the file that was rotated
            data += self._read_to_end(self._open())
            self._rest = rest
        return data

    def _read_to_end(self, descriptor: int) -> bytes:
        size, at = os.fstat(descriptor).st_size, os.lseek(descriptor, 0, os.SEEK_CUR)
        if size < at:  # truncated in place
            at = os.lseek(descriptor, 0, os.SEEK_SET)
            self._rest = b""
        skipped = size - at - MAX_TURN_BYTES
        if skipped > 0:
            self.num_gaps += 1
            os.lseek(descriptor, skipped, os.SEEK_CUR)
            self._rest = b""
        return os.read(descriptor, MAX_TURN_BYTES) if size > at else b""
