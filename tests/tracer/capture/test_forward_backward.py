"""Forwards that end without a call of torch's hook, by an interrupt that a notebook survives."""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from rankscope.tracer.capture.forward_backward import ComputeCapture, capture_forward
from rankscope.tracer.record.sampling import Settings
from rankscope.tracer.span import NONE, SpanKind
from tests.support.tracer.claiming import ClaimingCuda
from tests.support.tracer.reading import Row, dropped, missing_kinds, open_names, read_spans
from tests.support.tracer.recording import recorder_in
from tests.support.tracer.timing import TimedRecorder

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from rankscope.tracer.record.recorder import Recorder


class Model(nn.Linear):
    """Raises an interrupt or calls itself, as configured."""

    is_interrupted = False
    times = 0

    def __init__(self) -> None:
        super().__init__(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_interrupted:
            raise KeyboardInterrupt
        if self.times:
            self.times -= 1
            x = self(x)
        return super().forward(x)


class Outer(nn.Module):
    """Another root, whose forward runs a model that is captured too."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> Any:  # noqa: ANN401 - a tensor
        return self.model(x)


def captured(recorder: Recorder, *models: nn.Module) -> Callable[[], None]:
    """Capture the forwards of several roots; return a function that removes the hooks."""
    compute = ComputeCapture(recorder)
    hooks = [capture_forward(compute, one, lambda *_, is_microbatch: None) for one in models]

    def remove_hooks() -> None:
        for hook in hooks:
            hook.remove()

    return remove_hooks


def interrupt(model: Model) -> None:
    model.is_interrupted = True
    with pytest.raises(KeyboardInterrupt):
        model(torch.zeros(1, 2))
    model.is_interrupted = False


def summarize(rows: list[Row]) -> list[tuple[str, int, int, int]]:
    return [(row.name, row.step, row.microbatch, row.depth) for row in rows]


def test_after_an_interrupted_forward_the_next_is_recorded_and_the_step_says_one_is_missing(
    tmp_path: Path,
) -> None:
    recorder = recorder_in(tmp_path)
    recorder.begin_steps(3)
    model = Model()
    captured(recorder, model)
    model(torch.zeros(1, 2))
    interrupt(model)
    assert open_names(tmp_path) == ["forward"]
    model(torch.zeros(1, 2))
    assert open_names(tmp_path) == []
    with recorder.span("after"):
        pass
    recorder.step()
    model(torch.zeros(1, 2))
    recorder.step()
    recorder.shutdown()

    assert summarize(read_spans(tmp_path)) == [
        ("forward", 3, 0, 0),
        ("forward", 3, 2, 0),  # the second was interrupted at an unknown time
        ("after", 3, NONE, 0),
        ("forward", 4, 0, 0),
    ]
    assert missing_kinds(tmp_path) == [{SpanKind.FORWARD}, set()]
    assert dropped(tmp_path) == {}


def test_a_forward_interrupted_within_another_one_ends_both(tmp_path: Path) -> None:
    recorder = recorder_in(tmp_path)
    recorder.begin_steps()
    inner = Model()
    outer = Outer(inner)
    captured(recorder, inner, outer)
    inner.is_interrupted = True
    with pytest.raises(KeyboardInterrupt):
        outer(torch.zeros(1, 2))
    inner.is_interrupted = False
    inner(torch.zeros(1, 2))  # another one than the open forward
    outer(torch.zeros(1, 2))
    recorder.step()
    recorder.shutdown()

    assert summarize(read_spans(tmp_path)) == [("forward", 0, 1, 0), ("forward", 0, 2, 0)]
    assert missing_kinds(tmp_path) == [{SpanKind.FORWARD}]


@pytest.mark.parametrize("within", ["itself", "another"])
def test_a_forward_inside_a_forward_is_not_recorded(tmp_path: Path, within: str) -> None:
    recorder = recorder_in(tmp_path)
    recorder.begin_steps()
    model = Model()
    outer = Outer(model)
    captured(recorder, model, outer)
    if within == "itself":
        model.times = 3
        model(torch.zeros(1, 2))
    else:
        outer(torch.zeros(1, 2))
    recorder.step()
    recorder.shutdown()

    assert summarize(read_spans(tmp_path)) == [("forward", 0, 0, 0)]
    assert missing_kinds(tmp_path) == [set()]


def test_an_interrupted_forward_does_not_keep_its_model_alive(tmp_path: Path) -> None:
    recorder = recorder_in(tmp_path)
    model = Model()
    remove_hooks = captured(recorder, model)
    interrupt(model)
    remove_hooks()
    is_alive = weakref.ref(model)
    del model
    gc.collect()
    recorder.shutdown()

    assert is_alive() is None


def test_an_interrupted_forward_that_is_not_sampled_leaves_nothing_behind(tmp_path: Path) -> None:
    recorder = recorder_in(tmp_path, settings=Settings(sample_every=2))
    recorder.begin_steps(1)
    model = Model()
    captured(recorder, model)
    interrupt(model)
    recorder.step()
    model(torch.zeros(1, 2))
    recorder.step()
    recorder.shutdown()

    assert summarize(read_spans(tmp_path)) == [("forward", 2, 0, 0)]


def test_the_mark_of_an_interrupted_forward_is_released(tmp_path: Path) -> None:
    timed = TimedRecorder(tmp_path, ClaimingCuda(), capacity=20)
    timed.recorder.begin_steps()
    model = Model()
    captured(timed.recorder, model)
    for _ in range(30):
        interrupt(model)
    model(torch.zeros(1, 2))
    timed.recorder.step()
    timed.turns(5)
    timed.shutdown()

    assert [(row.name, row.step, row.microbatch) for row in read_spans(tmp_path)] == [
        ("forward", 0, 30)
    ]
    assert missing_kinds(tmp_path) == [{SpanKind.FORWARD}]
    assert dropped(tmp_path) == {}
