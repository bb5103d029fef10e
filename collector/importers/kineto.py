"""Import of traces of `torch.profiler` (Kineto's JSON), one file or several of each rank.

What a profiler records is not what the tracer records: kernels of a device, or operators of a
processor, instead of forwards and waits. `kineto_trace` reads a file, `kineto_comm` finds the
communication in it, `kineto_compute` phases, idle time and waits, and this module makes the
process of a rank of them:

* **Steps** are the annotations ``ProfilerStep#N``; work belongs to the step in which it was
  launched.
* **Input** is what the loader of PyTorch annotates.
* **Host spans** are the other annotations in which nothing was launched: what a host did instead.

The spool that comes of it is that of docs/spool-format.md.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

from rankscope.tracer.span import NONE, SpanFlag, SpanKind
from rankscope.tracer.topology import AXES, AxisGroup, derive_layout

from ..errors import TraceError
from .kineto_comm import CommKernels, find_communication, split_communication
from .kineto_compute import COMPUTE_TRACK, compute_records
from .kineto_trace import LOADER_PREFIX, check_members, find_rank, index_around, read_trace
from .spool_folder import Process, Record

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from .kineto_comm import Call
    from .kineto_trace import RankTrace


def read_traces(
    files: Sequence[Path], run_id: str, *, kernels: CommKernels | None = None
) -> Iterator[Process]:
    """Yield the process of each rank, with its records, and with the groups of no process before.

    A profiler with a schedule writes a file for each window of steps; those of one rank are joined.

    Args:
        files: The traces.
        run_id: Name of the run.
        kernels: Which kernels communicate; None: those of `LIBRARIES`.

    Raises:
        TraceError: A file is no such trace, two have the same step of one rank, the files of
            a rank that is not named at their begin do not follow each other, or the groups have
            more than `MAX_MEMBERS`.
    """
    kernels = kernels or CommKernels()
    seen: dict[tuple[int, int], Path] = {}
    known: set[int] = set()
    ranks: set[int] = set()
    num_members = 0
    process: Process | None = None
    for path in sorted(files, key=lambda path: (find_rank(path), path)):
        trace = read_trace(path)
        for *_, step in trace.steps:
            if (trace.rank, step) in seen:
                other = seen[trace.rank, step]
                raise TraceError(path, f"has step {step} of rank {trace.rank}, as has {other}")
            seen[trace.rank, step] = path
        window = _to_process(trace, run_id, kernels)
        window.groups = {key: one for key, one in window.groups.items() if key not in known}
        known |= window.groups.keys()
        num_members += sum(len(members) for *_, members in window.groups.values())
        check_members(path, num_members)
        if process is not None and process.rank == window.rank:
            process.records += window.records
            process.groups |= window.groups
            process.notes += [note for note in window.notes if note not in process.notes]
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
    process.records += compute_records(trace, comm.calls)
    process.records += _comm_records(trace, comm.calls)
    process.records += [
        Record(None, "", COMPUTE_TRACK, step, begin, end) for begin, end, step in trace.steps
    ]
    process.records += _host_records(trace)
    return process


def _comm_records(trace: RankTrace, calls: Sequence[Call]) -> Iterator[Record]:
    for call in calls:
        flags = SpanFlag.ASYNC | SpanFlag.HOST_CLOCK
        if trace.is_of_device:
            flags = SpanFlag.ASYNC | SpanFlag.DEVICE_BEGIN_KNOWN | SpanFlag.DEVICE_END_KNOWN
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
