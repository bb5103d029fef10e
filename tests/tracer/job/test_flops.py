from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn

from rankscope.tracer.job.flops import compute_dtype, megatron_flops, model_flops, unwrap


class Config:
    """A Hugging Face configuration, as far as FLOPs depend on it."""

    def __init__(self, model_type: str, **more: object) -> None:
        self.model_type = model_type
        self.num_hidden_layers = 2
        self.num_attention_heads = 4
        self.hidden_size = 8
        self.__dict__.update(more)


class Decoder(nn.Module):
    """Two blocks of one 8 x 8 product each, and a head of 8 x 10."""

    def __init__(self, config: Config, num_blocks: int = 2) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(10, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 10, bias=False)


def count_flops(model: nn.Module, seq_length: int = 16) -> float | None:
    """Return the FLOPs per token of sequences of one length."""
    found = model_flops(model)
    if found is None:
        return None
    return found.flops_per_token + found.flops_per_squared_length * seq_length


def test_a_known_decoder_costs_six_flops_per_weight_and_its_attention() -> None:
    model = Decoder(Config("llama"))

    # weights: 2 x 64 + 80 = 208; attention: 12 x 2 layers x 8 wide x 16 tokens = 3072
    assert count_flops(model) == 6 * 208 + 3072
    found = model_flops(model)
    assert found is not None
    assert (found.flops_per_token, found.flops_per_squared_length) == (6 * 208, 12 * 2 * 8)
    assert found.convention.endswith("padding and recomputation not counted")


def test_wrappers_are_removed() -> None:
    class Wrapper(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

    model = Decoder(Config("llama"))
    wrapped: Any = torch.compile(Wrapper(model), backend="eager")

    assert unwrap(wrapped) is model
    assert count_flops(wrapped) == count_flops(model)


def test_flops_of_other_models_are_unknown() -> None:
    frozen = Decoder(Config("llama"))
    frozen.blocks[0].requires_grad_(requires_grad=False)

    assert count_flops(nn.Linear(8, 8)) is None
    assert count_flops(Decoder(Config("mixtral"))) is None
    assert count_flops(Decoder(Config("llama"), num_blocks=1)) is None  # a pipeline stage
    assert count_flops(frozen) is None
    assert count_flops(Decoder(Config("llama", num_attention_heads=None))) is None


@pytest.mark.parametrize(("uses_window", "max_length"), [(True, 8), (False, None)])
def test_a_window_limits_the_length_for_which_the_flops_hold(
    uses_window: bool,  # noqa: FBT001
    max_length: int | None,
) -> None:
    config = Config("mistral", sliding_window=8, use_sliding_window=uses_window)

    found = model_flops(Decoder(config))

    assert found is not None
    assert found.max_length == max_length


def test_llama_3_8b_as_torchtitan_and_as_megatron_count_it() -> None:
    config = transformers.LlamaConfig(
        hidden_size=4096,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        intermediate_size=14336,
        vocab_size=128256,
    )
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]

    # per layer: q and o 2 x 4096^2, k and v 2 x 4096 x 1024, three of 4096 x 14336 = 218,103,808 N
    # = 32 layers + 4096 x 128256 = 7,504,658,432; attention 12 x 32 x 4096 x 8192
    assert count_flops(model, 8192) == 6 * 7_504_658_432 + 12_884_901_888
    counted = megatron_flops(
        hidden=4096,
        num_layers=32,
        num_heads=32,
        num_groups=8,
        ffn=14336,
        vocabulary=128256,
        seq_length=8192,
        is_gated=True,
    )
    assert counted.flops_per_token == 6 * 7_504_658_432 + 12_884_901_888 / 2


def test_gpt_agrees_with_the_published_formula() -> None:
    config = transformers.GPT2Config(
        n_embd=64, n_layer=2, n_head=4, vocab_size=100, bos_token_id=0, eos_token_id=0
    )
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]

    # arXiv 2104.04473: 72 l h^2 (1 + s/(6h) + V/(12 l h)) per token
    assert count_flops(model, 32) == pytest.approx(72 * 2 * 64**2 * (1 + 32 / 384 + 100 / 1536))


def test_the_number_type_comes_from_autocast_or_16_bit_weights_only() -> None:
    model = nn.Linear(2, 2)

    assert compute_dtype(model) == ""
    with torch.autocast("cpu", torch.bfloat16):
        assert compute_dtype(model) == "bfloat16"
    assert compute_dtype(nn.Linear(2, 2, dtype=torch.float16)) == "float16"
    assert compute_dtype(nn.ReLU()) == ""
