"""Writer of a job as a spool, byte by byte as in docs/spool-format.md."""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from rankscope.tracer.span import KIND_CODES, SpanFlag, SpanKind

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from benchmarks.independent.jobs import Running
    from benchmarks.independent.layout import Places
    from benchmarks.independent.machine import Rank

HEADER, SLOT = 4096, 256
UNIX_NS = 1_760_000_000_000_000_000
HAS_COMM = 1 << 15
MIN_STALL_NS = 20_000

ROW = np.dtype(
    {
        "names": [
            "type", "kind", "flags", "name", "step", "microbatch", "chunk", "track", "start", "end",
            "depth", "commit", "launch", "a", "b", "src", "dst", "bytes", "interval",
        ],
        "formats": [
            "u1", "u1", "<u2", "<u4", "<i4", "<i4", "<i4", "<u4", "<i8", "<i8",
            "<u2", "<u8", "<i8", "<u8", "<i8", "<i4", "<i4", "<i8", "<u8",
        ],
        "offsets": [0, 1, 2, 4, 8, 12, 16, 20, 24, 32, 40, 48, 56, 64, 72, 80, 84, 88, 96],
        "itemsize": 128,
    }
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Clock:
    """Relation of a host's monotonic clock to true time."""

    base_ns: int
    """Monotonic time at the start of the job."""

    unix_ns: int = UNIX_NS
    """True time at the start of the job."""

    anchor_error_ns: int = 0
    """Error of the anchor in the headers."""


@dataclass(frozen=True, kw_only=True)
class End:
    """Crash or hang of a rank: its moment and its open spans."""

    at_ns: int
    exception: Mapping[str, str] | None = None
    """The exception of a crash; None for a hang."""


@dataclass(frozen=True, kw_only=True)
class SpoolOptions:
    """Options of a written spool."""

    run_id: str
    clocks: Mapping[str, Clock]
    ends: Mapping[int, End] = field(default_factory=dict)
    cut_ns: int | None = None
    """Time from which on all ranks hang: nothing that ends later is recorded."""

    time_factor: float = 1.0
    first_step: int = 0
    settings: Mapping[int, Mapping[str, str]] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    """Replacements of span names."""

    shuffle_seed: int | None = None


def write_spool(
    folder: Path, running: Running, ranks: Sequence[Rank], options: SpoolOptions
) -> None:
    """Write a process folder for each rank."""
    at = running.moments.solve()
    for rank in ranks:
        _write_rank(folder, running, rank, at, options)


def _rows(
    rank: Rank, at: np.ndarray, options: SpoolOptions, names: dict[str, int], end_ns: int | None
) -> tuple[np.ndarray, list[tuple[Any, ...]]]:
    def numbered(name: str) -> int:
        return names.setdefault(options.names.get(name, name), len(names))

    times = at.tolist()
    rows: list[tuple[Any, ...]] = []
    is_open = []
    for each in rank.records:
        start, end, flags = times[each.start], times[each.end], each.flags
        if each.marks is not None and has_bounds_from_marks(rank):
            start, end, flags = _as_bounds(each.marks, at, start, end, flags)
        if end_ns is not None and end > end_ns:
            if start <= end_ns:
                is_open.append((start, each))
            continue
        launch = min(times[each.launch], start)
        rows.append(
            (1, KIND_CODES[each.kind], flags | (HAS_COMM if each.group_id else 0),
             numbered(each.name), each.step + options.first_step, each.microbatch, each.chunk,
             numbered(each.track), start, end, each.depth, 0, 0 if launch == start else launch,
             *((each.group_id, each.seq, each.src, each.dst, each.num_bytes)
               if each.group_id else (0, 0, 0, 0, 0)), 0)
        )  # fmt: skip
    unknown = int(np.float64("nan").view(np.int64))
    for step, start, end in rank.steps:
        if end_ns is None or times[end] <= end_ns:
            rows.append(
                (2, 0, 0, 0, step + options.first_step, -1, -1, 0, times[start], times[end], 0, 0,
                 0, 8192, unknown, -1, -1, 0, 0)
            )  # fmt: skip
    for step, microbatch, moment, tokens, squares in rank.microbatches:
        if end_ns is None or times[moment] <= end_ns:
            rows.append(
                (3, 0, 0, 0, step + options.first_step, microbatch, -1, 0, times[moment],
                 times[moment], 0, 0, 0, tokens, squares, 0, 0, 0, 0)
            )  # fmt: skip
    return np.array(rows, dtype=ROW), is_open


def has_bounds_from_marks(rank: Rank) -> bool:
    """Return whether only marks show a rank's asynchronous communication."""
    return rank.is_device and rank.as_bounds


def _as_bounds(
    marks: list[int], at: np.ndarray, start: int, end: int, flags: int
) -> tuple[int, int, int]:
    """Return the times that marks on the compute stream give: see docs/clocks.md."""
    mark, before, waits, goes_on = marks
    marked = int(at[mark])
    flags &= ~int(SpanFlag.DEVICE_BEGIN_KNOWN | SpanFlag.DEVICE_END_KNOWN)
    if before < 0 or at[before] <= marked:
        start, flags = marked, flags | int(SpanFlag.DEVICE_BEGIN_KNOWN)
    else:
        start = marked
    if waits >= 0 and at[goes_on] - at[waits] > MIN_STALL_NS:
        return start, int(at[goes_on]), flags | int(SpanFlag.DEVICE_END_KNOWN)
    if waits >= 0:
        end = int(at[goes_on])
    return start, end, flags | int(SpanFlag.END_BOUND)


def _write_rank(
    folder: Path, running: Running, rank: Rank, at: np.ndarray, options: SpoolOptions
) -> None:
    places = running.job.places
    names = {"__other__": 0}
    end = options.ends.get(rank.rank)
    end_ns = end.at_ns if end else options.cut_ns
    rows, is_open = _rows(rank, at, options, names, end_ns)
    for column in ("start", "end", "launch"):
        known = (rows[column] != 0) if column == "launch" else slice(None)
        scaled = np.rint(rows[column][known] * options.time_factor).astype(np.int64)
        rows[column][known] = scaled + options.clocks[places.host(rank.rank)].base_ns
    if options.shuffle_seed is not None:
        rows = np.random.default_rng((options.shuffle_seed, rank.rank)).permutation(rows)
    process = uuid.uuid5(uuid.NAMESPACE_OID, f"{options.run_id}/{rank.rank}")
    path = folder / options.run_id / f"e0-r{rank.rank:05d}-{process.hex[:12]}"
    path.mkdir(parents=True)
    anchor = options.clocks[places.host(rank.rank)]
    header = _header(options.run_id, rank.rank, places, process.bytes, anchor)
    (path / "process.rsp").write_bytes(_process(header, names, len(rows)))
    middle = len(rows) // 2
    for number, half in enumerate((rows[:middle], rows[middle:])):
        part = half.copy()
        part["commit"] = HEADER + 128 * np.arange(len(part))
        seals = end_ns is None or number == 0
        head = _segment_header(header, number, len(part), seals=seals)
        if number == 1:
            head = _with_open(head, is_open, names, options, anchor.base_ns)
        (path / f"seg-{number:06d}.rsp").write_bytes(head + part.tobytes())
    _write_texts(path, running, rank, options, process)


def _header(run_id: str, rank: int, places: Places, process: bytes, clock: Clock) -> bytearray:
    head = bytearray(HEADER)
    host = places.host(rank)
    for offset, value in (
        (8, 2), (12, HEADER), (16, 128), (20, 4096), (32, rank), (36, places.world_size),
        (44, 1000 + rank),
    ):  # fmt: skip
        head[offset : offset + 4] = value.to_bytes(4, "little")
    head[48:64] = process
    head[64:80] = uuid.uuid5(uuid.NAMESPACE_DNS, run_id + host).bytes
    head[80 : 80 + len(host)] = host.encode()
    head[144 : 144 + len(run_id)] = run_id.encode()
    unix_ns = clock.unix_ns + clock.anchor_error_ns
    for offset, value in ((208, clock.base_ns), (216, unix_ns), (224, 100)):
        head[offset : offset + 8] = value.to_bytes(8, "little", signed=True)
    return head


def _process(header: bytearray, names: dict[str, int], num_rows: int) -> bytes:
    head = bytearray(header)
    head[0:8] = b"RSCPPRC\0"
    for offset, value in ((384, len(names)), (392, num_rows), (400, num_rows)):
        head[offset : offset + 8] = value.to_bytes(8, "little")
    head[424:432] = (-1).to_bytes(8, "little", signed=True)
    slots = bytearray(SLOT * 4096)
    for text, number in names.items():
        raw = text.encode()
        slots[SLOT * number : SLOT * number + 2 + len(raw)] = len(raw).to_bytes(2, "little") + raw
    return bytes(head + slots)


def _segment_header(header: bytearray, number: int, num_rows: int, *, seals: bool) -> bytearray:
    head = bytearray(header)
    head[0:8] = b"RSCPSEG\0"
    head[20:24] = max(num_rows, 1).to_bytes(4, "little")
    head[24:28] = number.to_bytes(4, "little")
    head[28:32] = number.to_bytes(4, "little")
    head[256:264] = (1 + num_rows if seals else 0).to_bytes(8, "little")
    return head


def _with_open(
    head: bytearray,
    is_open: list[tuple[Any, ...]],
    names: dict[str, int],
    options: SpoolOptions,
    base_ns: int,
) -> bytearray:
    for place, (start, each) in enumerate(is_open[-40:]):
        at = 1024 + 64 * place
        begun = int(start * options.time_factor) + base_ns
        head[at : at + 8] = begun.to_bytes(8, "little")
        head[at + 8 : at + 16] = each.group_id.to_bytes(8, "little")
        head[at + 16 : at + 24] = each.seq.to_bytes(8, "little", signed=True)
        name = names.get(options.names.get(each.name, each.name), 0)
        head[at + 24 : at + 28] = name.to_bytes(4, "little")
        step = each.step + options.first_step
        head[at + 28 : at + 32] = step.to_bytes(4, "little", signed=True)
        head[at + 32] = KIND_CODES[each.kind]
        head[at + 40 : at + 48] = begun.to_bytes(8, "little")
    return head


def _write_texts(
    path: Path, running: Running, rank: Rank, options: SpoolOptions, process: uuid.UUID
) -> None:
    places = running.job.places
    host = places.host(rank.rank)
    manifest = {
        "version": 1, "run_id": options.run_id, "epoch": 0, "rank": rank.rank,
        "world_size": places.world_size,
        "local_rank": places.place_of(rank.rank) % places.ranks_per_host, "pid": 1000 + rank.rank,
        "host": host, "pod": None, "process_uuid": process.hex,
        "boot_id": uuid.uuid5(uuid.NAMESPACE_DNS, options.run_id + host).hex, "started_ns": UNIX_NS,
        "layout": places.layout.to_dict(), "coords": places.coords(rank.rank).to_dict(),
        "device": {"name": "NVIDIA H100 80GB HBM3", "uuid": None, "dtype": "bfloat16",
                   "peak_flops_per_s": None},
        "model": {"name": "independent", "num_parameters": None, "flops_per_token": None,
                  "flops_convention": None},
        "paced": None, "git": None, "config": None, "seeds": None,
        "environment": {"NCCL_DEBUG": "WARN"} | dict(options.settings.get(rank.rank, {})),
        "versions": {"python": "3.11", "torch": "2.9", "cuda": "12.8", "nccl": "2.27",
                     "packages": {}},
        "hosts": None, "derived": None,
    }  # fmt: skip
    (path / "manifest.json").write_text(json.dumps(manifest))
    lines = [
        json.dumps(
            {"group_id": f"{group.group_id:016x}", "kind": group.kind, "name": group.name,
             "members": list(group.members)}
        )
        for group in running.groups[rank.rank].values()
    ]  # fmt: skip
    (path / "groups.jsonl").write_text("".join(line + "\n" for line in lines))
    (path / "events.jsonl").write_text("")
    end = options.ends.get(rank.rank)
    if end is not None and end.exception is not None:
        at_ns = UNIX_NS + int(end.at_ns * options.time_factor)
        failed = {"state": "failed", "at_ns": at_ns, "exception": dict(end.exception)}
        (path / "exit.json").write_text(json.dumps(failed))
    elif end is None and options.cut_ns is None:
        (path / "exit.json").write_text(json.dumps({"state": "ended", "at_ns": UNIX_NS + 10**12}))


assert KIND_CODES[SpanKind.WAIT] == 9
