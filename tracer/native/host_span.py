"""Spans that ``with`` enters and leaves, timed by the host clock.

`ReadySpan` is the reusable span of one name in one thread, and the hottest Python code of the
project: ``span.c`` does the same, and `tracer.native.choice` takes it if it was compiled. Its
``__enter__`` and ``__exit__`` are closures behind a `staticmethod`, in a class of their own, so
that ``with`` finds them without making bound methods. docs/decisions/0050-span-cost.md lists what
each of these measures saves.

`HostSpan` is the plain form: for spans that are rare, that have a place of their own, or that
overlap with a span of the same name.
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
SpanFunction = TypeVar("SpanFunction", bound=Callable[..., object])


class SpanContext(Protocol):
    """A span as ``with`` uses it."""

    def __enter__(self) -> object:
        """Begin the span."""

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End the span; an exception passes on unchanged."""


class CancellableSpan(SpanContext, Protocol):
    """A span that can be left without being recorded."""

    def cancel(self) -> None:
        """Leave the span without recording it; call this at most once."""


class ComputeState(Protocol):
    """The compute state of one thread."""

    in_span: bool
    """Whether the thread is in a compute span."""


class HasStepNumber(Protocol):
    """An object that knows the current step."""

    step_number: int


# Four arguments: `ExitStack` passes the span itself, then what ``with`` passes.
def do_nothing(_a: object = None, _b: object = None, _c: object = None, _d: object = None) -> None:
    """Accept the arguments of ``__enter__`` or ``__exit__`` and do nothing."""


class Finder:
    """Lookup of each thread's ready spans by name."""

    __slots__ = ("_threads",)

    def __init__(self, threads: Any) -> None:  # noqa: ANN401 - a `threading.local`
        """Make a finder.

        Args:
            threads: `tracer.record.lane.Lanes.threads`.
        """
        self._threads = threads

    def find(self, name: str) -> SpanContext | None:
        """Return the calling thread's span of a name; None if there is none or it is in use."""
        try:
            ready: ReadySpan = self._threads.ready[name]
        except Exception:  # noqa: BLE001 - a new name or thread, or no name at all
            return None
        return ready.span if ready.start_ns is None else None

    def forget(self) -> None:
        """Drop what is cached of a thread that ends. Nothing is cached here."""


def fast_span(plain: SpanFunction, disabled: SpanContext, text: str) -> SpanFunction:
    """Return `tracer.span`; the compiled form finds a span by its name alone without Python code.

    Args:
        plain: The Python function, which handles all arguments.
        disabled: The span that is returned while nothing is recorded.
        text: Signature and help, in the form of a compiled function's ``__doc__``.
    """
    return plain


def set_finder(finder: Finder | None) -> None:
    """Set the finder that the compiled `fast_span` uses; None if nothing is recorded."""


class ReadySpan:
    """A reusable span of one name in one thread, entered at most once at a time."""

    __slots__ = ("enter", "head", "leave", "place", "span", "start_ns")

    span: SpanContext
    """The object for ``with``."""

    def __init__(self, lane: LaneState, head: int) -> None:
        self.head = head
        self.place = lane.place
        self.start_ns: int | None = None
        """Start, monotonic; None while the span is not in use."""

        self.enter, self.leave = _make_closures(self, lane, head)


def make_context(enter: Enter, leave: Leave) -> SpanContext:
    """Return an object that ``with`` enters and leaves by two functions, without bound methods."""
    # A class for this object alone: ``with`` looks the methods up on the class.
    members = {"__slots__": (), "__enter__": staticmethod(enter), "__exit__": staticmethod(leave)}
    span: SpanContext = type("Span", (), members)()
    return span


def _make_closures(  # a branch costs less than a call
    ready: ReadySpan, lane: LaneState, head: int
) -> tuple[Enter, Leave]:
    pool = lane.pool
    head_bytes = head.to_bytes(8, "little")

    # Defaults, because `ExitStack` passes the span itself first and ``with`` does not.
    def enter(_: object = None) -> None:
        try:
            ready.place = lane.place
            ready.start_ns = monotonic_ns()
            lane.depth += 1
        except Exception as problem:  # noqa: BLE001 - promise 1: harmless
            lane.swallow(problem)
            lane.depth += 1  # `leave` subtracts one

    def leave(exc_type: object, exc: object = None, _t: object = None, _m: object = None) -> None:
        # First of all: after any call a signal handler may raise, and the span is over then.
        start_ns = ready.start_ns
        ready.start_ns = None
        lane.depth = depth = lane.depth - 1
        try:
            if depth >> 16:
                depth = lane.clip_depth(depth)
            if exc_type is None and start_ns is not None:
                end_ns = monotonic_ns()
                segment = lane.segment
                for offset in segment.rows:  # claims a row atomically: `for` calls C code once
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
                    # In line and not by a call: a dropped span must cost no more than a kept one.
                    drops = pool.drops
                    for num in drops.numbers:
                        pack_word(drops.buffer, drops.offset, num)
                        return
            is_error = exc_type is not None and (exc_type is not ready.span or exc is not None)
            lane.leave_slowly(ready, start_ns, is_error=is_error)
        except Exception as problem:  # noqa: BLE001 - promise 1: harmless
            if not {"offset", "num"} & locals().keys() and not is_tracer_error(problem):
                # A signal handler raised before the row was claimed or the drop counted.
                lane.leave_slowly(ready, start_ns, is_error=True)
            lane.swallow(problem)

    return enter, leave


class HostSpan:
    """A span of a thread, timed by the host clock, that inherits its lane's place."""

    __slots__ = ("head", "lane", "opened", "place", "start_ns")

    place: bytes

    def __init__(self, lane: LaneState, head: int) -> None:
        """Make a span.

        Args:
            head: `tracer.record.lane.head_word` of the record.
        """
        self.lane = lane
        self.head = head
        self.opened: OpenEntry | None = None
        self.start_ns: int | None = None

    def __enter__(self) -> HostSpan:
        lane = self.lane
        try:
            self.start_ns = self.opened = None  # it may be entered again
            self.place = lane.place
            start_ns = monotonic_ns()
            if not lane.depth:
                self.opened = lane.open(start_ns, self.head)
            # Last, and without a call: if a signal handler raises above, no `__exit__` follows.
            lane.depth += 1
            self.start_ns = start_ns
        except Exception as problem:  # noqa: BLE001 - promise 1: harmless
            lane.swallow(problem)
        return self

    def __exit__(self, exc_type: object, *_: object) -> None:
        lane, start_ns = self.lane, self.start_ns
        if start_ns is None:  # entering failed, which was counted
            return
        try:
            duration_ns = monotonic_ns() - start_ns
            lane.depth = depth = lane.depth - 1
            head = self.head if exc_type is None else self.head | ERROR_HEAD
            try:
                lane.write(head, start_ns, duration_ns, self.place, start_ns, depth)
            finally:  # also if a signal handler of the job raises
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
    """A span with a micro-batch or chunk of its own."""

    __slots__ = ("chunk", "microbatch")

    def __init__(self, lane: LaneState, head: int, microbatch: int, chunk: int) -> None:
        """Make a span; ``microbatch`` and ``chunk`` inherit the lane's if they are `NONE`."""
        super().__init__(lane, head)
        self.microbatch = microbatch
        self.chunk = chunk

    def __enter__(self) -> PlacedSpan:
        super().__enter__()
        try:
            self.place = self.lane.place_of(self.microbatch, self.chunk)
        except Exception as problem:  # noqa: BLE001 - promise 1: harmless
            self.lane.swallow(problem)
        return self


class ComputeSpan(HostSpan):
    """The span of a forward or backward in Python.

    It sets its lane's place before it starts, so that it has that place itself.
    """

    __slots__ = ("chunk", "microbatch", "recorder", "state")

    def __init__(
        self,
        state: ComputeState,
        recorder: HasStepNumber,
        lane: LaneState,
        head: int,
        microbatch: int,
        chunk: int,
        /,
    ) -> None:
        """Make a span.

        Args:
            state: Its ``in_span`` is set while the span lasts.
            recorder: Gives the step of the place after the span.
            head: `tracer.record.lane.head_word` of the record.
        """
        super().__init__(lane, head)
        self.state = state
        self.recorder = recorder
        self.microbatch = microbatch
        self.chunk = chunk

    def __enter__(self) -> ComputeSpan:
        lane = self.lane
        try:
            lane.set_place(lane.step, self.microbatch, self.chunk)
            super().__enter__()
            self.state.in_span = True
        except Exception as problem:  # noqa: BLE001 - promise 1: harmless
            lane.swallow(problem)
        return self

    def __exit__(self, exc_type: object, *_: object) -> None:
        self.state.in_span = False
        try:
            super().__exit__(exc_type)
        finally:  # also if a signal handler of the job raises
            self._leave_place()

    def _leave_place(self) -> None:
        """Set the lane's place to the step, without micro-batch and chunk."""
        try:
            self.lane.set_place(self.recorder.step_number, NONE, NONE)
        except Exception as problem:  # noqa: BLE001 - promise 1: harmless
            self.lane.swallow(problem)
