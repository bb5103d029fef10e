"""Byte layout of the spool, its reader, and the opening of files that others write.

`docs/spool-format.md` describes the same layout in prose. Standard library only. Writers (the
tracer, a simulator, another program) and readers (the collector) share this module and no other.
"""

from __future__ import annotations

import errno
import os
import stat
import struct
import time
from dataclasses import astuple, dataclass, fields
from enum import IntEnum
from typing import TYPE_CHECKING

from .span import MonotonicNs, UnixNs

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SPOOL_VERSION = 2
HEADER_BYTES = 4096
RECORD_BYTES = 128

SEGMENT_MAGIC = b"RSCPSEG\0"
PROCESS_MAGIC = b"RSCPPRC\0"

SEGMENT_GLOB = "seg-*.rsp"
PROCESS_FILE = "process.rsp"
MANIFEST_FILE = "manifest.json"
GROUPS_FILE = "groups.jsonl"
EVENTS_FILE = "events.jsonl"
KERNELS_FILE = "kernels.jsonl"
DEVICE_CLOCK_FILE = "device_clock.jsonl"
EXIT_FILE = "exit.json"
CONTROL_FILE = "control.json"
MAX_CONTROL_BYTES = 65_536
"""A longer control file is rejected, because every rank reads it."""

FULL, PROFILE, STACKS = REQUEST_KEYS = ("full", "profile", "stacks")
"""Keys of a control file that request something of some steps of some ranks."""

MAX_REQUESTED_STEPS = 100
CAUSED_BY = "\ncaused by "
"""In the message of an exit record, before each exception that the one above was raised from."""

STALL_NS = 60_000_000_000
"""A process that records nothing for so long gets an event with its open spans: longer than any
step, shorter than the ten minutes after which NCCL gives up by default."""


IDENTITY = struct.Struct("<8sIIIIIIIIII16s16s64s64s")
"""magic, version, header_bytes, record_bytes, capacity, segment, lane, rank, world_size, epoch,
pid, process uuid, boot id, host, run id: the first 208 bytes of every header."""

ANCHOR_OFFSET = 208
ANCHOR = struct.Struct("<qqq")
"""monotonic_ns, unix_ns, error_ns: one moment read on both clocks of this host."""

SEALED_OFFSET = 256
SEALED = struct.Struct("<Q")
"""Segment header: 0 while the lane writes to the segment, else 1 + the number of rows claimed."""

OPEN_TABLE_OFFSET = 1024
OPEN_ENTRY = struct.Struct("<qQqIiBB6xQ")
"""start_ns (0: free), group_id, seq, name id, step, kind code, depth, check (= start_ns, last)."""
OPEN_ENTRY_BYTES = 64
OPEN_COMM_OFFSET = 48
OPEN_COMM = struct.Struct("<qii")
"""num_bytes, src_rank, dst_rank of a communication, in its entry; all zero: unknown."""

OPEN_CAPACITY = (HEADER_BYTES - OPEN_TABLE_OFFSET) // OPEN_ENTRY_BYTES

DROPPED_OFFSET = 256
DROPPED = struct.Struct("<16Q")
"""Process header: records dropped so far, by `DropReason`."""

WORD = struct.Struct("<Q")
"""One counter of a header."""

NUM_NAMES_OFFSET = 384
COUNTS_OFFSET = 392
COUNTS = struct.Struct("<QQqqq")
"""Process header: num_produced, num_written, at_ns, own_cpu_ns, resolver_lag_ns; updated every
second. See `SpoolCounts`."""

NAME_BYTES = 256
NAME_CAPACITY = 4096
NAME_LENGTH = struct.Struct("<H")
"""Name slot: length of the UTF-8 text (written last; 0: empty slot), then the text."""

CORE = struct.Struct("<BBHIiiiIqqH6xQq")
"""type, kind, flags, name, step, microbatch, chunk, track, start_ns, end_ns, depth, commit,
launch_ns: the first 64 bytes of a record. ``commit`` is `record_offset` and is written last.
``launch_ns`` is 0 if the host issued the work at the start itself."""

LAUNCH_OFFSET = 56
LAUNCH = struct.Struct("<q")

COMM_OFFSET = 64
COMM = struct.Struct("<Qqiiqq24x")
"""group_id, seq, src_rank, dst_rank, num_bytes (-1: unknown), interval_id: the second half of a
span with `HAS_COMM`; all zero and without meaning in a span without that flag."""

STEP = struct.Struct("<qdqI4xqq16x")
"""num_tokens, loss, peak_memory_bytes, left out, 1 + peak_reserved_bytes, 1 + num_alloc_retries:
the second half of a `RecordType.STEP`. Unknown is -1, NaN and -1, and 0 for the last two. Left
out: bit k is set if spans of kind code k that began in the step were not recorded, by request or
because their capture failed; 0: all were recorded."""

MICROBATCH = struct.Struct("<qqqq32x")
"""num_tokens, sum_squared_lengths, 1 + sum_windowed_lengths, 1 + num_elements: the second half of a
`RecordType.MICROBATCH`; unknown is -1, and 0 for the last two."""

HAS_COMM = 1 << 15
"""Flag bit of the spool, not of `SpanFlag`: the record's second half is a `COMM`."""

OTHER_NAME = "__other__"
"""Name 0 of every process, given to spans once the name table is full."""


class RecordType(IntEnum):
    """Type of a record; 0 never occurs in a committed one."""

    SPAN = 1
    STEP = 2
    MICROBATCH = 3


class DropReason(IntEnum):
    """Reasons for dropping a record in the training process, by position in `DROPPED`."""

    SPOOL_FULL = 0
    NO_SEGMENT = 1
    BAD_ARGUMENT = 2
    OUT_OF_MEMORY = 3
    INTERNAL_ERROR = 4
    NO_EVENT = 5
    CAPTURING = 6
    DEVICE_ERROR = 7


KEPT_REASONS = frozenset({DropReason.BAD_ARGUMENT})
"""Reasons that lose no record: the record was kept and the unusable value replaced."""


def drop_name(reason: DropReason) -> str:
    """Return the name of a reason in `ranks.dropped`."""
    return reason.name.lower().replace("_", "-")


class SpoolError(Exception):
    """Base class of the errors of reading a spool."""


class NotASpoolError(SpoolError):
    """The file has another magic than a spool file, or is shorter than its header."""


class SpoolVersionError(SpoolError):
    """The file has a spool version that this reader does not know."""

    def __init__(self, path: Path, found: int) -> None:
        super().__init__(
            f"{path} has spool version {found}; this rankscope reads version {SPOOL_VERSION}:"
            " read it with the rankscope release that wrote it, or upgrade"
        )
        self.path = path
        self.found = found


NUM_ANCHOR_READS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Anchor:
    """One moment on both clocks of this host."""

    monotonic_ns: MonotonicNs
    unix_ns: UnixNs
    error_ns: int
    """Half of the interval of monotonic time within which the wall clock was read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpoolIdentity:
    """The process that wrote a file, and its anchor: the part that all headers share.

    The fields have the order of `IDENTITY`, after the magic, and of `ANCHOR`.
    """

    version: int
    header_bytes: int
    record_bytes: int
    capacity: int
    """Number of records (segment) or names (process file) that fit into the file."""

    segment: int
    """Number of the segment in its process; 0 in the process file."""

    lane: int
    rank: int
    world_size: int
    epoch: int
    pid: int
    process_uuid: bytes
    boot_id: bytes
    host: str
    run_id: str
    anchor_monotonic_ns: MonotonicNs
    anchor_unix_ns: UnixNs
    anchor_error_ns: int


def pack_header(identity: SpoolIdentity, *, magic: bytes) -> bytes:
    """Return the `HEADER_BYTES` of a new file: identity and anchor, all else zero."""
    *numbers, host, run_id, monotonic_ns, unix_ns, error_ns = astuple(identity)
    head = IDENTITY.pack(magic, *numbers, _encode_text(host), _encode_text(run_id))
    anchor = ANCHOR.pack(monotonic_ns, unix_ns, error_ns)
    return (head + anchor).ljust(HEADER_BYTES, b"\0")


def read_header(data: bytes | memoryview, *, magic: bytes, path: Path) -> SpoolIdentity:
    """Return the identity in the header at the front of ``data``.

    Args:
        data: The file's first bytes, at least `HEADER_BYTES`.
        magic: `SEGMENT_MAGIC` or `PROCESS_MAGIC`.
        path: The file's name, for the error message.

    Raises:
        NotASpoolError: ``data`` is too short or has another magic.
        SpoolVersionError: The version is not `SPOOL_VERSION`.
    """
    if len(data) < HEADER_BYTES or bytes(data[:8]) != magic:
        raise NotASpoolError(f"{path} is not a rankscope spool file: point --spool at its folder")
    _, *numbers, host, run_id = IDENTITY.unpack_from(data)
    if numbers[0] != SPOOL_VERSION:
        raise SpoolVersionError(path, numbers[0])
    texts = (_decode_text(host), _decode_text(run_id))
    values = (*numbers, *texts, *ANCHOR.unpack_from(data, ANCHOR_OFFSET))
    names = (field.name for field in fields(SpoolIdentity))
    return SpoolIdentity(**dict(zip(names, values, strict=True)))


def name_slot_offset(name_id: int) -> int:
    """Return the offset of the slot of name ``name_id`` in the process file, in bytes."""
    return HEADER_BYTES + name_id * NAME_BYTES


def read_names(data: bytes | memoryview) -> dict[int, str]:
    """Return the interned names of a process file by id, without the empty slots."""
    names: dict[int, str] = {}
    last = min(NAME_CAPACITY, (len(data) - HEADER_BYTES) // NAME_BYTES)
    for name_id in range(last):
        offset = name_slot_offset(name_id)
        (length,) = NAME_LENGTH.unpack_from(data, offset)
        if length:
            text = bytes(data[offset + 2 : offset + 2 + min(length, NAME_BYTES - 2)])
            names[name_id] = text.decode("utf-8", "replace")
    return names


def read_dropped(data: bytes | memoryview) -> dict[DropReason, int]:
    """Return how many records the process dropped, by reason, without the reasons that are 0."""
    counts = DROPPED.unpack_from(data, DROPPED_OFFSET)
    return {reason: counts[reason] for reason in DropReason if counts[reason]}


@dataclass(frozen=True, slots=True, kw_only=True)
class SpoolCounts:
    """Counters that a process's tracer writes into its process file every second.

    Together with `read_dropped` they account for every record: ``num_produced`` is ``num_written``
    plus all dropped records. Of the written ones, those that the store does not hold yet are
    buffered in the spool or on the way.
    """

    num_produced: int
    """Records that the tracer made: ``num_written`` plus the dropped ones.

    Spans left out by request do not count, nor do the reasons in `KEPT_REASONS`.
    """

    num_written: int
    """Rows claimed in all segments, including segments that were removed from the disk since."""

    at_ns: MonotonicNs
    """When the counters were written. Some seconds ago or more: the process is dead or stopped."""

    own_cpu_ns: int
    """CPU time of the tracer's background thread so far."""

    resolver_lag_ns: int | None
    """Age of the oldest unresolved device span; None if no device is timed."""


def read_counts(data: bytes | memoryview) -> SpoolCounts:
    """Return the counters in the header of a process file."""
    produced, written, at_ns, own_cpu_ns, lag_ns = COUNTS.unpack_from(data, COUNTS_OFFSET)
    return SpoolCounts(
        num_produced=produced,
        num_written=written,
        at_ns=MonotonicNs(at_ns),
        own_cpu_ns=own_cpu_ns,
        resolver_lag_ns=None if lag_ns < 0 else lag_ns,
    )


def sealed_rows(data: bytes | memoryview) -> int | None:
    """Return the number of rows claimed in a sealed segment; None while the lane writes to it."""
    (value,) = SEALED.unpack_from(data, SEALED_OFFSET)
    return int(value) - 1 if value else None


def record_offset(row: int) -> int:
    """Return the offset of a row in its segment file, in bytes; also the row's commit word."""
    return HEADER_BYTES + row * RECORD_BYTES


def iter_committed(data: bytes | memoryview) -> Iterator[tuple[int, bytes]]:
    """Yield (row, record bytes) of each committed record, in row order.

    Uncommitted rows are skipped: whether such a row is torn or not yet written depends on whether
    the lane has moved on, which only the caller knows.
    """
    num_rows = (len(data) - HEADER_BYTES) // RECORD_BYTES
    for row in range(num_rows):
        offset = record_offset(row)
        record = bytes(data[offset : offset + RECORD_BYTES])
        if CORE.unpack_from(record)[-2] == offset:
            yield row, record


def read_anchor() -> Anchor:
    """Read the monotonic and the wall clock; return the most exact of several readings.

    The wall clock is read between two readings of the monotonic clock. A thread switch in between
    increases the error, so the smallest error of `NUM_ANCHOR_READS` is that of an undisturbed
    reading.
    """
    return min(
        (_read_clocks() for _ in range(NUM_ANCHOR_READS)), key=lambda anchor: anchor.error_ns
    )


_READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK
"""`O_NONBLOCK`, because opening a FIFO without a writer would block; regular files ignore it."""


def open_regular_file(path: Path) -> int:
    """Open a regular file for reading, following links, and return the descriptor. Never blocks.

    Raises:
        OSError: The file cannot be opened, or is a folder, a FIFO, a socket or a device.
    """
    descriptor = os.open(path, _READ_FLAGS)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, "not a regular file", str(path))


def read_regular_file(path: Path, *, max_bytes: int) -> bytes:
    """Return the content of a regular file.

    Raises:
        OSError: As `open_regular_file`, or the file is longer than ``max_bytes``.
    """
    with os.fdopen(open_regular_file(path), "rb") as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"longer than {max_bytes:,} bytes", str(path))
    return content


def _encode_text(text: str) -> bytes:
    """Return at most 64 bytes of UTF-8, cut between characters."""
    return text.encode("utf-8", "replace")[:64].decode("utf-8", "ignore").encode()


def _decode_text(field: bytes) -> str:
    return field.rstrip(b"\0").decode("utf-8", "replace")


def _read_clocks() -> Anchor:
    before = time.monotonic_ns()
    wall = time.time_ns()
    after = time.monotonic_ns()
    return Anchor(
        monotonic_ns=MonotonicNs((before + after) // 2),
        unix_ns=UnixNs(wall),
        error_ns=(after - before + 1) // 2,
    )
