from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rankscope.tracer.capture.pipeline import capture_pipeline, capture_steps_of_schedules
from rankscope.tracer.span import SpanKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@dataclass
class FakeCompute:
    """Keeps the spans that were opened."""

    opened: list[tuple[str, SpanKind, int, int]] = field(default_factory=list)

    @contextlib.contextmanager
    def span(
        self, name: str, kind: SpanKind, *, microbatch: int, chunk: int, **_: object
    ) -> Iterator[None]:
        self.opened.append((name, kind, microbatch, chunk))
        yield


@dataclass
class FakePatches:
    """Wraps a stage that computes nothing instead of torch's."""

    wrapped: dict[str, Callable[..., Any]] = field(default_factory=dict)

    def wrap(self, _: type, method: str, wrap: Callable[..., Any]) -> None:
        self.wrapped[method] = wrap(lambda *args, **__: args)


@dataclass(frozen=True)
class FakeStage:
    stage_index: int
    group_size: int
    dw_builder: object = None

    @property
    def is_first(self) -> bool:
        return self.stage_index == 0


def test_a_step_begins_before_the_schedule_runs() -> None:
    calls: list[str] = []

    class Steps:
        def on_next_work(self) -> None:
            calls.append("step begins")

    patches = FakePatches()
    capture_steps_of_schedules(patches, Steps())  # type: ignore[arg-type]

    assert patches.wrapped["step"]("schedule", "tokens") == ("schedule", "tokens")
    assert calls == ["step begins"]


def test_the_parts_of_a_split_backward_have_their_own_names() -> None:
    compute, patches = FakeCompute(), FakePatches()
    stages: list[object] = []
    capture_pipeline(compute, patches, stages.append)  # type: ignore[arg-type]
    # The second chunk of the first of four ranks.
    stage = FakeStage(stage_index=4, group_size=4)

    patches.wrapped["forward_one_chunk"](stage, 2)
    patches.wrapped["backward_one_chunk"](stage, 2, loss=None, full_backward=False)
    patches.wrapped["backward_weight_one_chunk"](stage, 2, last_backward=True)
    patches.wrapped["backward_one_chunk"](stage, 3, loss=None, full_backward=True)

    assert compute.opened == [
        ("forward", SpanKind.FORWARD, 2, 1),
        ("backward input", SpanKind.BACKWARD, 2, 1),
        ("backward weight", SpanKind.BACKWARD, 2, 1),
        ("backward", SpanKind.BACKWARD, 3, 1),
    ]
    assert stages == [stage] * 4


def test_the_first_stage_computes_its_whole_backward_with_the_weights() -> None:
    compute, patches = FakeCompute(), FakePatches()
    capture_pipeline(compute, patches, lambda _: None)  # type: ignore[arg-type]
    first = FakeStage(stage_index=0, group_size=4)
    with_own_weights = FakeStage(stage_index=0, group_size=4, dw_builder=object())

    for stage in (first, with_own_weights):
        patches.wrapped["backward_one_chunk"](stage, 2, loss=None, full_backward=False)
        patches.wrapped["backward_weight_one_chunk"](stage, 2, last_backward=True)

    assert compute.opened == [
        ("backward", SpanKind.BACKWARD, 2, 0),
        ("backward input", SpanKind.BACKWARD, 2, 0),
        ("backward weight", SpanKind.BACKWARD, 2, 0),
    ]
