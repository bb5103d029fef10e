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

The whole file, from its first work to its last, has the same parts: HTA shows those.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from rankscope.tracer.span import NONE, NS_PER_MS

from .intervals import Intervals, covered_ns, find_around, subtract, unite
from .kernel_sums import COPIES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from .intervals import Times
    from .kineto_reader import RankTrace, WorkTable

DEVICE_TIME = "device-time"
"""Kind of the event that has the parts of one step."""

INPUT, SYNCHRONISATION, LAUNCH, UNKNOWN = "input", "synchronisation", "launch", "unknown"
REASONS = (LAUNCH, INPUT, SYNCHRONISATION, UNKNOWN)

LATENCY_NS = 20_000
"""Longest usual time from a launch to the begin of its kernel on an idle device, 5 to 10 us, with a
margin. Until then the device is idle because of the launch."""


def split_steps(
    trace: RankTrace, table: WorkTable, comm: Sequence[tuple[int, int, str]]
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield end and data of each step's event; its parts sum to ``step_ns``.

    The last one is of the whole file, from its first work to the end of its last. It has no step.

    Args:
        comm: Begin, end and kind of each communication.
    """
    steps = _device_steps(trace, table)
    whole = Intervals(table.start[:1], table.end.max(initial=0, keepdims=True)[: len(table.start)])
    is_copy = np.array([work.event["cat"] in COPIES for work in table.works], dtype=np.bool_)
    work = Intervals(table.start, table.end)
    covering = {
        ("compute", ""): work.chosen(~table.is_comm & ~is_copy),
        **{
            ("exposed", kind): Intervals.of([row for row in comm if row[2] == kind])
            for kind in sorted({kind for *_, kind in comm})
        },
        ("copy", ""): work.chosen(~table.is_comm & is_copy),
    }
    busy, parts = Intervals.of(()), {}
    for part, own in covering.items():
        parts[part] = subtract(unite(own), busy)
        busy = unite(busy, parts[part])
    idle = subtract(unite(steps, whole), busy)
    for reason, own in _explain(trace, table, idle).items():
        parts["idle", reason] = unite(own)
    numbers: list[int | None] = [number for *_, number in trace.steps]
    for window, names in ((steps, numbers), (whole, (None,))):
        lengths = {part: covered_ns(own, *window).tolist() for part, own in parts.items()}
        for at, (begin, end) in enumerate(window.to_rows()):
            own_lengths = {part: ns[at] for part, ns in lengths.items()}
            yield end, _to_data(names[at], end - begin, own_lengths)


def _to_data(step: int | None, step_ns: int, lengths: dict[tuple[str, str], int]) -> dict[str, Any]:
    return {
        "step": step,
        "step_ns": step_ns,
        "compute_ns": lengths["compute", ""],
        "exposed_ns": {name: ns for (part, name), ns in lengths.items() if part == "exposed"},
        "copy_ns": lengths["copy", ""],
        "idle_ns": {name: ns for (part, name), ns in lengths.items() if part == "idle"},
    }


def describe_step(data: dict[str, Any]) -> str:
    """Return the parts of a step, or of the whole file, in one line."""
    exposed, idle = sum(data["exposed_ns"].values()), sum(data["idle_ns"].values())
    parts = {
        "compute": data["compute_ns"],
        "exposed communication": exposed,
        "copies": data["copy_ns"],
        "idle": idle,
    }
    texts = [f"{name} {length / NS_PER_MS:.1f} ms" for name, length in parts.items() if length]
    window = "whole file" if data["step"] is None else f"step {data['step']}"
    return f"{window}, {data['step_ns'] / NS_PER_MS:.1f} ms: {', '.join(texts)}"


def _device_steps(trace: RankTrace, table: WorkTable) -> Intervals:
    """Return begin and end of each step on the device; they do not overlap."""
    index = find_around(Intervals.of(trace.steps), table.launch)
    begin, end = Intervals.of(trace.steps)
    done = np.append(end, 0)  # the last one: of work outside
    np.maximum.at(done, index, table.end)
    until = np.maximum.accumulate(done[:-1])
    return Intervals(np.maximum(begin, np.append(0, until)[:-1]), until)


def _explain(trace: RankTrace, table: WorkTable, idle: Intervals) -> dict[str, Intervals]:
    """Return the idle time of a device by reason; ``idle`` is disjoint and ascending."""
    launch, next_row = _next_launches(trace, table, idle.end)
    is_known = launch != NONE
    was_launched = is_known & (launch <= idle.begin)
    launched = np.where(is_known, np.minimum(launch, idle.end), idle.end)
    host = Intervals(idle.begin, np.maximum(launched, idle.begin)).chosen(~was_launched)
    loader = unite(Intervals.of(trace.loader))
    later = subtract(host, loader)
    of = np.searchsorted(idle.begin, later.begin, side="right") - 1
    length = later.end - later.begin
    before = np.cumsum(length) - length
    before -= before[np.searchsorted(of, of)]  # in the same idle time
    blocked = _blocked_ns(trace, table, launch, next_row)[of]
    middle = later.begin + np.clip(blocked - before, 0, length)
    begun = np.minimum(launched + LATENCY_NS, idle.end)
    explained = is_known & ~was_launched
    return {
        LAUNCH: unite(
            Intervals(middle, later.end).chosen(is_known[of]),
            Intervals(launched, begun).chosen(explained),
        ),
        INPUT: subtract(host, subtract(host, loader)),
        SYNCHRONISATION: Intervals(later.begin, middle),
        UNKNOWN: unite(
            idle.chosen(was_launched),
            later.chosen(~is_known[of]),
            Intervals(begun, idle.end).chosen(explained),
        ),
    }


def _next_launches(
    trace: RankTrace, table: WorkTable, at: Times
) -> tuple[Times, NDArray[np.int64]]:
    """Return when the first kernel from each time on was launched, and its row.

    The time is `NONE` if it is unknown. If there is no such kernel, the thread of the last one has
    launched none by then.
    """
    num = len(table.works)
    row = np.searchsorted(table.start, at)
    if not trace.is_of_device or not num:
        return np.full(len(at), NONE), row
    launch, start = np.append(table.launch, NONE), np.append(table.start, NONE)
    # A kernel without a launch has its begin.
    known = np.where(launch[row] < start[row], launch[row], NONE)
    return np.where(row == num, at, known), np.minimum(row, num - 1)


def _blocked_ns(trace: RankTrace, table: WorkTable, launch: Times, row: NDArray[np.int64]) -> Times:
    """Return how long the thread of a kernel was blocked between the launch before and its own."""
    launches = np.sort(table.launch)
    before = np.searchsorted(launches, launch)
    since = np.append(0, launches)[before]
    blocked = np.zeros(len(launch), dtype=np.int64)
    for thread, own in trace.synchronizations.items():
        mine = (launch != NONE) & np.isin(row, table.rows_of.get(thread, ()))
        blocked[mine] = covered_ns(Intervals.of(own), since[mine], launch[mine])
    return blocked
