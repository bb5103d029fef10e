"""Open files that come from elsewhere: plain ones alone, and without waiting for anybody."""

from __future__ import annotations

import errno
import os
import stat
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK
"""Opening a FIFO that nobody writes to would wait for ever; plain files know no difference."""


def open_plain(path: Path) -> int:
    """Return a descriptor to read a file with; a link to a plain file is followed.

    Raises:
        OSError: It can't be opened, or is a folder, a FIFO, a socket or a device.
    """
    return _checked(os.open(path, _FLAGS), path)


def open_unlinked(path: Path) -> int:
    """Return a descriptor to read a file with that is no link itself.

    For folders that others write to: a link there would have the reader hand out what only the
    reader may read.

    Raises:
        OSError: It can't be opened, or is a link, a folder, a FIFO, a socket or a device.
    """
    return _checked(os.open(path, _FLAGS | os.O_NOFOLLOW), path)


def read_plain(path: Path, *, max_bytes: int) -> bytes:
    """Return the bytes of a file.

    Raises:
        OSError: As `open_plain`, or the file is longer than ``max_bytes``.
    """
    with os.fdopen(open_plain(path), "rb") as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"longer than {max_bytes:,} bytes", str(path))
    return content


def _checked(descriptor: int, path: Path) -> int:
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, "no plain file", str(path))
