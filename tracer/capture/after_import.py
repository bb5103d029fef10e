"""Learn when `torch.compile` has been loaded.

It is loaded late, often by `torch.compile` itself, and this process may have
no torch at all: so the import system is asked.
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


def once_loaded(tell: Callable[[], None]) -> None:
    """Call ``tell`` as soon as the compiler is loaded, or now; what it raises hurts nobody."""
    with contextlib.suppress(Exception):  # promise 1: harmless
        if COMPILER_MODULE in sys.modules:
            tell()
        else:
            sys.meta_path.insert(0, CompilerWatch(tell))


class CompilerWatch(MetaPathFinder):
    """Finds no module by itself: learns that the compiler has been loaded, and goes."""

    def __init__(self, tell: Callable[[], None]) -> None:
        """Prepare.

        Args:
            tell: What to call then.
        """
        self._tell = tell
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
                self._tell()

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
