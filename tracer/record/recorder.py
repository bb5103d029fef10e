"""The recorder: the tracer that writes spans, steps, events and its own end into a spool."""

from __future__ import annotations

import contextlib
import json
import time
from time import monotonic_ns
from typing import TYPE_CHECKING

from ..errors import print_notice
from ..native.host_span import HostSpan, PlacedSpan
from ..native.lane_state import PLACE
from ..span import KIND_CODES, NONE, SpanFlag, SpanKind
from ..spool import (
    EVENTS_FILE,
    GROUPS_FILE,
    MICROBATCH,
    NAME_BYTES,
    NAME_CAPACITY,
    STEP,
    DropReason,
    RecordType,
    SpoolIdentity,
)
from .background_thread import BackgroundThread
from .device_timer import NO_DEVICE_TIMING
from .exit_record import ended_record, failed_record, reserve_exit, write_exit
from .interface import NOOP_SPAN
from .lane import Lanes, OpenSpans, head_word
from .plain_values import Arguments, plain_copy, plain_text, type_name
from .process_file import ProcessFile
from .sampling import SamplingControl, Settings
from .segment_pool import SegmentPool, SpoolLimits
from .steps import MICROBATCH_HEAD, STEP_HEAD, MissingKinds, read_peak_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from ..native.host_span import CancellableSpan, SpanContext
    from .control import Handler
    from .device_timer import DeviceTimer
    from .lane import Lane


class Recorder:
    """The tracer of this process, which records into one folder of the spool."""

    enabled = True

    def __init__(
        self,
        folder: Path,
        identity: SpoolIdentity,
        *,
        limits: SpoolLimits | None = None,
        settings: Settings | None = None,
    ) -> None:
        self.folder = folder
        self.identity = identity
        self.run_id = identity.run_id
        self.step_number = NONE
        self._process = ProcessFile(folder, identity)
        self._pool = SegmentPool(
            folder,
            identity,
            limits or SpoolLimits(),
            process=self._process,
            on_full=self._report_full,
        )
        self._background = BackgroundThread(
            folder, work=self._work, on_error=lambda: self.drop(DropReason.INTERNAL_ERROR)
        )
        self._arguments = Arguments(lambda: self.drop(DropReason.BAD_ARGUMENT))
        self._head_words: dict[tuple[str, SpanKind], int] = {}
        self.step_start_ns: int | None = None
        """Start of the current step, monotonic; None before the first step."""

        self.missing_kinds = MissingKinds()
        """Span kinds missing because a capture failed."""

        self._failure: dict[str, object] | None = None
        self._closers: list[Callable[[], None]] = []
        self._step_tasks: list[Callable[[], bool]] = []
        self._closed = False
        self.sampling_control = SamplingControl(
            folder,
            settings or Settings(),
            rank=identity.rank,
            report=lambda text, data: self.event("control", text, data),
            on_invalid=lambda: self.drop(DropReason.BAD_ARGUMENT),
        )
        self.sampling = self.sampling_control.sampling
        self.count_tokens: Callable[[], int | None] = _unknown
        """Returns the number of tokens of the step that ends, for a job that does not report it."""

        self.job_reports_microbatches = False
        """Whether the job itself reports the sizes of its micro-batches."""

        self.device_timing: DeviceTimer = NO_DEVICE_TIMING
        """Timing of the work on the device, if there is one."""

        self._tick_tasks: list[Callable[[], None]] = []
        self.lanes = Lanes(
            process=self._process,
            pool=self._pool,
            sampling=self.sampling,
            wake=self._background.wake,
        )
        self._open_spans = OpenSpans(self.lanes)
        self.resolver_lag_ns: int | None = None
        """Age of the oldest unresolved device span; None if no device is timed."""

        self._own_cpu_ns = 0
        self.comm_lane = self.lanes.add("comm")

    def start(self) -> None:
        """Make the first segments and start the background thread."""
        reserve_exit(self.folder)
        self._pool.replenish()
        self._pool.prepare_spare()
        self.sampling_control.control.poll()
        self._background.start()

    # -- spans ---------------------------------------------------------------

    def span(
        self,
        name: str,
        *,
        kind: SpanKind = SpanKind.HOST,
        microbatch: int = NONE,
        chunk: int = NONE,
    ) -> SpanContext:
        """Return a span for ``with``."""
        head = self.head(name, kind)
        if self.sampling.left_out >> ((head >> 8) & 0xFF) & 1:
            return NOOP_SPAN
        if microbatch is NONE and chunk is NONE:
            is_plain = type(name) is str and kind is SpanKind.HOST and len(name) < NAME_BYTES
            return self.lanes.span(head, name if is_plain and name else None)
        return PlacedSpan(self.lane(), head, self.index(microbatch), self.index(chunk))

    def host_span(self, name: str, kind: SpanKind) -> CancellableSpan:
        """Return a span that a capture enters and leaves itself; count an error of the tracer."""
        try:
            if self.is_recorded(kind):
                return HostSpan(self.lanes.current(), self.head(name, kind))
        except Exception as problem:  # noqa: BLE001 - promise 1: harmless
            self.swallow(problem)
        return NOOP_SPAN

    def is_recorded(self, kind: SpanKind) -> bool:
        """Return whether spans of ``kind`` that begin now are recorded.

        Spans left out by request (level, sampling, recording off) are not counted as dropped. A
        capture need not call this, because `Lane.append` ignores such spans, but may do so to save
        work. Communications must be numbered in any case, or the members of a group would disagree
        on ``seq``.
        """
        return not self.sampling.left_out >> KIND_CODES[kind] & 1

    def on_control(self, handler: Handler) -> None:
        """Call ``handler`` on the background thread with the content of the control files.

        It is called soon after this call unless there is no content, and after each change, with
        the whole object: keys of other handlers included, ``{}`` once the files are removed. An
        exception of the handler is counted and recorded as an event.
        """
        self.sampling_control.control.subscribe(handler)

    def append_span(self, name: str, kind: SpanKind, start_ns: int, end_ns: int) -> None:
        """Write a span of the calling thread that has already ended."""
        lane = self.lane()
        lane.append(
            self.head(name, kind),
            start_ns,
            end_ns - start_ns,
            lane.place,
            start_ns,
            lane.depth,
        )

    def head(self, name: object, kind: object) -> int:
        """Return the head word of a host span; an invalid name or kind is replaced and counted."""
        if type(name) is str and type(kind) is SpanKind:
            word = self._head_words.get((name, kind))
            if word is not None:
                return word
        if type(kind) is not SpanKind:
            self.drop(DropReason.BAD_ARGUMENT)
            kind = SpanKind.OTHER
        head = head_word(
            RecordType.SPAN,
            kind=KIND_CODES[kind],
            flags=int(SpanFlag.HOST_CLOCK),
            name_id=self.name_id(self._arguments.name(name)),
        )
        # The job chooses the names, so without a bound the cache would grow without end.
        is_bounded = len(self._head_words) < NAME_CAPACITY
        if type(name) is str and 0 < len(name) < NAME_BYTES and is_bounded:
            self._head_words[name, kind] = head
        return head

    def has_begun(self, kind: SpanKind) -> bool:
        """Return whether a host span of ``kind`` was ever begun."""
        return any(known is kind for _, known in list(self._head_words))

    def name_id(self, name: str) -> int:
        """Return the id of a name that the tracer chose, interned on first use."""
        return self._process.name_id(name)

    def index(self, value: object) -> int:
        """Return ``value`` if it is an index of a micro-batch or chunk, else `NONE`, counted."""
        return self._arguments.index(value)

    def lane(self) -> Lane:
        """Return the calling thread's lane."""
        return self.lanes.current()

    def drop(self, reason: DropReason) -> None:
        """Count a dropped record."""
        self._process.drop(reason)

    def swallow(self, problem: Exception) -> None:
        """Count an error of the tracer; raise one of the job.

        Raises:
            Exception: ``problem`` itself, if a signal handler of the job raised it.
        """
        self.comm_lane.swallow(problem)

    # -- steps ---------------------------------------------------------------

    def begin_steps(self, first_step: int = 0) -> None:
        """Begin step ``first_step`` now."""
        self._begin_step(self._arguments.step(first_step), monotonic_ns())

    def step(self, tokens: int | None = None, loss: object = None) -> None:
        """End the step now and begin the next one."""
        now_ns = monotonic_ns()
        start_ns = self.step_start_ns
        if start_ns is None:
            self._begin_step(0, now_ns)
            return
        counted, memory = self.count_tokens(), read_peak_memory()
        second = STEP.pack(
            self._arguments.count(counted if tokens is None else tokens),
            self._arguments.loss(loss),
            memory.allocated_bytes,
            self.sampling.left_out | self.missing_kinds.end_step(),
            1 + memory.reserved_bytes,
            1 + memory.num_alloc_retries,
        )
        lane = self.lanes.current()
        place = PLACE.pack(self.step_number, NONE, NONE, lane.track_id)
        lane.append(STEP_HEAD, start_ns, now_ns - start_ns, place, start_ns, 0, second)
        self._begin_step(self.step_number + 1, now_ns)

    def microbatch(
        self, index: int, tokens: int | None = None, sum_squared_lengths: int | None = None
    ) -> None:
        """Record the size of micro-batch ``index`` of this step, as the job reports it."""
        self.job_reports_microbatches = True
        self.append_microbatch(index, tokens, sum_squared_lengths)

    def append_microbatch(
        self,
        index: int,
        tokens: int | None,
        sum_squared_lengths: int | None,
        sum_windowed_lengths: int | None = None,
        num_elements: int | None = None,
    ) -> None:
        """Record the size of micro-batch ``index`` of this step, as a capture found it."""
        now_ns = monotonic_ns()
        second = MICROBATCH.pack(
            self._arguments.count(tokens),
            self._arguments.count(sum_squared_lengths),
            1 + self._arguments.count(sum_windowed_lengths),
            1 + self._arguments.count(num_elements),
        )
        lane = self.lanes.current()
        place = PLACE.pack(self.step_number, self.index(index), lane.chunk, lane.track_id)
        lane.append(MICROBATCH_HEAD, now_ns, 0, place, now_ns, 0, second)

    # -- events and groups ---------------------------------------------------

    def event(self, kind: str, text: str, data: dict[str, object]) -> None:
        """Record an event at this moment; count an error of the tracer."""
        try:
            line = {
                "at_ns": time.time_ns(),
                "kind": self._arguments.name(kind),
                "text": plain_text(text) or f"<{type_name(text)}>",
                "data": data,
            }
            self.append_line(EVENTS_FILE, line)
        except Exception as problem:  # noqa: BLE001 - captures report their own errors here
            self.swallow(problem)

    def add_group(
        self, group_id: int, *, kind: SpanKind, name: str, members: Sequence[int]
    ) -> None:
        """Record a communication group; call it once per group."""
        line: dict[str, object] = {
            "group_id": f"{group_id:016x}",
            "kind": str(kind),
            "name": name,
            "members": list(members),
        }
        self.append_line(GROUPS_FILE, line)

    def append_line(self, file_name: str, line: dict[str, object]) -> None:
        """Queue one line for a line file of the process."""
        if not self._background.append_line(file_name, json.dumps(plain_copy(line))):
            self.drop(DropReason.NO_SEGMENT)

    def record_exception(self, exc: BaseException) -> None:
        """Record ``exc`` as the reason for the end of this process."""
        self._failure = failed_record(exc, time.time_ns())
        write_exit(self.folder, self._failure)

    # -- end -----------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """True after `shutdown` or `abandon`."""
        return self._closed

    def on_shutdown(self, closer: Callable[[], None]) -> None:
        """Call ``closer`` at shutdown, the last registered first."""
        self._closers.append(closer)

    def on_tick(self, task: Callable[[], None]) -> None:
        """Call ``task`` on the background thread about every second.

        Its exceptions are counted. It may do file work; long work delays the segments that the
        training needs.
        """
        self._tick_tasks.append(task)

    def wake_within(self, within_s: float) -> None:
        """Request the next turn of the background thread within ``within_s``."""
        self._background.wake_within(within_s)

    def on_step_begin(self, task: Callable[[], bool]) -> None:
        """Call ``task`` when a step begins, until it returns True.

        A task that raises is not called again: the error is counted and recorded as an event.
        """
        self._step_tasks.append(task)

    def shutdown(self) -> None:
        """Seal the segments and record the normal end of the process; once."""
        if self._closed:
            return
        self._closed = True
        while self._closers:
            with contextlib.suppress(Exception):
                self._closers.pop()()
        self._background.stop()
        self._pool.close()
        self._open_spans.close()
        for lane in self.lanes:
            lane.seal()
        self._publish_counts()
        if self._failure is None:
            write_exit(self.folder, ended_record(time.time_ns()))
        # Hooks that cannot be removed keep a reference to this recorder, and so to the mapping.
        self._process.detach()

    def abandon(self) -> None:
        """Release all files without writing to them, in a forked child."""
        self._closed = True
        self.device_timing = NO_DEVICE_TIMING  # CUDA cannot be used after a fork
        self._closers.clear()
        self._pool.abandon()
        self._process.detach()
        for lane in self.lanes:
            lane.detach()

    # -- private -------------------------------------------------------------

    def _work(self) -> None:
        self._pool.unmap_retired()  # first: a new segment takes as much memory again
        if self._pool.needs_segments() and not self._closed:
            self._pool.replenish()
        self._open_spans.refresh()
        self.sampling_control.control.poll()
        for task in list(self._tick_tasks):
            try:
                task()
            except Exception:  # noqa: BLE001 - promise 1: harmless
                self.drop(DropReason.INTERNAL_ERROR)
        self._own_cpu_ns = time.thread_time_ns()
        self._publish_counts()

    def _publish_counts(self) -> None:
        self._process.publish_drops()
        # Dropped before written: a row claimed in between counts as produced and written.
        num_dropped = self._process.num_dropped()
        num_written = sum(lane.num_claimed() for lane in self.lanes)
        self._process.write_counts(
            num_produced=num_written + num_dropped,
            num_written=num_written,
            own_cpu_ns=self._own_cpu_ns,
            resolver_lag_ns=self.resolver_lag_ns,
        )

    def _report_full(self, why: str) -> None:
        self.event("tracer", "the spool is full: dropping and counting new records", {"why": why})
        print_notice(f"rank {self.identity.rank} drops new spans and counts them: {why}")

    def _begin_step(self, step: int, now_ns: int) -> None:
        self.step_number = step
        self.step_start_ns = now_ns
        self.sampling_control.begin_step(step)
        self.lanes.begin_step(step)
        for task in list(self._step_tasks):
            try:
                is_done = task()
            except Exception as problem:  # noqa: BLE001 - promise 1: harmless
                is_done = True
                self.swallow(problem)
                self.event(
                    "tracer", "a task of each step failed and ends", {"error": type_name(problem)}
                )
            if is_done:
                self._step_tasks.remove(task)


def _unknown() -> None:
    return None
