"""Spans of work that a thread issues to a device, timed on the device."""

from __future__ import annotations

from time import monotonic_ns
from typing import TYPE_CHECKING

from ..record.device_timer import NO_DEVICE_TIMING
from ..record.lane import head_word
from ..span import KIND_CODES, NONE, SpanFlag
from ..spool import RecordType
from .timing import PendingSpan

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import TracebackType

    from ..native.host_span import CancellableSpan
    from ..native.lane_state import OpenEntry
    from ..record.recorder import Recorder
    from ..span import SpanKind
    from .backend import Mark

ON_DEVICE = SpanFlag.DEVICE_BEGIN_KNOWN | SpanFlag.DEVICE_END_KNOWN


def timed_span(
    recorder: Recorder,
    name: str,
    kind: SpanKind,
    *,
    on: Iterable[object],
) -> CancellableSpan:
    """Return a span on the clock of the device that does the work; the caller enters and leaves it.

    Args:
        recorder: Where the span goes.
        name: Name of the span.
        kind: Kind of the work.
        on: Tensors or devices of the work; the first one selects the device.
    """
    timing = recorder.device_timing
    device = None if timing is NO_DEVICE_TIMING else timing.device_of(on)
    if device is None or not recorder.is_recorded(kind):
        return recorder.host_span(name, kind)
    return DeviceSpan(recorder, name, kind, device=device)


class DeviceSpan:
    """Marks the current stream when the span is entered and left.

    The span is outermost on the track of that stream; its launch is when the host entered it. If a
    mark cannot be made, the span is counted as lost: the time to issue work does not say how long
    the work took.
    """

    __slots__ = (
        "_begin",
        "_chunk",
        "_device",
        "_kind",
        "_lane",
        "_launch_ns",
        "_microbatch",
        "_name",
        "_opened",
        "_recorder",
    )

    def __init__(
        self,
        recorder: Recorder,
        name: str,
        kind: SpanKind,
        *,
        device: int,
        microbatch: int = NONE,
        chunk: int = NONE,
    ) -> None:
        self._recorder = recorder
        self._lane = recorder.lane()
        self._name = name
        self._kind = KIND_CODES[kind]
        self._device = device
        self._microbatch = microbatch
        self._chunk = chunk
        self._begin: Mark | None = None
        self._opened: OpenEntry | None = None

    def __enter__(self) -> DeviceSpan:
        lane = self._lane
        try:
            self._launch_ns = monotonic_ns()
            if not lane.depth:
                self._opened = lane.open(self._launch_ns, self._head(SpanFlag.NOTHING))
            lane.depth += 1
            self._begin = self._recorder.device_timing.mark(self._device)
        except Exception as problem:  # noqa: BLE001 - promise 1: harmless
            lane.swallow(problem)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self._leave()
            flags = ON_DEVICE if exc_type is None else ON_DEVICE | SpanFlag.ERROR
            if self._begin is not None:
                self._end(self._begin, flags)
        except Exception as problem:  # noqa: BLE001 - promise 1: harmless
            self._lane.swallow(problem)

    def cancel(self) -> None:
        """Leave the span without recording it."""
        self._leave()
        if self._begin is not None:
            self._recorder.device_timing.release(self._begin)

    def _leave(self) -> None:
        self._lane.depth -= 1
        if self._opened is not None:
            self._opened.close()

    def _end(self, begin: Mark, flags: SpanFlag) -> None:
        timing = self._recorder.device_timing
        end = timing.mark(self._device)
        if end is None:
            timing.release(begin)
            return
        place = self._lane.place_of(self._microbatch, self._chunk, track_id=timing.track_id(begin))
        head, launch_ns, device_lane = self._head(flags), self._launch_ns, self._recorder.comm_lane

        def write(start_ns: int, duration_ns: int) -> None:
            device_lane.append(head, start_ns, duration_ns, place, launch_ns, 0)

        timing.push(PendingSpan(begin, end, write=write, lose=timing.lose, release=timing.release))

    def _head(self, flags: SpanFlag) -> int:
        return head_word(
            RecordType.SPAN,
            kind=self._kind,
            flags=int(flags),
            name_id=self._recorder.name_id(self._name),
        )
