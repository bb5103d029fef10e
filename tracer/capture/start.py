"""Start of all captures that this process can have."""

from __future__ import annotations

import atexit
import functools
import sys
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

from ..device.timing import watch_for_cuda
from ..native.lane_state import PLACE
from ..patches import Patches
from ..record.steps import COMMUNICATION_KINDS, COMPUTE_KINDS, OPTIMIZER_KINDS, TIMED_KINDS
from ..span import NONE, SpanKind
from .after_import import after_import
from .checkpoint import DISTRIBUTED_MODULE, SAFETENSORS_MODULE, Saves
from .compilation import capture_compilations
from .data import LOADER_MODULE, capture_loaders, spanned
from .garbage_collection import capture_garbage
from .guard import report_capture_failure
from .optimizer import OptimizerSpans, SkippedSteps, StepCounter, capture_optimizer
from .root_module import RootForwards
from .spawned import watch_group

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ..record.recorder import Recorder
    from ..topology import Layout
    from .derived_layout import LayoutDerivation
    from .forward_backward import ComputeCapture

STAGE_MODULE = "torch.distributed.pipelining.stage"
PIPELINING_MODULE = "torch.distributed.pipelining.schedules"

MIN_START_NS = 1_000_000_000
"""A shorter start-up explains nothing."""

GROUP_FUNCTIONS = ("init_process_group", "new_group", "destroy_process_group")


class OnceLoaded:
    """Starts a capture if its module is imported, else at the first step after the import.

    The tracer does not import the module: that could cost a job seconds for something it never
    uses.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._starts: dict[str, tuple[Callable[[], None], Iterable[SpanKind]]] = {}
        self._num_modules = 0

    def capture(
        self, module: str, start: Callable[[], None], kinds: Iterable[SpanKind] = ()
    ) -> None:
        """Call ``start`` once ``module`` is imported. If it fails, ``kinds`` are missing."""
        if module in sys.modules:
            _try(self._recorder, module, start, kinds)
            return
        if not self._starts:
            self._recorder.on_step_begin(self._start_loaded)
        self._starts[module] = (start, kinds)

    def _start_loaded(self) -> bool:
        """Return True if no module is left to wait for."""
        if len(sys.modules) == self._num_modules:
            return False
        self._num_modules = len(sys.modules)
        for module in list(self._starts):
            if module in sys.modules:
                _try(self._recorder, module, *self._starts.pop(module))
        return not self._starts


def start_captures(
    recorder: Recorder,
    *,
    model: Any,  # noqa: ANN401
    layout: Layout | None,
    derive_layout: bool = False,
    count_steps: bool | None = None,
) -> None:
    """Start the captures, which run until the recorder shuts down.

    The captures are independent. If this version of torch does not support one, the failure is
    counted and reported as an event, and the others go on.

    Args:
        model: The root module; if None, the outermost module that an optimizer trains.
        layout: The parallel layout, if the job declared it.
        derive_layout: Whether to derive layout and coordinates: the job declared neither.
        count_steps: Whether to count optimizer steps; see `tracer.install`.
    """
    _try(recorder, "gc", lambda: recorder.on_shutdown(capture_garbage(recorder)))
    start = functools.partial(
        _capture_torch,
        recorder,
        model=model,
        layout=layout,
        derive_layout=derive_layout,
        count_steps=count_steps,
    )
    if sys.modules.get("torch") is not None:  # None forbids the import
        start()
    else:
        recorder.on_shutdown(
            after_import("torch", lambda: _try(recorder, "torch", start, TIMED_KINDS))
        )


def _capture_torch(
    recorder: Recorder,
    *,
    model: Any,  # noqa: ANN401
    layout: Layout | None,
    derive_layout: bool,
    count_steps: bool | None,
) -> None:
    from .derived_layout import LayoutDerivation
    from .forward_backward import ComputeCapture

    if recorder.closed:
        return
    patches = Patches()
    _try(recorder, "device", lambda: watch_for_cuda(recorder))
    recorder.on_shutdown(patches.undo)
    steps = StepCounter(recorder, from_start=count_steps is True)
    layout_derivation = LayoutDerivation(recorder)
    optimizer = OptimizerSpans(recorder)
    forwards = RootForwards(recorder, steps, layout_derivation)
    once_loaded = OnceLoaded(recorder)
    _try(
        recorder,
        "compute",
        lambda: forwards.follow_model(
            _capture_compute(
                ComputeCapture(recorder, optimizer),
                patches,
                steps,
                forwards,
                layout_derivation,
                once_loaded,
            ),
            model,
            from_start=count_steps is True,
        ),
        COMPUTE_KINDS,
    )
    _try(
        recorder,
        "optimizer",
        lambda: recorder.on_shutdown(capture_optimizer(optimizer)),
        OPTIMIZER_KINDS,
    )
    _try(
        recorder,
        "communication",
        lambda: _capture_communication(
            recorder, patches, layout, layout_derivation if derive_layout else None
        ),
        COMMUNICATION_KINDS,
    )
    _capture_input_and_output(recorder, patches, forwards, once_loaded)
    skipped = SkippedSteps(recorder, steps)
    _try(recorder, "gradient scaler", lambda: recorder.on_shutdown(skipped.watch(patches)))
    _try(recorder, "start-up", lambda: _capture_startup(recorder, patches))
    _try(recorder, "imported function", patches.replace_imported)
    if count_steps is not False:
        _try(recorder, "step", lambda: recorder.on_shutdown(steps.count()))
        recorder.on_shutdown(steps.finish)


def _capture_input_and_output(
    recorder: Recorder, patches: Patches, forwards: RootForwards, once_loaded: OnceLoaded
) -> None:
    saves = Saves(recorder, patches)
    once_loaded.capture(LOADER_MODULE, lambda: capture_loaders(recorder, patches, forwards))
    _try(recorder, "save", saves.capture_torch)
    once_loaded.capture(DISTRIBUTED_MODULE, saves.capture_distributed)
    once_loaded.capture(SAFETENSORS_MODULE, saves.capture_safetensors)
    _try(
        recorder,
        "compilation",
        lambda: recorder.on_shutdown(
            capture_compilations(recorder, patches, forwards.function_compiles)
        ),
    )


def _capture_startup(recorder: Recorder, patches: Patches) -> None:
    _capture_time_to_first_step(recorder)
    dist = sys.modules["torch"].distributed
    if dist.is_available():
        # The first collective of a group, in which NCCL connects its members, is the communication
        # with ``seq`` 0 of that group.
        for name in GROUP_FUNCTIONS:
            wrap = functools.partial(spanned, recorder, name, SpanKind.HOST)
            patches.wrap(dist.distributed_c10d, name, wrap)
        watch_group(patches)


def _try(
    recorder: Recorder, what: str, start: Callable[[], None], kinds: Iterable[SpanKind] = ()
) -> None:
    """Start a capture; if this fails, report that ``kinds`` are missing."""
    try:
        start()
    except Exception as problem:  # noqa: BLE001 - promise 1: harmless
        report_capture_failure(recorder, f"no {what} capture", problem, kinds)


def _capture_compute(
    compute: ComputeCapture,
    patches: Patches,
    steps: StepCounter,
    forwards: RootForwards,
    layout_derivation: LayoutDerivation,
    once_loaded: OnceLoaded,
) -> ComputeCapture:
    from torch.optim.optimizer import register_optimizer_step_post_hook

    from .forward_backward import capture_backward
    from .pipeline import (
        SCHEDULES_MODULE,
        capture_megatron,
        capture_pipeline,
        capture_steps_of_schedules,
    )

    recorder = compute.recorder
    recorder.on_shutdown(register_optimizer_step_post_hook(compute.on_optimizer_step).remove)
    capture_backward(compute, patches, steps)
    once_loaded.capture(
        STAGE_MODULE,
        lambda: capture_pipeline(compute, patches, layout_derivation.on_stage),
        COMPUTE_KINDS,
    )
    once_loaded.capture(
        PIPELINING_MODULE, lambda: capture_steps_of_schedules(patches, steps), COMPUTE_KINDS
    )
    follow_model = functools.partial(forwards.attach_chunk, compute)
    once_loaded.capture(
        SCHEDULES_MODULE,
        lambda: capture_megatron(compute, patches, steps, follow_model),
        COMPUTE_KINDS,
    )
    return compute


def _capture_communication(
    recorder: Recorder,
    patches: Patches,
    layout: Layout | None,
    layout_derivation: LayoutDerivation | None,
) -> None:
    if not sys.modules["torch"].distributed.is_available():
        return
    from .communication import Communication
    from .intercept import intercept
    from .stream_waits import capture_stream_waits

    communication = Communication(recorder, layout)
    recorder.on_shutdown(communication.close)
    atexit.register(communication.completions.drain)  # runs after `shutdown`
    recorder.on_shutdown(intercept(communication, patches))
    capture_stream_waits(recorder, patches)
    if layout_derivation is not None:
        layout_derivation.start(communication)


def _capture_time_to_first_step(recorder: Recorder) -> None:
    """Record a span, outside any step, from now to the start of the first step, if it is long."""
    start_ns = monotonic_ns()

    def first_step() -> bool:
        duration_ns = monotonic_ns() - start_ns
        if duration_ns < MIN_START_NS:
            return True
        lane = recorder.lane()
        lane.append(
            recorder.head("start-up", SpanKind.HOST),
            start_ns,
            duration_ns,
            PLACE.pack(NONE, NONE, NONE, lane.track_id),
            start_ns,
            0,
        )
        return True

    recorder.on_step_begin(first_step)
