"""Calls of modules, followed without a trace in the modules themselves.

A hook is an entry in the dictionary of its module: it would be copied and pickled with the module,
and compiled by TorchScript. So a class gets a ``__call__`` of its own while one of its modules is
followed. A copy of that module has the same class, and is not followed.
"""

from __future__ import annotations

import functools
import weakref
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules import module as module_of_torch

from ..patches import Patches
from ..record.interface import NOOP_SPAN

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from types import CodeType

    Begin = Callable[[Any, tuple[Any, ...], dict[str, Any]], AbstractContextManager[object]]


class _Followed(dict[int, Any]):
    """Functions that begin a call (`Begin`), by `id` of the module.

    Some libraries pickle the classes of a script by value, with ``__call__`` and what it refers to.
    They get an empty dictionary.
    """

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return dict, ()


_followed = _Followed()


def follow_calls(module: Any, begin: Begin) -> Callable[[], None]:  # noqa: ANN401 - a Module
    """Call ``begin`` before each call of ``module``, and leave what it returns after the call.

    Calls that the compiler traces are not followed. A module is followed by the last ``begin``.

    Args:
        begin: Gets the module, its arguments and its keyword arguments.

    Returns:
        A function that ends this.
    """
    kind, key, alive = type(module), id(module), weakref.ref(module)

    def begin_own(called: Any, args: Any, kwargs: Any) -> AbstractContextManager[object]:  # noqa: ANN401
        # The `id` of a module that is gone may be that of another one.
        return begin(called, args, kwargs) if alive() is called else NOOP_SPAN

    def stop() -> None:
        if _followed.get(key) is begin_own:
            del _followed[key]
        if kind in _calls and not _calls[kind].discard(begin_own):
            _calls.pop(kind).restore()

    _followed[key] = begin_own
    if kind not in _calls:
        _calls[kind] = _ClassCall(kind)
    _calls[kind].users.add(begin_own)
    return stop


class _ClassCall:
    """The ``__call__`` of a class some of whose modules are followed."""

    def __init__(self, kind: Any) -> None:  # noqa: ANN401 - a class of modules
        self.users: set[object] = set()
        self._kind = kind
        self._own = kind.__dict__.get("__call__")
        self._traced = _make_call(kind, self._own)
        kind.__call__ = self._traced

    def discard(self, user: object) -> bool:
        """Remove a user; return whether others are left."""
        self.users.discard(user)
        return bool(self.users)

    def restore(self) -> None:
        """Restore the class, unless other code has replaced the function since."""
        if self._kind.__dict__.get("__call__") is not self._traced:
            return
        if self._own is None:
            del self._kind.__call__
        else:
            self._kind.__call__ = self._own


_calls: dict[type, _ClassCall] = {}


def _make_call(kind: type, own: Any) -> FunctionType:  # noqa: ANN401
    """Return a ``__call__`` for a class that has ``own``, or inherits one if that is None."""
    followed = _followed

    def call(module: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        # Not taken before: others (torch.fx) replace the inherited function for a while.
        target = super(kind, module).__call__ if own is None else own.__get__(module)  # type: ignore[arg-type]
        begin = None if torch.compiler.is_compiling() else followed.get(id(module))
        if begin is None:
            return target(*args, **kwargs)
        with begin(module, args, kwargs):
            return target(*args, **kwargs)

    # Everything of the tracer is behind `followed`; the rest is made to be torch's. So the compiler
    # treats both functions alike, a copy by value needs nothing of the tracer, and a traceback
    # shows the line of torch twice.
    before: Any = torch.nn.Module.__call__ if own is None else own
    torchs: CodeType = module_of_torch.Module._wrapped_call_impl.__code__
    code = call.__code__.replace(
        co_filename=torchs.co_filename,
        co_name=torchs.co_name,
        co_firstlineno=call.__code__.co_firstlineno
        + _last_line(torchs)
        - _last_line(call.__code__),
    )
    traced = FunctionType(code, vars(module_of_torch), torchs.co_name, None, call.__closure__)
    functools.update_wrapper(traced, before)
    traced.__module__ = kind.__module__  # where `pickle` looks for it
    traced.__qualname__ = f"{kind.__qualname__}.__call__"
    return traced


def _last_line(code: CodeType) -> int:
    return max(line for _, _, line in code.co_lines() if line is not None)


def watch_calls(on_call: Callable[[], object]) -> Callable[[], None]:
    """Call ``on_call`` before each call of any module.

    If ``on_call`` follows that very module, this call is followed too.

    Returns:
        A function that ends this. It must end soon: each call of each module pays.
    """
    patches = Patches()

    def wrap(original: Any) -> Any:  # noqa: ANN401
        @functools.wraps(original)
        def call(module: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            if torch.compiler.is_compiling():
                return original(module, *args, **kwargs)
            on_call()
            with _followed.get(id(module), _begin_nothing)(module, args, kwargs):
                return original(module, *args, **kwargs)

        return call

    patches.wrap(torch.nn.Module, "__call__", wrap)
    return patches.undo


def _begin_nothing(*call: object) -> AbstractContextManager[object]:
    return NOOP_SPAN
