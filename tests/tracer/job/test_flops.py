from __future__ import annotations

import importlib
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from rankscope.tracer.job.decoder import UnknownFlopsError
from rankscope.tracer.job.flops import (
    compute_dtype,
    find_window,
    megatron_flops,
    model_flops,
    unwrap,
)


def tiny_llama(**changes: Any) -> Any:  # noqa: ANN401
    """Return a model of 2 layers of 4 heads of 2, 8 wide: weights 2 x (256 + 3 x 96) + 80."""
    sizes = {
        "hidden_size": 8,
        "intermediate_size": 12,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": 10,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    config = transformers.LlamaConfig(**{**sizes, **changes})
    return transformers.AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]


WEIGHTS = 2 * (4 * 8 * 8 + 3 * 8 * 12) + 8 * 10


def count_flops(model: nn.Module, seq_length: int = 16) -> float:
    """Return the FLOPs per token of sequences of one length."""
    found = model_flops(model)
    return found.flops_per_token + found.flops_per_squared_length * seq_length


def reason(model: nn.Module) -> str:
    """Return why the FLOPs of a model are unknown."""
    with pytest.raises(UnknownFlopsError) as unknown:
        model_flops(model)
    return str(unknown.value)


def test_a_known_decoder_costs_six_flops_per_weight_and_its_attention() -> None:
    found = model_flops(tiny_llama())

    # attention: 12 x 2 layers x 8 wide
    assert (found.flops_per_token, found.flops_per_squared_length) == (6 * WEIGHTS, 12 * 2 * 8)
    assert (found.flops_per_windowed_length, found.window) == (0, None)
    assert found.convention.endswith("padding and recomputation not counted")


def test_wrappers_are_removed() -> None:
    class Wrapper(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

    model = tiny_llama()
    wrapped: Any = torch.compile(Wrapper(model), backend="eager")

    assert unwrap(wrapped) is model
    assert count_flops(wrapped) == count_flops(model)


def test_flops_of_other_models_are_unknown_with_the_reason() -> None:
    frozen, stage = tiny_llama(), tiny_llama()
    frozen.lm_head.requires_grad_(requires_grad=False)
    del stage.model.layers[1]  # a pipeline stage

    assert reason(nn.Linear(8, 8)) == "Linear has no configuration of Hugging Face"
    assert reason(frozen) == "weights are frozen or quantised"
    assert reason(stage) == (
        "the products of the model have 624 weights here, and 1,168 by its configuration"
    )


def test_a_frozen_embedding_costs_nothing_less() -> None:
    model = tiny_llama()
    model.model.embed_tokens.requires_grad_(requires_grad=False)

    assert count_flops(model) == count_flops(tiny_llama())


def test_parameters_that_zero_3_shards_count_whole() -> None:
    model = tiny_llama()
    for weight in model.parameters():
        weight.ds_shape = weight.shape
        weight.data = torch.empty(0)

    assert count_flops(model) == count_flops(tiny_llama())


@pytest.mark.parametrize(("window", "expected"), [(8, 8), (None, None)])
def test_the_window_is_known_before_the_first_forward(
    window: int | None, expected: int | None
) -> None:
    config = transformers.MistralConfig(**{**TINY_MISTRAL, "sliding_window": window})
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]

    found = model_flops(model)
    assert find_window(model) == found.window == expected
    assert found.flops_per_squared_length == (0.0 if window else 12 * 8)
    assert found.flops_per_windowed_length == (12 * 8 if window else 0.0)


def test_a_plain_module_has_no_window() -> None:
    assert find_window(nn.Linear(2, 2)) is None


TINY_MISTRAL: dict[str, Any] = {
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 10,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def titan_spec(name: str) -> Any:  # noqa: ANN401
    """Return the specification of a model of torchtitan, whose experts need triton at import."""
    kernels: Any = ModuleType("torchtitan.models.moe.kernels")
    kernels.generate_permute_indices = None
    sys.modules.setdefault(kernels.__name__, kernels)
    return importlib.import_module(f"torchtitan.models.{name}").get_train_spec()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torchtitan's imports
@pytest.mark.parametrize(
    ("name", "flavor"),
    [
        ("llama3", "8B"),
        ("qwen3", "30B-A3B"),
        ("deepseek_v3", "671B"),
        ("llama4", "17bx16e"),
        ("gpt_oss", "120b"),
    ],
)
def test_models_of_torchtitan_cost_what_it_counts_but_for_windows(name: str, flavor: str) -> None:
    spec = titan_spec(name)
    args = spec.model_args[flavor]
    vars(args).setdefault("moe_impl", "standard")  # as its trainer does
    with torch.device("meta"):
        model = spec.model_cls(args)
    _, theirs = args.get_nparams_and_flops(model, 4096)

    found = model_flops(model)

    # It counts the few weights of norms and biases as products.
    attended = found.flops_per_squared_length + found.flops_per_windowed_length
    assert found.flops_per_token + attended * 4096 == pytest.approx(theirs, rel=0.001)
    assert found.recomputed_flops_per_token == 0.0
    is_windowed = name == "gpt_oss"
    assert found.window == find_window(model) == (128 if is_windowed else None)
    assert bool(found.flops_per_windowed_length) == is_windowed


@pytest.mark.filterwarnings("ignore")
def test_a_part_of_a_model_of_torchtitan_is_unknown() -> None:
    spec = titan_spec("llama3")
    model = spec.model_cls(spec.model_args["debugmodel"])
    model.output = None

    assert reason(model) == "only a part of the model is here"


def test_llama_3_8b_as_megatron_counts_it() -> None:
    # per layer: q and o 2 x 4096^2, k and v 2 x 4096 x 1024, three of 4096 x 14336 = 218,103,808 N
    # = 32 layers + 4096 x 128256 = 7,504,658,432; half of the attention 12 x 32 x 4096 x 8192
    args = SimpleNamespace(
        hidden_size=4096,
        num_layers=32,
        num_attention_heads=32,
        group_query_attention=True,
        num_query_groups=8,
        kv_channels=128,
        ffn_hidden_size=14336,
        padded_vocab_size=128256,
        seq_length=8192,
        swiglu=True,
    )
    assert megatron_flops(args).flops_per_token == 6 * 7_504_658_432 + 12_884_901_888 / 2


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
