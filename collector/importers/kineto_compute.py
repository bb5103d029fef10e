"""Compute of a rank in a trace of `torch.profiler`: phases, idle time in them, and waits.

Each phase of a step is one span, from its first kernel to its last. Time in it in which nothing
was computed has spans of its own inside: a wait, if the compute went on as a communication ended,
else idle time. So the compute of a phase is the union of its kernels, however many there are.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from rankscope.tracer.span import NONE, IdleName, SpanFlag, SpanKind

from .intervals import Intervals, find_around
from .kineto_reader import index_around
from .spool_folder import ON_DEVICE, Comm, Record

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from .intervals import Times
    from .kineto_comm import Call
    from .kineto_events import Work
    from .kineto_reader import RankTrace, WorkTable

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

PHASE_KINDS = SpanKind.FORWARD, SpanKind.BACKWARD, SpanKind.OPTIMIZER
FORWARD, BACKWARD, OPTIMIZER = range(len(PHASE_KINDS))


class Phases(NamedTuple):
    """Step and phase of each work, by its launch."""

    step: Times
    """Shape (works,): index of the step; `NONE` outside of all."""

    kind: NDArray[np.int64]
    """Shape (works,): place in `PHASE_KINDS`."""


def find_phases(trace: RankTrace, table: WorkTable) -> Phases:
    """Return the phases of the work of a trace.

    What is launched by the autograd engine is backward; in a step of the optimizer, or after the
    last backward, optimizer; else forward.
    """
    step = find_around(Intervals.of(trace.steps), table.launch)
    kind = np.full(len(step), FORWARD)
    kind[table.find_around(trace.backward, table.launch) != NONE] = BACKWARD
    kind[table.find_around(trace.optimizer, table.launch) != NONE] = OPTIMIZER
    backward = (kind == BACKWARD) & (step != NONE)
    last_backward = np.full(len(trace.steps) + 1, NONE)  # the last one: of work outside
    np.maximum.at(last_backward, step[backward], table.launch[backward])
    last = last_backward[step]
    kind[(kind == FORWARD) & (last != NONE) & (table.launch > last)] = OPTIMIZER
    return Phases(step, kind)


def compute_records(
    trace: RankTrace, table: WorkTable, phases: Phases, calls: Sequence[Call]
) -> list[Record]:
    """Return the spans of the phases, with the idle time and the waits in them and between them.

    A phase lasts until the stream that computes most begins another one: what other streams
    compute meanwhile belongs to it, so that borders do not depend on which stream was first.
    """
    rows = np.flatnonzero(~table.is_comm & (phases.step != NONE))
    if not len(rows):
        return []
    busy_ns = np.zeros(len(table.works), dtype=np.int64)
    busy_ns[rows[1:]] = np.maximum.accumulate(table.end[rows])[:-1]
    phase = phases.step * len(PHASE_KINDS) + phases.kind
    may_begin = rows[_is_on_main_stream(table, rows)]
    may_begin = np.union1d(may_begin, rows[:1])
    begins = may_begin[np.diff(phase[may_begin], prepend=NONE) != 0]
    gaps = rows[1:][table.start[rows[1:]] > busy_ns[rows[1:]]]
    ended = sorted(calls, key=lambda call: call.work.end_ns)
    waited = _last_waits(trace, table, busy_ns, ended)
    names = _idle_names(trace, table, busy_ns)
    sweep = _Sweep(trace)
    is_begin = set(begins.tolist())
    for row in np.union1d(begins, gaps).tolist():
        work, busy = table.works[row], int(busy_ns[row])
        wait = None if waited[row] == NONE else _find_wait(trace, work, ended[waited[row]], busy)
        if row not in is_begin:
            sweep.add_gap(work.start_ns, busy, names[row], wait)
            continue
        kind = PHASE_KINDS[phases.kind[row]]
        sweep.begin(work, busy, (int(phases.step[row]), kind), wait)
    return sweep.finish(int(table.end[rows].max()))


def _is_on_main_stream(table: WorkTable, rows: Times) -> NDArray[np.bool_]:
    """Return which works are on the stream that computes most."""
    places: dict[str, int] = {}
    stream = [places.setdefault(table.works[row].stream, len(places)) for row in rows.tolist()]
    total_ns = np.bincount(stream, weights=(table.end - table.start)[rows])
    is_on: NDArray[np.bool_] = np.array(stream) == np.argmax(total_ns)
    return is_on


def _idle_names(trace: RankTrace, table: WorkTable, busy_ns: Times) -> list[IdleName]:
    """Return for each work why nothing was computed from the end of what was before it."""
    is_late = (table.launch > busy_ns) & trace.is_of_device
    is_synchronized = table.find_around(trace.synchronizations, busy_ns) != NONE
    of = {(False, False): IdleName.IDLE, (False, True): IdleName.IDLE,
          (True, False): IdleName.LATE, (True, True): IdleName.SYNCHRONIZED}  # fmt: skip
    return [of[key] for key in zip(is_late.tolist(), is_synchronized.tolist(), strict=True)]


def _last_waits(trace: RankTrace, table: WorkTable, busy_ns: Times, ended: Sequence[Call]) -> Times:
    """Return for each work the last communication that it may have waited for, or `NONE`."""
    until = table.start.copy()
    if not trace.is_of_device:
        until += np.maximum(HOST_SLACK_NS, (table.start - busy_ns) // 10)
    launch = np.array([call.work.launch_ns for call in ended] or [0], dtype=np.int64)
    end = np.array([call.work.end_ns for call in ended] or [0], dtype=np.int64)
    last = np.searchsorted(end[: len(ended)], until, side="right") - 1
    while (later := (last >= 0) & (launch[last] >= table.start)).any():
        last[later] -= 1  # it was called after the work began
    overlaps = np.maximum(busy_ns, launch[last]) < np.minimum(end[last], table.start)
    may_wait: Times = np.where((busy_ns > 0) & (last >= 0) & overlaps, last, NONE)
    return may_wait


class _Sweep:
    """The spans of the compute of a rank, in the order of begins."""

    def __init__(self, trace: RankTrace) -> None:
        self._records: list[Record] = []
        self._flags = ON_DEVICE if trace.is_of_device else SpanFlag.HOST_CLOCK
        self._numbers = [number for *_, number in trace.steps]
        self._cells_ns = [(end - begin) // RESOLUTION for begin, end, _ in trace.steps]
        self._microbatch = NONE
        self._step = NONE
        self._run: Record | None = None
        self._idle: Counter[IdleName] = Counter()
        self._idle_begin_ns = self._idle_end_ns = 0

    def begin(
        self, work: Work, busy_ns: int, phase: tuple[int, SpanKind], wait: _Wait | None
    ) -> None:
        """Begin a phase.

        Args:
            work: Its first kernel or operator.
            busy_ns: End of the compute before.
            phase: Index of its step, and its kind.
            wait: That between the two.
        """
        step, kind = phase
        self._end_run(busy_ns)
        if kind is SpanKind.FORWARD:
            self._microbatch = self._microbatch + 1 if self._step == step else 0
        self._step = step
        if wait is not None:
            self._add_wait(wait, depth=0)
        begin = max(work.start_ns, busy_ns)
        self._run = Record(
            kind, str(kind), COMPUTE_TRACK, self._numbers[step], begin, begin, self._flags,
            launch_ns=work.launch_ns,
            microbatch=NONE if kind is SpanKind.OPTIMIZER else self._microbatch,
        )  # fmt: skip
        self._records.append(self._run)

    def add_gap(self, start_ns: int, busy_ns: int, name: IdleName, wait: _Wait | None) -> None:
        """Add what was before work of the same phase, in which nothing was computed."""
        if wait is None:
            self._add_idle(busy_ns, start_ns, name)
            return
        self._add_idle(busy_ns, wait.begin_ns, name)
        self._flush_idle()
        self._add_wait(wait, depth=1)
        self._add_idle(wait.end_ns, start_ns, name)

    def finish(self, busy_ns: int) -> list[Record]:
        """Return all records, the last until the end of all compute."""
        self._end_run(busy_ns)
        return [record for record in self._records if record.end_ns > record.start_ns]

    def _end_run(self, busy_ns: int) -> None:
        self._flush_idle()
        if self._run is not None:
            self._run.end_ns = busy_ns

    def _add_wait(self, wait: _Wait, *, depth: int) -> None:
        self._records.append(
            Record(
                SpanKind.WAIT, "wait", COMPUTE_TRACK, self._numbers[self._step], wait.begin_ns,
                wait.end_ns, self._flags, depth=depth, comm=wait.comm,
            )
        )  # fmt: skip

    def _add_idle(self, begin: int, end: int, name: IdleName) -> None:
        if end <= begin:
            return
        if not self._idle:
            self._idle_begin_ns = begin
        self._idle[name] += end - begin
        self._idle_end_ns = end
        if end - self._idle_begin_ns >= self._cells_ns[self._step]:
            self._flush_idle()

    def _flush_idle(self) -> None:
        end = self._idle_end_ns
        for name, duration in self._idle.items():
            self._records.append(
                Record(
                    SpanKind.HOST, str(name), COMPUTE_TRACK, self._numbers[self._step],
                    end - duration, end, self._flags, depth=1,
                )
            )  # fmt: skip
            end -= duration
        self._idle.clear()


class _Wait(NamedTuple):
    begin_ns: int
    end_ns: int
    comm: Comm


def _find_wait(trace: RankTrace, work: Work, call: Call, busy_ns: int) -> _Wait | None:
    """Return the wait for a communication that ended as work began, if it was one.

    A stream waited if it had got the work before the communication ended; a host if it was in a
    call that returned as the communication ended, and then launched the work. A thread that
    computes nothing until a communication ends waits for it, whenever it gets a core afterwards: if
    it did something else, that took no longer than the communication, which is short on a rank that
    others wait for. A thread of gloo may lose its core between the end of a communication and that
    of its record, so one that ends a little later counts too, if the idle time was most of it.

    Args:
        call: The communication: it and the idle time before ``work`` overlap.
        busy_ns: End of the compute before.
    """
    waited, comm = call.work, call.comm
    begin, end = max(busy_ns, waited.launch_ns), min(waited.end_ns, work.start_ns)
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
