"""Files that appear whole or not at all, and are not written through what another user prepared."""

from __future__ import annotations

import os
import secrets
import stat
from contextlib import contextmanager
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@contextmanager
def new_file(path: Path, *, mode: int = 0o666) -> Iterator[BinaryIO]:
    """Open a file that gets its name as the block ends, instead of what has the name by then.

    Until then its name is random, so that no user can put a link there before. If the block raises,
    nothing is left. A device, such as ``/dev/null``, is written to, and not replaced.

    Args:
        mode: Its mode, of which the process's umask is taken off.

    Raises:
        OSError: The file can't be created or renamed.
    """
    if _is_device(path):
        with path.open("wb") as device:
            yield device
        return
    scratch = path.with_name(f".rankscope-{secrets.token_hex(8)}.tmp")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(scratch, flags, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
        scratch.replace(path)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise


def _is_device(path: Path) -> bool:
    try:
        return stat.S_ISCHR(path.lstat().st_mode)
    except FileNotFoundError:
        return False
