from __future__ import annotations

from itertools import islice

import torch

from rankscope.tracer.topology import Layout
from rankscope.trainer.config import ModelConfig, TrainerConfig
from rankscope.trainer.data import Batch, iter_batches


def first_batches(*, dp: int, num_microbatches: int, dp_position: int = 0) -> list[Batch]:
    config = TrainerConfig(
        layout=Layout(dp=dp),
        world_size=dp,
        num_microbatches=num_microbatches,
        model=ModelConfig(vocab_size=16, seq_length=40),
    )
    batches = iter_batches(config, dp_position=dp_position, device=torch.device("cpu"))
    return list(islice(batches, 2))


def test_the_target_is_the_next_token() -> None:
    (batch, _) = first_batches(dp=1, num_microbatches=3)

    assert batch.tokens.shape == batch.targets.shape == (6, 40)
    assert torch.equal(batch.tokens[:, 1:], batch.targets[:, :-1])


def test_a_token_is_followed_by_at_most_four_others_in_any_step() -> None:
    successors: dict[int, set[int]] = {}
    for batch in first_batches(dp=1, num_microbatches=8):
        pairs = zip(batch.tokens.flatten().tolist(), batch.targets.flatten().tolist(), strict=True)
        for token, target in pairs:
            successors.setdefault(token, set()).add(target)

    assert len(successors) == 16
    assert max(map(len, successors.values())) <= 4


def test_data_positions_share_out_what_one_would_read_alone() -> None:
    alone = first_batches(dp=1, num_microbatches=4)
    first = first_batches(dp=2, num_microbatches=2, dp_position=0)
    second = first_batches(dp=2, num_microbatches=2, dp_position=1)

    for whole, left, right in zip(alone, first, second, strict=True):
        assert torch.equal(whole.tokens, torch.cat((left.tokens, right.tokens)))


def test_every_step_has_new_tokens() -> None:
    first, second = first_batches(dp=1, num_microbatches=1)

    assert not torch.equal(first.tokens, second.tokens)
