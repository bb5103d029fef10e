"""Pauses of Python's garbage collector."""

from __future__ import annotations

import gc
import threading
from typing import TYPE_CHECKING, Any

from tracer.clock import monotonic_ns
from tracer.span import SpanKind

if TYPE_CHECKING:
    from collections.abc import Callable

    from tracer.recorder import Recorder

LEAST_PAUSE_NS = 1_000_000
"""A shorter pause explains nothing, and there are thousands of them."""


class _Begun(threading.local):
    start_ns = 0


def capture_garbage(
    recorder: Recorder, *, least_pause_ns: int = LEAST_PAUSE_NS
) -> Callable[[], None]:
    """Make a span of each collection that takes ``least_pause_ns`` or more.

    Returns:
        A function that takes the callback off again.
    """
    begun = _Begun()

    def notice(phase: str, info: dict[str, Any]) -> None:
        now_ns = monotonic_ns()
        if phase == "start":
            begun.start_ns = now_ns
        elif begun.start_ns and now_ns - begun.start_ns >= least_pause_ns:
            try:
                name = f"gc generation {info['generation']}"
                recorder.append_span(name, SpanKind.GC, begun.start_ns, now_ns)
            except Exception as problem:  # noqa: BLE001 - promise 1: harmless
                recorder.swallow(problem)

    gc.callbacks.append(notice)

    def take_off() -> None:
        if notice in gc.callbacks:
            gc.callbacks.remove(notice)

    return take_off
