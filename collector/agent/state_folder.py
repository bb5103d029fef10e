"""State folder of the agent: journal, lock and dead letters, where no other user can write.

The journal decides which rows are deleted unsent, so it must not be in the spool, which training
processes write.
"""

from __future__ import annotations

import hashlib
import os
import socket
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import StateFolderError

if TYPE_CHECKING:
    from collections.abc import Mapping

FORMER_FOLDER = ".agent"
"""Name of the state folder of earlier releases, in the spool."""

SYSTEM_FOLDER = Path("/var/lib")
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
MAX_LINKS = 40
"""Links in one path, as the kernel allows."""


def default_state_folder(spool: Path, environ: Mapping[str, str]) -> Path:
    """Return the state folder of a spool of this host.

    ``XDG_STATE_HOME`` takes precedence, then ``/var/lib`` for root and ``~/.local/state`` for
    other users. A home folder may be on several hosts, so the name contains the host.

    Raises:
        StateFolderError: The user has no home folder.
    """
    base = Path(environ.get("XDG_STATE_HOME", ""))
    if not base.is_absolute():
        try:
            base = SYSTEM_FOLDER if os.geteuid() == 0 else Path.home() / ".local/state"
        except RuntimeError as error:
            raise StateFolderError("this user has no home folder: give --state DIR") from error
    place = f"{socket.gethostname()}\0{os.path.realpath(spool)}"
    name = hashlib.blake2b(place.encode("utf-8", "surrogateescape"), digest_size=8).hexdigest()
    return base / "rankscope/agent" / name


def open_state_folder(folder: Path) -> None:
    """Create a state folder, or check that no other user can have changed what is in it.

    Raises:
        StateFolderError: It can't be created, or belongs to or can be changed by another user.
    """
    folder = folder.absolute()
    try:
        _check_parents(folder.parent)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_parents(folder.parent)
        status = folder.lstat()
        is_own = status.st_uid == os.geteuid() and not status.st_mode & OTHERS_WRITE
        if not stat.S_ISDIR(status.st_mode) or not is_own:
            raise StateFolderError(
                f"--state {folder} must be a folder of this user, no link, that no other user can"
                " write: choose another one"
            )
        for path in sorted(folder.iterdir()):
            entry = path.lstat()
            is_file = stat.S_ISREG(entry.st_mode) and entry.st_nlink == 1
            is_own = entry.st_uid in {0, os.geteuid()} and not entry.st_mode & OTHERS_WRITE
            if not is_own or not (is_file or stat.S_ISDIR(entry.st_mode)):
                raise StateFolderError(
                    f"{path} must be a regular file of this user, without a second name, that no"
                    " other user can write: another user may have made it. Move it away, or give"
                    " another --state"
                )
    except OSError as error:
        raise StateFolderError(f"--state {folder} can't be used ({error.strerror})") from error


def _check_parents(folder: Path) -> None:
    """Raise if a user other than this one and root can replace a folder or link on the way."""
    at, todo, num_links = Path("/"), list(reversed(folder.parts[1:])), 0
    while True:
        found = at.lstat()
        is_open = found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX
        is_link = stat.S_ISLNK(found.st_mode)
        if found.st_uid not in {0, os.geteuid()} or (is_open and not is_link):
            raise StateFolderError(
                f"--state below {at} is not safe: another user can replace what is in it. Choose a"
                " folder whose parents belong to this user or root and are writable by no others"
            )
        if is_link:
            num_links += 1
            if num_links > MAX_LINKS:
                raise StateFolderError(f"--state: {at} is one of more than {MAX_LINKS} links")
            target = at.readlink()
            todo += [part for part in reversed(target.parts) if part != "/"]
            at = Path("/") if target.is_absolute() else at.parent
        if not todo:
            return
        part = todo.pop()
        at = at.parent if part == ".." else at / part
        if not os.path.lexists(at):
            return
