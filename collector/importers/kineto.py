"""Import of traces of `torch.profiler` (Kineto's JSON), one file or several of each rank.

What a profiler records is not what the tracer records: kernels of a device, or operators of a
processor, instead of forwards and waits. `kineto_trace` reads a file, and this module finds these
in it:

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

The spool that comes of it is that of docs/spool-format.md.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, Any, TypeGuard

from rankscope.tracer.span import NONE, SpanFlag, SpanKind
from rankscope.tracer.topology import AXES, AxisGroup, derive_layout

from ..errors import TraceError
from .kineto_trace import (
    GLOO_PREFIX,
    LOADER_PREFIX,
    MAX_NS,
    check_members,
    find_rank,
    index_around,
    read_trace,
    text_of,
)
from .spool_folder import Comm, Process, Record

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from .kineto_trace import Group, RankTrace, Work

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

COMPUTE_TRACK = "compute"


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
    for path in sorted(files, key=lambda path: (find_rank(path), path)):
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
        check_members(path, num_members)
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
        index = index_around(trace.steps, begin)
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
        index = index_around(trace.steps, work.launch_ns)
        if index == NONE:
            phases.append(None)
            continue
        step, kind = trace.steps[index][2], SpanKind.FORWARD
        if index_around(trace.optimizer.get(work.thread, ()), work.launch_ns) != NONE:
            kind = SpanKind.OPTIMIZER
        elif index_around(trace.backward.get(work.thread, ()), work.launch_ns) != NONE:
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
        step = trace.steps[index_around(trace.steps, work.launch_ns)][2]
        name = text_of(args.get("Collective name")) or work.event["name"].removeprefix(GLOO_PREFIX)
        yield Record(
            comm.kind, name, f"comm {text_of(args.get('stream', comm.axis))}", step, work.start_ns,
            work.end_ns, flags, launch_ns=work.launch_ns, comm=comm,
        )  # fmt: skip


def _numbered_comm(trace: RankTrace) -> Iterator[tuple[Work, Comm]]:
    """Yield each communication of a step with its place in its group."""
    counts: dict[tuple[object, ...], int] = {}
    for work in trace.comm:
        index = index_around(trace.steps, work.launch_ns)
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
    group = trace.groups.get(text_of(name))
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
    element = ELEMENT_BYTES.get(text_of(args.get("dtype")))
    known = [size for size in sizes if _is_count(size)]
    num = max(known) * element if known and element else NONE
    return num if num < MAX_NS else NONE
