"""Shows from outside what a thread is in the middle of, when it has been there for a while."""

from __future__ import annotations

from time import monotonic_ns
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ..native.host_span import ReadySpan
    from ..native.lane_state import OpenEntry
    from .lane import Lane

SHOW_AFTER_NS = 200_000_000
"""A shorter span explains no hang, and showing it would cost more than recording it."""


class _Shown(NamedTuple):
    ready: ReadySpan
    start_ns: int
    entry: OpenEntry | None


class Showing:
    """Keeps the outermost ready span of each lane in the open table while it lasts.

    Done by the background thread once a second, because a training
    thread would pay more for the two lines than for the span's record.
    """

    def __init__(self, lanes: Iterable[Lane]) -> None:
        self._lanes = lanes
        self._shown: dict[int, _Shown] = {}

    def refresh(self) -> None:
        """Show what has begun since, and take off what has ended."""
        now_ns = monotonic_ns()
        for lane in self._lanes:
            shown = self._shown.get(lane.number)
            if shown is not None:
                if shown.ready.start_ns == shown.start_ns:
                    continue
                self._take_off(lane.number)
            self._show_outermost(lane, now_ns)

    def close(self) -> None:
        """Take everything off."""
        for number in list(self._shown):
            self._take_off(number)

    def _show_outermost(self, lane: Lane, now_ns: int) -> None:
        in_use = [
            (start_ns, ready.head, ready)
            for ready in list(lane.ready.values())
            if (start_ns := ready.start_ns) is not None
        ]
        if not in_use:
            return
        start_ns, head, ready = min(in_use, key=lambda found: found[0])
        if now_ns - start_ns < SHOW_AFTER_NS:
            return
        entry = lane.open(start_ns, head)
        self._shown[lane.number] = _Shown(ready, start_ns, entry)
        if ready.start_ns != start_ns:  # it ended meanwhile
            self._take_off(lane.number)

    def _take_off(self, number: int) -> None:
        entry = self._shown.pop(number).entry
        if entry is not None:
            entry.close()
