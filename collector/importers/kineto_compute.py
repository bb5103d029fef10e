"""Compute of a rank in a trace of `torch.profiler`: phases, idle time in them, and waits.

Each phase of a step is one span, from its first kernel to its last. Time in it in which nothing
was computed has spans of its own inside: a wait, if the compute went on as a communication ended,
else idle time. So the compute of a phase is the union of its kernels, however many there are.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from rankscope.tracer.span import NONE, IdleName, SpanFlag, SpanKind

from .kineto_events import text_of
from .kineto_trace import index_around
from .spool_folder import Comm, Record

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .kineto_comm import Call
    from .kineto_events import Work
    from .kineto_trace import RankTrace

DEVICE_SLACK_NS = 20_000
"""Longest time from the end of a communication to the begin of the kernel that waited for it: a
stream's wait for an event of another stream, 5 to 10 us, with a margin."""

HOST_SLACK_NS = 2_000_000
"""Longest time from the end of a communication to the return of a thread that waited for it, which
the operating system has to wake."""

RESOLUTION = 1000
"""Idle times that are closer together than this part of a step have one span with their sum: a step
has some thousand of them at most, however many kernels it has."""

COMPUTE_TRACK = "compute"

Phase = tuple[int, SpanKind]
"""Step and kind."""


def compute_records(trace: RankTrace, calls: Sequence[Call]) -> list[Record]:
    """Return the spans of the phases, with the idle time and the waits in them and between them.

    A phase lasts until the stream that computes most begins another one: what other streams
    compute meanwhile belongs to it, so that borders do not depend on which stream was first.
    """
    sweep = _Sweep(trace, calls)
    main = _main_stream(trace)
    for work, phase in zip(trace.compute, find_phases(trace), strict=True):
        if phase is not None:
            sweep.add(work, phase, is_main=_stream_of(work) == main)
    return sweep.finish()


class _Sweep:
    """One pass over the compute of a rank, in the order of begins."""

    def __init__(self, trace: RankTrace, calls: Sequence[Call]) -> None:
        self._records: list[Record] = []
        self._trace = trace
        self._flags = SpanFlag.HOST_CLOCK
        if trace.is_of_device:
            self._flags = SpanFlag.DEVICE_BEGIN_KNOWN | SpanFlag.DEVICE_END_KNOWN
        self._calls = sorted(calls, key=lambda call: call.work.end_ns)
        self._cell_ns = {step: (end - begin) // RESOLUTION for begin, end, step in trace.steps}
        self._busy_ns = 0
        self._microbatch = NONE
        self._phase: Phase = NONE, SpanKind.OTHER
        self._run: Record | None = None
        self._idle: Counter[IdleName] = Counter()
        self._idle_begin_ns = self._idle_end_ns = 0

    def add(self, work: Work, phase: Phase, *, is_main: bool) -> None:
        """Add a kernel or an operator.

        Args:
            work: It begins after all before, or with them.
            phase: That of its launch.
            is_main: Whether it may begin another phase.
        """
        goes_on = self._run is not None and (phase == self._phase or not is_main)
        if not goes_on:
            self._flush_idle()
        if work.start_ns > self._busy_ns > 0:
            self._add_gap(work, phase[0], goes_on=goes_on)
        if not goes_on:
            self._begin(work, phase)
        self._busy_ns = max(self._busy_ns, work.end_ns)
        if self._run is not None:
            self._run.end_ns = self._busy_ns

    def finish(self) -> list[Record]:
        """Return all records."""
        self._flush_idle()
        return [record for record in self._records if record.end_ns > record.start_ns]

    def _begin(self, work: Work, phase: Phase) -> None:
        step, kind = phase
        if kind is SpanKind.FORWARD:
            self._microbatch = self._microbatch + 1 if self._phase[0] == step else 0
        begin = max(work.start_ns, self._busy_ns)
        self._run = Record(
            kind, str(kind), COMPUTE_TRACK, step, begin, begin, self._flags,
            launch_ns=work.launch_ns,
            microbatch=NONE if kind is SpanKind.OPTIMIZER else self._microbatch,
        )  # fmt: skip
        self._records.append(self._run)
        self._phase = phase

    def _add_gap(self, work: Work, step: int, *, goes_on: bool) -> None:
        """Add what was before a kernel, in which nothing was computed."""
        begin, end = self._busy_ns, work.start_ns
        name = _idle_name(self._trace, work, begin)
        wait = _find_wait(self._trace, work, self._calls, begin)
        if wait is None:
            if goes_on:
                self._add_idle(begin, end, name)
            return
        if goes_on:
            self._add_idle(begin, wait.begin_ns, name)
            self._flush_idle()
        self._records.append(
            Record(
                SpanKind.WAIT,
                "wait",
                COMPUTE_TRACK,
                step,
                wait.begin_ns,
                wait.end_ns,
                self._flags,
                depth=1 if goes_on else 0,
                comm=wait.comm,
            )
        )
        if goes_on:
            self._add_idle(wait.end_ns, end, name)

    def _add_idle(self, begin: int, end: int, name: IdleName) -> None:
        if end <= begin:
            return
        if not self._idle:
            self._idle_begin_ns = begin
        self._idle[name] += end - begin
        self._idle_end_ns = end
        if end - self._idle_begin_ns >= self._cell_ns[self._phase[0]]:
            self._flush_idle()

    def _flush_idle(self) -> None:
        end = self._idle_end_ns
        for name, duration in self._idle.items():
            self._records.append(
                Record(
                    SpanKind.HOST,
                    str(name),
                    COMPUTE_TRACK,
                    self._phase[0],
                    end - duration,
                    end,
                    self._flags,
                    depth=1,
                )
            )
            end -= duration
        self._idle.clear()


def _idle_name(trace: RankTrace, work: Work, begin_ns: int) -> IdleName:
    """Return why nothing was computed from a time on until work began."""
    if not trace.is_of_device or work.launch_ns <= begin_ns:
        return IdleName.IDLE
    synchronized = index_around(trace.synchronizations.get(work.thread, ()), begin_ns) != NONE
    return IdleName.SYNCHRONIZED if synchronized else IdleName.LATE


def find_phases(trace: RankTrace) -> list[Phase | None]:
    """Return step and kind of each item of compute; None outside the steps."""
    phases: list[Phase | None] = []
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


def _main_stream(trace: RankTrace) -> str:
    """Return the stream that computes most; "" of a processor, whose operators have none."""
    total_ns: Counter[str] = Counter()
    for work in trace.compute:
        total_ns[_stream_of(work)] += work.end_ns - work.start_ns
    return total_ns.most_common(1)[0][0] if total_ns else ""


def _stream_of(work: Work) -> str:
    return text_of(work.event["args"].get("stream"))


class _Wait(NamedTuple):
    begin_ns: int
    end_ns: int
    comm: Comm


def _find_wait(trace: RankTrace, work: Work, calls: Sequence[Call], busy_ns: int) -> _Wait | None:
    """Return the wait that ended as work began, if any.

    A stream waited if it had got the work before the communication ended; a host if it was in a
    call that returned as the communication ended, and then launched the work. A thread that
    computes nothing until a communication ends waits for it, whenever it gets a core afterwards: if
    it did something else, that took no longer than the communication, which is short on a rank that
    others wait for. A thread of gloo may lose its core between the end of a communication and that
    of its record, so one that ends a little later counts too, if the idle time was most of it.

    Args:
        trace: The rank's trace.
        work: A kernel or operator.
        calls: All communication, by its end.
        busy_ns: End of the compute before.
    """
    until_ns = work.start_ns
    if not trace.is_of_device:
        until_ns += max(HOST_SLACK_NS, (work.start_ns - busy_ns) // 10)
    last = bisect_right(calls, until_ns, key=lambda call: call.work.end_ns) - 1
    while last >= 0 and calls[last].work.launch_ns >= work.start_ns:
        last -= 1
    if last < 0:
        return None
    waited, comm = calls[last].work, calls[last].comm
    begin, end = max(busy_ns, waited.launch_ns), min(waited.end_ns, work.start_ns)
    if begin >= end:
        return None
    if trace.is_of_device and work.launch_ns >= waited.end_ns:
        called_ns = _synchronized_since(trace, work, waited.end_ns)
        begin = max(begin, end if called_ns is None else called_ns)
        return _Wait(begin, end, comm) if begin < end else None
    if trace.is_of_device:
        return _Wait(begin, end, comm) if work.start_ns - end <= DEVICE_SLACK_NS else None
    is_most = 2 * (end - begin) >= waited.end_ns - waited.launch_ns
    return _Wait(begin, end, comm) if waited.end_ns <= work.start_ns or is_most else None


def _synchronized_since(trace: RankTrace, work: Work, end_ns: int) -> int | None:
    """Return when the thread that launched work began to wait until a communication ended."""
    own = trace.synchronizations.get(work.thread, ())
    index = index_around(own, end_ns)
    if index == NONE:
        return None
    begin, returned = own[index]
    return begin if returned - end_ns <= HOST_SLACK_NS and returned <= work.launch_ns else None
