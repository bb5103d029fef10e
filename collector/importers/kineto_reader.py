"""One file of `torch.profiler` (Kineto's JSON): the work of a rank, its launches, and its steps.

Source: names and arguments of events as ``torch/csrc/profiler`` and Kineto's ``output_json`` write
them.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rankscope.tracer.span import NONE, SpanKind
from rankscope.tracer.topology import AXES, GROUP_KINDS

from ..errors import NotATraceError, TraceError
from .event_stream import EventStream
from .foreign_formats import describe_format
from .intervals import Intervals, find_around, unite
from .kineto_events import (
    LOADER_PREFIX,
    MAX_NS,
    OPTIMIZER_PREFIX,
    OWN_PREFIXES,
    Events,
    text_of,
)
from .spool_folder import make_group_id

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from .intervals import Times
    from .kineto_events import Annotation, Event, Interval, Work
    from .operator_costs import Cost

    Step = tuple[int, int, int]

MAX_RANKS = 1 << 20
MAX_MEMBERS = 1 << 22
"""Of the groups of one file, and of the different groups of all: 64 groups of 65,536 ranks. A group
of all ranks, which lists none in the file, counts as many as any other."""

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

STEP = re.compile(r"ProfilerStep#(\d{1,9})")
LAST_NUMBER = re.compile(r"(\d{1,9})\D*$")
WHOLE_TRACE = "all"
"""Value of ``--step-name`` by which the whole trace is one step."""

MAX_SHOWN = 8
"""Annotations that an error lists."""


class Group(NamedTuple):
    """A process group."""

    name: str
    axis: str
    members: tuple[int, ...]
    """Global ranks; by position in a dump of the flight recorder, ascending in a profile."""

    group_id: int

    @property
    def kind(self) -> SpanKind:
        """Kind of its collectives."""
        return SpanKind(GROUP_KINDS.get(self.axis, SpanKind.OTHER))


@dataclass(slots=True)
class RankTrace:
    """Content of the file of one rank."""

    path: Path
    rank: int
    world_size: int
    host: str
    device: str
    base_ns: int
    steps: list[Step] = field(default_factory=list)
    """(begin, end, number), Unix ns, ascending and disjoint."""

    are_steps_numbered: bool = True
    """Whether the trace has the numbers; else they count from 0."""

    compute: list[Work] = field(default_factory=list)
    comm: list[Work] = field(default_factory=list)
    backward: dict[str, list[Interval]] = field(default_factory=dict)
    """By thread."""

    optimizer: dict[str, list[Interval]] = field(default_factory=dict)
    loader: list[Interval] = field(default_factory=list)
    calls: dict[str, list[tuple[int, int, Event]]] = field(default_factory=dict)
    """Calls of communication by thread, sorted by begin; one may contain another."""

    synchronizations: dict[str, list[Interval]] = field(default_factory=dict)
    """Calls by thread in which a host waits for its device; disjoint, ascending."""

    ranges: dict[str, list[tuple[int, int, str]]] = field(default_factory=dict)
    """Other annotations than steps, among them those of the job's own, by thread."""

    costs: dict[str, list[tuple[int, int, Cost]]] = field(default_factory=dict)
    """Begin, end and work of operators by thread, sorted by begin, as far as the file has it."""

    groups: dict[str, Group] = field(default_factory=dict)
    """By name."""

    is_of_device: bool = False


@dataclass(frozen=True, slots=True)
class WorkTable:
    """Compute and communication of a trace as arrays of shape (works,), by begin."""

    works: list[Work]
    start: Times
    end: Times
    launch: Times
    is_comm: NDArray[np.bool_]
    rows_of: dict[str, Times]
    """Rows of each thread that launched work."""

    @classmethod
    def of(cls, trace: RankTrace) -> WorkTable:
        """Return the work of a trace, its communication after compute that begins with it."""
        works = [*trace.compute, *trace.comm]
        times = np.array([work[:3] for work in works], dtype=np.int64).reshape(-1, 3)
        order = np.lexsort((times[:, 1], times[:, 0]))
        ordered = [works[row] for row in order.tolist()]
        rows_of: dict[str, list[int]] = {}
        for row, work in enumerate(ordered):
            rows_of.setdefault(work.thread, []).append(row)
        start, end, launch = times[order].T
        return cls(
            works=ordered,
            start=start,
            end=end,
            launch=launch,
            is_comm=order >= len(trace.compute),
            rows_of={thread: np.array(rows) for thread, rows in rows_of.items()},
        )

    def find_around(
        self, rows_by_thread: Mapping[str, Sequence[tuple[Any, ...]]], at: Times
    ) -> Times:
        """Return which disjoint interval of its thread is around a time of each work, or `NONE`."""
        around = np.full(len(self.works), NONE)
        for thread, rows in self.rows_of.items():
            if own := rows_by_thread.get(thread):
                around[rows] = find_around(Intervals.of(own), at[rows])
        return around


def read_trace(
    path: Path,
    *,
    rank: int,
    world_size: int,
    step_name: str | None,
    show: Callable[[float], object],
) -> RankTrace:
    """Read the file of one rank.

    Args:
        rank: Its rank if its ``distributedInfo`` has none.
        world_size: The same of the number of ranks.
        step_name: As for `find_steps`.
        show: Called with the share of the file that was read, from time to time.

    Raises:
        NotATraceError: It is of another format.
        TraceError: It can't be read, lacks the device of its job, or its steps are not known.
    """
    stream = EventStream(path, show=show)
    events = Events(step_name=step_name)
    events.add(stream)
    if not (stream.has_events and events.is_of_profiler):
        reason = (
            "has no operator or kernel of torch.profiler. If it has forwards and backwards of a"
            " framework, import it with --format chrome"
        )
        if not stream.has_events:
            missing = "has no list of traceEvents: it is no trace of torch.profiler"
            reason = describe_format(path) or missing
        raise NotATraceError(path, reason)
    if events.is_merged:
        reason = "has the events of several ranks: import the files that it was merged from"
        raise TraceError(path, reason)
    try:
        trace = _describe(path, stream.members, rank=rank, world_size=world_size)
    except (TypeError, KeyError, ValueError, AttributeError, OverflowError) as error:
        reason = f"has another distributedInfo than torch.profiler writes ({error!r})"
        raise TraceError(path, reason) from None
    if events.misses_device(stream.members):
        raise TraceError(
            path,
            "has no kernels, though its job computes on a device: its operators only launch."
            " Profile with activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]; if you did,"
            " the profiler was not allowed to record the device, and its log says why",
        )
    annotations = _fill(trace, events)
    trace.steps, trace.are_steps_numbered = find_steps(
        path, annotations, [*trace.compute, *trace.comm], step_name=step_name
    )
    steps = {(begin, end) for begin, end, _ in trace.steps}
    for thread, ranges in trace.ranges.items():
        trace.ranges[thread] = [each for each in ranges if each[:2] not in steps]
    return trace


def _describe(path: Path, document: Event, *, rank: int, world_size: int) -> RankTrace:
    """Return the trace without its events.

    Raises:
        ValueError: A number is out of range. Other errors come from values of another type.
        TraceError: The groups have more than `MAX_MEMBERS`.
    """
    about = document.get("distributedInfo")
    about = {} if about is None else about
    rank = int(about.get("rank", rank))
    world_size = int(about.get("world_size", max(world_size, rank + 1)))
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
        groups[name] = Group(name, axis_of(described), members, make_group_id(name, members))
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


def axis_of(described: str) -> str:
    """Return the axis of a group by its description."""
    return AXIS_OF_DESCRIPTION.get(described, described.removeprefix("mesh_"))


def check_members(path: Path, num_members: int) -> None:
    """Raise if the groups of a job have more than `MAX_MEMBERS` in all.

    Raises:
        TraceError: They have.
    """
    if num_members > MAX_MEMBERS:
        reason = (
            f"has process groups of {num_members:,} members, more than {MAX_MEMBERS:,}: remove"
            " those that it does not use from the pg_config of its distributedInfo"
        )
        raise TraceError(path, reason)


def _fill(trace: RankTrace, events: Events) -> list[Annotation]:
    """Add the work and the annotations of a file to its trace, and return the annotations."""
    trace.is_of_device = events.is_of_device
    if trace.is_of_device:
        trace.compute = events.kernels(trace.base_ns)
    else:
        trace.compute = events.outermost_operators(trace.base_ns)
        trace.comm = events.host_comm(trace.base_ns)
    trace.calls = events.calls(trace.base_ns)
    trace.synchronizations = events.synchronizations(trace.base_ns)
    trace.backward = events.backward(trace.base_ns)
    trace.costs = events.costs(trace.base_ns)
    annotations = events.annotations(trace.base_ns)
    for begin, end, thread, name, is_own in annotations:
        if name.startswith(OPTIMIZER_PREFIX):
            trace.optimizer.setdefault(thread, []).append((begin, end))
        elif name.startswith(LOADER_PREFIX):
            trace.loader.append((begin, end))
        elif is_own:
            trace.ranges.setdefault(thread, []).append((begin, end, name))
    for thread, own in trace.optimizer.items():
        trace.optimizer[thread] = unite(Intervals.of(own)).to_rows()
    return annotations


def find_steps(
    path: Path, annotations: Sequence[Annotation], works: Sequence[Work], *, step_name: str | None
) -> tuple[list[Step], bool]:
    """Find the steps of a file.

    Args:
        works: What the trace computes and communicates.
        step_name: Name of the annotation of a step, or the begin of names that go on with a number;
            `WHOLE_TRACE`; None for ``ProfilerStep#N``, or the whole trace if no annotation repeats.

    Returns:
        Begin, end and number of each step, ascending and disjoint; whether the trace numbers them.

    Raises:
        TraceError: No annotation is known to be a step.
    """
    if step_name == WHOLE_TRACE:
        return _whole_trace(works), False
    if step_name is not None:
        chosen = [each for each in annotations if each.name == step_name] or [
            each for each in annotations if each.name.startswith(step_name)
        ]
    else:
        chosen = [each for each in annotations if STEP.fullmatch(each.name)]
    if chosen:
        return _number_steps(chosen)
    names = _repeated_names(annotations)
    if step_name is None and not names:
        return _whole_trace(works), False
    missing = "ProfilerStep" if step_name is None else f"annotation that begins with {step_name!r}"
    reason = (
        f"has no {missing}: give --step-name with the annotation of a step, or"
        f" --step-name {WHOLE_TRACE} for one step over the whole trace"
    )
    if names:
        reason += f". Annotations that repeat: {', '.join(names)}"
    raise TraceError(path, reason)


def _number_steps(annotations: Iterable[Annotation]) -> tuple[list[Step], bool]:
    """Return the outermost annotations as steps, numbered as their names are if those ascend."""
    outermost: list[Annotation] = []
    for each in sorted(annotations, key=lambda each: (each.start_ns, -each.end_ns)):
        if not outermost or each.start_ns >= outermost[-1].end_ns:
            outermost.append(each)
    matches = [LAST_NUMBER.search(each.name) for each in outermost]
    numbers = [int(match[1]) for match in matches if match]
    is_numbered = len(numbers) == len(outermost) and all(
        before < after for before, after in pairwise(numbers)
    )
    if not is_numbered or (len(numbers) == 1 and not STEP.fullmatch(outermost[0].name)):
        is_numbered, numbers = False, list(range(len(outermost)))
    return [
        (each.start_ns, each.end_ns, number)
        for each, number in zip(outermost, numbers, strict=True)
    ], is_numbered


def _repeated_names(annotations: Iterable[Annotation]) -> list[str]:
    """Return the names that repeat, or their begins up to a number, with their counts.

    Those that take the most time are first, as a step contains all else.
    """
    own = [each for each in annotations if each.is_own and not each.name.startswith(OWN_PREFIXES)]
    counts = Counter(each.name for each in own)
    names = {name: name if num > 1 else re.split(r"\d", name)[0] for name, num in counts.items()}
    lengths: Counter[str] = Counter()
    repeats: Counter[str] = Counter()
    for each in own:
        lengths[names[each.name]] += each.end_ns - each.start_ns
        repeats[names[each.name]] += 1
    longest = [name for name, _ in lengths.most_common() if name and repeats[name] > 1]
    texts = [f"{name} ({repeats[name]:,} times)" for name in longest[:MAX_SHOWN]]
    more = len(longest) - len(texts)
    return [*texts, f"{more} more"] if more else texts


def _whole_trace(works: Sequence[Work]) -> list[Step]:
    if not works:
        return []
    begin = min(min(each.launch_ns, each.start_ns) for each in works)
    return [(begin, max(each.end_ns for each in works) + 1, 0)]


def index_around(intervals: Sequence[tuple[Any, ...]], at_ns: int) -> int:
    """Return the index of the disjoint interval around a time, else `NONE`."""
    index = bisect_right(intervals, at_ns, key=lambda each: each[0]) - 1
    return index if index >= 0 and at_ns < intervals[index][1] else NONE
