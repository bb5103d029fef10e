"""Turn on every capture that this process can have."""

from __future__ import annotations

import atexit
import sys
from typing import TYPE_CHECKING, Any

from tracer.capture.garbage import capture_garbage
from tracer.capture.patch import Patches
from tracer.spool import DropReason

if TYPE_CHECKING:
    from collections.abc import Callable

    from tracer.recorder import Recorder
    from tracer.topology import Layout

STAGE_MODULE = "torch.distributed.pipelining.stage"


def start_captures(recorder: Recorder, *, model: Any, layout: Layout | None) -> None:  # noqa: ANN401
    """Capture what Python and torch do by themselves, until the recorder shuts down.

    Each capture stands alone: one that this torch cannot have is counted,
    told as an event, and left out.

    Args:
        recorder: Where the spans go.
        model: The root module; None: its forward is not captured.
        layout: The job's parallel layout, where it told it.
    """
    _try(recorder, "gc", lambda: recorder.on_shutdown(capture_garbage(recorder)))
    if "torch" not in sys.modules:
        return
    patches = Patches()
    recorder.on_shutdown(patches.undo)
    _try(recorder, "compute", lambda: _capture_compute(recorder, patches, model))
    _try(recorder, "optimizer", lambda: _capture_optimizer(recorder))
    _try(recorder, "communication", lambda: _capture_communication(recorder, patches, layout))


def _try(recorder: Recorder, what: str, start: Callable[[], None]) -> None:
    try:
        start()
    except Exception as problem:  # noqa: BLE001 - promise 1: harmless
        recorder.drop(DropReason.INTERNAL_ERROR)
        recorder.event("tracer", f"no {what} capture", {"error": repr(problem)[:500]})


def _capture_compute(recorder: Recorder, patches: Patches, model: Any) -> None:  # noqa: ANN401
    from tracer.capture.compute import Compute
    from tracer.capture.module import capture_backward, capture_forward
    from tracer.capture.pipeline import capture_pipeline

    compute = Compute(recorder)
    capture_backward(compute, patches)
    if model is not None:
        recorder.on_shutdown(capture_forward(compute, model))
    _capture_once_loaded(recorder, STAGE_MODULE, lambda: capture_pipeline(compute, patches))


def _capture_once_loaded(recorder: Recorder, module: str, start: Callable[[], None]) -> None:
    """Capture a part of torch if the job has loaded it, or when a step begins after it has.

    Loading it ourselves would make a job pay seconds for what it may never use.
    """

    def attempt() -> bool:
        if module not in sys.modules:
            return False
        _try(recorder, module, start)
        return True

    if not attempt():
        recorder.at_each_step(attempt)


def _capture_optimizer(recorder: Recorder) -> None:
    from tracer.capture.optimizer import capture_optimizer

    recorder.on_shutdown(capture_optimizer(recorder))


def _capture_communication(recorder: Recorder, patches: Patches, layout: Layout | None) -> None:
    if not sys.modules["torch"].distributed.is_available():
        return
    from tracer.capture.communication import Communication
    from tracer.capture.intercept import intercept

    communication = Communication(recorder, layout)
    recorder.on_shutdown(communication.close)
    atexit.register(communication.completions.drain)  # last in, first out: after `shutdown`
    recorder.on_shutdown(intercept(communication, patches))
