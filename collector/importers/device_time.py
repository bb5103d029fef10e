"""Parts of the time of a device in each step: compute, exposed communication, copies, idle.

As HTA (Holistic Trace Analysis) defines them: **compute** is the union of the kernels that are
neither communication nor copies; **exposed** is communication outside of compute, by kind;
**copies** are what is in neither; the rest of the step is **idle**. Why it is idle is read from the
host:

* **input**: the host was in a data loader;
* **synchronisation**: the host had been blocked until the device was done, as in ``item`` or
  ``cudaStreamSynchronize``, and it launched the next kernel later by as much;
* **launch**: the host had not launched the next kernel, for no such reason;
* **unknown**: the next kernel had been launched and did not begin.

A host runs ahead of its device. So a step begins on the device when the work of the steps before
is done, if that is later than its annotation, and ends when its own is. The parts sum to its time.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, Any

from rankscope.tracer.span import NS_PER_MS

from .intervals import subtract, unite
from .kernel_sums import COPIES
from .kineto_trace import index_around

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from .kineto_events import Work
    from .kineto_trace import RankTrace

    Interval = tuple[int, int]

DEVICE_TIME = "device-time"
"""Kind of the event that has the parts of one step."""

INPUT, SYNCHRONISATION, LAUNCH, UNKNOWN = "input", "synchronisation", "launch", "unknown"
REASONS = (LAUNCH, INPUT, SYNCHRONISATION, UNKNOWN)

LATENCY_NS = 20_000
"""Longest usual time from a launch to the begin of its kernel on an idle device, 5 to 10 us, with a
margin. Until then the device is idle because of the launch."""


def split_steps(
    trace: RankTrace, comm: Sequence[tuple[int, int, str]]
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield end and data of each step's event; its parts sum to ``step_ns``.

    Args:
        trace: The trace.
        comm: Begin, end and kind of each communication.
    """
    steps = _device_steps(trace)
    by_kind: dict[str, list[Interval]] = {}
    for begin, end, kind in comm:
        by_kind.setdefault(kind, []).append((begin, end))
    is_copy = [work.event["cat"] in COPIES for work in trace.compute]
    busy: list[Interval] = []
    parts: dict[tuple[str, str], list[Interval]] = {}
    for part, works in (
        (("compute", ""), _times(trace.compute, is_copy, wanted=False)),
        *((("exposed", kind), own) for kind, own in sorted(by_kind.items())),
        (("copy", ""), _times(trace.compute, is_copy, wanted=True)),
    ):
        parts[part] = subtract(unite(works), busy)
        busy = unite([*busy, *parts[part]])
    idle = subtract([(steps[0][0], steps[-1][1])], busy)
    for reason, intervals in _explain(trace, idle).items():
        parts["idle", reason] = intervals
    for begin, end, step in steps:
        length = {part: _overlap(own, begin, end) for part, own in parts.items()}
        yield (
            end,
            {
                "step": step,
                "step_ns": end - begin,
                "compute_ns": length["compute", ""],
                "exposed_ns": {
                    name: ns for (part, name), ns in length.items() if part == "exposed"
                },
                "copy_ns": length["copy", ""],
                "idle_ns": {name: ns for (part, name), ns in length.items() if part == "idle"},
            },
        )


def describe_step(data: dict[str, Any]) -> str:
    """Return the parts of a step in one line."""
    exposed, idle = sum(data["exposed_ns"].values()), sum(data["idle_ns"].values())
    parts = {
        "compute": data["compute_ns"],
        "exposed communication": exposed,
        "copies": data["copy_ns"],
        "idle": idle,
    }
    texts = [f"{name} {length / NS_PER_MS:.1f} ms" for name, length in parts.items() if length]
    return f"step {data['step']}, {data['step_ns'] / NS_PER_MS:.1f} ms: {', '.join(texts)}"


def _device_steps(trace: RankTrace) -> list[tuple[int, int, int]]:
    """Return begin, end and number of each step on the device; they do not overlap."""
    done: dict[int, int] = {}
    for work in (*trace.compute, *trace.comm):
        index = index_around(trace.steps, work.launch_ns)
        done[index] = max(work.end_ns, done.get(index, 0))
    steps, before = [], 0
    for index, (begin, end, step) in enumerate(trace.steps):
        until = max(end, before, done.get(index, 0))
        steps.append((max(begin, before), until, step))
        before = until
    return steps


def _explain(trace: RankTrace, idle: Sequence[Interval]) -> dict[str, list[Interval]]:
    """Return the idle time of a device by reason."""
    reasons: dict[str, list[Interval]] = {reason: [] for reason in REASONS}
    loader = unite(trace.loader)
    works = sorted((*trace.compute, *trace.comm), key=lambda work: work[:2])
    launches = sorted(work.launch_ns for work in works)
    for begin, end in idle:
        launch, thread = _next_launch(trace, works, end)
        if launch is not None and launch <= begin:
            reasons[UNKNOWN].append((begin, end))
            continue
        host = [(begin, end if launch is None else min(launch, end))]
        later = subtract(host, loader)
        reasons[INPUT] += subtract(host, later)
        if launch is None:
            reasons[UNKNOWN] += later
            continue
        before = bisect_left(launches, launch)
        since = launches[before - 1] if before else 0
        blocked = _overlap(trace.synchronizations.get(thread, ()), since, launch)
        for first, last in later:
            middle = min(last, first + blocked)
            blocked -= middle - first
            reasons[SYNCHRONISATION].append((first, middle))
            reasons[LAUNCH].append((middle, last))
        launched = min(launch, end)
        begun = min(end, launched + LATENCY_NS)
        reasons[LAUNCH].append((launched, begun))
        reasons[UNKNOWN].append((begun, end))
    return {
        reason: [(first, last) for first, last in intervals if first < last]
        for reason, intervals in reasons.items()
    }


def _next_launch(trace: RankTrace, works: Sequence[Work], at_ns: int) -> tuple[int | None, str]:
    """Return when and by which thread the first kernel from a time on was launched.

    None if it is unknown. If there is no such kernel, the last thread has launched none by then.

    Args:
        trace: A processor's operators are not launched.
        works: By begin.
        at_ns: The time.
    """
    place = bisect_left(works, at_ns, key=lambda work: work.start_ns)
    if not trace.is_of_device or not works:
        return None, ""
    if place == len(works):
        return at_ns, works[-1].thread
    work = works[place]
    is_known = work.launch_ns < work.start_ns  # a kernel without a launch has its begin
    return work.launch_ns if is_known else None, work.thread


def _times(works: Sequence[Work], is_copy: Sequence[bool], *, wanted: bool) -> list[Interval]:
    return [
        (work.start_ns, work.end_ns)
        for work, copies in zip(works, is_copy, strict=True)
        if copies is wanted
    ]


def _overlap(intervals: Sequence[Interval], begin: int, end: int) -> int:
    """Return how much of a stretch of time ascending, disjoint intervals cover."""
    total = 0
    place = bisect_left(intervals, begin, key=lambda interval: interval[1])
    while place < len(intervals) and intervals[place][0] < end:
        total += min(end, intervals[place][1]) - max(begin, intervals[place][0])
        place += 1
    return total
