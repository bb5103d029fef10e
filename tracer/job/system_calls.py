"""The system call in which the main thread is blocked, as the kernel reports it.

Its Python frames end where C code begins: a line that opens a file on a dead server looks like a
line that computes. Linux only, on x86-64 and ARM; elsewhere nothing is known.
"""

from __future__ import annotations

import os
import platform
from contextlib import suppress

PAGE_FAULT = "page fault"
"""Blocked outside any call: a page of a mapped file, or of swap, is read."""

MAX_PATH = 256

# fmt: off
NAMES = {
    "x86_64": {
        0: "read", 1: "write", 2: "open", 3: "close", 4: "stat", 5: "fstat", 6: "lstat",
        16: "ioctl", 17: "pread64", 18: "pwrite64", 19: "readv", 20: "writev", 21: "access",
        40: "sendfile", 72: "fcntl", 73: "flock", 74: "fsync", 75: "fdatasync", 77: "ftruncate",
        82: "rename", 83: "mkdir", 87: "unlink", 217: "getdents64", 257: "openat",
        258: "mkdirat", 262: "newfstatat", 263: "unlinkat", 264: "renameat", 269: "faccessat",
        285: "fallocate", 316: "renameat2", 326: "copy_file_range", 332: "statx",
        437: "openat2", 439: "faccessat2",
    },
    "aarch64": {
        25: "fcntl", 29: "ioctl", 32: "flock", 34: "mkdirat", 35: "unlinkat", 38: "renameat",
        46: "ftruncate", 47: "fallocate", 48: "faccessat", 56: "openat", 57: "close",
        61: "getdents64", 63: "read", 64: "write", 65: "readv", 66: "writev", 67: "pread64",
        68: "pwrite64", 71: "sendfile", 79: "newfstatat", 80: "fstat", 82: "fsync",
        83: "fdatasync", 276: "renameat2", 285: "copy_file_range", 291: "statx",
        437: "openat2", 439: "faccessat2",
    },
}
# fmt: on
"""Calls on files by number. Others, such as waits for a lock, a time or a socket's readiness, say
nothing about what a thread waits for. Source: the kernel's tables of system calls."""

PATH_FIRST = frozenset({"open", "stat", "lstat", "access", "rename", "mkdir", "unlink"})
PATH_SECOND = frozenset(
    {"openat", "openat2", "newfstatat", "statx", "faccessat", "faccessat2"}
    | {"mkdirat", "unlinkat", "renameat", "renameat2"}
)
"""Calls whose first or second argument is a path. That of all others is a file descriptor."""


def blocking_call(process: str = "/proc/self") -> str:
    """Return the call on a file in which the main thread is: "openat /data/shard-17.tar".

    Nothing of the job is touched: the kernel answers without the thread. The file is followed by
    nothing if it is unknown; a socket is ``socket:[4711]``.

    Args:
        process: Folder of the process; its files are those of the thread that began it.

    Returns:
        "" if it runs, is in another call, or the kernel doesn't say.
    """
    try:
        with open(f"{process}/syscall", encoding="ascii") as file:  # noqa: PTH123  # light
            words = file.read().split()
        numbers = [int(word, 0) for word in words if word != "running"]
    except (OSError, ValueError):
        return ""
    if numbers[:1] == [-1]:
        return PAGE_FAULT
    name = NAMES.get(platform.machine(), {}).get(numbers[0], "") if len(numbers) > 2 else ""  # noqa: PLR2004
    if not name:
        return ""
    if name in PATH_FIRST or name in PATH_SECOND:
        target = _read_path(process, numbers[2 if name in PATH_SECOND else 1])
    else:
        with suppress(OSError):
            return f"{name} {os.readlink(f'{process}/fd/{numbers[1]}')}"  # noqa: PTH115  # light
        target = ""
    return f"{name} {target}".strip()


def _read_path(process: str, address: int) -> str:
    """Return the text at an address of the process; "" if it can't be read."""
    try:
        memory = os.open(f"{process}/mem", os.O_RDONLY)
    except OSError:
        return ""
    try:
        return os.pread(memory, MAX_PATH, address).partition(b"\0")[0].decode("utf-8", "replace")
    except (OSError, OverflowError):
        return ""
    finally:
        os.close(memory)
