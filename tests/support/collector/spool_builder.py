"""Builder of spools from the structs of `tracer.spool`, independent of the tracer."""

from __future__ import annotations

import json
import os
import socket
import time
import uuid
from pathlib import Path
from typing import Any

from rankscope.tracer.span import KIND_CODES, NONE, MonotonicNs, SpanFlag, SpanKind, UnixNs
from rankscope.tracer.spool import (
    COMM,
    CORE,
    COUNTS,
    COUNTS_OFFSET,
    DROPPED,
    DROPPED_OFFSET,
    EVENTS_FILE,
    EXIT_FILE,
    GROUPS_FILE,
    HAS_COMM,
    HEADER_BYTES,
    MANIFEST_FILE,
    MICROBATCH,
    NAME_BYTES,
    NAME_LENGTH,
    OPEN_COMM,
    OPEN_ENTRY,
    OPEN_ENTRY_BYTES,
    OPEN_TABLE_OFFSET,
    OTHER_NAME,
    PROCESS_FILE,
    PROCESS_MAGIC,
    RECORD_BYTES,
    SEALED,
    SEALED_OFFSET,
    SEGMENT_MAGIC,
    SPOOL_VERSION,
    STEP,
    DropReason,
    RecordType,
    SpoolIdentity,
    name_slot_offset,
    pack_header,
    record_offset,
)

ANCHOR_MONOTONIC_NS = 1_000
ANCHOR_UNIX_NS = 1_700_000_000_000_001_000
OFFSET_NS = ANCHOR_UNIX_NS - ANCHOR_MONOTONIC_NS
"""Unix time - monotonic time of the built host: a span at monotonic t shows at t + this."""

BOOT_ID = bytes(range(16))
ELSEWHERE = "another-host"
"""Name of another host, on which the pid is not checked."""


class SpoolBuilder:
    """The folder of one process. Rows go to its current segment."""

    def __init__(
        self,
        spool: Path,
        *,
        run_id: str,
        rank: int = 0,
        epoch: int = 0,
        world_size: int = 2,
        host: str = ELSEWHERE,
        boot_id: bytes = BOOT_ID,
        pid: int = 1,
        capacity: int = 64,
        version: int = SPOOL_VERSION,
        anchor_unix_ns: int = ANCHOR_UNIX_NS,
        anchor_monotonic_ns: int = ANCHOR_MONOTONIC_NS,
        manifest: dict[str, Any] | None = None,
    ) -> None:
        self.process = uuid.uuid4()
        self.capacity = capacity
        self.folder = spool / run_id / f"e{epoch}-r{rank:05d}-{self.process.hex[:12]}"
        self.folder.mkdir(parents=True)
        self._shared: dict[str, Any] = {
            "version": version,
            "header_bytes": HEADER_BYTES,
            "record_bytes": RECORD_BYTES,
            "rank": rank,
            "world_size": world_size,
            "epoch": epoch,
            "pid": pid,
            "process_uuid": self.process.bytes,
            "boot_id": boot_id,
            "host": host,
            "run_id": run_id,
            "anchor_monotonic_ns": MonotonicNs(anchor_monotonic_ns),
            "anchor_unix_ns": UnixNs(anchor_unix_ns),
            "anchor_error_ns": 500,
        }
        self._names: dict[str, int] = {}
        self._dropped = [0] * 16
        self._write(
            PROCESS_FILE, 0, pack_header(self._identity(capacity=4096), magic=PROCESS_MAGIC)
        )
        self.name(OTHER_NAME)
        self.write_json(MANIFEST_FILE, manifest if manifest is not None else self._manifest())
        self._num_segments = 0
        self.segment = Path()
        self.next_row = 0
        self.new_segment()

    @property
    def identity(self) -> tuple[str, int, int]:
        """Run, epoch and rank."""
        return self._shared["run_id"], self._shared["epoch"], self._shared["rank"]

    def rename(self, run_id: str) -> None:
        """Change the run id in the headers; the folder keeps its name."""
        self._shared["run_id"] = run_id
        header = pack_header(self._identity(capacity=4096), magic=PROCESS_MAGIC)
        self._write(PROCESS_FILE, 0, header)
        identity = self._identity(capacity=self.capacity)
        self._write(self.segment.name, 0, pack_header(identity, magic=SEGMENT_MAGIC))

    def new_segment(self, *, number: int | None = None) -> None:
        """Begin a segment; `seal` the one before first."""
        number = self._num_segments if number is None else number
        self._num_segments += 1
        self.segment = self.folder / f"seg-{number:06d}.rsp"
        identity = self._identity(capacity=self.capacity, segment=number)
        self._write(self.segment.name, 0, pack_header(identity, magic=SEGMENT_MAGIC))
        os.truncate(self.segment, HEADER_BYTES + self.capacity * RECORD_BYTES)
        self.next_row = 0

    def seal(self) -> None:
        """Seal the current segment."""
        self._write(self.segment.name, SEALED_OFFSET, SEALED.pack(1 + self.next_row))

    def claim(self) -> int:
        """Claim a row without writing it; return its number."""
        self.next_row += 1
        return self.next_row - 1

    def span(
        self,
        name: str = "op",
        *,
        kind: SpanKind | int = SpanKind.FORWARD,
        start_ns: int = 0,
        duration_ns: int = 10,
        step: int = 0,
        microbatch: int = NONE,
        chunk: int = NONE,
        track: str = "main",
        launch_ns: int = NONE,
        depth: int = 0,
        flags: int = SpanFlag.HOST_CLOCK,
        comm: tuple[int, int, int, int, int, int] | None = None,
        record_type: int = RecordType.SPAN,
        row: int | None = None,
        commit: bool = True,
    ) -> int:
        """Write a span; ``comm`` is group_id, seq, src_rank, dst_rank, num_bytes, interval_id."""
        row = self.claim() if row is None else row
        core = self._core(
            record_type, row, start_ns, duration_ns, step=step, microbatch=microbatch, chunk=chunk,
            kind=KIND_CODES[kind] if isinstance(kind, SpanKind) else kind,
            flags=flags | (HAS_COMM if comm else 0), name=self.name(name), track=self.name(track),
            depth=depth, launch_ns=launch_ns, commit=record_offset(row) if commit else 0,
        )  # fmt: skip
        self._row(row, core + (COMM.pack(*comm) if comm else bytes(64)))
        return row

    def step(
        self,
        step: int,
        *,
        start_ns: int,
        duration_ns: int,
        num_tokens: int = NONE,
        loss: float = float("nan"),
        peak_memory_bytes: int = NONE,
        left_out: int = 0,
        peak_reserved_bytes: int = NONE,
        num_alloc_retries: int = NONE,
    ) -> int:
        row = self.claim()
        core = self._core(RecordType.STEP, row, start_ns, duration_ns, step=step)
        plus_one = 1 + peak_reserved_bytes, 1 + num_alloc_retries
        self._row(row, core + STEP.pack(num_tokens, loss, peak_memory_bytes, left_out, *plus_one))
        return row

    def microbatch(
        self,
        index: int,
        *,
        step: int,
        num_tokens: int,
        sum_squared_lengths: int,
        sum_windowed_lengths: int = NONE,
        num_elements: int = NONE,
    ) -> int:
        row = self.claim()
        core = self._core(RecordType.MICROBATCH, row, 0, 0, step=step, microbatch=index)
        sums = sum_squared_lengths, 1 + sum_windowed_lengths, 1 + num_elements
        self._row(row, core + MICROBATCH.pack(num_tokens, *sums))
        return row

    def name(self, text: str) -> int:
        """Return the id of a name, cut to the length of a slot."""
        if text not in self._names:
            name_id = self._names[text] = len(self._names)
            raw = text.encode("utf-8", "surrogatepass")[: NAME_BYTES - 2]
            slot = (NAME_LENGTH.pack(len(raw)) + raw).ljust(NAME_BYTES, b"\0")
            self._write(PROCESS_FILE, name_slot_offset(name_id), slot)
        return self._names[text]

    def open_span(
        self,
        slot: int,
        name: str,
        *,
        start_ns: int,
        step: int,
        group_id: int = 0,
        seq: int = NONE,
        comm: tuple[int, int, int] = (0, 0, 0),
    ) -> None:
        kind = KIND_CODES[SpanKind.DP_COMM]
        place = start_ns, group_id, seq, self.name(name), step, kind, 0, start_ns
        entry = OPEN_ENTRY.pack(*place) + OPEN_COMM.pack(*comm)
        self._write(self.segment.name, OPEN_TABLE_OFFSET + slot * OPEN_ENTRY_BYTES, entry)

    def drop(self, reason: DropReason, num: int) -> None:
        self._dropped[reason] += num
        self._write(PROCESS_FILE, DROPPED_OFFSET, DROPPED.pack(*self._dropped))

    def publish(self, *, produced: int, written: int, at_ns: int | None = None) -> None:
        """Write the counters as the tracer does once a second."""
        at_ns = time.monotonic_ns() if at_ns is None else at_ns
        counts = COUNTS.pack(produced, written, at_ns, 0, -1)
        self._write(PROCESS_FILE, COUNTS_OFFSET, counts)

    def group(self, group_id: int, *, kind: str, name: str, members: list[int]) -> None:
        line = {"group_id": f"{group_id:016x}", "kind": kind, "name": name, "members": members}
        self.append_line(GROUPS_FILE, json.dumps(line))

    def event(self, kind: str, text: str, *, at_ns: int, data: dict[str, Any]) -> None:
        line = {"at_ns": at_ns, "kind": kind, "text": text, "data": data}
        self.append_line(EVENTS_FILE, json.dumps(line))

    def append_line(self, file_name: str, line: str, *, end: str = "\n") -> None:
        with (self.folder / file_name).open("a", encoding="utf-8") as file:
            file.write(line + end)

    def end(self, *, at_ns: int = 0) -> None:
        """End as the tracer does: seal the segment, then write the exit record."""
        self.seal()
        self.write_json(EXIT_FILE, {"state": "ended", "at_ns": at_ns})

    def fail(self, kind: str, message: str, *, at_ns: int = 0) -> None:
        exception = {"type": kind, "message": message, "traceback": "Traceback ..."}
        self.write_json(EXIT_FILE, {"state": "failed", "at_ns": at_ns, "exception": exception})

    def write_json(self, file_name: str, document: object) -> None:
        (self.folder / file_name).write_text(json.dumps(document), encoding="utf-8")

    def _manifest(self) -> dict[str, Any]:
        return {
            "version": 1,
            "run_id": self._shared["run_id"],
            "epoch": self._shared["epoch"],
            "rank": self._shared["rank"],
            "world_size": self._shared["world_size"],
            "local_rank": self._shared["rank"],
            "host": self._shared["host"],
            "pod": None,
            "pid": self._shared["pid"],
            "process_uuid": self.process.hex,
            "boot_id": BOOT_ID.hex(),
            "started_ns": ANCHOR_UNIX_NS,
            "layout": {"dp": 2, "tp": 1, "pp": 1, "cp": 1, "ep": 1, "dsp": 1, "vpp": 1},
            "coords": {"dp": self._shared["rank"], "tp": 0, "pp": 0, "cp": 0, "ep": 0},
            "device": {"name": "cpu", "uuid": None, "dtype": "float32", "peak_flops_per_s": 5e9},
            "model": {
                "name": "tiny",
                "num_parameters": 1000,
                "flops_per_token": 6e3,
                "flops_convention": "6 N",
            },
            "paced": None,
        }

    def _identity(self, *, capacity: int, segment: int = 0) -> SpoolIdentity:
        return SpoolIdentity(capacity=capacity, segment=segment, lane=0, **self._shared)

    def _core(
        self,
        record_type: int,
        row: int,
        start_ns: int,
        duration_ns: int,
        *,
        step: int,
        microbatch: int = NONE,
        chunk: int = NONE,
        kind: int = 0,
        flags: int = SpanFlag.HOST_CLOCK,
        name: int = 0,
        track: int = 0,
        depth: int = 0,
        launch_ns: int = NONE,
        commit: int | None = None,
    ) -> bytes:
        end_ns = min(start_ns + duration_ns, 2**63 - 1)
        commit = record_offset(row) if commit is None else commit
        return CORE.pack(
            record_type, kind, flags, name, step, microbatch, chunk, track, start_ns, end_ns, depth,
            commit, launch_ns,
        )  # fmt: skip

    def _row(self, row: int, record: bytes) -> None:
        assert len(record) == RECORD_BYTES
        self._write(self.segment.name, HEADER_BYTES + row * RECORD_BYTES, record)

    def _write(self, file_name: str, offset: int, data: bytes) -> None:
        descriptor = os.open(self.folder / file_name, os.O_WRONLY | os.O_CREAT, 0o640)
        try:
            os.pwrite(descriptor, data, offset)
        finally:
            os.close(descriptor)


def this_host() -> dict[str, Any]:
    """Return the identity of this process, which is alive and older than its spool."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")
    return {
        "host": socket.gethostname(),
        "boot_id": bytes.fromhex(boot_id),
        "pid": os.getpid(),
        "anchor_monotonic_ns": time.monotonic_ns(),
    }
