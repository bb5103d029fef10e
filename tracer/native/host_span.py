"""The span that ``with`` enters: the hottest code of the project.

`ReadySpan` is the way that a span takes over and over: one name, one thread,
made once and used again whenever it is not in use. Its ``__enter__`` and
``__exit__`` are closures behind a `staticmethod`, in a class of its own, so
that ``with`` finds them without making bound methods; docs/decisions/0050-host-span.md
tells what each of these is worth. `HostSpan` is the same in the plain way, for
spans that are rare, place themselves, or overlap with one of their own name.
`tracer.native.choice` chooses between this module and `tracer/native/_hot.c`.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from ..errors import is_tracer_error
from ..span import NONE
from .lane_state import ERROR_HEAD, pack_core, pack_word

if TYPE_CHECKING:
    from types import TracebackType

    from .lane_state import LaneState, OpenEntry

Enter = Callable[..., None]
Leave = Callable[..., None]
Span = TypeVar("Span", bound=Callable[..., object])


class Enterable(Protocol):
    """What `ReadySpan.span` is."""

    def __enter__(self) -> object: ...

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...


class Inside(Protocol):
    """What a thread is at."""

    in_span: bool
    """Whether it is in a compute span."""


class StepCounter(Protocol):
    """Knows the step that runs."""

    @property
    def step_number(self) -> int:
        """The step that runs."""
        ...


# What ``with`` passes, or `ExitStack`, which passes the span itself first.
def do_nothing(_a: object = None, _b: object = None, _c: object = None, _d: object = None) -> None:
    """Take what a span is entered or left with, and do nothing."""


class Finder:
    """The ready spans of each thread by name."""

    __slots__ = ("_threads",)

    def __init__(self, threads: Any) -> None:  # noqa: ANN401 - a `threading.local`
        """Prepare.

        Args:
            threads: `tracer.record.lane.Lanes.threads`.
        """
        self._threads = threads

    def find(self, name: str) -> Enterable | None:
        """Return the calling thread's span of a name; None: there is none, or it is in use."""
        try:
            ready: ReadySpan = self._threads.ready[name]
        except Exception:  # noqa: BLE001 - a new name or thread, or no name at all
            return None
        return ready.span if ready.start_ns is None else None

    def forget(self) -> None:
        """Forget what was found last: its thread ends."""


def fast_span(plain: Span, unrecorded: Enterable, text: str) -> Span:
    """Return `tracer.span` as it is called: without a line of Python, were it compiled.

    Args:
        plain: The function that knows all arguments.
        unrecorded: What it returns where nobody records.
        text: Its signature and help, as a compiled function tells them.
    """
    return plain


def set_finder(finder: Finder | None) -> None:
    """Say whose spans `fast_span` finds from now on; None: nobody's."""


class ReadySpan:
    """A span of one name in one thread, ready to be entered; entered at most once at a time."""

    __slots__ = ("enter", "head", "leave", "place", "span", "start_ns")

    span: Enterable
    """What ``with`` is given."""

    def __init__(self, lane: LaneState, head: int) -> None:
        self.head = head
        self.place = lane.place
        self.start_ns: int | None = None
        """Begin, monotonic; None while it is not in use."""

        self.enter, self.leave = _closures(self, lane, head)


def enterable(enter: Enter, leave: Leave) -> Enterable:
    """Return what ``with`` enters and leaves by these two, without making bound methods."""
    # Its class is its own: ``with`` looks there, not at it.
    members = {"__slots__": (), "__enter__": staticmethod(enter), "__exit__": staticmethod(leave)}
    span: Enterable = type("Span", (), members)()
    return span


def _closures(  # noqa: C901 - a branch costs less than a call
    ready: ReadySpan, lane: LaneState, head: int
) -> tuple[Enter, Leave]:
    pool = lane.pool
    head_bytes = head.to_bytes(8, "little")

    # `ExitStack` passes the span itself first, ``with`` does not: hence the defaults.
    def enter(_: object = None) -> None:
        try:
            ready.place = lane.place
            ready.start_ns = monotonic_ns()
            lane.depth += 1
        except Exception as problem:  # noqa: BLE001 - promise 1: harmless
            lane.swallow(problem)
            lane.depth += 1  # as `leave` will take one off

    def leave(exc_type: object, exc: object = None, _t: object = None, _m: object = None) -> None:
        # Before any call, after which a signal handler may raise: the span is over.
        start_ns = ready.start_ns
        ready.start_ns = None
        lane.depth = depth = lane.depth - 1
        try:
            if depth >> 16:
                depth = lane.clip_depth(depth)
            if exc_type is None and start_ns is not None:
                end_ns = monotonic_ns()
                segment = lane.segment
                for offset in segment.rows:  # a claim in one C call, without making one
                    pack_core(
                        segment.buffer,
                        offset,
                        head_bytes,
                        ready.place,
                        start_ns,
                        end_ns,
                        depth,
                        offset,  # the commit word, written last
                    )
                    return
                if not pool.spares:
                    # Here, and not by a call: what is dropped must cost no more than what is kept.
                    drops = pool.drops
                    for num in drops.numbers:
                        pack_word(drops.buffer, drops.offset, num)
                        return
            is_error = exc_type is not None and (exc_type is not ready.span or exc is not None)
            lane.leave_slowly(ready, start_ns, is_error=is_error)
        except Exception as problem:  # noqa: BLE001 - promise 1: harmless
            if not {"offset", "num"} & locals().keys() and not is_tracer_error(problem):
                # The handler of a signal raised before the row was claimed or the drop counted.
                lane.leave_slowly(ready, start_ns, is_error=True)
            lane.swallow(problem)

    return enter, leave


class HostSpan:
    """A span of a thread, timed by the host clock. Whoever makes it sets ``lane`` and ``head``."""

    __slots__ = ("head", "lane", "opened", "place", "start_ns")

    lane: LaneState
    head: int
    place: bytes
    opened: OpenEntry | None
    start_ns: int | None

    def __enter__(self) -> HostSpan:
        lane = self.lane
        try:
            self.start_ns = self.opened = None
            self.place = lane.place
            start_ns = monotonic_ns()
            if not lane.depth:
                self.opened = lane.open(start_ns, self.head)
            # Last, and without a call: no `__exit__` follows what a handler raises above.
            lane.depth += 1
            self.start_ns = start_ns
        except Exception as problem:  # noqa: BLE001 - promise 1: harmless
            lane.swallow(problem)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        lane, start_ns = self.lane, self.start_ns
        if start_ns is None:  # an error of ours, counted then
            return
        try:
            duration_ns = monotonic_ns() - start_ns
            lane.depth = depth = lane.depth - 1
            head = self.head if exc_type is None else self.head | ERROR_HEAD
            try:
                lane.write(head, start_ns, duration_ns, self.place, start_ns, depth)
            finally:  # also where a handler of the job has raised
                if self.opened is not None:
                    self.opened.close()
        except Exception as problem:  # noqa: BLE001 - promise 1: harmless
            lane.swallow(problem)

    def cancel(self) -> None:
        """Leave the span without recording it."""
        if self.start_ns is not None:
            self.lane.depth -= 1
        if self.opened is not None:
            self.opened.close()


class PlacedSpan(HostSpan):
    """A span that says itself which micro-batch and chunk it belongs to."""

    __slots__ = ("chunk", "microbatch")

    microbatch: int
    chunk: int

    def __enter__(self) -> PlacedSpan:
        super().__enter__()
        try:
            self.place = self.lane.place_of(self.microbatch, self.chunk)
        except Exception as problem:  # noqa: BLE001 - promise 1: harmless
            self.lane.swallow(problem)
        return self


class UnrecordedSpan(HostSpan):
    """A span that is not recorded: its kind is left out of this step."""

    __slots__ = ()

    def __enter__(self) -> UnrecordedSpan:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        return None

    def cancel(self) -> None:
        """Do nothing."""


class ComputeSpan(HostSpan):
    """A span that also sets its lane's place, before it begins: so it has it."""

    __slots__ = ("chunk", "inside", "microbatch", "recorder")

    inside: Inside
    recorder: StepCounter
    microbatch: int
    chunk: int

    def __enter__(self) -> ComputeSpan:
        lane = self.lane
        try:
            lane.set_place(lane.step, self.microbatch, self.chunk)
            super().__enter__()
            self.inside.in_span = True
        except Exception as problem:  # noqa: BLE001 - promise 1: harmless
            lane.swallow(problem)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.inside.in_span = False
        try:
            super().__exit__(exc_type, exc, traceback)
        finally:  # also where a handler of the job has raised
            self._leave_place()

    def cancel(self) -> None:
        """Leave the span without recording it."""
        self.inside.in_span = False
        try:
            super().cancel()
        except Exception as problem:  # noqa: BLE001 - promise 1: harmless
            self.lane.swallow(problem)
        self._leave_place()

    def _leave_place(self) -> None:
        """Let what follows belong to the step alone."""
        try:
            self.lane.set_place(self.recorder.step_number, NONE, NONE)
        except Exception as problem:  # noqa: BLE001 - promise 1: harmless
            self.lane.swallow(problem)


def compute_span(
    inside: Inside,
    recorder: StepCounter,
    lane: LaneState,
    head: int,
    microbatch: int,
    chunk: int,
    /,
) -> ComputeSpan:
    """Return a span that also sets its lane's place.

    Args:
        inside: Told while it lasts.
        recorder: Whose step goes on once it is over.
        lane: The calling thread's.
        head: `tracer.record.lane.head_word` of its record.
        microbatch: Which it belongs to, or `NONE`.
        chunk: Likewise.
    """
    span = ComputeSpan()
    span.inside, span.recorder, span.lane = inside, recorder, lane
    span.head, span.microbatch, span.chunk = head, microbatch, chunk
    span.opened = span.start_ns = None
    return span


def host_span(lane: LaneState, head: int) -> HostSpan:
    """Return a span that inherits its lane's place.

    Args:
        lane: The calling thread's.
        head: `tracer.record.lane.head_word` of its record.
    """
    span = HostSpan()
    span.lane = lane
    span.head = head
    return span


def placed_span(lane: LaneState, head: int, microbatch: int, chunk: int) -> PlacedSpan:
    """Return a span of a micro-batch or chunk of its own; `NONE` inherits the lane's."""
    span = PlacedSpan()
    span.lane = lane
    span.head = head
    span.microbatch = microbatch
    span.chunk = chunk
    return span
