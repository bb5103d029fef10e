from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch

from rankscope.trainer.config import ModelConfig
from rankscope.trainer.model import Stage, initialize, rotary_table, rotate, token_loss

MODEL = ModelConfig(num_layers=4, hidden_size=32, num_heads=4, ffn_size=48, vocab_size=20)


def make_stage(*, stage: int = 0, num_stages: int = 1) -> Stage:
    model = Stage(MODEL, stage=stage, num_stages=num_stages)
    initialize(model, seed=7)
    return model


def make_tokens() -> torch.Tensor:
    return torch.randint(20, (2, 32), generator=torch.Generator().manual_seed(0))


def logits_of(tokens: torch.Tensor) -> torch.Tensor:
    """Return an untrained model's logits, shape (batch, seq, vocab)."""
    return make_stage()(tokens).unflatten(0, tokens.shape)  # type: ignore[no-any-return]


def test_each_token_becomes_one_row_of_logits() -> None:
    assert make_stage()(make_tokens()).shape == (2 * 32, 20)


def test_a_position_does_not_attend_to_later_ones() -> None:
    tokens = make_tokens()
    changed = tokens.clone()
    changed[:, 20] = (changed[:, 20] + 1) % 20

    before, after = logits_of(tokens), logits_of(changed)

    assert torch.equal(before[:, :20], after[:, :20])
    assert not torch.allclose(before[:, 20], after[:, 20])
    assert not torch.allclose(before[:, 31], after[:, 31])


def test_sequences_of_a_microbatch_do_not_attend_to_each_other() -> None:
    tokens = make_tokens()

    assert torch.allclose(logits_of(tokens)[1], logits_of(tokens[1:])[0], atol=1e-6)


def test_the_loss_of_an_untrained_model_is_that_of_a_guess() -> None:
    loss = token_loss(make_stage()(make_tokens()), make_tokens())

    assert loss.item() == pytest.approx(math.log(20), rel=0.05)


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_the_stages_of_a_pipeline_together_are_the_whole_model(num_stages: int) -> None:
    x = make_tokens()

    for stage in range(num_stages):
        x = make_stage(stage=stage, num_stages=num_stages)(x)

    assert torch.equal(x, make_stage()(make_tokens()))


def test_only_the_ends_embed_and_only_the_last_has_a_head() -> None:
    stages = [make_stage(stage=stage, num_stages=3) for stage in range(3)]

    assert [stage.embedding is not None for stage in stages] == [True, False, False]
    assert [stage.head is not None for stage in stages] == [False, False, True]
    assert [list(stage.blocks) for stage in stages] == [["0", "1"], ["2"], ["3"]]


def test_rotated_scores_depend_only_on_the_distance() -> None:
    cos, sin = rotary_table(16, 8)
    generator = torch.Generator().manual_seed(1)
    query, key = torch.randn(8, generator=generator), torch.randn(8, generator=generator)

    rotated_query = rotate(query.expand(16, 8), cos, sin)
    rotated_key = rotate(key.expand(16, 8), cos, sin)
    three_positions = [rotated_query[at + 3] @ rotated_key[at] for at in range(13)]

    assert all(math.isclose(a, b, abs_tol=1e-5) for a, b in pairwise(map(float, three_positions)))
    assert rotated_query[0].tolist() == query.tolist()
