"""Bytes of a model's state, summed here from the shapes of its tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from rankscope.tracer.job.model_memory import read_device_memory, state_bytes


def stepped(model: nn.Module, optimizer: Any) -> Any:  # noqa: ANN401
    model(torch.ones(1, 4, dtype=next(model.parameters()).dtype)).sum().backward()
    optimizer.step()
    return optimizer


def test_adam_has_two_moments_of_each_parameter() -> None:
    model = nn.Linear(4, 6)  # 30 parameters
    optimizer = stepped(model, torch.optim.AdamW(model.parameters()))

    # and the number of steps of both tensors, 4 bytes each
    assert state_bytes(model, [optimizer]) == {
        "parameter_bytes": 120,
        "gradient_bytes": 120,
        "optimizer_bytes": 240 + 8,
    }


def test_frozen_parameters_have_no_gradient() -> None:
    model = nn.Linear(4, 6)
    model.bias.requires_grad = False

    sizes = state_bytes(model, [stepped(model, torch.optim.SGD([model.weight]))])

    assert (sizes["parameter_bytes"], sizes["gradient_bytes"]) == (120, 96)
    assert sizes["optimizer_bytes"] == 0


def test_copies_that_only_the_optimizer_has_are_its_own() -> None:
    model = nn.Linear(4, 6, bias=False).bfloat16()
    copy = model.weight.detach().float().requires_grad_()
    copy.grad = torch.ones_like(copy)
    optimizer: Any = torch.optim.Adam([copy])
    optimizer.step()

    # a copy and two moments of 24 weights in float32, and one number of steps
    assert state_bytes(model, [optimizer])["optimizer_bytes"] == 3 * 24 * 4 + 4


def test_gradients_that_megatron_accumulates_count_in_their_own_type() -> None:
    model: Any = nn.Linear(4, 6, bias=False).bfloat16()
    model.weight.main_grad = torch.zeros(6, 4)

    assert state_bytes(model, []) == {
        "parameter_bytes": 48,
        "gradient_bytes": 96,
        "optimizer_bytes": 0,
    }


def test_without_a_device_nothing_is_known_of_its_memory() -> None:
    assert read_device_memory() == {}
