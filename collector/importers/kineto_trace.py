"""One file of `torch.profiler` (Kineto's JSON): the work of a rank, and what launched it.

Source: names and arguments of events as ``torch/csrc/profiler`` and Kineto's ``output_json`` write
them.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import zlib
from bisect import bisect_right
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from rankscope.tracer.span import NONE, SpanKind
from rankscope.tracer.spool import open_regular_file
from rankscope.tracer.topology import AXES, GROUP_KINDS

from ..errors import TraceError
from .spool_folder import make_group_id

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
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


def find_rank(path: Path) -> int:
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
    check_members(path, sum(len(each.get("ranks") or range(world_size)) for each in config))
    groups, everyone = {}, tuple(range(world_size)) if config else ()
    for each in config:
        name, described = text_of(each["pg_name"]), text_of(each.get("pg_desc"))
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
        host=text_of(document.get("host_name")),
        device=text_of(devices[0].get("name")),
        base_ns=base_ns,
        groups=groups,
    )


def check_members(path: Path, num_members: int) -> None:
    if num_members > MAX_MEMBERS:
        reason = (
            f"has process groups of {num_members:,} members, more than {MAX_MEMBERS:,}: remove"
            " those that it does not use from the pg_config of its distributedInfo"
        )
        raise TraceError(path, reason)


def text_of(value: Any) -> str:  # noqa: ANN401  # of any JSON type
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
        text_of(each["args"]["correlation"]): each
        for each in events
        if each["cat"] in LAUNCHES and "correlation" in each["args"]
    }
    for event in events:
        if event["cat"] in KERNELS:
            launch = launches.get(text_of(event["args"].get("correlation")), event)
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
    return text_of(event.get("tid"))


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


def index_around(intervals: Sequence[tuple[int, ...]], at_ns: int) -> int:
    """Return the index of the disjoint interval around a time, else `NONE`."""
    index = bisect_right(intervals, at_ns, key=lambda each: each[0]) - 1
    return index if index >= 0 and at_ns < intervals[index][1] else NONE
