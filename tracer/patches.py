"""Replacement of a library's functions, which can be undone."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


class Patches:
    """Replaced functions, in the order of replacement. A copy has replaced none."""

    def __init__(self) -> None:
        self._originals: list[tuple[Any, str, Any, Any]] = []

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """Copy and pickle neither functions nor replacements."""
        return Patches, ()

    def wrap(self, owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:  # noqa: ANN401
        """Replace ``owner.name`` by ``wrap(original)``."""
        original = getattr(owner, name)
        replacement = wrap(original)
        setattr(owner, name, replacement)
        self._originals.append((owner, name, original, replacement))

    def replace_imported(self) -> None:
        """Replace the originals wherever a module has imported them, by whatever name.

        `pickle` stores a function as the name of a module and a name in it, and refuses a function
        that is not found there. So the replacement must be found in the module that defines the
        original, and no module may keep the original.
        """
        _exchange({id(original): new for _, _, original, new in self._originals})

    def undo(self) -> None:
        """Restore the originals, except functions that other code has replaced again since.

        Modules that have imported a replacement get the original too.
        """
        if self._originals:
            _exchange({id(new): original for _, _, original, new in self._originals})
        while self._originals:
            owner, name, original, replacement = self._originals.pop()
            if getattr(owner, name) is replacement:
                setattr(owner, name, original)


def _exchange(exchanged: dict[int, Any]) -> None:
    """Replace values of loaded modules, given by `id`."""
    for module in list(sys.modules.values()):
        # What C code puts among the modules may claim to be one (`isinstance`), and has no names.
        if issubclass(type(module), ModuleType):
            # A module that is loaded at the first use must not be loaded now.
            names: dict[str, Any] = object.__getattribute__(module, "__dict__")
            for name, value in list(names.items()):
                if id(value) in exchanged:
                    names[name] = exchanged[id(value)]
