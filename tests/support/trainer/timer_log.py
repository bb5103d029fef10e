"""A timer of segments that records its calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class TimerLog:
    """A timer that records its calls."""

    slowdown = 1.0
    num_segments = 0
    num_overruns = 0

    def __init__(self) -> None:
        self.calls: list[str] = []

    def begin(self) -> None:
        self.calls.append("begin")

    def reach(self, paces: float) -> None:
        self.calls.append(f"reach {paces:g}")

    def exclude(self, wait: Callable[[], object]) -> None:
        wait()

    def end(self, paces: float) -> None:
        self.calls.append(f"end {paces:g}")

    def reset_counts(self) -> None:
        self.calls.clear()
