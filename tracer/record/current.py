"""The tracer of this process, and the functions through which a job speaks to it."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
from types import FunctionType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast, overload

from ..native.choice import accelerated, set_finder
from ..span import NONE, SpanKind
from .interface import NOOP_SPAN, NOOP_TRACER
from .plain_values import plain_text
from .recorder import Recorder

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..native.host_span import SpanContext
    from .interface import Tracer

P = ParamSpec("P")
R = TypeVar("R")

UNNAMED = "traced"

HOST = SpanKind.HOST

_tracer: Tracer = NOOP_TRACER
_make_span: Callable[..., SpanContext] | None = None
"""Makes any span; None where there is no tracer."""

_find: Callable[[str], SpanContext | None] | None = None
"""`tracer.record.lane.Lanes.finder`; None where plain host spans are not recorded."""


def current_tracer() -> Tracer:
    """Return the installed tracer, `NOOP_TRACER` where there is none."""
    return _tracer


def set_current(tracer: Tracer) -> None:
    """Make ``tracer`` the one that the functions of this module speak to."""
    global _tracer, _make_span  # noqa: PLW0603 - one tracer a process
    _make_span = None if tracer is NOOP_TRACER else tracer.span
    _tracer = tracer
    if isinstance(tracer, Recorder):
        tracer.sampling_control.on_kinds_changed = _keep_or_not
    _keep_or_not()


@accelerated(NOOP_SPAN)
def span(
    name: str, kind: SpanKind | None = None, microbatch: int | None = None, chunk: int | None = None
) -> SpanContext:
    """Return a span of this thread: it begins when ``with`` is entered and ends when it is left.

    Args:
        name: What the table calls it; kept to 254 bytes of UTF-8, and 4096 names a process.
        kind: What the track is doing; None: `SpanKind.HOST`.
        microbatch: Index in the step; None: that of the enclosing captured span.
        chunk: Model chunk on this rank; None likewise.
    """
    # Arguments that may come by position and are None by default: CPython 3.11 calls
    # such a function 30 ns faster than one with keyword-only ones.
    if _make_span is None:
        return NOOP_SPAN
    if kind is None and microbatch is None and chunk is None:
        find = _find  # another thread may turn recording off meanwhile
        if find is None:
            return NOOP_SPAN
        ready = find(name)
        if ready is not None:
            return ready
    try:
        return _make_span(
            name,
            kind=HOST if kind is None else kind,
            microbatch=NONE if microbatch is None else microbatch,
            chunk=NONE if chunk is None else chunk,
        )
    except Exception as problem:  # noqa: BLE001 - promise 1: harmless
        _swallow(problem)
        return NOOP_SPAN


def begin_steps(first_step: int = 0) -> None:
    """Say that step ``first_step`` begins now; what came before belongs to no step."""
    try:
        _tracer.begin_steps(first_step)
    except Exception as problem:  # noqa: BLE001 - promise 1: harmless
        _swallow(problem)


def step(tokens: int | None = None, loss: object = None) -> None:
    """Say that the step ends now and the next begins.

    Without `begin_steps` the first call begins step 0 and ends none.

    Args:
        tokens: Tokens that this rank's data position contributed to the step.
        loss: A number, or a tensor on the CPU; one on a device is not read,
            because reading it would synchronise the job.
    """
    try:
        _tracer.step(tokens, loss)
    except Exception as problem:  # noqa: BLE001 - promise 1: harmless
        _swallow(problem)


def microbatch(
    index: int, tokens: int | None = None, sum_squared_lengths: int | None = None
) -> None:
    """Note what micro-batch ``index`` of this step holds.

    Args:
        index: Position in the step, from 0.
        tokens: Tokens in it.
        sum_squared_lengths: Sum of the squared lengths of its sequences, in tokens squared.
    """
    try:
        _tracer.microbatch(index, tokens, sum_squared_lengths)
    except Exception as problem:  # noqa: BLE001 - promise 1: harmless
        _swallow(problem)


def event(kind: str, text: str, **data: object) -> None:
    """Note something that happened at this moment: a checkpoint, a restart, a skipped batch."""
    try:
        _tracer.event(kind, text, data)
    except Exception as problem:  # noqa: BLE001 - promise 1: harmless
        _swallow(problem)


def record_exception(exc: BaseException) -> None:
    """Note that ``exc`` ends this process.

    Needed only where something catches the exception before the interpreter
    sees it and then ends the process, as `torch.multiprocessing.spawn` does.
    """
    try:
        _tracer.record_exception(exc)
    except Exception as problem:  # noqa: BLE001 - promise 1: harmless
        _swallow(problem)


def shutdown() -> None:
    """Say goodbye: seal what is written and record the end. A second call does nothing."""
    tracer = _tracer
    try:
        set_current(NOOP_TRACER)
        tracer.shutdown()
    except Exception as problem:  # noqa: BLE001 - promise 1: harmless
        if isinstance(tracer, Recorder):
            tracer.swallow(problem)


@overload
def traced(target: Callable[P, R]) -> Callable[P, R]: ...
@overload
def traced(target: str) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
def traced(
    target: Callable[P, R] | str,
) -> Callable[P, R] | Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a span of every call of a function, named by ``target`` or by the function.

    The span of an ``async`` function lasts from its first line to its last. A call
    of a generator function makes the generator, and so does its span: what runs
    later is the caller's loop. A `classmethod` or `staticmethod` stays one, and what
    cannot be called is returned as it is.
    """
    if issubclass(type(target), str):
        return functools.partial(_traced, cast("str", target))
    return cast("Callable[P, R]", _traced(None, target))


def _swallow(problem: Exception) -> None:
    """Count an error of the tracer's own; hand on one that is the job's."""
    tracer = _tracer
    if isinstance(tracer, Recorder):
        tracer.swallow(problem)


def _keep_or_not() -> None:
    """Follow the tracer when it begins or ceases to keep host spans."""
    global _find  # noqa: PLW0603 - one tracer a process
    own = _tracer
    finder = own.lanes.finder if isinstance(own, Recorder) and own.is_recorded(HOST) else None
    _find = None if finder is None else finder.find
    set_finder(finder)


def _traced(name: str | None, target: Any) -> Any:  # noqa: ANN401
    kind = type(target)
    if kind is classmethod or kind is staticmethod:
        return kind(_traced(name, target.__func__))
    if not callable(target):  # a property, say
        return target
    return _wrapped(name, target)


def _wrapped(name: str | None, function: Callable[P, R]) -> Callable[P, R]:
    label = _name_of(function) if name is None else name
    if type(function) is FunctionType and inspect.iscoroutinefunction(function):
        return _like(function, _async_call(label, cast("Callable[P, Any]", function)))

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with span(label):
            return function(*args, **kwargs)

    return _like(function, call)


def _async_call(name: str, function: Callable[P, Any]) -> Callable[P, Any]:
    async def call(*args: P.args, **kwargs: P.kwargs) -> Any:  # noqa: ANN401
        with span(name):
            return await function(*args, **kwargs)

    return call


def _name_of(function: object) -> str:
    """Return what a callable calls itself; asking may run code of the job's."""
    try:
        return plain_text(getattr(function, "__qualname__", None)) or UNNAMED
    except Exception:  # noqa: BLE001 - promise 1: harmless
        return UNNAMED


def _like(function: Callable[P, R], call: Callable[P, R]) -> Callable[P, R]:
    """Return ``call`` with the name and attributes of ``function``, as far as those can be had."""
    try:
        return functools.wraps(function)(call)
    except Exception:  # noqa: BLE001 - promise 1: harmless
        return call


def _forget_in_child() -> None:
    tracer = _tracer
    set_current(NOOP_TRACER)
    if isinstance(tracer, Recorder):
        with contextlib.suppress(Exception):  # out of memory; the count would be the parent's
            tracer.abandon()


os.register_at_fork(after_in_child=_forget_in_child)
