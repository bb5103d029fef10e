from __future__ import annotations

from dataclasses import replace

import torch

from rankscope.trainer.config import ModelConfig
from rankscope.trainer.model import Stage, initialize
from rankscope.trainer.pace import BACKWARD_PACES, FORWARD_PACES
from rankscope.trainer.segments import BackwardPart, StageSegments, time_optimizer
from tests.support.trainer.timer_log import TimerLog

MODEL = ModelConfig(
    num_layers=2, hidden_size=16, num_heads=2, ffn_size=16, vocab_size=8, seq_length=4
)


def make_stage(*, stage: int, num_stages: int) -> Stage:
    model = Stage(MODEL, stage=stage, num_stages=num_stages)
    initialize(model, seed=0)
    return model


def test_each_half_of_a_block_is_one_segment_in_each_direction() -> None:
    log, model = TimerLog(), make_stage(stage=0, num_stages=1)
    StageSegments(model, log)

    loss = model(torch.zeros(1, 4, dtype=torch.int64)).sum()
    forward, log.calls = log.calls, []
    loss.backward()

    assert forward == ["begin", f"end {FORWARD_PACES}"] * 4
    assert log.calls == ["begin", f"end {BACKWARD_PACES}"] * 4


def test_a_middle_stage_is_timed_like_the_ends() -> None:
    log, model = TimerLog(), make_stage(stage=1, num_stages=2)
    StageSegments(model, log)

    output = model(torch.zeros(4, 16, requires_grad=True))
    output.backward(torch.ones_like(output))

    forward, backward = ["begin", f"end {FORWARD_PACES}"], ["begin", f"end {BACKWARD_PACES}"]
    assert log.calls == [*forward, *forward, *backward, *backward]


def test_a_split_backward_has_half_segments_and_one_for_all_weights() -> None:
    log, model = TimerLog(), make_stage(stage=1, num_stages=2)
    segments = StageSegments(model, log)
    x = torch.zeros(4, 16, requires_grad=True)
    output = model(x)
    weights = list(model.parameters())
    log.calls.clear()

    segments.backward(
        BackwardPart.INPUT,
        lambda: torch.autograd.grad(output.sum(), x, retain_graph=True),
    )
    inputs, log.calls = log.calls, []
    segments.backward(
        BackwardPart.WEIGHT,
        lambda: torch.autograd.grad(output.sum(), weights),
    )

    assert inputs == ["begin", "end 1"] * 2
    # Two segments of one layer, of one pace each.
    assert log.calls == ["begin", "end 2"]


def test_the_exchange_of_experts_is_outside_of_segments() -> None:
    log = TimerLog()
    config = replace(MODEL, num_experts=4)
    model = Stage(config, stage=1, num_stages=2)
    initialize(model, seed=0)
    StageSegments(model, log)
    (block,) = model.blocks.values()

    def exchange(
        rows: torch.Tensor, counts: torch.Tensor, experts: torch.nn.Module
    ) -> torch.Tensor:
        log.calls.append("exchange")
        output: torch.Tensor = experts(rows, counts.tolist())
        return output

    block.mlp.exchange = exchange  # type: ignore[union-attr]

    model(torch.zeros(4, 16))

    assert log.calls == ["begin", "end 1", "exchange", "begin", "end 1"]


def test_keys_are_gathered_between_the_two_halves_of_attention() -> None:
    class Gather(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            log.calls.append("gather")
            return torch.cat((x, x), dim=3)

    log, model = TimerLog(), make_stage(stage=1, num_stages=2)
    (block,) = model.blocks.values()
    block.attention.divide_sequences(  # type: ignore[operator,union-attr]
        Gather(), torch.tensor([0, 3]), torch.tensor([0, 3, 1, 2])
    )
    StageSegments(model, log)

    output = model(torch.zeros(4, 16, requires_grad=True))
    forward, log.calls = log.calls, []
    output.sum().backward()

    assert forward == ["begin", "end 0.5", "gather", "begin", "end 0.5", "begin", "end 1"]
    assert log.calls == ["begin", "end 2", "begin", "end 1", "begin", "end 1"]


def test_timing_changes_neither_result_nor_gradient() -> None:
    plain, timed = make_stage(stage=0, num_stages=1), make_stage(stage=0, num_stages=1)
    StageSegments(timed, TimerLog())
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
    StageSegments(model, log)

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
