from __future__ import annotations

import torch

from rankscope.trainer.config import ModelConfig
from rankscope.trainer.model import Stage, initialize
from rankscope.trainer.pace import BACKWARD_PACES, FORWARD_PACES
from rankscope.trainer.segments import time_optimizer, time_segments

MODEL = ModelConfig(
    num_layers=2, hidden_size=16, num_heads=2, ffn_size=16, vocab_size=8, seq_length=4
)


class TimerLog:
    """A timer that records its calls."""

    slowdown = 1.0
    num_segments = 0
    num_overruns = 0

    def __init__(self) -> None:
        self.calls: list[str] = []

    def begin(self) -> None:
        self.calls.append("begin")

    def end(self, paces: int) -> None:
        self.calls.append(f"end {paces}")

    def reset_counts(self) -> None:
        self.calls.clear()


def make_stage(*, stage: int, num_stages: int) -> Stage:
    model = Stage(MODEL, stage=stage, num_stages=num_stages)
    initialize(model, seed=0)
    return model


def test_each_half_of_a_block_is_one_segment_in_each_direction() -> None:
    log, model = TimerLog(), make_stage(stage=0, num_stages=1)
    time_segments(model, log)

    loss = model(torch.zeros(1, 4, dtype=torch.int64)).sum()
    forward, log.calls = log.calls, []
    loss.backward()

    assert forward == ["begin", f"end {FORWARD_PACES}"] * 4
    assert log.calls == ["begin", f"end {BACKWARD_PACES}"] * 4


def test_a_middle_stage_is_timed_like_the_ends() -> None:
    log, model = TimerLog(), make_stage(stage=1, num_stages=2)
    time_segments(model, log)

    output = model(torch.zeros(4, 16, requires_grad=True))
    output.backward(torch.ones_like(output))

    assert (
        log.calls
        == ["begin", f"end {FORWARD_PACES}"] * 2
        + [
            "begin",
            f"end {BACKWARD_PACES}",
        ]
        * 2
    )


def test_timing_changes_neither_result_nor_gradient() -> None:
    plain, timed = make_stage(stage=0, num_stages=1), make_stage(stage=0, num_stages=1)
    time_segments(timed, TimerLog())
    tokens = torch.arange(8).reshape(2, 4)

    results = [model(tokens) for model in (plain, timed)]
    for result in results:
        result.square().sum().backward()

    assert torch.equal(*results)
    for mine, other in zip(plain.parameters(), timed.parameters(), strict=True):
        assert mine.grad is not None
        assert other.grad is not None
        assert torch.equal(mine.grad, other.grad)


def test_without_gradients_only_forward_is_timed() -> None:
    log, model = TimerLog(), make_stage(stage=0, num_stages=1)
    time_segments(model, log)

    with torch.no_grad():
        model(torch.zeros(1, 4, dtype=torch.int64))

    assert log.calls == ["begin", f"end {FORWARD_PACES}"] * 4


def test_the_update_is_one_segment() -> None:
    log, weight = TimerLog(), torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([weight])
    time_optimizer(optimizer, log)
    weight.grad = torch.ones(2)

    optimizer.step()

    assert log.calls == ["begin", "end 1"]
