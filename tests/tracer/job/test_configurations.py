"""FLOPs by configuration, against real models of transformers, torch's counter and publications."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from rankscope.tracer.job.configurations import FAMILIES, read_hugging_face, read_megatron
from rankscope.tracer.job.decoder import Decoder, UnknownFlopsError
from rankscope.tracer.job.flops import CONVENTION, megatron_flops, model_flops

if TYPE_CHECKING:
    from collections.abc import Mapping

CONFIGS: Mapping[str, Mapping[str, Any]] = json.loads(
    (Path(__file__).parent / "configurations.json").read_text()
)
"""Fields on which FLOPs depend, of published ``config.json`` files."""

BILLION = 1e9

PUBLISHED = {
    "llama-3-8b": (8.03, 8.03),
    "llama-3-70b": (70.6, 70.6),
    "llama-3.1-405b": (405.9, 405.9),
    "mistral-7b-v0.1": (7.24, 7.24),
    "mixtral-8x7b": (46.7, 12.9),
    "mixtral-8x22b": (140.6, 39.2),
    "phi-3.5-moe": (41.9, 6.6),
    "qwen2.5-72b": (72.7, 72.7),
    "qwen2-57b-a14b": (57.4, 14.2),
    "qwen3-30b-a3b": (30.5, 3.3),
    "qwen3-235b-a22b": (235.1, 22.2),
    "gemma-2-9b": (9.24, 9.24),
    "gemma-3-1b": (1.0, 1.0),
    "gpt-oss-20b": (20.9, 3.6),
    "gpt-oss-120b": (116.8, 5.1),
    "deepseek-v3": (671.0, 37.6),
    "olmo-3-7b": (7.3, 7.3),
    "olmoe-1b-7b": (6.92, 1.28),
}
"""Billions of parameters, all and active.
Source: the models' cards, arXiv 2401.04088, 2404.14219, 2412.19437, 2409.02060, 2505.09388,
2508.10925."""

WITHOUT_EMBEDDING = {"gpt-oss-20b", "gpt-oss-120b"}
"""Whose published active parameters leave the embedding out."""


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_active_parameters_are_those_that_were_published(name: str) -> None:
    config = CONFIGS[name]
    decoder = read_hugging_face(config)
    total, active = PUBLISHED[name]
    embedding = decoder.head_weights
    untied = 0 if config.get("tie_word_embeddings") else embedding

    whole = decoder.count_weights(is_active=False) + untied
    assert whole / BILLION == pytest.approx(total, rel=0.005)
    passed = decoder.count_weights(is_active=True)
    passed += 0 if name in WITHOUT_EMBEDDING else untied
    assert passed / BILLION == pytest.approx(active, rel=0.02)


REMOTE = ("kimi_k2",)
"""Families whose code is with the weights, not in transformers."""

TODAY = ("mistral", "mixtral", "qwen3_moe", "gemma3_text", "gpt_oss", "deepseek_v3")


def tiny_config(model_type: str) -> Any:  # noqa: ANN401
    """Return the configuration of a small model of a family, with windows of 8 tokens."""
    config_type: Any = type(transformers.AutoConfig.for_model(model_type))
    wanted: dict[str, Any] = {
        **dict.fromkeys(("hidden_size", "n_embd"), 32),
        **dict.fromkeys(("num_hidden_layers", "n_layer"), 4),
        **dict.fromkeys(("num_attention_heads", "n_head"), 4),
        **dict.fromkeys(("num_key_value_heads",), 2),
        **dict.fromkeys(("head_dim", "v_head_dim", "qk_nope_head_dim"), 16),
        **dict.fromkeys(("intermediate_size",), 48),
        **dict.fromkeys(("vocab_size",), 64),
        **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), 8),
        **dict.fromkeys(("moe_num_experts", "max_position_embeddings", "n_positions"), 64),
        **dict.fromkeys(("num_experts_per_tok", "moe_k", "max_window_layers"), 2),
        **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 24),
        **dict.fromkeys(("first_k_dense_replace", "n_shared_experts"), 1),
        **dict.fromkeys(("n_group", "topk_group"), 1),
        **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "sliding_window"), 8),
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0),
        **dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), 0.0),
    }
    if model_type in {"deepseek_v2", "deepseek_v3"}:
        wanted["num_key_value_heads"] = 4
    if model_type == "deepseek_v3":
        del wanted["head_dim"]
    known = transformers.AutoConfig.for_model(model_type).to_dict()
    own = {name: value for name, value in wanted.items() if name in known}
    return config_type(**own, attn_implementation="eager", experts_implementation="eager")


def tiny_model(config: Any) -> Any:  # noqa: ANN401
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).float()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(
    "model_type",
    [
        *TODAY,
        *(
            pytest.param(name, marks=pytest.mark.nightly)
            for name in sorted(FAMILIES.keys() - {*TODAY, *REMOTE})
        ),
    ],
)
def test_a_known_family_costs_what_torch_counts(model_type: str) -> None:
    model = tiny_model(tiny_config(model_type))
    ids = torch.randint(1, 64, (2, 8))  # as long as the window

    flops = model_flops(model)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, use_cache=False).logits.sum().backward()

    attention = flops.flops_per_squared_length + flops.flops_per_windowed_length
    derived = flops.flops_per_token * 16 + attention * 2 * 8**2
    assert derived == pytest.approx(counter.get_total_flops(), rel=0.01)


@pytest.mark.parametrize(
    ("name", "num_windowed", "window"),
    [
        ("mistral-7b-v0.1", 32, 4096),
        ("mixtral-8x7b", 0, None),
        ("qwen2.5-72b", 0, None),  # use_sliding_window is false
        ("gemma-2-9b", 21, 4096),  # every second
        ("gemma-3-1b", 22, 512),  # all but layers 5, 11, 17, 23
        ("gpt-oss-120b", 18, 128),  # layer_types
        ("olmo-3-7b", 24, 4096),
    ],
)
def test_layers_have_the_windows_of_their_configuration(
    name: str, num_windowed: int, window: int | None
) -> None:
    decoder = read_hugging_face(CONFIGS[name])

    assert (decoder.num_windowed_layers, decoder.window) == (num_windowed, window)
    if name == "gemma-3-1b":
        assert {*range(26)} - decoder.windowed == {5, 11, 17, 23}


def test_qwen_has_windows_from_max_window_layers_on() -> None:
    config = {**CONFIGS["qwen2.5-72b"], "use_sliding_window": True}

    decoder = read_hugging_face(config)

    assert decoder.windowed == {*range(70, 80)}


@pytest.mark.parametrize(
    ("name", "heads", "num_dense", "num_experts", "vocabulary"),
    [("deepseek-v3", 128, 3, 256, 129280), ("kimi-k2", 64, 1, 384, 163840)],
)
def test_latent_attention_by_hand(
    name: str, heads: int, num_dense: int, num_experts: int, vocabulary: int
) -> None:
    decoder = read_hugging_face(CONFIGS[name])

    # queries 1536 x (7168 + heads x 192), keys and values 7168 x 576 + 512 x heads x 256, output
    attention = 1536 * (7168 + heads * 192) + 7168 * 576 + 512 * heads * 256 + heads * 128 * 7168
    dense, expert = 3 * 7168 * 18432, 3 * 7168 * 2048
    # the others of 61 layers have 8 of the experts, a shared one and a router
    routed = (61 - num_dense) * (9 * expert + 7168 * num_experts)
    weights = 61 * attention + num_dense * dense + routed + 7168 * vocabulary
    flops = decoder.flops("as counted here")
    assert flops.flops_per_token == 6 * weights
    assert flops.flops_per_squared_length == 6 * 61 * heads * (192 + 128)


def test_glm_4_5_is_published_without_embedding_and_head() -> None:
    decoder = read_hugging_face(CONFIGS["glm-4.5"])

    # arXiv 2508.06471, table 1: 355 and 32 billion, with one layer that predicts a further token
    layer = 5120 * (2 * 96 * 128 + 2 * 8 * 128) + 5120 * 160
    expert = 3 * 5120 * 1536
    total = decoder.count_weights(is_active=False) - decoder.head_weights + layer + 161 * expert
    active = decoder.count_weights(is_active=True) - decoder.head_weights + layer + 9 * expert
    assert (round(total / BILLION), round(active / BILLION)) == (355, 32)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": "jamba"}, "the architecture jamba is not known"),
        ({"num_local_experts": 8}, "num_local_experts is not known of the architecture llama"),
        ({"sliding_window": 4096}, "sliding_window is not known of the architecture llama"),
        ({"kv_lora_rank": 512}, "kv_lora_rank is not known of the architecture llama"),
        ({"index_topk": 2048}, "index_topk is not known of the architecture llama"),
        ({"vision_config": {"depth": 2}}, "vision_config is not known of the architecture llama"),
        ({"hidden_size": None}, "hidden_size is missing in the configuration"),
        (
            {"model_type": "gemma3_text", "head_dim": None, "sliding_window": 8},
            "head_dim is missing in the configuration",
        ),
        (
            {"model_type": "qwen2", "layer_types": ["linear_attention"] * 32},
            "layer_types has linear_attention",
        ),
    ],
)
def test_what_is_not_understood_is_unknown_with_the_reason(
    changes: Mapping[str, object], reason: str
) -> None:
    with pytest.raises(UnknownFlopsError, match=f"^{reason}$"):
        read_hugging_face({**CONFIGS["llama-3-8b"], **changes})


def test_a_changed_model_is_unknown_with_the_reason() -> None:
    model = tiny_model(tiny_config("llama"))
    model.extra = torch.nn.Linear(
        32, 32
    )  # of 4 x (2 x 32 x 64 + 2 x 32 x 32 + 3 x 32 x 48) + 32 x 64

    with pytest.raises(UnknownFlopsError, match=r"have 46,080 weights here, and 45,056 by its"):
        model_flops(model)


def test_a_window_costs_what_torch_counts_of_a_local_attention() -> None:
    num_heads, head_size, seq, window = 2, 4, 24, 6
    decoder = Decoder(
        hidden=8,
        num_layers=1,
        num_heads=num_heads,
        num_groups=num_heads,
        head_size=head_size,
        ffn=0,
        vocabulary=0,
        window=window,
        windowed=frozenset({0}),
    )
    query, key, value = (
        torch.randn(num_heads, seq, head_size, requires_grad=True) for _ in range(3)
    )

    def last_tokens(tensor: torch.Tensor) -> torch.Tensor:
        """Return for each token the last ones of the window: shape (heads, seq, window, size)."""
        padded = torch.nn.functional.pad(tensor, (0, 0, window - 1, 0))
        return padded.unfold(1, window, 1).transpose(-1, -2)

    with FlopCounterMode(display=False) as counter:
        scores = torch.einsum("hsd,hswd->hsw", query, last_tokens(key)).softmax(-1)
        loss = torch.einsum("hsw,hswd->hsd", scores, last_tokens(value)).sum()
        loss.backward()  # type: ignore[no-untyped-call]

    flops = decoder.flops("")
    assert flops.flops_per_windowed_length * seq * window == counter.get_total_flops()


@pytest.mark.parametrize("recomputes", [False, True])
def test_recomputation_repeats_the_forward_of_the_layers(recomputes: bool) -> None:  # noqa: FBT001
    model = tiny_model(tiny_config("llama"))
    if recomputes:
        model.activation_checkpointing_enable()

    flops = model_flops(model)

    in_layers = flops.flops_per_token - 6 * 32 * 64
    assert flops.recomputed_flops_per_token == pytest.approx(in_layers / 3 * recomputes)
    assert flops.recomputed_attention_ratio == pytest.approx(recomputes / 3)


GPT3 = SimpleNamespace(
    hidden_size=12288,
    num_layers=96,
    num_attention_heads=96,
    group_query_attention=False,
    num_query_groups=1,
    kv_channels=128,
    ffn_hidden_size=4 * 12288,
    padded_vocab_size=51200,
    seq_length=2048,
    swiglu=False,
)
"""Megatron-LM's arguments for its 175B model."""


def megatron(**changes: object) -> SimpleNamespace:
    return SimpleNamespace(**{**vars(GPT3), **changes})


def test_megatron_agrees_with_its_published_formula() -> None:
    # arXiv 2104.04473 per token, of whose s / 6h of the attention Megatron-LM counts half
    hidden, layers, seq, vocabulary = 12288, 96, 2048, 51200
    formula = (
        72 * layers * hidden**2 * (1 + seq / (12 * hidden) + vocabulary / (12 * layers * hidden))
    )
    repeated = 24 * layers * hidden**2 * (1 + seq / (12 * hidden))

    flops = megatron_flops(megatron(recompute_granularity="full", recompute_method="uniform"))

    assert flops.flops_per_token == pytest.approx(formula)
    assert flops.recomputed_flops_per_token == pytest.approx(repeated)
    assert megatron_flops(GPT3).recomputed_flops_per_token == 0.0


def test_megatron_counts_experts_latent_attention_and_predicted_tokens() -> None:
    args = megatron(
        hidden_size=7168,
        num_layers=61,
        num_attention_heads=128,
        kv_channels=128,
        ffn_hidden_size=18432,
        padded_vocab_size=129280,
        seq_length=4096,
        swiglu=True,
        num_experts=256,
        moe_router_topk=8,
        moe_ffn_hidden_size=2048,
        moe_shared_expert_intermediate_size=2048,
        moe_layer_freq=[0] * 3 + [1] * 58,
        multi_latent_attention=True,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_head_dim=128,
        qk_pos_emb_head_dim=64,
        v_head_dim=128,
        mtp_num_layers=1,
    )

    attention = 1536 * (7168 + 24576) + 7168 * 576 + 512 * 32768 + 16384 * 7168
    products = 128 * (192 + 128) * 4096 / 2
    experts, dense = 9 * 3 * 7168 * 2048, 3 * 7168 * 18432
    # 61 layers and one for the further token: its projection is 2 h^2, and it has the head again
    total = 62 * (attention + products) + 3 * dense + 59 * experts + 2 * 7168**2 + 2 * 7168 * 129280
    assert megatron_flops(args).flops_per_token == pytest.approx(6 * total, rel=1e-12)


@pytest.mark.parametrize(("skip", "num_windowed"), [(None, 96), (4, 72), ([1] * 10 + [0] * 86, 10)])
def test_megatron_counts_what_a_window_leaves(skip: object, num_windowed: int) -> None:
    args = megatron(window_size=(511, 0), window_attn_skip_freq=skip)

    whole = megatron_flops(GPT3).flops_per_token
    windowed = megatron_flops(args).flops_per_token

    # of a row of 2048 tokens each attends to 512, but the first 512 to half as many
    less = 2048 / 2 - (512 - 512**2 / (2 * 2048))
    assert whole - windowed == pytest.approx(6 * 2 * 96 * 128 * num_windowed * less)
    assert read_megatron(args).window == 512


def test_other_models_of_megatron_are_unknown() -> None:
    with pytest.raises(UnknownFlopsError, match="--hybrid-layer-pattern is not known"):
        megatron_flops(megatron(hybrid_layer_pattern="M-M*"))
    assert "causal mask not halved" in CONVENTION
