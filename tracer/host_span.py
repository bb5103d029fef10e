"""The span that ``with`` enters: the hottest code of the project."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tracer.clock import monotonic_ns
from tracer.lane import pair_word
from tracer.span import NONE, SpanFlag

if TYPE_CHECKING:
    from types import TracebackType

    from tracer.recorder import Recorder

ERROR_HEAD = int(SpanFlag.ERROR) << 16
"""The flag in a `head_word`."""


class HostSpan:
    """A span of the calling thread, timed by the host clock."""

    __slots__ = (
        "_chunk",
        "_head",
        "_lane",
        "_microbatch",
        "_open",
        "_place",
        "_recorder",
        "_start_ns",
        "_where",
    )

    def __init__(
        self, recorder: Recorder, head: int, microbatch: int = NONE, chunk: int = NONE
    ) -> None:
        self._recorder = recorder
        self._head = head
        self._microbatch = microbatch
        self._chunk = chunk

    def __enter__(self) -> HostSpan:
        try:
            self._lane = lane = self._recorder.lane()
            self._place = (
                lane.place if self._microbatch == NONE else pair_word(lane.step, self._microbatch)
            )
            self._where = (
                lane.where if self._chunk == NONE else pair_word(self._chunk, lane.track_id)
            )
            self._open = None
            self._start_ns = start_ns = monotonic_ns()
            if lane.depth == 0:
                self._open = lane.open(start_ns, self._head)
            lane.depth += 1
        except Exception as problem:  # noqa: BLE001 - promise 1: harmless
            self._recorder.swallow(problem)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            start_ns = self._start_ns
            duration_ns = monotonic_ns() - start_ns
            lane = self._lane
            lane.depth = depth = lane.depth - 1
            head = self._head if exc_type is None else self._head | ERROR_HEAD
            lane.append(head, start_ns, duration_ns, self._place, self._where, start_ns, depth)
            if self._open is not None:
                self._open.close()
        except Exception as problem:  # noqa: BLE001 - promise 1: harmless
            self._recorder.swallow(problem)

    def cancel(self) -> None:
        """Leave the span without recording it."""
        self._lane.depth -= 1
        if self._open is not None:
            self._open.close()
