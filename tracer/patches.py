"""Replace functions of a library, and put the originals back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


class Patches:
    """What was replaced, in order."""

    def __init__(self) -> None:
        self._originals: list[tuple[Any, str, Any, Any]] = []

    def wrap(self, owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:  # noqa: ANN401
        """Put ``wrap(original)`` in the place of ``owner.name``."""
        original = getattr(owner, name)
        replacement = wrap(original)
        setattr(owner, name, replacement)
        self._originals.append((owner, name, original, replacement))

    def undo(self) -> None:
        """Put the originals back, except where somebody has since put something else there."""
        while self._originals:
            owner, name, original, replacement = self._originals.pop()
            if getattr(owner, name) is replacement:
                setattr(owner, name, original)
