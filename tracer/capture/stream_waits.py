"""Waits of computing streams for communications that the job issued on other streams, by events.

FSDP gathers and reduces on streams of its own: the call stalls only these, and compute waits for an
event that is recorded behind the call. What a stream has received after a communication is behind
it, so the event of a stream means the last communication there.

Source: torch/distributed/fsdp (`wait_event`, `wait_stream`), both of which are `Event.record` and
`Event.wait`.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from ..device.communication import PendingWait
from ..span import SpanKind
from .guard import Guard
from .launch import DeviceWriter

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..device.backend import Mark
    from ..patches import Patches
    from ..record.recorder import Recorder
    from .launch import Launch


class StreamWaits:
    """Records the first wait of a computing stream for each communication on another stream."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._guard = Guard(recorder, "stream wait", (SpanKind.WAIT,))
        self._behind: WeakKeyDictionary[Any, list[Launch]] = WeakKeyDictionary()
        """By event of the job, the communication that it is behind. An attribute of the event would
        be copied with it."""

    def wrap_record(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``Event.record``, which notes what the event is behind."""

        @functools.wraps(original)
        def record(event: Any, stream: Any = None) -> Any:  # noqa: ANN401
            result = original(event, stream)
            if self._recorder.device_timing.side_calls:
                self._guard.call(self._note, event, stream)
            return result

        return record

    def wrap_wait(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``Event.wait``, with a mark on either side if a stream that computes waits."""

        @functools.wraps(original)
        def wait(event: Any, stream: Any = None) -> Any:  # noqa: ANN401
            if event not in self._behind:
                return original(event, stream)
            begun: list[tuple[Launch, Any, Mark]] = []
            self._guard.call(self._reach, event, stream, begun)
            result = original(event, stream)
            for waited in begun:
                self._guard.call(self._pass, *waited)
            return result

        return wait

    def _note(self, event: Any, stream: Any) -> None:  # noqa: ANN401
        last = self._recorder.device_timing.side_calls.get(_key(_or_current(stream)))
        if last:
            self._behind[event] = last
        else:
            self._behind.pop(event, None)

    def _reach(self, event: Any, stream: Any, begun: list[tuple[Launch, Any, Mark]]) -> None:  # noqa: ANN401
        last = self._behind.pop(event)
        if not last:
            return
        stream = _or_current(stream)
        timing, (device, handle) = self._recorder.device_timing, _key(stream)
        if not timing.computes_on(device, handle):
            # What that stream receives from now on is behind the communication, too.
            timing.side_calls[device, handle] = last
            return
        mark = timing.mark(device, stream)
        if mark is not None:
            begun.append((last.pop(), stream, mark))

    def _pass(self, launch: Launch, stream: Any, before: Mark) -> None:  # noqa: ANN401
        timing = self._recorder.device_timing
        after = timing.mark(before.device, stream)
        if after is None:
            timing.release(before)
            return
        timing.push(PendingWait(timing, before, after, DeviceWriter(launch, before.device)))


def capture_stream_waits(recorder: Recorder, patches: Patches) -> None:
    """Record waits by events of CUDA."""
    if torch.version.cuda is not None:
        waits = StreamWaits(recorder)
        patches.wrap(torch.cuda.Event, "record", waits.wrap_record)
        patches.wrap(torch.cuda.Event, "wait", waits.wrap_wait)


def _or_current(stream: Any) -> Any:  # noqa: ANN401
    return torch.cuda.current_stream() if stream is None else stream


def _key(stream: Any) -> tuple[int, int]:  # noqa: ANN401
    return stream.device_index, stream.cuda_stream
