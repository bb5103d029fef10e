"""Logs of NCCL's Inspector (its profiler plugin): when each rank was in which collective.

Each process writes a file of JSON lines, one for each collective that has ended. With
``NCCL_INSPECTOR_DUMP_VERBOSE=1`` a line has the times at which its kernel began and ended on each
channel; without, only how long it took, from which no wait of one rank for another follows, so such
files are refused. There are neither steps nor compute: all is one step, and what is between two
collectives is a gap. What a log does not have is not guessed:

* **Global ranks** are those of the communicator that has all processes, as PyTorch's default group.
* **Numbers** of collectives count per communicator and function, so each such pair is a group.
* **Sends and receives** have numbers that differ between the two sides, and are left out.
* **Clocks** are those of the hosts; the analysis aligns them by the ends of collectives.

Source: NCCL's ``plugins/profiler/inspector`` (``inspector_json.cc``, ``inspector.cc``), formats 4.0
to 4.2, as of 2.30.7.
"""

from __future__ import annotations

import json
import zlib
from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple

from rankscope.tracer.span import NS_PER_US, SpanKind

from ..errors import TraceError
from .event_stream import open_unpacked
from .flight_recorder_dump import MAX_SEQ
from .kineto_events import MAX_NS
from .kineto_reader import MAX_RANKS
from .nccl_ras import NAMES, read_number
from .spool_folder import ON_DEVICE, Comm, Process, Record, make_group_id

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

MAX_US = MAX_NS // NS_PER_US
MAX_LINE_BYTES = 1 << 20
MAX_CALLS = 20_000_000
STEP = 0

GATHERS = frozenset({"AllGather", "ReduceScatter"})
"""Functions whose size counts what one rank gives or gets, and not what it moves."""


class _Process(NamedTuple):
    host: str
    pid: int


class _Call(NamedTuple):
    """A collective of one rank; times in Unix ns of its host."""

    communicator: str
    rank: int
    """Of the communicator."""

    function: str
    seq: int
    num_bytes: int
    start_ns: int
    end_ns: int


def read_logs(
    files: Sequence[Path], run_id: str, *, show: Callable[[str], object] = lambda _: None
) -> Iterator[Process]:
    """Yield the process of each rank of a job.

    Args:
        files: The logs of all its processes.
        show: Takes a line about the progress.

    Raises:
        TraceError: A file is no log of the Inspector, or has no times, or no communicator has all
            processes.
    """
    calls: dict[_Process, list[_Call]] = defaultdict(list)
    sizes: dict[str, int] = {}
    num_p2p = 0
    for number, path in enumerate(files):
        show(f"read {number:,} of {len(files):,} logs")
        for process, size, call in _read_log(path):
            if call is None:
                num_p2p += 1
                continue
            calls[process].append(call)
            sizes[call.communicator] = size
    if not calls:
        raise TraceError(files[0], "has no collective")
    places = {
        (call.communicator, process): call.rank for process, own in calls.items() for call in own
    }
    members: dict[str, dict[int, _Process]] = defaultdict(dict)
    for (communicator, process), rank in places.items():
        members[communicator][rank] = process
    world = next(
        (one for one, size in sizes.items() if size == len(calls) == len(members[one])), None
    )
    if world is None:
        raise TraceError(
            files[0],
            f"has, with the others, no communicator of all {len(calls):,} processes, so their ranks"
            " are unknown: give the logs of all processes, of a job with one GPU each that calls a"
            " collective of the default group",
        )
    ranks = {process: rank for rank, process in members[world].items()}
    notes = [f"{num_p2p:,} sends and receives are left out: their sides can't be matched"]
    for process, rank in sorted(ranks.items(), key=lambda item: item[1]):
        yield _to_process(
            run_id, rank, process, calls[process],
            groups={
                one: tuple(sorted(ranks[each] for each in of.values()))
                for one, of in members.items() if len(of) == sizes[one]
            },
            world_size=len(ranks), notes=notes if num_p2p else [],
        )  # fmt: skip


def _to_process(  # noqa: PLR0913
    run_id: str,
    rank: int,
    process: _Process,
    calls: list[_Call],
    *,
    groups: dict[str, tuple[int, ...]],
    world_size: int,
    notes: list[str],
) -> Process:
    known: dict[int, tuple[str, str, tuple[int, ...]]] = {}
    records = []
    for call in calls:
        if call.communicator not in groups:
            continue
        name = f"{call.communicator} {NAMES[call.function]}"
        group_id = make_group_id(f"nccl-inspector {name}", groups[call.communicator])
        known[group_id] = str(SpanKind.OTHER), name, groups[call.communicator]
        records.append(
            Record(
                SpanKind.OTHER, NAMES[call.function], call.communicator, STEP, call.start_ns,
                call.end_ns, flags=int(ON_DEVICE), launch_ns=call.start_ns,
                comm=Comm(group_id, "", SpanKind.OTHER, call.seq, num_bytes=call.num_bytes),
            )
        )  # fmt: skip
    begin_ns = min(record.start_ns for record in records)
    end_ns = max(record.end_ns for record in records)
    records.append(Record(None, "", "", STEP, begin_ns, end_ns))
    return Process(
        run_id=run_id, rank=rank, world_size=world_size, host=process.host,
        manifest={"layout": None, "coords": None, "config": {"imported": "nccl inspector"}},
        groups=known, records=records, notes=notes,
    )  # fmt: skip


def _read_log(path: Path) -> Iterator[tuple[_Process, int, _Call | None]]:
    """Yield the collectives of a file, None for a p2p operation, with process and group size."""
    try:
        file, packed, _ = open_unpacked(path)
        with packed, file:
            for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES), b"")):
                if number >= MAX_CALLS:
                    raise TraceError(path, f"has more than {MAX_CALLS:,} lines: give fewer")
                found = _read_line(path, json.loads(line)) if line.strip() else None
                if found is not None:
                    yield found
    except (
        OSError, EOFError, zlib.error, RecursionError, AttributeError, KeyError, TypeError,
        ValueError,
    ) as error:  # fmt: skip
        reason = f"is no log of NCCL's Inspector ({type(error).__name__}: {error})"
        raise TraceError(path, reason) from None


def _read_line(path: Path, line: dict[str, Any]) -> tuple[_Process, int, _Call | None] | None:
    header, metadata = line["header"], line["metadata"]
    process = _Process(str(metadata["hostname"]), read_number(metadata["pid"], MAX_SEQ))
    size = read_number(header["n_ranks"], MAX_RANKS)
    if "p2p_perf" in line:
        return process, size, None
    if "coll_perf" not in line:  # counts of what the Inspector itself dropped
        return None
    call = line["coll_perf"]
    if call["coll"] not in NAMES:
        return None
    if "event_trace_ts" not in call:
        raise TraceError(
            path, "has no times of kernels: run the job with NCCL_INSPECTOR_DUMP_VERBOSE=1"
        )
    channels = call["event_trace_ts"]["kernel_events"]
    times = [
        (read_number(one["kernel_start_ts"], MAX_US), read_number(one["kernel_stop_ts"], MAX_US))
        for one in channels
    ]
    begin_us = min((begin for begin, _ in times), default=0)
    end_us = max((end for _, end in times), default=0)
    if not 0 < begin_us <= end_us:
        return None  # the Inspector did not see all of its kernel
    num_bytes = read_number(call["coll_msg_size_bytes"], MAX_SEQ)
    return (
        process,
        size,
        _Call(
            communicator=str(header["id"]),
            rank=read_number(header["rank"], size),
            function=call["coll"],
            seq=read_number(call["coll_sn"], MAX_SEQ),
            num_bytes=num_bytes * (size if call["coll"] in GATHERS else 1),
            start_ns=begin_us * NS_PER_US,
            end_ns=end_us * NS_PER_US,
        ),
    )
