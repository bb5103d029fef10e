"""The tracer of this process, and the functions through which a job speaks to it."""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING, ParamSpec, TypeVar, overload

from tracer.host_span import HostSpan
from tracer.noop import NOOP_SPAN, NOOP_TRACER
from tracer.recorder import Recorder, ThreadState
from tracer.span import NONE, SpanKind

if TYPE_CHECKING:
    from collections.abc import Callable

    from tracer.protocol import SpanContext, Tracer

P = ParamSpec("P")
R = TypeVar("R")

HOST = SpanKind.HOST

_tracer: Tracer = NOOP_TRACER
_make_span = _tracer.span
_heads: dict[str, int] | None = None
_threads = ThreadState()


def current_tracer() -> Tracer:
    """Return the installed tracer, `NOOP_TRACER` where there is none."""
    return _tracer


def set_current(tracer: Tracer) -> None:
    """Make ``tracer`` the one that the functions of this module speak to."""
    global _tracer, _make_span, _heads, _threads  # noqa: PLW0603 - one tracer a process
    _heads = None
    if isinstance(tracer, Recorder):
        tracer.on_keeping_changed = _keep_or_not
        _heads = tracer.host_heads if tracer.keeps(HOST) else None
    _threads = tracer.threads if isinstance(tracer, Recorder) else ThreadState()
    _make_span = tracer.span
    _tracer = tracer


def span(
    name: str, *, kind: SpanKind = SpanKind.HOST, microbatch: int = NONE, chunk: int = NONE
) -> SpanContext:
    """Return a span of this thread: it begins when ``with`` is entered and ends when it is left.

    Args:
        name: What the table calls it; kept to 254 bytes of UTF-8, and 4096 names a process.
        kind: What the track is doing.
        microbatch: Index in the step; `NONE`: that of the enclosing captured span.
        chunk: Model chunk on this rank; `NONE` likewise.
    """
    # What `Recorder.span` does, without its calls, for the common case: a name seen
    # before, in a thread seen before. `is` because a foreign `==` may do anything.
    if kind is HOST:
        if _heads is None:
            return NOOP_SPAN
        if microbatch is not NONE or chunk is not NONE or type(name) is not str:
            return _make_span(name, kind=kind, microbatch=microbatch, chunk=chunk)
        made = HostSpan()
        try:
            made.head = _heads[name]
            made.lane = _threads.lane
        except (KeyError, AttributeError):
            return _make_span(name)
        return made
    return _make_span(name, kind=kind, microbatch=microbatch, chunk=chunk)


@overload
def traced(target: Callable[P, R]) -> Callable[P, R]: ...
@overload
def traced(target: str) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
def traced(
    target: Callable[P, R] | str,
) -> Callable[P, R] | Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a span of every call of a function, named by ``target`` or by the function."""
    if isinstance(target, str):
        return functools.partial(_traced, target)
    return _traced(getattr(target, "__qualname__", "traced"), target)


def begin_steps(first_step: int = 0) -> None:
    """Say that step ``first_step`` begins now; what came before belongs to no step."""
    _tracer.begin_steps(first_step)


def step(tokens: int | None = None, loss: object = None) -> None:
    """Say that the step ends now and the next begins.

    Without `begin_steps` the first call begins step 0 and ends none.

    Args:
        tokens: Tokens that this rank's data position contributed to the step.
        loss: A number, or a tensor on the CPU; one on a device is not read,
            because reading it would synchronise the job.
    """
    _tracer.step(tokens, loss)


def microbatch(
    index: int, tokens: int | None = None, sum_squared_lengths: int | None = None
) -> None:
    """Note what micro-batch ``index`` of this step holds.

    Args:
        index: Position in the step, from 0.
        tokens: Tokens in it.
        sum_squared_lengths: Sum of the squared lengths of its sequences, in tokens squared.
    """
    _tracer.microbatch(index, tokens, sum_squared_lengths)


def event(kind: str, text: str, **data: object) -> None:
    """Note something that happened at this moment: a checkpoint, a restart, a skipped batch."""
    _tracer.event(kind, text, data)


def record_exception(exc: BaseException) -> None:
    """Note that ``exc`` ends this process.

    Needed only where something catches the exception before the interpreter
    sees it and then ends the process, as `torch.multiprocessing.spawn` does.
    """
    _tracer.record_exception(exc)


def shutdown() -> None:
    """Say goodbye: seal what is written and record the end. A second call does nothing."""
    tracer = _tracer
    set_current(NOOP_TRACER)
    tracer.shutdown()


def _keep_or_not() -> None:
    """Follow the recorder when it begins or ceases to keep host spans."""
    global _heads  # noqa: PLW0603 - one tracer a process
    tracer = _tracer
    if isinstance(tracer, Recorder):
        _heads = tracer.host_heads if tracer.keeps(HOST) else None


def _traced(name: str, function: Callable[P, R]) -> Callable[P, R]:
    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with span(name):
            return function(*args, **kwargs)

    return call


def _forget_in_child() -> None:
    tracer = _tracer
    set_current(NOOP_TRACER)
    if isinstance(tracer, Recorder):
        tracer.abandon()


os.register_at_fork(after_in_child=_forget_in_child)
