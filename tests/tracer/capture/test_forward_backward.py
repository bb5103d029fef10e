"""Forwards: inside each other, interrupted, and followed without a trace in the module."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from rankscope.tracer.capture.forward_backward import ComputeCapture, capture_forward
from rankscope.tracer.span import NONE, SpanFlag
from tests.support.tracer.reading import Row, dropped, missing_kinds, open_names, read_spans
from tests.support.tracer.recording import recorder_in

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
    """Capture the forwards of several roots; return a function that ends this."""
    compute = ComputeCapture(recorder)
    ends = [capture_forward(compute, one, lambda *_, is_microbatch: None) for one in models]

    def end_all() -> None:
        for end in ends:
            end()

    return end_all


def interrupt(model: Model) -> None:
    model.is_interrupted = True
    with pytest.raises(KeyboardInterrupt):
        model(torch.zeros(1, 2))
    model.is_interrupted = False


def summarize(rows: list[Row]) -> list[tuple[str, int, int, int]]:
    return [(row.name, row.step, row.microbatch, row.depth) for row in rows]


def test_a_forward_that_a_notebook_interrupts_ends_there_with_an_error(tmp_path: Path) -> None:
    recorder = recorder_in(tmp_path)
    recorder.begin_steps(3)
    model = Model()
    captured(recorder, model)
    model(torch.zeros(1, 2))
    interrupt(model)
    assert open_names(tmp_path) == []
    with recorder.span("after"):
        pass
    model(torch.zeros(1, 2))
    recorder.step()
    recorder.shutdown()

    spans = read_spans(tmp_path)
    assert summarize(spans) == [
        ("forward", 3, 0, 0),
        ("forward", 3, 1, 0),
        ("after", 3, NONE, 0),
        ("forward", 3, 2, 0),
    ]
    assert [SpanFlag.ERROR in row.flags for row in spans] == [False, True, False, False]
    assert missing_kinds(tmp_path) == [set()]
    assert dropped(tmp_path) == {}


def test_an_error_in_an_except_block_of_the_job_is_not_one_of_the_forward(tmp_path: Path) -> None:
    recorder = recorder_in(tmp_path)
    model = Model()
    captured(recorder, model)
    try:
        raise KeyError  # noqa: TRY301 - the job retries
    except KeyError:
        model(torch.zeros(1, 2))
    recorder.shutdown()

    (span,) = read_spans(tmp_path)
    assert SpanFlag.ERROR not in span.flags


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


def test_a_followed_model_is_not_kept_alive(tmp_path: Path) -> None:
    recorder = recorder_in(tmp_path)
    model = Model()
    end = captured(recorder, model)
    interrupt(model)
    is_alive = weakref.ref(model)
    del model
    gc.collect()
    end()
    recorder.shutdown()

    assert is_alive() is None


def test_other_modules_of_the_class_are_not_followed_nor_one_at_the_same_address(
    tmp_path: Path,
) -> None:
    recorder = recorder_in(tmp_path)
    model = Model()
    captured(recorder, model)
    address = id(model)
    del model
    gc.collect()
    others = [Model() for _ in range(50)]
    captured(recorder, others[0])
    others[0] = copy.deepcopy(others[0])
    for other in others:
        other(torch.zeros(1, 2))
    recorder.shutdown()

    assert read_spans(tmp_path) == []
    assert address  # which one of the others may have by now


def test_a_class_gets_its_call_back_with_its_last_followed_module(tmp_path: Path) -> None:
    class Plain(Model):
        pass

    class Doubles(Plain):
        def __call__(self, *args: Any) -> Any:  # noqa: ANN401
            return 2 * super().__call__(*args)

    recorder = recorder_in(tmp_path)
    plain, doubles, other = Plain(), Doubles(), Doubles()
    own = Doubles.__dict__["__call__"]
    ends = [captured(recorder, one) for one in (plain, doubles, other)]
    x = torch.ones(1, 2)
    assert torch.equal(doubles(x), 2 * doubles.forward(x))
    ends[0]()
    ends[1]()
    assert "__call__" not in Plain.__dict__
    assert Doubles.__dict__["__call__"] is not own
    ends[2]()
    assert Doubles.__dict__["__call__"] is own
    recorder.shutdown()

    assert summarize(read_spans(tmp_path)) == [("forward", NONE, 0, 0)]
