"""Import of traces of `torch.profiler` (Kineto's JSON), one file or several of each rank.

What a profiler records is not what the tracer records: kernels of a device, or operators of a
processor, instead of forwards and waits. `kineto_reader` reads a file, `kineto_comm` finds the
communication in it, `kineto_compute` phases, idle time and waits, and this module makes the
process of a rank of them:

* **Steps** are the annotations that `kineto_reader` finds; work belongs to the step in which it was
  launched.
* **Input** is what the loader of PyTorch annotates.
* **Host spans** are the other annotations in which nothing was launched: what a host did instead.

The spool that comes of it is that of docs/spool-format.md.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from functools import partial
from itertools import chain, zip_longest
from typing import TYPE_CHECKING

from rankscope.tracer.span import NONE, SpanFlag, SpanKind
from rankscope.tracer.topology import AXES, AxisGroup, derive_layout

from ..errors import TraceError
from .device_time import DEVICE_TIME, describe_step, split_steps
from .gloo_groups import misses_groups, name_groups
from .kernel_sums import sum_kernels
from .kineto_comm import CommKernels, find_communication, split_communication
from .kineto_compute import COMPUTE_TRACK, compute_records, find_phases
from .kineto_events import LOADER_PREFIX
from .kineto_files import JobFiles, find_job
from .kineto_reader import WorkTable, check_members, index_around, read_trace
from .spool_folder import ON_DEVICE, Process, Record, make_group_id

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence
    from pathlib import Path

    from .kineto_comm import Call
    from .kineto_reader import RankTrace


def read_traces(
    files: Sequence[Path] | JobFiles,
    run_id: str,
    *,
    kernels: CommKernels | None = None,
    step_name: str | None = None,
    show: Callable[[str], object] = lambda _: None,
) -> Iterator[Process]:
    """Yield the process of each rank, with its records, and with the groups of no process before.

    A profiler with a schedule writes a file for each window of steps; those of one rank are joined.

    Args:
        kernels: Which kernels communicate; None: those of `LIBRARIES`.
        step_name: As for `kineto_reader.find_steps`.
        show: Called with the progress in words.

    Raises:
        TraceError: A file is no such trace, two have the same step of one rank, or the groups have
            more than `MAX_MEMBERS`.
    """
    kernels = kernels or CommKernels()
    job = files if isinstance(files, JobFiles) else find_job(files)
    windows: dict[int, Windows] = defaultdict(Windows)
    known: set[int] = set()
    num_members = 0
    process: Process | None = None
    for trace in _read_each(job, step_name, show):
        windows[trace.rank].add(trace)
        window = _to_process(trace, run_id, kernels)
        _cut_pairs(window, job.ranks)
        window.groups = {key: one for key, one in window.groups.items() if key not in known}
        known |= window.groups.keys()
        num_members += sum(len(members) for *_, members in window.groups.values())
        check_members(trace.path, num_members)
        if process is not None and process.rank == window.rank:
            process.records += window.records
            process.kernels += window.kernels
            process.events += window.events
            process.groups |= window.groups
            process.notes += [note for note in window.notes if note not in process.notes]
            continue
        if process is not None:
            yield process
        process = window
    if process is not None:
        yield process


def _read_each(
    job: JobFiles, step_name: str | None, show: Callable[[str], object]
) -> Iterator[RankTrace]:
    """Yield the traces of a job; those that need the others to find their groups come last."""
    held: dict[int, list[RankTrace]] = defaultdict(list)
    for number, file in enumerate(job.traces, 1):
        what = f"reading {file.path.name}, {number} of {len(job.traces)}"
        trace = read_trace(
            file.path,
            rank=file.rank,
            world_size=job.ranks[-1] + 1,
            step_name=step_name,
            show=partial(_show_share, show, what),
        )
        if trace.rank != file.rank:
            reason = f"is of rank {trace.rank} by its distributedInfo, not of rank {file.rank}"
            raise TraceError(file.path, reason)
        if misses_groups(trace):
            held[trace.rank].append(trace)
        else:
            yield trace
    for window in zip_longest(*held.values()):
        name_groups([trace for trace in window if trace is not None])
    yield from chain.from_iterable(held.values())


def _cut_pairs(process: Process, ranks: Collection[int]) -> None:
    """Give transfers to or from ranks without a file a group of this rank alone.

    Who waited for whom in them is unknown, so they are no measure of a link.
    """
    alone = (process.rank,)
    for record in process.records:
        comm = record.comm
        if comm is None or comm.src_rank == NONE or {comm.src_rank, comm.dst_rank} <= set(ranks):
            continue
        group_id = make_group_id(f"{comm.src_rank} to {comm.dst_rank}", alone)
        process.groups[group_id] = (str(SpanKind.OTHER), comm.axis, alone)
        record.comm = comm._replace(
            group_id=group_id, kind=SpanKind.OTHER, src_rank=NONE, dst_rank=NONE
        )
        if record.kind is not SpanKind.WAIT:
            record.kind = SpanKind.OTHER
            record.flags |= SpanFlag.END_BOUND


def _show_share(show: Callable[[str], object], what: str, share: float) -> None:
    show(f"{what}: {share:.0%}")


class Windows:
    """The windows of steps of one rank."""

    def __init__(self) -> None:
        self._path_of: dict[int, Path] = {}
        self._end_ns = 0

    def add(self, trace: RankTrace) -> None:
        """Add a window; steps that its trace does not number go on from the window before.

        Raises:
            TraceError: It has a step, or is of a time, of another window.
        """
        if not trace.are_steps_numbered:
            first = 1 + max(self._path_of, default=-1)
            trace.steps = [(begin, end, first + step) for begin, end, step in trace.steps]
            if trace.steps[0][0] < self._end_ns:
                reason = f"is of the same time as another file of rank {trace.rank}: leave one out"
                raise TraceError(trace.path, reason)
            self._end_ns = trace.steps[-1][1]
        for *_, step in trace.steps:
            if step in self._path_of:
                reason = f"has step {step} of rank {trace.rank}, as has {self._path_of[step]}"
                raise TraceError(trace.path, reason)
            self._path_of[step] = trace.path


def _to_process(trace: RankTrace, run_id: str, kernels: CommKernels) -> Process:
    split_communication(trace, kernels)
    comm = find_communication(trace, kernels)
    groups = comm.groups.values()
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
        notes=comm.notes,
    )
    table = WorkTable.of(trace)
    phases = find_phases(trace, table)
    calls = [call for call in comm.calls if call.step != NONE]
    process.records += compute_records(trace, table, phases, calls)
    process.records += _comm_records(trace, calls)
    process.records += [
        Record(None, "", COMPUTE_TRACK, step, begin, end) for begin, end, step in trace.steps
    ]
    process.records += _host_records(trace)
    process.kernels += sum_kernels(trace, table, phases)
    kinds = [(call.work.start_ns, call.work.end_ns, str(call.comm.kind)) for call in comm.calls]
    process.events += [
        {"at_ns": end_ns, "kind": DEVICE_TIME, "text": describe_step(data), "data": data}
        for end_ns, data in split_steps(trace, table, kinds)
    ]
    return process


def _comm_records(trace: RankTrace, calls: Sequence[Call]) -> Iterator[Record]:
    for call in calls:
        flags = SpanFlag.ASYNC | SpanFlag.HOST_CLOCK
        if trace.is_of_device:
            flags = SpanFlag.ASYNC | ON_DEVICE
        if not call.is_known:  # the wait for others is in it, so it is no measure of a link
            flags |= SpanFlag.END_BOUND
        yield Record(
            call.comm.kind, call.name, call.track, call.step, call.work.start_ns, call.work.end_ns,
            flags, launch_ns=call.work.launch_ns, comm=call.comm,
        )  # fmt: skip


def _host_records(trace: RankTrace) -> Iterator[Record]:
    """Yield what the loader and the job itself annotated; of the job, what is no part of a step.

    An annotation in which work was launched names a part of the program, not a pause of the host.
    """
    spans = [(begin, end, SpanKind.DATA, LOADER_PREFIX, "loader") for begin, end in trace.loader]
    launched = sorted(work.launch_ns for work in (*trace.compute, *trace.comm))
    for thread, ranges in trace.ranges.items():
        for begin, end, name in ranges:
            first = bisect_left(launched, begin)
            if first == len(launched) or launched[first] >= end:
                spans.append((begin, end, SpanKind.HOST, name, f"thread {thread}"))
    for begin, end, kind, name, track in spans:
        index = index_around(trace.steps, begin)
        if index != NONE:
            step = trace.steps[index][2]
            yield Record(kind, name, track, step, begin, end, SpanFlag.HOST_CLOCK)
