"""The tracer that records: lanes by thread, steps, events, goodbye."""

from __future__ import annotations

import contextlib
import json
import time
from time import monotonic_ns
from typing import TYPE_CHECKING

from ..errors import print_notice
from ..native.host_span import HostSpan, UnrecordedSpan, host_span, placed_span
from ..span import KIND_CODES, NONE, SpanFlag, SpanKind
from ..spool import (
    EVENTS_FILE,
    GROUPS_FILE,
    NAME_BYTES,
    NAME_CAPACITY,
    DropReason,
    RecordType,
    SpoolIdentity,
)
from .background_thread import BackgroundThread
from .device_timer import NO_DEVICE_TIMING
from .exit_record import ended, failed, reserve_exit, write_exit
from .interface import NOOP_SPAN
from .lane import Lanes, OpenSpans, head_word
from .plain_values import Arguments, plain_copy, plain_text, type_name
from .process_file import ProcessFile
from .sampling import SamplingControl, Settings
from .segment_pool import SegmentPool, SpoolLimits
from .steps import MissingKinds, StepRecords

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from ..native.host_span import SpanContext
    from .control import Handler
    from .device_timer import DeviceTimer
    from .lane import Lane


class Recorder:
    """Records spans of this process into one spool folder."""

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
        self._head_words = HeadWords(self._process, self._arguments)
        self._step_records = StepRecords(self._arguments)
        self.step_start_ns: int | None = None
        """When the step that runs began, monotonic; None before the first."""

        self.missing_kinds = MissingKinds()
        """Of which kinds spans are missing for an error of ours."""

        self._failure: dict[str, object] | None = None
        self._closers: list[Callable[[], None]] = []
        self._attempts: list[Callable[[], bool]] = []
        self._closed = False
        self.sampling_control = SamplingControl(
            folder,
            settings or Settings(),
            tell=lambda text, data: self.event("control", text, data),
            on_bad=lambda: self.drop(DropReason.BAD_ARGUMENT),
        )
        self.sampling = self.sampling_control.sampling
        self.count_tokens: Callable[[], int | None] = _unknown
        """Tells the tokens of the step that ends, where the job does not."""

        self.job_reports_microbatches = False
        """Whether the job itself tells what its micro-batches hold."""

        self.device_timing: DeviceTimer = NO_DEVICE_TIMING
        """Times work on the device, where it has one."""

        self._chores: list[Callable[[], None]] = []
        self.lanes = Lanes(
            process=self._process,
            pool=self._pool,
            sampling=self.sampling,
            wake=self._background.wake,
        )
        self._open_spans = OpenSpans(self.lanes)
        self.resolver_lag_ns: int | None = None
        """Age of the oldest device span not yet resolved; None: no device is timed."""

        self._own_cpu_ns = 0
        self.comm_lane = self.lanes.add("comm")

    def start(self) -> None:
        """Make the first segments ready and start the background thread."""
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
        """Return a span to be entered with ``with``."""
        head = self.head(name, kind)
        if self.sampling.left_out >> ((head >> 8) & 0xFF) & 1:
            return NOOP_SPAN
        if microbatch is NONE and chunk is NONE:
            is_plain = type(name) is str and kind is SpanKind.HOST and len(name) < NAME_BYTES
            return self.lanes.span(head, name if is_plain and name else None)
        return placed_span(self.lane(), head, self.index(microbatch), self.index(chunk))

    def host_span(self, name: str, kind: SpanKind) -> HostSpan:
        """Return a span of ours, to be entered and left by hand; an error of ours is counted."""
        try:
            if self.is_recorded(kind):
                return host_span(self.lanes.current(), self.head(name, kind))
        except Exception as problem:  # noqa: BLE001 - promise 1: harmless
            self.swallow(problem)
        return UnrecordedSpan()

    def is_recorded(self, kind: SpanKind) -> bool:
        """Return whether spans of ``kind`` that begin now are recorded.

        What is not kept by request (level, sampling, recording off) is not
        counted as dropped. A capture need not ask: `Lane.append` passes over
        such spans. It may, where that saves it work; but operations must be
        numbered all the same, or members of a group would disagree on ``seq``.
        """
        return not self.sampling.left_out >> KIND_CODES[kind] & 1

    def on_control(self, handler: Handler) -> None:
        """Call ``handler`` on the background thread with what the control file says.

        Soon after this call where it says anything, and again whenever it
        changes; the whole object each time, keys of others included, ``{}``
        once the file is gone. An exception of the handler is counted and told
        as an event.
        """
        self.sampling_control.control.subscribe(handler)

    def append_span(self, name: str, kind: SpanKind, start_ns: int, end_ns: int) -> None:
        """Write a span of the calling thread that is already over."""
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
        """Return the first word of a host span's record: kind, flag and interned name."""
        return self._head_words.of(name, kind)

    def has_begun(self, kind: SpanKind) -> bool:
        """Return whether a host span of ``kind`` was ever begun."""
        return self._head_words.has(kind)

    def name_id(self, name: str) -> int:
        """Return the id of a name of ours, interned on first sight."""
        return self._process.name_id(name)

    def lane(self) -> Lane:
        """Return the calling thread's lane."""
        return self.lanes.current()

    def drop(self, reason: DropReason) -> None:
        """Count a lost record."""
        self._process.drop(reason)

    def swallow(self, problem: Exception) -> None:
        """Count an error of the tracer's own; hand on one that is the job's.

        Raises:
            Exception: ``problem`` itself, where a signal handler of the job raised it.
        """
        self.comm_lane.swallow(problem)

    # -- steps ---------------------------------------------------------------

    def begin_steps(self, first_step: int = 0) -> None:
        """Say that step ``first_step`` begins now."""
        self._begin_step(self._arguments.step(first_step), monotonic_ns())

    def step(self, tokens: int | None = None, loss: object = None) -> None:
        """Say that the step ends now and the next begins."""
        now_ns = monotonic_ns()
        start_ns = self.step_start_ns
        if start_ns is None:
            self._begin_step(0, now_ns)
            return
        counted = self.count_tokens()
        self._step_records.end_step(
            self.lanes.current(),
            self.step_number,
            start_ns=start_ns,
            end_ns=now_ns,
            tokens=counted if tokens is None else tokens,
            loss=loss,
            left_out=self.sampling.left_out | self.missing_kinds.end_step(),
        )
        self._begin_step(self.step_number + 1, now_ns)

    def microbatch(
        self, index: int, tokens: int | None = None, sum_squared_lengths: int | None = None
    ) -> None:
        """Note what micro-batch ``index`` of this step holds."""
        self.job_reports_microbatches = True
        self.append_microbatch(index, tokens, sum_squared_lengths)

    def append_microbatch(
        self, index: int, tokens: int | None, sum_squared_lengths: int | None
    ) -> None:
        """Note what a capture found micro-batch ``index`` of this step to hold."""
        self._step_records.note_microbatch(
            self.lane(),
            self.step_number,
            index=index,
            tokens=tokens,
            sum_squared_lengths=sum_squared_lengths,
        )

    # -- what is not a span --------------------------------------------------

    def event(self, kind: str, text: str, data: dict[str, object]) -> None:
        """Note something that happened at this moment; an error of ours is counted."""
        try:
            line = {
                "at_ns": time.time_ns(),
                "kind": self._arguments.name(kind),
                "text": plain_text(text) or f"<{type_name(text)}>",
                "data": data,
            }
            self.append_line(EVENTS_FILE, line)
        except Exception as problem:  # noqa: BLE001 - captures tell of their own errors here
            self.swallow(problem)

    def add_group(
        self, group_id: int, *, kind: SpanKind, name: str, members: Sequence[int]
    ) -> None:
        """Note a communication group, once."""
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
        """Note that ``exc`` ends this process."""
        self._failure = failed(exc, time.time_ns())
        write_exit(self.folder, self._failure)

    # -- end -----------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether goodbye was said."""
        return self._closed

    def on_shutdown(self, closer: Callable[[], None]) -> None:
        """Call ``closer`` at shutdown, the last registered first."""
        self._closers.append(closer)

    def on_tick(self, chore: Callable[[], None]) -> None:
        """Call ``chore`` on the background thread about every second.

        An exception of it is counted. File work is allowed; long work delays
        the segments that the training writes to.
        """
        self._chores.append(chore)

    def wake_within(self, within_s: float) -> None:
        """Ask for the background thread's next turn to begin within ``within_s``."""
        self._background.wake_within(within_s)

    def on_step_begin(self, attempt: Callable[[], bool]) -> None:
        """Call ``attempt`` when a step begins, until it returns True.

        One that raises is not called again: its error is counted, told as an
        event, and kept from the job.
        """
        self._attempts.append(attempt)

    def shutdown(self) -> None:
        """Say goodbye: seal what is written and record the end. A second call does nothing."""
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
            write_exit(self.folder, ended(time.time_ns()))
        # Captures and hooks that cannot be taken back hold this recorder for good.
        self._process.detach()

    def abandon(self) -> None:
        """Let go of every file without writing: this process is a forked child."""
        self._closed = True
        self.device_timing = NO_DEVICE_TIMING  # CUDA cannot be used after a fork
        self._closers.clear()
        self._pool.abandon()
        self._process.detach()
        for lane in self.lanes:
            lane.detach()

    # -- inside --------------------------------------------------------------

    def _work(self) -> None:
        """What the background thread does at each turn."""
        self._pool.unmap_retired()  # before the next is made: it takes as much memory again
        if self._pool.needs_segments() and not self._closed:
            self._pool.replenish()
        self._open_spans.refresh()
        self.sampling_control.control.poll()
        for chore in list(self._chores):
            try:
                chore()
            except Exception:  # noqa: BLE001 - promise 1: harmless
                self.drop(DropReason.INTERNAL_ERROR)
        self._own_cpu_ns = time.thread_time_ns()
        self._publish_counts()

    def _publish_counts(self) -> None:
        """Write what was recorded and what it cost into the process file's header."""
        self._process.publish_drops()
        # Drops first: what is claimed meanwhile then counts as produced and stored.
        num_dropped = self._process.num_dropped()
        num_written = sum(lane.num_claimed() for lane in self.lanes)
        self._process.write_counts(
            num_produced=num_written + num_dropped,
            num_written=num_written,
            own_cpu_ns=self._own_cpu_ns,
            resolver_lag_ns=self.resolver_lag_ns,
        )

    def _report_full(self, why: str) -> None:
        self.event("tracer", "no room for more records: dropping and counting them", {"why": why})
        print_notice(f"rank {self.identity.rank} drops spans, and counts them: {why}")

    def _begin_step(self, step: int, now_ns: int) -> None:
        self.step_number = step
        self.step_start_ns = now_ns
        self.sampling_control.begin_step(step)
        self.lanes.begin_step(step)
        for attempt in list(self._attempts):
            try:
                is_over = attempt()
            except Exception as problem:  # noqa: BLE001 - promise 1: harmless
                is_over = True
                self._give_up(problem)
            if is_over:
                self._attempts.remove(attempt)

    def _give_up(self, problem: Exception) -> None:
        """Tell that a chore of each step has raised; hand on what is the job's."""
        self.swallow(problem)
        self.event("tracer", "a chore of each step was given up", {"error": type_name(problem)})

    def index(self, value: object) -> int:
        """Return ``value`` where it can be a micro-batch or chunk, else `NONE`, counted."""
        return self._arguments.index(value)


class HeadWords:
    """Makes each word once."""

    __slots__ = ("_arguments", "_process", "_words")

    def __init__(self, process: ProcessFile, arguments: Arguments) -> None:
        self._process = process
        self._arguments = arguments
        self._words: dict[tuple[str, SpanKind], int] = {}

    def of(self, name: object, kind: object) -> int:
        """Return `tracer.record.lane.head_word` of a host span; what cannot be used is replaced."""
        if type(name) is str and type(kind) is SpanKind:
            known = self._words.get((name, kind))
            if known is not None:
                return known
        if type(kind) is not SpanKind:
            self._process.drop(DropReason.BAD_ARGUMENT)
            kind = SpanKind.OTHER
        head = head_word(
            RecordType.SPAN,
            kind=KIND_CODES[kind],
            flags=int(SpanFlag.HOST_CLOCK),
            name_id=self._process.name_id(self._arguments.name(name)),
        )
        # Names of the caller's choosing: without a bound this would grow for ever.
        is_bounded = len(self._words) < NAME_CAPACITY
        if type(name) is str and 0 < len(name) < NAME_BYTES and is_bounded:
            self._words[name, kind] = head
        return head

    def has(self, kind: SpanKind) -> bool:
        """Return whether a span of ``kind`` was ever begun."""
        return any(known is kind for _, known in self._words)


def _unknown() -> None:
    return None
