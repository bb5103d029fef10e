"""Folders and files of a spool, which users write whom the reader need not trust.

The operator names the spool, which may be a link. Below it, no link is followed: the folder of the
run, the folder of the process and the file are opened one after the other, each relative to the
descriptor of the one before, so that none can be replaced by a link between a check and a use. A
file counts only if it belongs to the owner of its folder: a hard link to the file of another user
is not read.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import stat
import threading
from contextlib import ExitStack, contextmanager, suppress
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from rankscope.tracer.spool import SEGMENT_GLOB

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SPOOL, RUN, PROCESS = range(3)
"""Number of folders on the way from the spool to a folder."""

TEMPORARY = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
"""Errors that say nothing of the file: this process or host has too much open."""

BLOCK_BYTES = 512
"""Unit of `st_blocks`."""

_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FILE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
"""`O_NONBLOCK`, because opening a FIFO without a writer would block; regular files ignore it."""


def run_folders(spool: Path) -> list[Path]:
    """Return the folders of the runs, and links, which can't be opened.

    Names that begin with a dot are no runs.

    Raises:
        FileNotFoundError: There is no spool yet.
    """
    return [path for path in _inner_folders(spool, SPOOL) if path.name[0] != "."]


def process_folders(run: Path) -> list[Path]:
    """Return the folders of a run's processes, and links, which can't be opened.

    Raises:
        OSError: The run's folder is a link, is missing or can't be read.
    """
    return _inner_folders(run, RUN)


def all_process_folders(spool: Path) -> list[Path]:
    """Return the folders of the processes of all runs that can be read.

    Raises:
        OSError: The spool can't be read.
    """
    folders: list[Path] = []
    for run in run_folders(spool):
        with suppress(OSError):
            folders += process_folders(run)
    return folders


def segment_paths(process: Path) -> list[Path]:
    """Return the segments of a process, by number.

    Raises:
        OSError: The folder is a link, is missing or can't be read.
    """
    with _opened(process, PROCESS) as descriptor:
        names = sorted(os.listdir(descriptor))  # noqa: PTH208  # a path could be replaced
    return [process / name for name in names if fnmatchcase(name, SEGMENT_GLOB)]


def is_process_folder(process: Path) -> bool:
    """Return whether a folder of a spool exists and can be read."""
    with suppress(OSError), _opened(process, PROCESS):
        return True
    return False


def open_spool_file(path: Path) -> int:
    """Open the regular file of a process for reading, and return the descriptor. Never blocks.

    Raises:
        OSError: The file can't be opened, is a link, a folder, a FIFO, a socket or a device, or
            belongs to another user than its folder.
    """
    with _opened(path.parent, PROCESS) as folder:
        descriptor = os.open(path.name, _FILE_FLAGS, dir_fd=folder)
        status, owner = os.fstat(descriptor), os.fstat(folder).st_uid
    if stat.S_ISREG(status.st_mode) and status.st_uid == owner:
        return descriptor
    os.close(descriptor)
    if stat.S_ISREG(status.st_mode):
        raise OSError(errno.EPERM, "belongs to another user than its folder", str(path))
    raise OSError(errno.EINVAL, "not a regular file", str(path))


def stat_spool_file(path: Path) -> os.stat_result:
    """Return the status of a file of a process; of a link, its own.

    Raises:
        OSError: The file or one of its folders is missing, or a folder is a link.
    """
    with _opened(path.parent, PROCESS) as folder:
        return os.stat(path.name, dir_fd=folder, follow_symlinks=False)


def remove_spool_file(path: Path, *, inode: int) -> None:
    """Remove a file of a process, unless it is missing or is not the one that was read.

    Args:
        inode: Its inode when it was read.

    Raises:
        OSError: It can't be removed.
    """
    with suppress(FileNotFoundError), _opened(path.parent, PROCESS) as folder:
        if os.stat(path.name, dir_fd=folder, follow_symlinks=False).st_ino == inode:
            os.unlink(path.name, dir_fd=folder)


def replace_spool_file(path: Path, content: bytes) -> None:
    """Write a file of a process, which appears whole and belongs to the owner of its folder.

    Raises:
        OSError: It can't be written, or one of its folders is missing or a link.
    """
    scratch = f".{path.name}.{secrets.token_hex(8)}.new"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with _opened(path.parent, PROCESS) as folder:
        descriptor = os.open(scratch, flags, 0o640, dir_fd=folder)
        try:
            with os.fdopen(descriptor, "wb") as file:
                owner = os.fstat(folder)
                if owner.st_uid != os.geteuid():
                    os.fchown(descriptor, owner.st_uid, owner.st_gid)
                file.write(content)
            os.replace(scratch, path.name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with suppress(FileNotFoundError):
                os.unlink(scratch, dir_fd=folder)
            raise


def remove_process_folder(process: Path) -> int:
    """Remove the folder of a process and what is in it; return how many bytes that freed."""
    # RecursionError: folders that are nested too deeply. They stay.
    with suppress(OSError, RecursionError), _opened(process.parent, RUN) as run:
        before = used_bytes(process, PROCESS)
        shutil.rmtree(process.name, ignore_errors=True, dir_fd=run)
        return before
    return 0


def used_bytes(folder: Path, depth: int = SPOOL) -> int:
    """Return the disk usage of a folder down to the files of the processes.

    A file that is deleted meanwhile counts 0.

    Args:
        folder: The spool, or a folder in it.
        depth: How many folders the folder is below the spool.
    """
    with suppress(OSError), _opened(folder, depth) as descriptor:
        return _used_bytes(descriptor, depth)
    return 0


def _used_bytes(folder: int, depth: int) -> int:
    total = 0
    for name in os.listdir(folder):  # as above
        with suppress(OSError):
            status = os.stat(name, dir_fd=folder, follow_symlinks=False)
            total += status.st_blocks * BLOCK_BYTES
            if stat.S_ISDIR(status.st_mode) and depth < PROCESS:
                inner = os.open(name, _FOLDER_FLAGS | os.O_NOFOLLOW, dir_fd=folder)
                try:
                    total += _used_bytes(inner, depth + 1)
                finally:
                    os.close(inner)
    return total


def _inner_folders(folder: Path, depth: int) -> list[Path]:
    """Return the folders in a folder, and its links: who opens those reports them."""
    with _opened(folder, depth) as descriptor, os.scandir(descriptor) as entries:
        names = [
            entry.name
            for entry in entries
            if entry.is_dir(follow_symlinks=False) or entry.is_symlink()
        ]
    return [folder / name for name in sorted(names)]


_held = threading.local()


@contextmanager
def held_open(process: Path) -> Iterator[os.stat_result | None]:
    """Keep the folder of a process open: this thread's uses of its files open it no more.

    Yields:
        Its status; None if it can't be opened, which each use will raise.
    """
    with ExitStack() as stack:
        status = None
        with suppress(OSError):
            descriptor = stack.enter_context(_opened(process, PROCESS))
            status = os.fstat(descriptor)
            _held.folder = process, descriptor
        try:
            yield status
        finally:
            _held.folder = None


@contextmanager
def _opened(folder: Path, depth: int) -> Iterator[int]:
    """Open a folder of a spool; none of the last ``depth`` parts of its path may be a link."""
    held = getattr(_held, "folder", None)
    if held is not None and depth == PROCESS and held[0] == folder:
        yield held[1]
        return
    spool, names = folder.absolute(), list[str]()
    for _ in range(depth):
        spool, names = spool.parent, [spool.name, *names]
    descriptor = os.open(spool, _FOLDER_FLAGS)
    try:
        for name in names:
            outer = descriptor
            descriptor = _open_inner(name, outer, folder)
            os.close(outer)
        yield descriptor
    finally:
        os.close(descriptor)


def _open_inner(name: str, outer: int, folder: Path) -> int:
    try:
        return os.open(name, _FOLDER_FLAGS | os.O_NOFOLLOW, dir_fd=outer)
    except OSError as error:
        if error.errno not in {errno.ENOTDIR, errno.ELOOP}:
            raise
        reason = f"{name} is a link or no folder: links in a spool are not followed"
        raise OSError(errno.ENOTDIR, reason, str(folder)) from error
