"""Forwards and backwards of pipeline schedules: `torch.distributed.pipelining` and megatron.core.

If a rank holds several model chunks (the interleaved schedule of megatron.core), micro-batch and
chunk cannot be counted. `schedules.forward_step` receives both, and the output that it returns is
the object from which `schedules.backward_step` starts. If outputs are freed early, backwards call
the autograd engine without `torch.autograd.backward`.
"""

from __future__ import annotations

import functools
import inspect
import sys
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from ..record.steps import COMPUTE_KINDS
from ..span import NONE, SpanKind
from .forward_backward import traced_backward
from .guard import Guard

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..patches import Patches
    from .forward_backward import ComputeCapture
    from .optimizer import StepCounter

METHODS = {
    "forward_one_chunk": ("forward", SpanKind.FORWARD),
    "backward_one_chunk": ("backward", SpanKind.BACKWARD),
    "backward_weight_one_chunk": ("backward weight", SpanKind.BACKWARD),
}
"""Methods of a stage; the first argument of each is the micro-batch's index."""

SCHEDULES_MODULE = "megatron.core.pipeline_parallel.schedules"

COMBINED = "combined_1f1b_schedule_for_interleaved_pipelining"
"""A forward and a backward of two micro-batches at once, which call neither of the two methods."""

UNKNOWN: Place = (NONE, NONE)


def capture_pipeline(
    compute: ComputeCapture, patches: Patches, on_stage: Callable[[Any], None]
) -> None:
    """Record a span of each method of a pipeline stage; call ``on_stage`` with the stage before."""
    from torch.distributed.pipelining import stage

    for method, (name, kind) in METHODS.items():
        wrap = functools.partial(_traced_chunk, compute, on_stage, name, kind)
        patches.wrap(stage._PipelineStageBase, method, wrap)


def capture_steps_of_schedules(patches: Patches, steps: StepCounter) -> None:
    """Let a step begin where a schedule begins one, before its first receive.

    Its first backward would be too late: the forwards and receives before it, some of the next
    step's on each rank, would count as the end of the step before.
    """
    from torch.distributed.pipelining import schedules

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def step(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            steps.on_next_work()
            return original(*args, **kwargs)

        return step

    for schedule in (schedules.PipelineScheduleSingle, schedules.PipelineScheduleMulti):
        patches.wrap(schedule, "step", wrap)


def read_chunk(stage: Any) -> int:  # noqa: ANN401 - a private class of torch
    """Return the index of a stage among this rank's model chunks; `NONE` if unknown.

    Stages are assigned to ranks in rounds as long as the pipeline, in looped and V-shaped schedules
    alike, and a rank gets one stage per round.
    """
    index, size = getattr(stage, "stage_index", None), getattr(stage, "group_size", None)
    return index // size if type(index) is int and type(size) is int and size else NONE


def _traced_chunk(
    compute: ComputeCapture,
    on_stage: Callable[[Any], None],
    name: str,
    kind: SpanKind,
    original: Callable[..., Any],
) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(stage: Any, microbatch: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        on_stage(stage)
        part = _part_of_backward(stage, name, is_full=kwargs.get("full_backward") is not False)
        if part is None:
            return original(stage, microbatch, *args, **kwargs)
        on = (getattr(stage, "device", None),)
        with compute.span(part, kind, microbatch=microbatch, chunk=read_chunk(stage), on=on):
            return original(stage, microbatch, *args, **kwargs)

    return call


def _part_of_backward(stage: Any, name: str, *, is_full: bool) -> str | None:  # noqa: ANN401
    """Return what a call of a stage computes; None if nothing.

    A zero-bubble schedule requests the gradients of the input alone, by keyword, and later those
    of the weights. The first stage, whose input has no gradient, then computes all of them later,
    unless the job brought its own function for the weights.
    """
    is_split = getattr(stage, "is_first", False) is not True or getattr(stage, "dw_builder", None)
    if not is_full:
        return f"{name} input" if is_split else None
    return name if is_split else name.removesuffix(" weight")


Place = tuple[int, int]
"""Micro-batch and model chunk."""


def capture_megatron(
    compute: ComputeCapture,
    patches: Patches,
    steps: StepCounter,
    follow_module: Callable[[Any], object],
) -> None:
    """Record a span of each forward and backward of megatron.core's schedules.

    Args:
        steps: Called before the span of a backward begins.
        follow_module: Records a span of each forward of a module.
    """
    schedules: Any = sys.modules[SCHEDULES_MODULE]
    chunks = _MegatronChunks(compute, follow_module, schedules.parallel_state)
    wraps: dict[str, Callable[[Any], Any]] = {
        "forward_step": chunks.wrap_forward,
        "backward_step": chunks.wrap_backward,
        "custom_backward": functools.partial(traced_backward, compute, steps),
    }
    for name in wraps:
        getattr(schedules, name)  # all or none: some of them alone would give wrong places
    for name, wrap in wraps.items():
        patches.wrap(schedules, name, wrap)
    if hasattr(schedules, COMBINED):
        patches.wrap(schedules, COMBINED, chunks.wrap_combined)


class _MegatronChunks:
    """Micro-batch and chunk of the running work on a rank with several chunks."""

    def __init__(
        self,
        compute: ComputeCapture,
        follow_module: Callable[[Any], object],
        groups: Any,  # noqa: ANN401 - a module
    ) -> None:
        from torch.utils.weak import WeakTensorKeyDictionary

        self._thread_state = compute.thread_state
        self._guard = Guard(compute.recorder, "megatron", COMPUTE_KINDS)
        self._follow_module = follow_module
        self._groups = groups
        self._followed: WeakSet[Any] = WeakSet()
        self._places: Any = WeakTensorKeyDictionary()
        """Place of each output that waits for its backward."""

    def wrap_forward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        names = list(inspect.signature(original).parameters)

        @functools.wraps(original)
        def forward_step(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            place = self._find_place(
                self._forward_begins, {**dict(zip(names, args, strict=False)), **kwargs}
            )
            if place is None:
                return original(*args, **kwargs)
            output = self._call_at(place, original, args, kwargs)
            self._guard.call(self._forward_ends, output, place)
            return output

        return forward_step

    def wrap_backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        names = list(inspect.signature(original).parameters)

        @functools.wraps(original)
        def backward_step(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            place = self._find_place(
                self._backward_begins, {**dict(zip(names, args, strict=False)), **kwargs}
            )
            return self._call_at(place, original, args, kwargs)

        return backward_step

    def wrap_combined(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def combined(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            return self._call_at(UNKNOWN, original, args, kwargs)

        return combined

    def _find_place(
        self, find: Callable[[Any], Place | None], arguments: dict[str, Any]
    ) -> Place | None:
        """Return the place of a call with these arguments; None if the rank has a single chunk."""
        if not self._guard.active:
            return UNKNOWN if self._followed else None
        try:
            return find(arguments)
        except Exception as problem:  # noqa: BLE001 - promise 1: harmless
            self._guard.fail(problem)
            return UNKNOWN

    def _call_at(
        self,
        place: Place | None,
        original: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:  # noqa: ANN401
        state = self._thread_state
        before, state.place = state.place, place
        try:
            return original(*args, **kwargs)
        finally:
            state.place = before

    def _forward_begins(self, arguments: dict[str, Any]) -> Place | None:
        if "vp_stage" in arguments:
            chunk = arguments["vp_stage"]
        else:  # before core 0.13, the groups had it
            chunk = self._groups.get_virtual_pipeline_model_parallel_rank()
        if chunk is None:
            return None
        model = arguments["model"]
        if model not in self._followed:
            self._followed.add(model)
            self._follow_module(model)
        microbatch = arguments.get("current_microbatch")
        return NONE if microbatch is None else int(microbatch), int(chunk)

    def _forward_ends(self, found: tuple[Any, Any], place: Place) -> None:
        output = _first_tensor(found[0])
        if output is not None:
            self._places[output] = place

    def _backward_begins(self, arguments: dict[str, Any]) -> Place | None:
        output = _first_tensor(arguments["output_tensor"])
        place = None if output is None else self._places.pop(output, None)
        if place is None and self._followed:
            return UNKNOWN
        return place


def _first_tensor(output: Any) -> Any:  # noqa: ANN401
    """Return the tensor from which a backward starts; None if there is none."""
    import torch

    first = output[0] if isinstance(output, list) and output else output
    return first if isinstance(first, torch.Tensor) else None
