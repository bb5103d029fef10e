from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from rankscope.tracer.job.counted_flops import FlopCount

SHAPE = (3, 5)


def count(model: nn.Module, shape: tuple[int, ...] | None = SHAPE) -> tuple[float, float] | None:
    """Return FLOPs per token and per squared length of one forward and backward."""
    counter = FlopCount()
    counter.count_forward(model)
    loss = model(torch.zeros(SHAPE, dtype=torch.long)).sum()
    counter.count_backward(torch.autograd.backward)(loss)
    found = counter.flops([shape])
    return None if found is None else (found.flops_per_token, found.flops_per_squared_length)


class Attention(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = x[:, None]
        return nn.functional.scaled_dot_product_attention(heads, heads, heads)[:, 0]


class Channels(nn.Module):
    """A convolution over the tokens, of which the formulas know nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(8, 8, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x.transpose(1, 2)).transpose(1, 2)  # type: ignore[no-any-return]


def test_all_products_of_forward_and_backward_count_per_token() -> None:
    # 6 FLOPs for each of 8 x 8 x 3 weights of the convolution and 8 x 10 of the head.
    model = nn.Sequential(nn.Embedding(10, 8), Channels(), nn.Linear(8, 10))

    assert count(model) == (6 * (8 * 8 * 3 + 8 * 10), 0)


def test_attention_counts_per_squared_length() -> None:
    # Forward 2 products, backward 5: torch counts the scores that are computed again.
    model = nn.Sequential(nn.Embedding(10, 8), Attention())

    assert count(model) == (0, 7 * 2 * 8)


def test_without_token_ids_the_flops_are_unknown() -> None:
    assert count(nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 8)), None) is None


def test_nothing_is_left_of_a_forward_that_fails() -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    counter = FlopCount()
    counter.count_forward(model)

    with pytest.raises(RuntimeError):
        model(torch.zeros(3, 5))

    assert not model._forward_hooks
    assert _get_current_dispatch_mode() is None
