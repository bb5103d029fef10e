"""What a server does for its store besides writing: sweep up behind deletions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankscope import terminal
from rankscope.loops import Loop

if TYPE_CHECKING:
    from collections.abc import Callable

    from collector.deletion import Deletions

UPKEEP_PAUSE_S = 5.0


class Upkeep:
    """One turn of upkeep.

    Args:
        deletions: The store's tombstones.
        say: Tells a line to the person at the terminal.
    """

    def __init__(
        self,
        deletions: Deletions,
        *,
        say: Callable[[str], None] = terminal.say,
    ) -> None:
        self._deletions = deletions
        self._say = say

    def turn(self) -> None:
        """Do what is due."""
        for run_id in self._deletions.sweep():
            self._say(f"removed what came late of the deleted run {run_id!r}")


def upkeep_loop(upkeep: Upkeep) -> Loop:
    """Return the loop that keeps the store in order."""
    return Loop("upkeep", upkeep.turn, pause_s=UPKEEP_PAUSE_S)
