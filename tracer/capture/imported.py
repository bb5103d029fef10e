"""Hear that a module has been loaded, without loading it."""

from __future__ import annotations

import importlib.util
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType


class AfterImport:
    """A finder that finds nothing itself: it lets the others find, and waits for the end."""

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self._name = name
        self._then = then

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return what the others find, and hear of its end; None for any other module."""
        if name != self._name:
            return None
        self.remove()
        spec = importlib.util.find_spec(name)
        loader = None if spec is None else spec.loader
        if loader is None:
            return None
        load = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            self._then()

        loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

    def remove(self) -> None:
        """Wait no longer."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)


def after_import(name: str, then: Callable[[], None]) -> Callable[[], None]:
    """Call ``then`` once, when the job has loaded the top-level module ``name``.

    Returns:
        A function that gives up waiting.
    """
    finder = AfterImport(name, then)
    sys.meta_path.insert(0, finder)
    return finder.remove
