"""Replacement of a library's functions, which can be undone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


class Patches:
    """Replaced functions, in the order of replacement."""

    def __init__(self) -> None:
        self._originals: list[tuple[Any, str, Any, Any]] = []

    def wrap(self, owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:  # noqa: ANN401
        """Replace ``owner.name`` by ``wrap(original)``."""
        original = getattr(owner, name)
        replacement = wrap(original)
        setattr(owner, name, replacement)
        self._originals.append((owner, name, original, replacement))

    def undo(self) -> None:
        """Restore the originals, except functions that other code has replaced again since."""
        while self._originals:
            owner, name, original, replacement = self._originals.pop()
            if getattr(owner, name) is replacement:
                setattr(owner, name, original)
