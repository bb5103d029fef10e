"""The current tracer of the process, and the functions by which a job uses it."""

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
"""The tracer's `span`; None if there is no tracer."""

_find: Callable[[str], SpanContext | None] | None = None
"""`find` of `tracer.record.lane.Lanes.finder`; None if plain host spans are not recorded."""


def current_tracer() -> Tracer:
    """Return the installed tracer, `NOOP_TRACER` if there is none."""
    return _tracer


def set_current(tracer: Tracer) -> None:
    """Make ``tracer`` the current tracer."""
    global _tracer, _make_span  # noqa: PLW0603 - one tracer a process
    _make_span = None if tracer is NOOP_TRACER else tracer.span
    _tracer = tracer
    if isinstance(tracer, Recorder):
        tracer.sampling_control.on_kinds_changed = _update_finder
    _update_finder()


@accelerated(NOOP_SPAN)
def span(
    name: str, kind: SpanKind | None = None, microbatch: int | None = None, chunk: int | None = None
) -> SpanContext:
    """Return a span of this thread, to be used with ``with``.

    Args:
        name: Name in the table; truncated to 254 bytes of UTF-8, 4096 names per process.
        kind: Kind of the work; `SpanKind.HOST` if None.
        microbatch: Index in the step; that of the enclosing captured span if None.
        chunk: Model chunk on this rank; that of the enclosing captured span if None.
    """
    # Positional arguments with a default: CPython 3.11 calls such a function 30 ns faster than
    # one with keyword-only arguments.
    if _make_span is None:
        return NOOP_SPAN
    if kind is None and microbatch is None and chunk is None:
        find = _find  # read once: another thread may turn recording off
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
    """Begin step ``first_step`` now; spans before it belong to no step."""
    try:
        _tracer.begin_steps(first_step)
    except Exception as problem:  # noqa: BLE001 - promise 1: harmless
        _swallow(problem)


def step(tokens: int | None = None, loss: object = None) -> None:
    """End the step now and begin the next one.

    Without `begin_steps`, the first call begins step 0 and ends none.

    Args:
        tokens: Number of tokens that this rank's data position contributed to the step.
        loss: A number, or a tensor on the CPU. A tensor on a device is not read, because that
            would synchronise the job.
    """
    try:
        _tracer.step(tokens, loss)
    except Exception as problem:  # noqa: BLE001 - promise 1: harmless
        _swallow(problem)


def microbatch(
    index: int, tokens: int | None = None, sum_squared_lengths: int | None = None
) -> None:
    """Record the size of micro-batch ``index`` of this step.

    Args:
        index: Position in the step, from 0.
        tokens: Number of tokens.
        sum_squared_lengths: Sum of the squared lengths of its sequences, in tokens squared.
    """
    try:
        _tracer.microbatch(index, tokens, sum_squared_lengths)
    except Exception as problem:  # noqa: BLE001 - promise 1: harmless
        _swallow(problem)


def event(kind: str, text: str, **data: object) -> None:
    """Record an event at this moment, such as a checkpoint, a restart or a skipped batch."""
    try:
        _tracer.event(kind, text, data)
    except Exception as problem:  # noqa: BLE001 - promise 1: harmless
        _swallow(problem)


def record_exception(exc: BaseException) -> None:
    """Record ``exc`` as the reason for the end of this process.

    Needed only if something catches the exception before the interpreter sees it and then ends
    the process, as `torch.multiprocessing.spawn` does.
    """
    try:
        _tracer.record_exception(exc)
    except Exception as problem:  # noqa: BLE001 - promise 1: harmless
        _swallow(problem)


def shutdown() -> None:
    """Seal the segments and record the normal end of the process. A second call does nothing."""
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
    """Decorate a function so that each call is a span, named by ``target`` or by the function.

    The span of an ``async`` function lasts from its first line to its last. The span of a
    generator function covers only the making of the generator, because its body runs in the
    caller's loop. A `classmethod` or `staticmethod` remains one, and an object that cannot be
    called is returned unchanged.
    """
    if issubclass(type(target), str):
        return functools.partial(_traced, cast("str", target))
    return cast("Callable[P, R]", _traced(None, target))


def _swallow(problem: Exception) -> None:
    """Count an error of the tracer; raise one of the job."""
    tracer = _tracer
    if isinstance(tracer, Recorder):
        tracer.swallow(problem)


def _update_finder() -> None:
    """Set the finder of host spans, or None while the tracer does not record them."""
    global _find  # noqa: PLW0603 - one tracer a process
    tracer = _tracer
    finder = (
        tracer.lanes.finder if isinstance(tracer, Recorder) and tracer.is_recorded(HOST) else None
    )
    _find = None if finder is None else finder.find
    set_finder(finder)


def _traced(name: str | None, target: Any) -> Any:  # noqa: ANN401
    kind = type(target)
    if kind is classmethod or kind is staticmethod:
        return kind(_traced(name, target.__func__))
    if not callable(target):  # a property, say
        return target
    return _wrap(name, target)


def _wrap(name: str | None, function: Callable[P, R]) -> Callable[P, R]:
    label = _read_name(function) if name is None else name
    if type(function) is FunctionType and inspect.iscoroutinefunction(function):
        return _copy_attributes(function, _wrap_async(label, cast("Callable[P, Any]", function)))

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with span(label):
            return function(*args, **kwargs)

    return _copy_attributes(function, call)


def _wrap_async(name: str, function: Callable[P, Any]) -> Callable[P, Any]:
    async def call(*args: P.args, **kwargs: P.kwargs) -> Any:  # noqa: ANN401
        with span(name):
            return await function(*args, **kwargs)

    return call


def _read_name(function: object) -> str:
    """Return the qualified name of a callable; reading it may run code of the job."""
    try:
        return plain_text(getattr(function, "__qualname__", None)) or UNNAMED
    except Exception:  # noqa: BLE001 - promise 1: harmless
        return UNNAMED


def _copy_attributes(function: Callable[P, R], call: Callable[P, R]) -> Callable[P, R]:
    """Return ``call`` with the name and attributes of ``function``, if they can be read."""
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
