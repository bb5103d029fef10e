"""A spool of finished processes, written from records of another format."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from rankscope.tracer.span import KIND_CODES, NONE, MonotonicNs, SpanFlag, SpanKind, UnixNs
from rankscope.tracer.spool import (
    COMM,
    CORE,
    COUNTS,
    COUNTS_OFFSET,
    EVENTS_FILE,
    EXIT_FILE,
    GROUPS_FILE,
    HAS_COMM,
    HEADER_BYTES,
    KERNELS_FILE,
    MANIFEST_FILE,
    NAME_BYTES,
    NAME_CAPACITY,
    NAME_LENGTH,
    NUM_NAMES_OFFSET,
    OTHER_NAME,
    PROCESS_FILE,
    PROCESS_MAGIC,
    RECORD_BYTES,
    SEALED,
    SEALED_OFFSET,
    SEGMENT_MAGIC,
    SPOOL_VERSION,
    STEP,
    WORD,
    RecordType,
    SpoolIdentity,
    pack_header,
    record_offset,
)

from ..spool.descriptions import IMPORT_NOTE

if TYPE_CHECKING:
    from pathlib import Path

MAX_NAME_BYTES = NAME_BYTES - 2
ON_DEVICE = SpanFlag.DEVICE_BEGIN_KNOWN | SpanFlag.DEVICE_END_KNOWN


class Comm(NamedTuple):
    """The communication of a span, or that a wait is for."""

    group_id: int
    axis: str
    kind: SpanKind
    seq: int
    src_rank: int = NONE
    dst_rank: int = NONE
    num_bytes: int = NONE


@dataclass(slots=True)
class Record:
    """A span, or a step if it has no kind. Times are Unix ns."""

    kind: SpanKind | None
    name: str
    track: str
    step: int
    start_ns: int
    end_ns: int
    flags: int = 0
    """Bits of `SpanFlag`."""

    launch_ns: int = 0
    microbatch: int = NONE
    chunk: int = 0
    depth: int = 0
    comm: Comm | None = None
    interval_id: int = 0
    """Shared by the communications of one call; 0: none."""

    left_out: int = 0
    """Of a step: kinds that were not recorded, as `tracer.span.pack_kinds` packs them."""


@dataclass(slots=True, kw_only=True)
class Process:
    """The process of one rank."""

    run_id: str
    rank: int
    world_size: int
    host: str
    manifest: dict[str, Any]
    """What its `manifest.json` has beside the identity."""

    groups: dict[int, tuple[str, str, tuple[int, ...]]]
    """Kind, name and members by id. It is enough if one process of a run has a group."""

    records: list[Record] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What its import assumed or could not find, in sentences."""

    kernels: list[dict[str, Any]] = field(default_factory=list)
    """Lines of ``kernels.jsonl``."""

    events: list[dict[str, Any]] = field(default_factory=list)
    """Further lines of ``events.jsonl``."""

    state: str = "ended"
    """As in `exit.json`."""


def make_group_id(name: str, members: tuple[int, ...]) -> int:
    """Return the id of a group, the same on all its members. See docs/spool-format.md."""
    text = f"{name}\0{','.join(map(str, members))}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") or 1


def make_process_uuid(run_id: str, rank: int) -> bytes:
    """Return the id of the only process of a rank."""
    return hashlib.blake2b(f"{run_id} {rank}".encode(), digest_size=16).digest()


def write_process(spool: Path, process: Process) -> None:
    """Write the folder of a process that has ended.

    Its monotonic clock is the Unix time of its records, so that all hosts share one.
    """
    rank, num = process.rank, len(process.records)
    uuid = make_process_uuid(process.run_id, rank)
    folder = spool / process.run_id / f"e0-r{rank:05d}-{uuid.hex()[:12]}"
    folder.mkdir(parents=True)
    at_ns = [event["at_ns"] for event in process.events]
    begin_ns = min([*(each.start_ns for each in process.records), *at_ns], default=0)
    end_ns = max([*(each.end_ns for each in process.records), *at_ns], default=0)
    boot_id = hashlib.blake2b(process.host.encode(), digest_size=16).digest()
    manifest = {
        "version": 1, "run_id": process.run_id, "epoch": 0, "rank": rank, "local_rank": None,
        "world_size": process.world_size, "pid": 0, "host": process.host, "pod": None,
        "process_uuid": uuid.hex(), "boot_id": boot_id.hex(), "started_ns": begin_ns,
        **process.manifest,
    }  # fmt: skip
    _write_json(folder / MANIFEST_FILE, manifest)
    names = {OTHER_NAME: 0}
    rows = bytearray()
    for row, record in enumerate(process.records):
        rows += _pack(record, row, names)

    def header(magic: bytes, capacity: int) -> bytearray:
        identity = SpoolIdentity(
            version=SPOOL_VERSION, header_bytes=HEADER_BYTES, record_bytes=RECORD_BYTES,
            capacity=capacity, segment=0, lane=0, rank=rank, world_size=process.world_size,
            epoch=0, pid=0, process_uuid=uuid, boot_id=boot_id, host=process.host,
            run_id=process.run_id, anchor_monotonic_ns=MonotonicNs(begin_ns),
            anchor_unix_ns=UnixNs(begin_ns), anchor_error_ns=0,
        )  # fmt: skip
        return bytearray(pack_header(identity, magic=magic))

    about = header(PROCESS_MAGIC, NAME_CAPACITY)
    WORD.pack_into(about, NUM_NAMES_OFFSET, len(names))
    COUNTS.pack_into(about, COUNTS_OFFSET, num, num, end_ns, 0, NONE)
    slots = bytearray()
    for name in names:
        text = name.encode("utf-8", "replace")[:MAX_NAME_BYTES] or b"?"
        slots += (NAME_LENGTH.pack(len(text)) + text).ljust(NAME_BYTES, b"\0")
    about += slots.ljust(NAME_CAPACITY * NAME_BYTES, b"\0")
    (folder / PROCESS_FILE).write_bytes(about)
    segment = header(SEGMENT_MAGIC, num)
    SEALED.pack_into(segment, SEALED_OFFSET, 1 + num)
    (folder / "seg-000000.rsp").write_bytes(segment + rows)
    groups = [
        {"group_id": f"{group_id:016x}", "kind": kind, "name": name, "members": members}
        for group_id, (kind, name, members) in process.groups.items()
    ]
    notes: list[dict[str, Any]] = [
        {"at_ns": begin_ns, "kind": IMPORT_NOTE, "text": note, "data": {}} for note in process.notes
    ]
    for file, lines in (
        (GROUPS_FILE, groups),
        (EVENTS_FILE, [*notes, *process.events]),
        (KERNELS_FILE, process.kernels),
    ):
        own = "".join(f"{json.dumps(line)}\n" for line in lines)
        (folder / file).write_text(own, encoding="utf-8")
    _write_json(folder / EXIT_FILE, {"state": process.state, "at_ns": end_ns})


def _pack(record: Record, row: int, names: dict[str, int]) -> bytes:
    """Return the bytes of a record; its names are numbered in ``names``."""
    is_step = record.kind is None
    flags, second = record.flags, b""
    if record.comm is not None:
        flags |= HAS_COMM
        one = record.comm
        second = COMM.pack(
            one.group_id, one.seq, one.src_rank, one.dst_rank, one.num_bytes, record.interval_id
        )
    elif is_step:
        second = STEP.pack(NONE, float("nan"), NONE, record.left_out, 0, 0)
    first = CORE.pack(
        RecordType.STEP if is_step else RecordType.SPAN,
        KIND_CODES[record.kind] if record.kind is not None else 0,
        flags, 0 if is_step else _number(record.name, names), record.step, record.microbatch,
        record.chunk, _number(record.track, names), record.start_ns, record.end_ns, record.depth,
        record_offset(row), record.launch_ns,
    )  # fmt: skip
    return (first + second).ljust(RECORD_BYTES, b"\0")


def _number(name: str, names: dict[str, int]) -> int:
    if name not in names and len(names) == NAME_CAPACITY:
        return 0
    return names.setdefault(name, len(names))


def _write_json(path: Path, document: dict[str, Any]) -> None:
    path.write_text(json.dumps(document), encoding="utf-8")
