"""The process file, `process.rsp`: identity, counters and names; and the mapping of files."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
import os
from dataclasses import replace
from time import monotonic_ns
from typing import TYPE_CHECKING

from ..native.choice import IS_COMPILED, DropCount
from ..span import NONE
from ..spool import (
    COUNTS,
    COUNTS_OFFSET,
    DROPPED_OFFSET,
    HEADER_BYTES,
    KEPT_REASONS,
    NAME_BYTES,
    NAME_CAPACITY,
    NAME_LENGTH,
    NUM_NAMES_OFFSET,
    OTHER_NAME,
    PROCESS_FILE,
    PROCESS_MAGIC,
    WORD,
    DropReason,
    SpoolIdentity,
    name_slot_offset,
    pack_header,
)

if TYPE_CHECKING:
    from pathlib import Path

MAP_FIXED = 0x10

_libc_mmap = ctypes.CDLL(None, use_errno=True).mmap
_libc_mmap.restype = ctypes.c_void_p
_libc_mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]

_unusable: list[mmap.mmap] = []
"""Mappings that must never be unmapped: other memory may have their addresses by now."""

MAX_NAME_BYTES = NAME_BYTES - NAME_LENGTH.size
PROCESS_FILE_BYTES = HEADER_BYTES + NAME_CAPACITY * NAME_BYTES


def map_file(path: Path, num_bytes: int) -> mmap.mmap:
    """Create ``path`` with every block allocated, and map it.

    The blocks are allocated before the file is mapped, so that a full disk is an `OSError` here
    and not a SIGBUS in the job later. Afterwards the file is made read-only, because truncating a
    mapped file would cause the same SIGBUS. Only root or a change of mode can still truncate it.

    Raises:
        OSError: The file cannot be created or the disk is full; no file is left behind.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o640)
    try:
        os.posix_fallocate(fd, 0, num_bytes)
        mapped = map_without_descriptor(fd, num_bytes)
        with contextlib.suppress(OSError):  # the file system has no modes
            os.fchmod(fd, 0o440)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    else:
        return mapped
    finally:
        os.close(fd)


def map_without_descriptor(fd: int, num_bytes: int) -> mmap.mmap:
    """Map a file over anonymous memory, without the duplicate of ``fd`` that `mmap.mmap` holds.

    One descriptor per segment would count towards the job's limit. Python 3.13 has ``trackfd`` for
    this purpose.

    Raises:
        OSError: The file cannot be mapped for writing.

    Source:
        POSIX.1-2017, ``mmap``: a ``MAP_FIXED`` mapping replaces the former one atomically.
    """
    memory = private_memory(num_bytes)
    at = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    if _libc_mmap(at, num_bytes, protection, mmap.MAP_SHARED | MAP_FIXED, fd, 0) != at:
        _unusable.append(memory)
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return memory


def private_memory(num_bytes: int) -> mmap.mmap:
    """Return zeroed memory shared with no file and no forked child; unwritten pages are free.

    Raises:
        OSError: No address space is left.
    """
    return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


class ProcessFile:
    """The mapped process file. All methods are thread-safe and reentrant."""

    __slots__ = ("_dropped", "_ids", "_next_name", "buffer", "drops")

    def __init__(self, folder: Path, identity: SpoolIdentity) -> None:
        self.buffer = map_file(folder / PROCESS_FILE, PROCESS_FILE_BYTES)
        self.buffer[:HEADER_BYTES] = pack_header(
            replace(identity, capacity=NAME_CAPACITY), magic=PROCESS_MAGIC
        )
        self.drops = [DropCount(self.buffer, DROPPED_OFFSET + 8 * reason) for reason in DropReason]
        self._dropped = [self.drops[reason] for reason in DropReason if reason not in KEPT_REASONS]
        self._next_name = itertools.count()
        self._ids: dict[str, int] = {}
        self.name_id(OTHER_NAME)

    def drop(self, reason: DropReason) -> None:
        """Count one record as dropped for ``reason``."""
        self.drops[reason].add()

    def publish_drops(self) -> None:
        """Write all drop counts again: if two threads drop at once, the lower may be written last.

        Not needed with the compiled part, where counting is one C call.
        """
        if IS_COMPILED:
            return
        for drops in self.drops:
            WORD.pack_into(self.buffer, drops.offset, drops.count)

    def num_dropped(self) -> int:
        """Return the number of dropped records, for all reasons except `KEPT_REASONS`."""
        return sum(drops.count for drops in self._dropped)

    def write_counts(
        self, *, num_produced: int, num_written: int, own_cpu_ns: int, resolver_lag_ns: int | None
    ) -> None:
        """Write the counters of `SpoolCounts` into the header."""
        COUNTS.pack_into(
            self.buffer,
            COUNTS_OFFSET,
            num_produced,
            num_written,
            monotonic_ns(),
            own_cpu_ns,
            NONE if resolver_lag_ns is None else resolver_lag_ns,
        )

    def name_id(self, name: str) -> int:
        """Return the id of ``name``, interned on first use; 0 (`OTHER_NAME`) if the table is full.

        Args:
            name: A plain `str` of any length and content, not empty; truncated to
                `MAX_NAME_BYTES` of UTF-8, between characters.
        """
        cut = name[:MAX_NAME_BYTES]
        interned = self._ids.get(cut)
        if interned is not None:
            return interned
        if len(self._ids) >= NAME_CAPACITY:
            return 0
        text = cut.encode("utf-8", "replace")[:MAX_NAME_BYTES]
        text = text.decode("utf-8", "ignore").encode()
        name_id = next(self._next_name)
        if name_id >= NAME_CAPACITY:
            return 0
        offset = name_slot_offset(name_id)
        self.buffer[offset + 2 : offset + 2 + len(text)] = text
        NAME_LENGTH.pack_into(self.buffer, offset, len(text))
        WORD.pack_into(self.buffer, NUM_NAMES_OFFSET, min(name_id + 1, NAME_CAPACITY))
        return self._ids.setdefault(cut, name_id)

    def detach(self) -> None:
        """Write to private memory from now on.

        After a fork the file belongs to the parent alone. After shutdown a mapping would keep the
        file's blocks on the disk even after a reader has removed it.
        """
        self.buffer = private_memory(PROCESS_FILE_BYTES)
        for drops in self.drops:
            drops.write_to(self.buffer)
