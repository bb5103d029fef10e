from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from rankscope.tracer.job.graph_flops import FirstStep

if TYPE_CHECKING:
    from collections.abc import Callable

WIDE, HEADS, WORDS = 8, 2, 10

WEIGHTS = 4 * WIDE * WIDE + 2 * WIDE * 4 * WIDE + WIDE * WORDS
"""Of q, k, v and o, of the feed-forward layer, and of the head."""

Products = tuple[float, float]
"""FLOPs per token, and per squared length."""


class Decoder(nn.Module):
    """One block and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDE)
        self.qkv = nn.Linear(WIDE, 3 * WIDE)
        self.out = nn.Linear(WIDE, WIDE, bias=False)
        self.feed = nn.Sequential(nn.Linear(WIDE, 4 * WIDE), nn.GELU(), nn.Linear(4 * WIDE, WIDE))
        self.head = nn.Linear(WIDE, WORDS, bias=False)
        self.pooled = nn.Linear(WIDE, WIDE)
        self.more: list[Callable[[torch.Tensor], torch.Tensor]] = []

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        num, length, _ = x.shape
        q, k, v = (part.view(num, length, HEADS, -1).transpose(1, 2) for part in x.chunk(3, -1))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return mixed.transpose(1, 2).reshape(num, length, -1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        x = x + self.out(self.attend(self.qkv(x)))
        x = x + self.feed(x)
        for function in self.more:
            x = function(x)
        return self.head(x)  # type: ignore[no-any-return]


class Explicit(Decoder):
    """Attention as two products."""

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        num, length, _ = x.shape
        q, k, v = (part.view(num, length, HEADS, -1).transpose(1, 2) for part in x.chunk(3, -1))
        mixed = (q @ k.transpose(-1, -2)).softmax(-1) @ v
        return mixed.transpose(1, 2).reshape(num, length, -1)


class Checkpointed(Decoder):
    """Activations that the backward computes again."""

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        attend = super().attend
        attended: torch.Tensor = checkpoint(attend, x, use_reentrant=False)
        return attended


def flops_of_step(
    model: Decoder, *, num: int = 3, length: int = 5, num_backwards: int = 1
) -> Products | None:
    """Return the FLOPs of a step of one forward on ``num`` rows of ``length``."""
    step, ids = FirstStep(), torch.zeros(num, length, dtype=torch.long)
    step.forward_begins(tuple(ids.shape))
    loss = model(ids).sum()
    for _ in range(num_backwards):
        step.backward_begins((loss,))
    found = step.flops(model)
    if found is None:
        return None
    return found.flops_per_token, found.flops_per_squared_length


@pytest.mark.parametrize("kind", [Decoder, Explicit, Checkpointed])
@pytest.mark.parametrize("length", [5, WIDE, WIDE // HEADS])
def test_a_plain_decoder_costs_six_flops_per_weight_and_its_attention(
    kind: type[Decoder], length: int
) -> None:
    # attention: 6 x (d_qk + d_v) x heads = 6 x 2 x 8
    assert flops_of_step(kind(), length=length) == (6 * WEIGHTS, 96)


def test_a_tied_head_counts_and_the_lookup_does_not() -> None:
    model = Decoder()
    model.head.weight = model.embedding.weight

    assert flops_of_step(model) == (6 * WEIGHTS, 96)


def test_a_parameter_multiplied_without_a_module_counts() -> None:
    model = Decoder()
    weight = nn.Parameter(torch.zeros(WIDE, WIDE))
    model.more.append(lambda x: x @ weight)

    assert flops_of_step(model) == (6 * (WEIGHTS + WIDE * WIDE), 96)


def test_autocast_and_a_frozen_embedding_change_nothing() -> None:
    model = Decoder()
    model.embedding.requires_grad_(requires_grad=False)

    with torch.autocast("cpu", torch.bfloat16):
        assert flops_of_step(model) == (6 * WEIGHTS, 96)


def frozen(model: Decoder) -> None:
    model.feed[0].requires_grad_(requires_grad=False)


def pooled(model: Decoder) -> None:
    model.more.append(lambda x: x + model.pooled(x[:, :1]))


def convolved(model: Decoder) -> None:
    conv = nn.Conv1d(WIDE, WIDE, 1)
    model.more.append(lambda x: conv(x.transpose(1, 2)).transpose(1, 2))


def routed(model: Decoder) -> None:
    model.more.append(lambda x: torch.cat([model.pooled(x[:, :2]), x[:, 2:]], dim=1))


def recurrent(model: Decoder) -> None:
    layer = nn.GRU(WIDE, WIDE, batch_first=True)
    model.more.append(lambda x: layer(x)[0])


def compiled(model: Decoder) -> None:
    model.compile(backend="aot_eager")


def checkpointed_reentrantly(model: Decoder) -> None:
    model.more.append(lambda x: checkpoint(model.pooled, x, use_reentrant=True))


def encoder_decoder(model: Decoder) -> None:
    model.cross = nn.TransformerDecoder(nn.TransformerDecoderLayer(WIDE, HEADS), 1)


@pytest.mark.parametrize(
    "change",
    [
        frozen,
        pooled,
        convolved,
        routed,
        recurrent,
        compiled,
        checkpointed_reentrantly,
        encoder_decoder,
    ],
)
def test_flops_are_unknown_if_a_product_is_hidden_or_depends_on_more_than_tokens(
    change: Callable[[Decoder], None],
) -> None:
    model = Decoder()
    change(model)

    assert flops_of_step(model) is None


def test_flops_of_two_backwards_for_one_forward_are_unknown() -> None:
    assert flops_of_step(Decoder(), num_backwards=2) is None


def test_several_forwards_for_each_backward_count_together() -> None:
    model, step = Decoder(), FirstStep()
    for _ in range(2):
        losses = []
        for shape in ((3, 5), (2, 7)):
            step.forward_begins(shape)
            losses.append(model(torch.zeros(shape, dtype=torch.long)).sum())
        step.backward_begins((sum(losses),))

    found = step.flops(model)

    assert found is not None
    assert (found.flops_per_token, found.flops_per_squared_length) == (6 * WEIGHTS, 96)
