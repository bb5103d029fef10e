"""Import of traces of `torch.profiler` (Kineto's JSON), one file or several of each rank.

What a profiler records is not what the tracer records: kernels of a device, or operators of a
processor, instead of forwards and waits. This module finds these in it:

* **Steps** are the annotations ``ProfilerStep#N``; work belongs to the step in which it was
  launched.
* **Compute**: each run of neighbouring kernels of one phase is a span, up to an idle time in which
  the host was late. Backward is what the
  autograd engine launched, the optimizer what was launched inside of an optimizer's step or after
  the last backward, and all else is forward.
* **Communication** is the kernels of NCCL, which name their process group. If they have no sequence
  number (torch 2.12 and newer write one), they are counted in each step.
* **Waits**: a kernel that had been launched before a communication ended, on a stream that was
  idle, and that began as the communication ended, waited for it.

Source: names and arguments of events as ``torch/csrc/profiler`` and Kineto's ``output_json`` write
them; the spool that comes of it is that of docs/spool-format.md.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import zlib
from bisect import bisect_right
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

from rankscope.tracer.span import NONE, SpanFlag, SpanKind
from rankscope.tracer.spool import open_regular_file
from rankscope.tracer.topology import AXES, GROUP_KINDS, AxisGroup, derive_layout

from ..errors import TraceError
from .spool_folder import Comm, Process, Record, make_group_id

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    Event = dict[str, Any]

MAX_BYTES = 1 << 30
"""Of one decompressed file; its events take some ten times as much memory."""

MAX_RATIO = 100
"""Decompressed over compressed size; of a trace it is 10 to 20."""

MAX_PARSED_RATIO = 20
"""Memory of the parsed values over size of the text; of a trace it is some 5."""

FREE_BYTES = 64 << 20
"""Memory that a small file may take whatever its ratio: lists of ranks alone have a high one."""

MAX_NS = 1 << 62
MAX_RANKS = 1 << 20
MAX_MEMBERS = 1 << 22
"""Of the groups of one file, and of the different groups of all: 64 groups of 65,536 ranks. A group
of all ranks, which lists none in the file, counts as many as any other."""

BEGIN_BYTES = 1 << 20
RANK = re.compile(rb'"distributedInfo"\s*:\s*\{[^{}\[\]]*"rank"\s*:\s*(\d{1,9})')

STEP = re.compile(r"ProfilerStep#(\d{1,9})")
BACKWARD_PREFIX = "autograd::engine::evaluate_function"
OPTIMIZER_PREFIX = "Optimizer.step#"
LOADER_PREFIX = "enumerate(DataLoader)"
KERNELS = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
LAUNCHES = frozenset({"cuda_runtime", "cuda_driver", "hip_runtime"})
COMM_KERNEL = re.compile(r"(?:nccl|rccl|mscclpp?)", re.IGNORECASE)
GLOO_PREFIX = "gloo:"
ELEMENT_BYTES = {
    "Double": 8, "Long": 8, "ComplexFloat": 8, "Float": 4, "Int": 4, "Half": 2, "BFloat16": 2,
    "Short": 2, "Byte": 1, "Char": 1, "Bool": 1, "Float8_e4m3fn": 1, "Float8_e5m2": 1,
}  # fmt: skip
"""Bytes of one element by the name of its type in ``c10``; of any other, sizes are unknown."""

DEVICE_SLACK_NS = 20_000
"""Longest time from the end of a communication to the begin of the kernel that waited for it: a
stream's wait for an event of another stream, 5 to 10 us, with a margin."""

HOST_SLACK_NS = 2_000_000
"""The same of a thread, which the operating system has to wake."""

LATE_NS = 1_000_000
"""Idle time before work that was launched after it began: the host was late. Shorter ones are the
usual pauses between the launches of a program that runs eagerly."""

AXIS_OF_DESCRIPTION = {
    "TENSOR_MODEL_PARALLEL_GROUP": "tp",
    "PIPELINE_MODEL_PARALLEL_GROUP": "pp",
    "CONTEXT_PARALLEL_GROUP": "cp",
    "EXPERT_MODEL_PARALLEL_GROUP": "ep",
    "DATA_PARALLEL_GROUP": "dp",
    "DATA_PARALLEL_GROUP_WITH_CP": "dp_cp",
}
"""Axis by the description that Megatron-LM gives to a group. PyTorch's meshes write ``mesh_`` and
the axis."""

COMPUTE_TRACK = "compute"
WHOLE_JOB = "default_pg"


class Group(NamedTuple):
    """A process group."""

    name: str
    axis: str
    members: tuple[int, ...]
    group_id: int

    @property
    def kind(self) -> SpanKind:
        """Kind of its collectives."""
        return SpanKind(GROUP_KINDS.get(self.axis, SpanKind.OTHER))


class Work(NamedTuple):
    """A kernel of the device, or an outermost operator of the processor."""

    start_ns: int
    end_ns: int
    launch_ns: int
    thread: str
    """That launched it."""

    event: Event


@dataclass(slots=True)
class RankTrace:
    """Content of the file of one rank."""

    path: Path
    rank: int
    world_size: int
    host: str
    device: str
    base_ns: int
    steps: list[tuple[int, int, int]] = field(default_factory=list)
    """(begin, end, number), Unix ns, ascending."""

    compute: list[Work] = field(default_factory=list)
    comm: list[Work] = field(default_factory=list)
    backward: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    """By thread."""

    optimizer: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    loader: list[tuple[int, int]] = field(default_factory=list)
    groups: dict[str, Group] = field(default_factory=dict)
    """By name."""

    is_of_device: bool = False


def read_traces(files: Sequence[Path], run_id: str) -> Iterator[Process]:
    """Yield the process of each rank, with its records, and with the groups of no process before.

    A profiler with a schedule writes a file for each window of steps; those of one rank are joined.

    Raises:
        TraceError: A file is no such trace, two have the same step of one rank, the files of
            a rank that is not named at their begin do not follow each other, a communication
            names no group, or the groups have more than `MAX_MEMBERS`.
    """
    seen: dict[tuple[int, int], Path] = {}
    known: set[int] = set()
    ranks: set[int] = set()
    num_members = 0
    process: Process | None = None
    for path in sorted(files, key=lambda path: (_find_rank(path), path)):
        trace = read_trace(path)
        for *_, step in trace.steps:
            if (trace.rank, step) in seen:
                other = seen[trace.rank, step]
                raise TraceError(path, f"has step {step} of rank {trace.rank}, as has {other}")
            seen[trace.rank, step] = path
        window = _to_process(trace, run_id)
        window.groups = {key: one for key, one in window.groups.items() if key not in known}
        known |= window.groups.keys()
        num_members += sum(len(members) for *_, members in window.groups.values())
        _check_members(path, num_members)
        if process is not None and process.rank == window.rank:
            process.records += window.records
            process.groups |= window.groups
            continue
        if window.rank in ranks:
            reason = f"is of rank {window.rank}, as are files before: name them one after another"
            raise TraceError(path, reason)
        ranks.add(window.rank)
        if process is not None:
            yield process
        process = window
    if process is not None:
        yield process


def _find_rank(path: Path) -> int:
    """Return the rank that the begin of a file names; `NONE` if it names none there."""
    try:
        with os.fdopen(open_regular_file(path), "rb") as file:
            begin = gzip.GzipFile(fileobj=file) if path.suffix == ".gz" else file
            rank = RANK.search(begin.read(BEGIN_BYTES))
    except (OSError, EOFError, zlib.error):
        return NONE
    return NONE if rank is None else int(rank[1])


def read_trace(path: Path) -> RankTrace:
    """Read the file of one rank.

    Raises:
        TraceError: It is no trace of this format, or has no step.
    """
    document = _load(path)
    about, events = document.get("distributedInfo"), document.get("traceEvents")
    if not isinstance(events, list):
        raise TraceError(path, "has no list of traceEvents: it is no trace of torch.profiler")
    if not isinstance(about, dict):
        reason = "has no distributedInfo: start the profiler after init_process_group"
        raise TraceError(path, reason)
    try:
        trace = _describe(path, document, about)
    except (TypeError, KeyError, ValueError, AttributeError, OverflowError) as error:
        reason = f"has another distributedInfo than torch.profiler writes ({error!r})"
        raise TraceError(path, reason) from None
    _read_events(trace, [each for each in events if _is_complete(each)])
    if not trace.steps:
        raise TraceError(path, "has no ProfilerStep: call step() of the profiler in each step")
    return trace


def _load(path: Path) -> dict[str, Any]:
    try:
        with os.fdopen(open_regular_file(path), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if path.suffix == ".gz":
                most = min(MAX_BYTES, MAX_RATIO * size)
                with gzip.GzipFile(fileobj=file) as unpacked:
                    text = unpacked.read(most + 1)
                size = len(text)
            else:
                most, text = MAX_BYTES, b"" if size > MAX_BYTES else file.read(size)
        if size > most:
            raise TraceError(path, f"has more than {most:,} bytes: profile fewer steps")
        if _parsed_bytes(text) > max(MAX_PARSED_RATIO * size, FREE_BYTES):
            reason = "has more values than a trace of its size: it is not from torch.profiler"
            raise TraceError(path, reason)
        document = json.loads(text)
    except (OSError, EOFError, zlib.error, ValueError, RecursionError) as error:
        raise TraceError(path, f"is no JSON file that can be read ({error})") from None
    if not isinstance(document, dict):
        raise TraceError(path, "is no trace of torch.profiler: it has no object")
    return document


def _parsed_bytes(text: bytes) -> int:
    """Return about how much memory the values of a JSON text take."""
    in_objects, in_lists, values = (text.count(each) for each in (b"{", b"[", b","))
    return 2 * len(text) + 250 * in_objects + 90 * in_lists + 40 * values


def _describe(path: Path, document: Event, about: Event) -> RankTrace:
    """Return the trace without its events.

    Raises:
        ValueError: A number is out of range. Other errors come from values of another type.
        TraceError: The groups have more than `MAX_MEMBERS`.
    """
    rank, world_size = int(about["rank"]), int(about["world_size"])
    base_ns = int(document.get("baseTimeNanoseconds", 0))
    if not (0 <= rank < world_size <= MAX_RANKS and 0 <= base_ns < MAX_NS):
        raise ValueError(f"rank {rank} of {world_size}, base time {base_ns}")
    devices = document.get("deviceProperties") or [{}]
    config = about.get("pg_config") or ()
    _check_members(path, sum(len(each.get("ranks") or range(world_size)) for each in config))
    groups, everyone = {}, tuple(range(world_size)) if config else ()
    for each in config:
        name, described = _text(each["pg_name"]), _text(each.get("pg_desc"))
        members = tuple(sorted(map(int, each["ranks"]))) if each.get("ranks") else everyone
        if not 0 <= members[0] <= members[-1] < world_size or len(set(members)) < len(members):
            raise ValueError(f"members of group {name[:64]!r} of {world_size} ranks")
        axis = AXIS_OF_DESCRIPTION.get(described, described.removeprefix("mesh_"))
        groups[name] = Group(name, axis, members, make_group_id(name, members))
    if not {group.axis for group in groups.values()} & AXES:
        # Without a named axis, the job is data parallel over the group of all ranks.
        groups = {
            name: group._replace(axis="dp") if group.axis == WHOLE_JOB else group
            for name, group in groups.items()
        }
    return RankTrace(
        path=path,
        rank=rank,
        world_size=world_size,
        host=_text(document.get("host_name")),
        device=_text(devices[0].get("name")),
        base_ns=base_ns,
        groups=groups,
    )


def _check_members(path: Path, num_members: int) -> None:
    if num_members > MAX_MEMBERS:
        reason = (
            f"has process groups of {num_members:,} members, more than {MAX_MEMBERS:,}: remove"
            " those that it does not use from the pg_config of its distributedInfo"
        )
        raise TraceError(path, reason)


def _text(value: Any) -> str:  # noqa: ANN401  # of any JSON type
    """Return a name or a number as text; "" of anything else."""
    return str(value) if isinstance(value, str | int | float) else ""


def _is_complete(event: Any) -> bool:  # noqa: ANN401  # of any JSON type
    """Return whether an event is an interval of time; absent arguments are added."""
    if not isinstance(event, dict) or event.get("ph") != "X":
        return False
    times = event.get("ts"), event.get("dur")
    if not all(isinstance(each, int | float) and 0 <= each < MAX_NS / 2000 for each in times):
        return False
    names = event.get("name"), event.setdefault("cat", "")
    is_sound = isinstance(event.setdefault("args", {}), dict)
    return is_sound and all(isinstance(name, str) for name in names)


def _read_events(trace: RankTrace, events: list[Event]) -> None:
    trace.is_of_device = any(each["cat"] in KERNELS for each in events)
    launches = {
        _text(each["args"]["correlation"]): each
        for each in events
        if each["cat"] in LAUNCHES and "correlation" in each["args"]
    }
    for event in events:
        if event["cat"] in KERNELS:
            launch = launches.get(_text(event["args"].get("correlation")), event)
            begin, end = _times(trace, event)
            work = Work(begin, end, _times(trace, launch)[0], _thread(launch), event)
            (trace.comm if COMM_KERNEL.match(event["name"]) else trace.compute).append(work)
        elif not event["cat"].startswith("gpu_"):  # a copy of an annotation on the device
            _read_annotation(trace, event)
    if not trace.is_of_device:
        trace.compute = _outermost_operators(trace, events)
    for regions in (trace.backward, trace.optimizer):
        for thread, own in regions.items():
            regions[thread] = _merge(own)
    trace.steps.sort()
    trace.loader.sort()
    for items in (trace.compute, trace.comm):
        items.sort(key=lambda each: each[:2])


def _read_annotation(trace: RankTrace, event: Event) -> None:
    begin, end = _times(trace, event)
    name, thread = event["name"], _thread(event)
    if step := STEP.fullmatch(name):
        trace.steps.append((begin, end, int(step[1])))
    elif name.startswith(BACKWARD_PREFIX):
        trace.backward.setdefault(thread, []).append((begin, end))
    elif name.startswith(OPTIMIZER_PREFIX):
        trace.optimizer.setdefault(thread, []).append((begin, end))
    elif name.startswith(LOADER_PREFIX):
        trace.loader.append((begin, end))
    elif name.startswith(GLOO_PREFIX) and not trace.is_of_device:
        trace.comm.append(Work(begin, end, begin, thread, event))


def _times(trace: RankTrace, event: Event) -> tuple[int, int]:
    """Return begin and end, Unix ns."""
    begin = trace.base_ns + round(event["ts"] * 1000)
    return begin, begin + round(event["dur"] * 1000)


def _thread(event: Event) -> str:
    return _text(event.get("tid"))


def _outermost_operators(trace: RankTrace, events: Iterable[Event]) -> list[Work]:
    """Return the operators of a processor that no other one of their thread contains."""
    outermost: list[Work] = []
    until: dict[str, int] = {}
    operators = [event for event in events if event["cat"] == "cpu_op"]
    for event in sorted(operators, key=lambda event: (event["ts"], -event["dur"])):
        begin, end = _times(trace, event)
        thread = _thread(event)
        if begin >= until.get(thread, 0):
            outermost.append(Work(begin, end, begin, thread, event))
            until[thread] = end
    return outermost


def _merge(intervals: list[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((begin, end))
    return merged


def _covers(intervals: Sequence[tuple[int, ...]], at_ns: int) -> int:
    """Return the index of the disjoint interval around a time, else `NONE`."""
    index = bisect_right(intervals, at_ns, key=lambda each: each[0]) - 1
    return index if index >= 0 and at_ns < intervals[index][1] else NONE


def _to_process(trace: RankTrace, run_id: str) -> Process:
    groups = trace.groups.values()
    axes = [
        AxisGroup(axis=group.axis, members=group.members)
        for group in groups
        if group.axis in AXES and trace.rank in group.members
    ]
    derived = derive_layout(axes, rank=trace.rank, world_size=trace.world_size)
    process = Process(
        run_id=run_id,
        rank=trace.rank,
        world_size=trace.world_size,
        host=trace.host,
        manifest={
            "layout": None if derived is None else derived.layout.to_dict(),
            "coords": None if derived is None else derived.coords.to_dict(),
            "device": {"name": trace.device or None},
            "config": {"imported": "torch.profiler"},
        },
        groups={group.group_id: (str(group.kind), group.axis, group.members) for group in groups},
    )
    phases = _find_phases(trace)
    process.records += _compute_records(trace, phases)
    process.records += _comm_records(trace)
    for begin, end, step in trace.steps:
        process.records.append(Record(None, "", COMPUTE_TRACK, step, begin, end))
    for begin, end in trace.loader:
        index = _covers(trace.steps, begin)
        if index != NONE:
            flags = SpanFlag.HOST_CLOCK
            step = trace.steps[index][2]
            process.records.append(
                Record(SpanKind.DATA, LOADER_PREFIX, "loader", step, begin, end, flags)
            )
    return process


def _find_phases(trace: RankTrace) -> list[tuple[int, SpanKind] | None]:
    """Return step and kind of each item of compute; None outside the steps."""
    phases: list[tuple[int, SpanKind] | None] = []
    last_backward: dict[int, int] = {}
    for work in trace.compute:
        index = _covers(trace.steps, work.launch_ns)
        if index == NONE:
            phases.append(None)
            continue
        step, kind = trace.steps[index][2], SpanKind.FORWARD
        if _covers(trace.optimizer.get(work.thread, ()), work.launch_ns) != NONE:
            kind = SpanKind.OPTIMIZER
        elif _covers(trace.backward.get(work.thread, ()), work.launch_ns) != NONE:
            kind = SpanKind.BACKWARD
            last_backward[step] = max(work.launch_ns, last_backward.get(step, 0))
        phases.append((step, kind))
    return [
        (phase[0], SpanKind.OPTIMIZER)
        if phase is not None
        and phase[1] is SpanKind.FORWARD
        and work.launch_ns > last_backward.get(phase[0], work.launch_ns)
        else phase
        for work, phase in zip(trace.compute, phases, strict=True)
    ]


def _compute_records(trace: RankTrace, phases: list[tuple[int, SpanKind] | None]) -> list[Record]:
    """Return a span of each run of compute of one phase, and the waits between the compute."""
    records: list[Record] = []
    flags = SpanFlag.HOST_CLOCK
    if trace.is_of_device:
        flags = SpanFlag.DEVICE_BEGIN_KNOWN | SpanFlag.DEVICE_END_KNOWN
    comm = sorted(_numbered_comm(trace), key=lambda each: each[0].end_ns)
    busy_ns, microbatch, before = 0, NONE, (NONE, SpanKind.OTHER)
    run: Record | None = None
    for work, phase in zip(trace.compute, phases, strict=True):
        if phase is None:
            continue
        step, kind = phase
        is_late = busy_ns < work.launch_ns and work.start_ns - busy_ns >= LATE_NS
        goes_on = phase == before and not is_late
        wait = _find_wait(trace, work, comm, busy_ns)
        if wait is not None:
            begin, end, about = wait
            depth = 1 if goes_on else 0
            records.append(
                Record(SpanKind.WAIT, "wait", COMPUTE_TRACK, step, begin, end, flags, depth=depth,
                       comm=about)
            )  # fmt: skip
        if run is None or not goes_on:
            if phase != before and kind is SpanKind.FORWARD:
                microbatch = microbatch + 1 if before[0] == step else 0
            run = Record(
                kind, str(kind), COMPUTE_TRACK, step, max(work.start_ns, busy_ns), work.end_ns,
                flags, launch_ns=work.launch_ns,
                microbatch=NONE if kind is SpanKind.OPTIMIZER else microbatch,
            )  # fmt: skip
            records.append(run)
        busy_ns, before = max(busy_ns, work.end_ns), phase
        run.end_ns = busy_ns
    return records


def _find_wait(
    trace: RankTrace, work: Work, comm: Sequence[tuple[Work, Comm]], busy_ns: int
) -> tuple[int, int, Comm] | None:
    """Return begin, end and communication of the wait that ended as work began, if any.

    Args:
        trace: Says whether the work is of a device, which gets it before it can begin. A thread of
            gloo may lose its core between the end of a communication and that of its record, so on
            a host one that ends a little later counts too, if the idle time was most of it.
        work: A kernel or operator.
        comm: All communication, by its end.
        busy_ns: End of the compute before; 0 at the first.
    """
    slack_ns, until_ns = DEVICE_SLACK_NS, work.start_ns
    if not trace.is_of_device:
        slack_ns = HOST_SLACK_NS
        until_ns += max(slack_ns, (work.start_ns - busy_ns) // 10)
    last = bisect_right(comm, until_ns, key=lambda each: each[0].end_ns) - 1
    if not busy_ns or last < 0:
        return None
    waited, about = comm[last]
    begin, end = max(busy_ns, waited.launch_ns), min(waited.end_ns, work.start_ns)
    had_launched = work.launch_ns < waited.end_ns or not trace.is_of_device
    is_most = 2 * (end - begin) >= waited.end_ns - waited.launch_ns
    if begin >= end or work.start_ns - end > slack_ns or not had_launched:
        return None
    return (begin, end, about) if waited.end_ns <= work.start_ns or is_most else None


def _comm_records(trace: RankTrace) -> Iterator[Record]:
    flags = SpanFlag.ASYNC | SpanFlag.HOST_CLOCK
    if trace.is_of_device:
        flags = SpanFlag.ASYNC | SpanFlag.DEVICE_BEGIN_KNOWN | SpanFlag.DEVICE_END_KNOWN
    for work, comm in _numbered_comm(trace):
        args = work.event["args"]
        step = trace.steps[_covers(trace.steps, work.launch_ns)][2]
        name = _text(args.get("Collective name")) or work.event["name"].removeprefix(GLOO_PREFIX)
        yield Record(
            comm.kind, name, f"comm {_text(args.get('stream', comm.axis))}", step, work.start_ns,
            work.end_ns, flags, launch_ns=work.launch_ns, comm=comm,
        )  # fmt: skip


def _numbered_comm(trace: RankTrace) -> Iterator[tuple[Work, Comm]]:
    """Yield each communication of a step with its place in its group."""
    counts: dict[tuple[object, ...], int] = {}
    for work in trace.comm:
        index = _covers(trace.steps, work.launch_ns)
        if index == NONE:
            continue
        args = work.event["args"]
        group = _group_of(trace, args)
        src, dst = args.get("Src Rank"), args.get("Dst Rank")
        ends, kind = None, group.kind
        if _is_count(src) and _is_count(dst) and max(src, dst) < len(group.members):
            ends = group.members[src], group.members[dst]
            kind = SpanKind.PP_SEND if ends[0] == trace.rank else SpanKind.PP_RECV
        step = trace.steps[index][2]
        key = (group.name, ends, step)
        counts[key] = counts.get(key, -1) + 1
        seq = args.get("Seq")
        yield (
            work,
            Comm(
                group_id=group.group_id,
                axis=group.axis,
                kind=kind,
                # The profiler begins in the same step on all ranks, not in the same call.
                seq=seq if ends is None and _is_count(seq) else (step << 24) + counts[key],
                src_rank=NONE if ends is None else ends[0],
                dst_rank=NONE if ends is None else ends[1],
                num_bytes=_num_bytes(args),
            ),
        )


def _group_of(trace: RankTrace, args: dict[str, Any]) -> Group:
    name = args.get("Process Group Name")
    if name is None and len(trace.groups) == 1:  # gloo's events name none
        return next(iter(trace.groups.values()))
    group = trace.groups.get(_text(name))
    if group is None:
        reason = (
            "has a communication that names no known process group: profile with torch 2.4 or"
            " newer and NCCL, or with a single group"
        )
        raise TraceError(trace.path, reason)
    return group


def _is_count(value: Any) -> TypeGuard[int]:  # noqa: ANN401  # of any JSON type
    return isinstance(value, int) and 0 <= value < MAX_NS


def _num_bytes(args: dict[str, Any]) -> int:
    """Return the bytes of the larger side; `NONE` if they are unknown."""
    sizes = [args.get(name) for name in ("In msg nelems", "Out msg nelems")]
    element = ELEMENT_BYTES.get(_text(args.get("dtype")))
    known = [size for size in sizes if _is_count(size)]
    num = max(known) * element if known and element else NONE
    return num if num < MAX_NS else NONE
