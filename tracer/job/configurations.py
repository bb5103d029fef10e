"""Decoders, read from the configurations of Hugging Face and Megatron-LM."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..record.plain_values import plain_int, plain_text
from .decoder import Decoder, Experts, LatentAttention, UnknownFlopsError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

FULL, SLIDING = "full_attention", "sliding_attention"

ALL = 0
"""Period of windows: every layer has one."""

FEATURES = {
    "experts": re.compile(r"experts|^moe_|_moe(_|$)|sparse_step"),
    "windows": re.compile(r"sliding_window|^layer_types$"),
    "latent": re.compile(r"_lora_rank$"),
    "": re.compile(
        r"mamba|ssm|recurrent|linear_(num|key|value|attn|conv)|conv_kernel|delta_rule|short_conv"
        r"|^index_|attention_chunk|compress|kv_shared|per_layer_input|altup|vision|audio"
        r"|is_encoder|encoder_layers|cross_attention|moe_latent|zero_expert"
    ),
}
"""Fields of a configuration that change the FLOPs, by the feature of a `Family` that explains
them. Those of no feature ("") are known of no family here."""

MEGATRON_OTHERS = (
    "hybrid_layer_pattern",
    "hybrid_override_pattern",
    "experimental_attention_variant",
    "heterogeneous_layers_config_path",
    "heterogeneous_layers_config_encoded_json",
    "moe_latent_size",
)
"""Megatron-LM's arguments of models that are not a GPT with attention in every layer."""

NAMES = {
    "hidden": ("hidden_size", "n_embd"),
    "num_layers": ("num_hidden_layers", "n_layer"),
    "num_heads": ("num_attention_heads", "n_head"),
    "num_groups": ("num_key_value_heads",),
    "head_size": ("head_dim",),
    "ffn": ("intermediate_size", "n_inner"),
    "vocabulary": ("vocab_size",),
    "num_experts": ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
    "top_k": ("num_experts_per_tok", "moe_k"),
    "expert_ffn": ("moe_intermediate_size", "intermediate_size"),
    "num_shared": ("n_shared_experts", "moe_num_shared_experts"),
    "shared_ffn": ("shared_expert_intermediate_size",),
    "first_moe": ("first_k_dense_replace", "moe_layer_start_index"),
    "last_moe": ("moe_layer_end_index",),
    "moe_step": ("decoder_sparse_step", "moe_layer_interval"),
    "period": ("sliding_window_pattern", "_sliding_window_pattern"),
}
"""Names of one size in the configurations of different families, in the order of preference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Properties of a Hugging Face decoder that its configuration does not have."""

    num_matrices: int = 3
    features: frozenset[str] = frozenset()
    """Of `FEATURES`: what the model does if its configuration says so."""

    period: int | None = None
    """One of so many layers has no window, unless the configuration lists ``layer_types``. `ALL`:
    every layer has one; None: the layers from ``max_window_layers`` on have one."""

    has_head_size: bool = False
    """Whether the default of ``head_dim`` is not the hidden size over the heads."""


EXPERTS, WINDOWS = frozenset({"experts"}), frozenset({"windows"})
LATENT = EXPERTS | {"latent"}
PLAIN, UNGATED, ROUTED = Family(), Family(num_matrices=2), Family(features=EXPERTS)

FAMILIES = {
    **dict.fromkeys(("llama", "olmo", "olmo2", "granite", "cohere", "glm", "glm4"), PLAIN),
    **dict.fromkeys(("gpt2", "gpt_neox", "phi", "nemotron", "arcee"), UNGATED),
    **dict.fromkeys(("olmoe", "granitemoe", "ernie4_5_moe", "glm4_moe"), ROUTED),
    **dict.fromkeys(("gemma", "seed_oss", "ernie4_5"), Family(has_head_size=True)),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "kimi_k2"), Family(features=LATENT)),
    **dict.fromkeys(("mistral", "phi3"), Family(features=WINDOWS, period=ALL)),
    **dict.fromkeys(("mixtral", "phimoe"), Family(features=EXPERTS | WINDOWS, period=ALL)),
    **dict.fromkeys(("qwen2", "smollm3"), Family(features=WINDOWS)),
    "minimax_m2": Family(features=EXPERTS, has_head_size=True),
    "starcoder2": Family(num_matrices=2, features=WINDOWS, period=ALL),
    "qwen3": Family(features=WINDOWS, has_head_size=True),
    "qwen2_moe": Family(features=EXPERTS | WINDOWS),
    "qwen3_moe": Family(features=EXPERTS | WINDOWS, period=ALL),
    "dots1": Family(features=EXPERTS | WINDOWS),
    "gemma2": Family(features=WINDOWS, period=2, has_head_size=True),
    "gemma3_text": Family(features=WINDOWS, period=6, has_head_size=True),
    "cohere2": Family(features=WINDOWS, period=4),
    "olmo3": Family(features=WINDOWS, period=4),
    "gpt_oss": Family(features=EXPERTS | WINDOWS, period=2, has_head_size=True),
}
"""Hugging Face's decoders by ``model_type``. A test compares each with the weights of its model.

Source:
    Their configuration and modeling files in transformers 5."""


def read_hugging_face(config: Mapping[str, Any]) -> Decoder:
    """Return the decoder of a Hugging Face configuration, or of its ``config.json``.

    Heads that predict further tokens are not counted: transformers has none.

    Raises:
        UnknownFlopsError: The family is not one of `FAMILIES`, a size is missing, or a field that
            changes the FLOPs is not known of the family.
    """
    model_type = plain_text(config.get("model_type")) or "without a model_type"
    family = FAMILIES.get(model_type)
    if family is None:
        raise UnknownFlopsError(f"the architecture {model_type} is not known")
    for feature, names in FEATURES.items():
        unknown = [
            name
            for name, value in config.items()
            if value and not name.startswith("_") and names.search(name)
        ]
        if unknown and feature not in family.features:
            raise UnknownFlopsError(f"{unknown[0]} is not known of the architecture {model_type}")
    hidden, num_heads = _size(config, "hidden"), _size(config, "num_heads")
    num_layers = _size(config, "num_layers")
    windowed, window = _windowed_layers(config, family, num_layers)
    head_size = _find(config, "head_size")
    if not head_size and family.has_head_size:
        raise UnknownFlopsError("head_dim is missing in the configuration")
    return Decoder(
        hidden=hidden,
        num_layers=num_layers,
        num_heads=num_heads,
        num_groups=_find(config, "num_groups") or num_heads,
        head_size=head_size or hidden // num_heads,
        ffn=_find(config, "ffn") or 4 * hidden,
        vocabulary=_size(config, "vocabulary"),
        num_matrices=family.num_matrices,
        latent=_latent_attention(config) if "latent" in family.features else None,
        experts=_experts(config, num_layers) if "experts" in family.features else None,
        window=window,
        windowed=windowed,
    )


def _windowed_layers(
    config: Mapping[str, Any], family: Family, num_layers: int
) -> tuple[frozenset[int], int | None]:
    """Return the layers with a window, and its tokens."""
    window = plain_int(config.get("sliding_window"))
    kinds = config.get("layer_types")
    if kinds:
        others = set(kinds) - {FULL, SLIDING}
        if others or len(kinds) != num_layers:
            raise UnknownFlopsError(
                f"layer_types has {', '.join(sorted(others)) or 'other layers'}"
            )
    if not window or config.get("use_sliding_window") is False:
        return frozenset(), None
    if kinds:
        return frozenset(layer for layer, kind in enumerate(kinds) if kind == SLIDING), window
    if family.period is None:
        return frozenset(range(_size(config, "max_window_layers"), num_layers)), window
    if family.period is ALL:
        return frozenset(range(num_layers)), window
    period = _find(config, "period") or family.period
    return frozenset(layer for layer in range(num_layers) if (layer + 1) % period), window


def _latent_attention(config: Mapping[str, Any]) -> LatentAttention:
    return LatentAttention(
        query_rank=plain_int(config.get("q_lora_rank")),
        rank=_size(config, "kv_lora_rank"),
        nope_size=_size(config, "qk_nope_head_dim"),
        rope_size=_size(config, "qk_rope_head_dim"),
        value_size=_size(config, "v_head_dim"),
    )


def _experts(config: Mapping[str, Any], num_layers: int) -> Experts:
    ffn, num_shared = _size(config, "expert_ffn"), _find(config, "num_shared") or 0
    gated_ffn = _find(config, "shared_ffn") or 0
    last = _find(config, "last_moe")
    step, dense = _find(config, "moe_step") or 1, config.get("mlp_only_layers") or ()
    layers = range(_find(config, "first_moe") or 0, num_layers if last in {None, -1} else last + 1)
    pattern = moe_pattern(config.get("moe_layer_freq") or 1, num_layers)
    return Experts(
        num=_size(config, "num_experts"),
        top_k=_size(config, "top_k"),
        ffn=ffn,
        shared_ffn=num_shared * ffn + gated_ffn,
        num_gates=int(gated_ffn > 0),
        layers=frozenset(
            layer
            for layer in layers
            if layer in pattern and (layer + 1) % step == 0 and layer not in dense
        ),
    )


def read_megatron(args: Any) -> Decoder:  # noqa: ANN401 - a Namespace
    """Return the decoder of Megatron-LM's arguments.

    Raises:
        UnknownFlopsError: An argument of `MEGATRON_OTHERS` is set, or is not as expected.
    """
    for name in MEGATRON_OTHERS:
        if getattr(args, name, None):
            raise UnknownFlopsError(f"--{name.replace('_', '-')} is not known")
    num_layers = args.num_layers
    experts = latent = None
    if getattr(args, "num_experts", None):
        experts = Experts(
            num=args.num_experts,
            top_k=args.moe_router_topk,
            ffn=args.moe_ffn_hidden_size or args.ffn_hidden_size,
            shared_ffn=getattr(args, "moe_shared_expert_intermediate_size", None) or 0,
            layers=moe_pattern(getattr(args, "moe_layer_freq", 1), num_layers),
        )
    if getattr(args, "multi_latent_attention", False):
        latent = LatentAttention(
            query_rank=args.q_lora_rank,
            rank=args.kv_lora_rank,
            nope_size=args.qk_head_dim,
            rope_size=args.qk_pos_emb_head_dim,
            value_size=args.v_head_dim,
        )
    windowed, window = _megatron_windows(args)
    return Decoder(
        hidden=args.hidden_size,
        num_layers=num_layers,
        num_heads=args.num_attention_heads,
        num_groups=args.num_query_groups
        if args.group_query_attention
        else args.num_attention_heads,
        head_size=args.kv_channels or args.hidden_size // args.num_attention_heads,
        ffn=args.ffn_hidden_size,
        vocabulary=args.padded_vocab_size,
        num_matrices=3 if args.swiglu else 2,
        has_output_gate=bool(getattr(args, "attention_output_gate", False)),
        latent=latent,
        experts=experts,
        window=window,
        windowed=windowed,
        num_predicted=getattr(args, "mtp_num_layers", None) or 0,
    )


def _megatron_windows(args: Any) -> tuple[frozenset[int], int | None]:  # noqa: ANN401
    """Return the layers with a window, and its tokens. Megatron-LM gives those before a token."""
    before, _ = getattr(args, "window_size", None) or (-1, -1)
    skip = getattr(args, "window_attn_skip_freq", None)
    if before < 0:
        return frozenset(), None
    numbers = range(args.num_layers)
    if isinstance(skip, list):
        return frozenset(layer for layer in numbers if skip[layer]), before + 1
    return frozenset(layer for layer in numbers if not skip or (layer + 1) % skip), before + 1


def moe_pattern(frequency: int | Sequence[int], num_layers: int) -> frozenset[int]:
    """Return the layers with experts: every so many from the first on, or those with a 1."""
    if isinstance(frequency, int):
        return frozenset(range(0, num_layers, frequency))
    if len(frequency) != num_layers:
        raise UnknownFlopsError(f"moe_layer_freq lists {len(frequency)} of {num_layers} layers")
    return frozenset(layer for layer, has_experts in enumerate(frequency) if has_experts)


def _find(config: Mapping[str, Any], what: str) -> int | None:
    """Return a size by any of its names; None if the configuration has none."""
    for name in NAMES.get(what, (what,)):
        value = plain_int(config.get(name))
        if value is not None:
            return value
    return None


def _size(config: Mapping[str, Any], what: str) -> int:
    value = _find(config, what)
    if value is None or value < 0:
        raise UnknownFlopsError(f"{NAMES.get(what, (what,))[0]} is missing in the configuration")
    return value
