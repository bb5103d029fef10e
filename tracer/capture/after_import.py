"""Calls made once another module has been imported, without importing it.

The tracer captures torch and its compiler, but must not import either: a job may need neither, and
the compiler alone takes seconds.
"""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType


def after_import(name: str, call: Callable[[], None]) -> Callable[[], None]:
    """Call ``call`` once, after the import of module ``name``, or now if it is imported.

    An `Exception` that ``call`` raises is dropped.

    Returns:
        A function that cancels the call.
    """
    finder = ImportWatch(name, call)
    with contextlib.suppress(Exception):  # promise 1: harmless
        if sys.modules.get(name) is not None:  # None forbids the import
            call()
        else:
            sys.meta_path.insert(0, finder)
    return finder.remove


class ImportWatch:
    """A finder that lets the other finders find its module, and runs a call after the import."""

    def __init__(self, name: str, call: Callable[[], None]) -> None:
        self._name = name
        self._call = call
        self._is_searching = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the specification that the other finders find; None for any other module."""
        if fullname != self._name or self._is_searching:
            return None
        self._is_searching = True  # `sys.meta_path` contains this finder too
        try:
            spec = _find_spec(fullname, path, target)
        finally:
            self._is_searching = False
        if spec is not None:
            with contextlib.suppress(Exception):  # a loader that takes no attribute, say
                self._watch(spec.loader)
        return spec

    def remove(self) -> None:
        """Stop watching."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def _watch(self, loader: Any) -> None:  # noqa: ANN401 - gets an attribute
        load = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            loader.exec_module = load
            load(module)
            if self in sys.meta_path:  # else it was cancelled during the import
                with contextlib.suppress(Exception):  # promise 1: harmless
                    self.remove()
                    self._call()

        loader.exec_module = exec_module


def _find_spec(
    fullname: str, path: Sequence[str] | None, target: ModuleType | None
) -> ModuleSpec | None:
    """Return the first finder's specification, as the import system does."""
    for finder in list(sys.meta_path):
        find = getattr(finder, "find_spec", None)
        spec: ModuleSpec | None = None if find is None else find(fullname, path, target)
        if spec is not None:
            return spec
    return None
