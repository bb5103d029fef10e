"""`tracer.traced`: a span of every call of a function."""

from __future__ import annotations

import functools
import inspect
from types import FunctionType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast, overload

from .current import span
from .plain_values import plain_text

if TYPE_CHECKING:
    from collections.abc import Callable

P = ParamSpec("P")
R = TypeVar("R")

UNNAMED = "traced"


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
