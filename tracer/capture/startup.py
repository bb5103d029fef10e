"""Start-up: the making of process groups, and the time to the first step."""

from __future__ import annotations

import functools
import sys
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

from ..native.lane_state import PLACE
from ..span import NONE, SpanKind

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..patches import Patches
    from ..record.recorder import Recorder


MIN_START_NS = 1_000_000_000
"""A shorter start-up explains nothing."""

GROUP_FUNCTIONS = ("init_process_group", "new_group", "destroy_process_group")


def capture_groups(recorder: Recorder, patches: Patches) -> None:
    """Record a span of each call that makes or destroys process groups.

    The first collective of a group, in which NCCL connects its members, is the communication with
    ``seq`` 0 of that group.
    """
    dist = sys.modules["torch"].distributed
    for name in GROUP_FUNCTIONS:
        wrap = functools.partial(spanned, recorder, name, SpanKind.HOST)
        for owner in (dist.distributed_c10d, dist):
            patches.wrap(owner, name, wrap)


def capture_start(recorder: Recorder) -> None:
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


def spanned(
    recorder: Recorder, name: str, kind: SpanKind, original: Callable[..., Any]
) -> Callable[..., Any]:
    """Return ``original`` with a span of each of its calls."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        with recorder.host_span(name, kind):
            return original(*args, **kwargs)

    return call
