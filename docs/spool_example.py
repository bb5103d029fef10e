"""Example of a program that writes a spool: four ranks, two pipeline stages, two replicas.

It uses the standard library and docs/spool-format.md only, so it can be translated into any
language. The job is not real. Rank 2 computes 40 % longer from step 4 on, and the others wait:

    python docs/spool_example.py /tmp/spool
    rankscope check-spool /tmp/spool
    rankscope import /tmp/spool --format rankscope
    rankscope analyze example
"""

from __future__ import annotations

import hashlib
import json
import struct
import sys
from pathlib import Path
from typing import Any

RUN, HOST, WORLD_SIZE, NUM_STEPS, NUM_MICROBATCHES = "example", "example-host", 4, 10, 4
MS = 1_000_000
MONOTONIC_NS, UNIX_NS = 5_000_000_000_000, 1_700_000_000_000_000_000
"""One moment on the host's CLOCK_MONOTONIC and in Unix time: the anchor."""

HEADER_BYTES, RECORD_BYTES, NAME_BYTES, NUM_NAMES, CAPACITY = 4096, 128, 256, 4096, 1024
SPAN, STEP = 1, 2
FORWARD, BACKWARD, OPTIMIZER, DP, SEND, RECV, WAIT = 0, 1, 2, 6, 7, 8, 9
ASYNC, HOST_CLOCK, HAS_COMM = 1, 16, 32768
UNKNOWN = -1
NAMES = ("__other__", "main", "comm dp", "comm pp", "forward", "backward", "optimizer",
         "all_reduce", "send", "recv", "wait")  # fmt: skip


def group_id(name: str, members: list[int]) -> int:
    """Return the id of a group: equal on all its members, never 0."""
    text = f"{name}\0{','.join(map(str, members))}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") or 1


class Process:
    """The folder of one rank's process, with one segment."""

    def __init__(self, spool: Path, rank: int) -> None:
        self.rank, self.uuid = rank, hashlib.blake2b(b"%d" % rank, digest_size=16).digest()
        self.folder = spool / RUN / f"e0-r{rank:05d}-{self.uuid.hex()[:12]}"
        self.folder.mkdir(parents=True)
        self.dp, self.stage = divmod(rank, 2)
        self.now_ns = MONOTONIC_NS + MS
        self.rows: list[bytes] = []
        self.next_seq: dict[tuple[object, ...], int] = {}

    def header(self, magic: bytes, capacity: int) -> bytearray:
        """Return the first 4096 bytes of a .rsp file."""
        numbers = (2, HEADER_BYTES, RECORD_BYTES, capacity, 0, 0, self.rank, WORLD_SIZE, 0, 1)
        texts = (HOST.encode(), RUN.encode())
        head = struct.pack("<8s10I16s16s64s64s", magic, *numbers, self.uuid, bytes(16), *texts)
        anchor = struct.pack("<qqq", MONOTONIC_NS, UNIX_NS, 1_000)
        return bytearray((head + anchor).ljust(HEADER_BYTES, b"\0"))

    def record(  # noqa: PLR0913  # the columns of a record
        self, kind: int, name: str, start: int, end: int, *, step: int, microbatch: int = UNKNOWN,
        track: str = "main", flags: int = HOST_CLOCK, second: bytes = b"",
        record_type: int = SPAN, launch: int = 0,
    ) -> None:  # fmt: skip
        """Append one row; its commit is its own offset."""
        commit = HEADER_BYTES + RECORD_BYTES * len(self.rows)
        codes = (record_type, kind, flags, NAMES.index(name) if record_type == SPAN else 0)
        place = (step, microbatch, 0, NAMES.index(track))
        times = (start, end, 0, commit, launch)
        first = struct.pack("<BBHIiiiIqqH6xQq", *codes, *place, *times)
        self.rows.append((first + second).ljust(RECORD_BYTES, b"\0"))

    def compute(
        self, kind: int, name: str, duration_ns: int, *, step: int, microbatch: int = UNKNOWN
    ) -> None:
        """Compute for a while; one rank is slow."""
        slow = 1.4 if self.rank == 2 and step >= 4 else 1.0  # noqa: PLR2004
        jitter = 1 + 0.01 * ((self.rank * 7 + step * 13 + microbatch * 5 + kind * 3) % 11 - 5) / 5
        begin, self.now_ns = self.now_ns, self.now_ns + int(duration_ns * slow * jitter)
        self.record(kind, name, begin, self.now_ns, step=step, microbatch=microbatch)

    def seq(self, *key: object) -> int:
        """Return the number of the next operation: by group, for p2p by group and ordered pair."""
        self.next_seq[key] = self.next_seq.get(key, -1) + 1
        return self.next_seq[key]

    def close(self, groups: list[dict[str, Any]]) -> None:
        """Write the files. A live writer creates them at the start, with their full size."""
        manifest = {
            "version": 1, "run_id": RUN, "epoch": 0, "rank": self.rank, "world_size": WORLD_SIZE,
            "local_rank": self.rank, "pid": 1, "host": HOST, "process_uuid": self.uuid.hex(),
            "boot_id": bytes(16).hex(), "started_ns": UNIX_NS, "layout": {"dp": 2, "pp": 2},
            "coords": {"dp": self.dp, "pp": self.stage},
        }  # fmt: skip
        (self.folder / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
        process = self.header(b"RSCPPRC\0", NUM_NAMES)
        struct.pack_into("<QQQq", process, 384, len(NAMES), *[len(self.rows)] * 2, self.now_ns)
        slots = [struct.pack("<H", len(name)) + name.encode() for name in NAMES]
        table = b"".join(slot.ljust(NAME_BYTES, b"\0") for slot in slots)
        names = table.ljust(NUM_NAMES * NAME_BYTES, b"\0")
        (self.folder / "process.rsp").write_bytes(process + names)
        segment = self.header(b"RSCPSEG\0", CAPACITY)
        struct.pack_into("<Q", segment, 256, 1 + len(self.rows))  # sealed
        rows = b"".join(self.rows).ljust(CAPACITY * RECORD_BYTES, b"\0")
        (self.folder / "seg-000000.rsp").write_bytes(segment + rows)
        own = [group for group in groups if self.rank in group["members"]]
        lines = "".join(json.dumps(group) + "\n" for group in own)
        (self.folder / "groups.jsonl").write_text(lines, encoding="utf-8")
        at_ns = self.now_ns - MONOTONIC_NS + UNIX_NS
        end = json.dumps({"state": "ended", "at_ns": at_ns})
        (self.folder / "exit.json").write_text(end, encoding="utf-8")


def transfer(
    source: Process, target: Process, duration_ns: int, *, step: int, microbatch: int
) -> None:
    """Send from one rank to another: the sender launches and goes on, the receiver blocks."""
    group = group_id("pp", sorted((source.rank, target.rank)))  # any number but 0 that both write
    sent, posted = source.now_ns, target.now_ns
    end = max(sent, posted) + duration_ns  # of both: the send ends when the transfer is done
    for process, kind, name, begin, flags in (
        (source, SEND, "send", sent, HOST_CLOCK | ASYNC),  # nothing waits for it
        (target, RECV, "recv", posted, HOST_CLOCK),  # synchronous: the record is the wait, too
    ):
        seq = process.seq(group, source.rank, target.rank)
        comm = struct.pack("<Qqiiqq", group, seq, source.rank, target.rank, 8 << 20, 0)
        process.record(kind, name, begin, end, step=step, microbatch=microbatch, track="comm pp",
                       flags=flags | HAS_COMM, second=comm)  # fmt: skip
    target.now_ns = end


def all_reduce(members: list[Process], duration_ns: int, *, step: int) -> None:
    """Launch an asynchronous all-reduce on each rank, and wait for it at once."""
    group = group_id("dp", [member.rank for member in members])
    end = max(member.now_ns for member in members) + duration_ns
    for member in members:
        comm = struct.pack("<Qqiiqq", group, member.seq(group), -1, -1, 64 << 20, 0)
        flags, begin = HOST_CLOCK | HAS_COMM, member.now_ns
        member.record(DP, "all_reduce", begin, end, step=step, track="comm dp",
                      flags=flags | ASYNC, second=comm)  # fmt: skip
        member.record(WAIT, "wait", begin, end, step=step, flags=flags, second=comm)
        member.now_ns = end


def write_spool(spool: Path) -> None:
    """Write the spool of the job."""
    ranks = [Process(spool, rank) for rank in range(WORLD_SIZE)]
    first, last = ranks[0::2], ranks[1::2]
    for step in range(NUM_STEPS):
        begins = [process.now_ns for process in ranks]
        for microbatch in range(NUM_MICROBATCHES):
            for source, target in zip(first, last, strict=True):
                place = {"step": step, "microbatch": microbatch}
                source.compute(FORWARD, "forward", 10 * MS, **place)
                transfer(source, target, MS // 2, **place)
                target.compute(FORWARD, "forward", 10 * MS, **place)
                target.compute(BACKWARD, "backward", 20 * MS, **place)
                transfer(target, source, MS // 2, **place)
                source.compute(BACKWARD, "backward", 20 * MS, **place)
        for stage in (first, last):
            all_reduce(stage, 5 * MS, step=step)
        for process, begin in zip(ranks, begins, strict=True):
            process.compute(OPTIMIZER, "optimizer", 2 * MS, step=step)
            result = struct.pack("<qdqI", 8192, 2.5, UNKNOWN, 0)
            process.record(0, "main", begin, process.now_ns, step=step, second=result,
                           record_type=STEP)  # fmt: skip
    groups: list[dict[str, Any]] = []
    for stage in (first, last):
        members = [process.rank for process in stage]
        number = f"{group_id('dp', members):016x}"
        groups.append({"group_id": number, "kind": "dp-comm", "name": "dp", "members": members})
    for process in ranks:
        process.close(groups)


if __name__ == "__main__":
    write_spool(Path(sys.argv[1]))
