"""Backwards of megatron.core's pipelines, which call the autograd engine past Python."""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

from tracer.capture.module import traced_backward

if TYPE_CHECKING:
    from collections.abc import Callable

    from tracer.capture.compute import Compute
    from tracer.capture.patch import Patches
    from tracer.capture.steps import StepCounter

SCHEDULES_MODULE = "megatron.core.pipeline_parallel.schedules"


def capture_megatron(compute: Compute, patches: Patches, steps: StepCounter) -> None:
    """Make a span of each backward of a pipeline whose ranks hold one model chunk.

    The n-th backward of a step is that of its micro-batch n. Where ranks hold
    several chunks it is not, and nobody here can tell whose it is: no span.

    Args:
        compute: What opens the spans.
        patches: Where the replaced function is noted.
        steps: Told before the span begins.
    """
    schedules: Any = sys.modules[SCHEDULES_MODULE]
    groups = schedules.parallel_state

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        traced = traced_backward(compute, steps, original)

        @functools.wraps(original)
        def custom_backward(output: Any, grad_output: Any) -> Any:  # noqa: ANN401 - tensors
            has_chunks = groups.get_virtual_pipeline_model_parallel_world_size() is not None
            return (original if has_chunks else traced)(output, grad_output)

        return custom_backward

    patches.wrap(schedules, "custom_backward", wrap)
