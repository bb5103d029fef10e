from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from rankscope.trainer.config import ModelConfig
from rankscope.trainer.model import (
    Block,
    Stage,
    check_compiler,
    compile_kernels,
    initialize,
    rotary_table,
    rotate,
    set_kernels,
    token_loss,
)

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


def test_a_token_sees_as_far_as_the_windows_of_all_layers() -> None:
    config = replace(MODEL, num_layers=3, window=4)
    model = Stage(config, stage=0, num_stages=1)
    initialize(model, seed=7)
    tokens = make_tokens()
    # Token 20 attends to 17 to 20 in the last layer; these to 14 and later; these to 11 and later.
    reached, beyond = tokens.clone(), tokens.clone()
    reached[:, 11] = (tokens[:, 11] + 1) % 20
    beyond[:, :11] = (tokens[:, :11] + 1) % 20

    at_20 = [model(x).unflatten(0, x.shape)[:, 20] for x in (tokens, reached, beyond)]

    assert not torch.equal(at_20[0], at_20[1])
    assert torch.equal(at_20[0], at_20[2])


def test_heads_of_keys_and_values_serve_several_queries() -> None:
    shared = Stage(replace(MODEL, num_kv_heads=2), stage=0, num_stages=1)
    initialize(shared, seed=7)
    whole = make_stage()
    # As if each of the 2 heads, of 8 rows, were there twice.
    whole.load_state_dict(
        {
            name: weight.unflatten(0, (2, 8)).repeat_interleave(2, dim=0).flatten(0, 1)
            if name.endswith(("wk.weight", "wv.weight"))
            else weight
            for name, weight in shared.state_dict().items()
        }
    )

    assert shared.blocks["0"].attention.wk.weight.shape == (16, 32)  # type: ignore[union-attr]
    assert torch.allclose(shared(make_tokens()), whole(make_tokens()), atol=1e-6)


def test_a_parallel_block_adds_attention_and_mlp_of_one_input() -> None:
    block = Block(replace(MODEL, parallel_block=True))
    x = torch.randn(2 * 32, 32, generator=torch.Generator().manual_seed(0))

    normed = block.attention_norm(x)

    assert torch.equal(block(x), x + (block.attention(normed) + block.mlp(normed)))
    assert not any("mlp_norm" in name for name, _ in block.named_parameters())


@pytest.mark.slow
@pytest.mark.nightly  # compiles for half a minute
@pytest.mark.filterwarnings("ignore")  # the compiler has its own
def test_compiled_kernels_are_fewer_and_equal() -> None:
    check_compiler()
    plain, fused = make_stage(), make_stage()
    set_kernels(fused, compile_kernels())

    gradients, num_operators = [], []
    for model in (plain, fused):
        model(make_tokens()).square().mean().backward()
        model.zero_grad()
        with torch.profiler.profile() as profile:
            model(make_tokens()).square().mean().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
        num_operators.append(sum(event.name.startswith("aten::") for event in profile.events()))

    torch.testing.assert_close(gradients[1], gradients[0])
    assert num_operators[1] < num_operators[0]
