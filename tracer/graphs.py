"""Keep spans by hand out of the compiler's graphs, whoever is installed, or nobody.

`torch.compile` cannot look into a function in compiled lines, so a span in a
model would break its graph (an error with ``fullgraph=True``) even where
nothing is traced. It is told of a replacement that compiles to nothing. The
compiler is loaded late, often by `torch.compile` itself, and this process may
have no torch at all: so the import system tells when it comes.
"""

from __future__ import annotations

import contextlib
import sys
from importlib.abc import MetaPathFinder
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

COMPILER_MODULE = "torch._dynamo"

_REPLACED: set[object] = set()
"""Functions that the compiler knows a replacement of: for good."""


def no_span(
    name: object, kind: object = None, microbatch: object = None, chunk: object = None
) -> contextlib.AbstractContextManager[None]:
    """Return what the compiler takes in the place of `tracer.span`: it compiles to nothing."""
    return contextlib.nullcontext()


def leave_out(span: Callable[..., Any]) -> None:
    """Have the compiler take `no_span` for ``span``, where it is loaded."""
    replace = getattr(sys.modules.get(COMPILER_MODULE), "substitute_in_graph", None)
    if replace is not None and span not in _REPLACED:
        replace(span)(no_span)
        _REPLACED.add(span)


def leave_out_soon(span: Callable[..., Any]) -> None:
    """Call `leave_out` as soon as the compiler is loaded, or now; an error leaves all as it was."""
    with contextlib.suppress(Exception):  # promise 1: harmless
        if COMPILER_MODULE not in sys.modules:
            sys.meta_path.insert(0, CompilerWatch(span))
        leave_out(span)


class CompilerWatch(MetaPathFinder):
    """Finds no module: learns that the compiler has been loaded, and goes."""

    def __init__(self, span: Callable[..., Any]) -> None:
        """Prepare.

        Args:
            span: What to leave out of its graphs.
        """
        self._span = span
        self._is_asking = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return what the other finders find, for the compiler alone."""
        if fullname != COMPILER_MODULE or self._is_asking:
            return None
        self._is_asking = True  # we are one of those
        try:
            spec = _found(fullname, path, target)
        finally:
            self._is_asking = False
        if spec is not None:
            with contextlib.suppress(Exception):  # a loader that takes no attribute, say
                self._watch(spec.loader)
        return spec

    def _watch(self, loader: Any) -> None:  # noqa: ANN401 - takes an attribute of ours
        load = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            loader.exec_module = load
            load(module)
            with contextlib.suppress(Exception):  # promise 1: harmless
                sys.meta_path.remove(self)
                leave_out(self._span)

        loader.exec_module = exec_module


def _found(
    fullname: str, path: Sequence[str] | None, target: ModuleType | None
) -> ModuleSpec | None:
    """Return the first finder's specification, as the import system does."""
    for finder in list(sys.meta_path):
        find = getattr(finder, "find_spec", None)
        spec: ModuleSpec | None = None if find is None else find(fullname, path, target)
        if spec is not None:
            return spec
    return None
