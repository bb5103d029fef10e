"""Model FLOPs of training, from the model itself: for known architectures only, never guessed."""

from __future__ import annotations

import contextlib
import math
import re
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from ..record.plain_values import plain_int, plain_text, type_name
from .configurations import read_hugging_face, read_megatron
from .decoder import REPEATED, TIMES_6, Decoder, ModelFlops, UnknownFlopsError
from .model_memory import layer_shape

if TYPE_CHECKING:
    from collections.abc import Sequence

WRAPPERS = ("_orig_mod", "module")
"""Attributes in which `torch.compile` and `DistributedDataParallel` keep the wrapped model."""

MAX_WRAPPERS = 8

CONVENTION = (
    "6 N per token of the weights that it passes and 6 L heads (d_qk + d_v) per token that it"
    " attends to, causal mask not halved, padding and recomputation not counted"
)
"""How `model_flops` counts."""

TITAN_MODELS = ("llama3", "llama4", "qwen3", "deepseek_v3", "gpt_oss")
"""Models of torchtitan whose arguments are known."""

MATRIX_DIMS, EXPERT_DIMS = 2, 3
"""Dimensions of the weights of all experts of a layer; those of other products have 2."""

DROPOUT = re.compile(r"(_pdrop|dropout)$")
"""Rates of dropout in Hugging Face's configurations."""

CHECKPOINTED = "CheckpointWrapper"
"""Module of `torch.distributed.algorithms` around what it recomputes."""


def model_flops(model: Any) -> ModelFlops:  # noqa: ANN401 - a Module
    """Return the model FLOPs of training on a sequence, by `Decoder.flops`.

    Known are the Hugging Face decoders of `configurations.FAMILIES` and torchtitan's. The weights
    of the model's products must be exactly those that its configuration gives, so that a part of
    it (a pipeline stage, flat parameters of FSDP1) or a changed architecture is unknown.

    Args:
        model: The root module. Wrappers of `torch.compile` and DDP are removed.

    Raises:
        UnknownFlopsError: With the reason.
    """
    try:
        return _derive(unwrap(model))
    except UnknownFlopsError:
        raise
    except Exception as problem:
        raise UnknownFlopsError(f"reading the model raised {type_name(problem)}") from problem


def _derive(model: Any) -> ModelFlops:  # noqa: ANN401
    weights = _list_matrices(model)
    if _is_titan(model):
        return _titan_flops(model, weights)
    decoder = read_decoder(model)
    num_here = sum(each.num for each in weights)
    num_expected = decoder.count_weights(is_active=False)
    if num_here != num_expected:
        raise UnknownFlopsError(
            f"the products of the model have {num_here:,} weights here, and {num_expected:,} by its"
            " configuration"
        )
    return decoder.flops(CONVENTION, recomputes=_recomputes(model, decoder.num_layers))


def read_decoder(model: Any) -> Decoder:  # noqa: ANN401
    """Return the decoder of a Hugging Face model, by its configuration alone.

    Raises:
        UnknownFlopsError: With the reason.
    """
    config = getattr(model, "config", None)
    model_type = plain_text(getattr(config, "model_type", None))
    if model_type is None:
        raise UnknownFlopsError(f"{type_name(model)} has no configuration of Hugging Face")
    return read_hugging_face(vars(config) | {"model_type": model_type})


def find_window(model: Any) -> int | None:  # noqa: ANN401
    """Return the window of the attention of a model that is about to be run; None: none known."""
    with contextlib.suppress(Exception):
        whole = unwrap(model)
        if _is_titan(whole):
            return plain_int(getattr(whole.model_args, "sliding_window_size", None))
        decoder = read_decoder(whole)
        return decoder.window if decoder.windowed else None
    return None


def read_shape_of_layers(model: Any) -> dict[str, object]:  # noqa: ANN401
    """Return the sizes and settings that the memory of activations depends on; {} if unknown."""
    with contextlib.suppress(Exception):
        whole = unwrap(model)
        decoder = read_decoder(whole)
        config = vars(whole.config)
        return layer_shape(
            decoder,
            is_fused=config.get("_attn_implementation_internal") not in {None, "eager"},
            drops=any(value for name, value in config.items() if DROPOUT.search(name)),
            recomputes=_recomputes(whole, decoder.num_layers),
        )
    return {}


def megatron_shape(args: Any) -> dict[str, object]:  # noqa: ANN401 - a Namespace
    """Return the same of Megatron-LM's arguments."""
    with contextlib.suppress(Exception):
        granularity = getattr(args, "recompute_granularity", None)
        method = getattr(args, "recompute_method", None)
        return layer_shape(
            read_megatron(args),
            is_fused=bool(getattr(args, "use_flash_attn", False)) or granularity == "selective",
            drops=bool(args.hidden_dropout or args.attention_dropout),
            is_sequence_parallel=bool(args.sequence_parallel),
            recomputes=None if method == "block" else granularity == "full",
        )
    return {}


def megatron_flops(args: Any) -> ModelFlops:  # noqa: ANN401 - a Namespace
    """Return the model FLOPs per token of a model as Megatron-LM counts them.

    As `Decoder.flops` without the routers, for sequences of ``seq_length``. Half of the attention's
    products are counted: those that a causal mask leaves.

    Raises:
        UnknownFlopsError: With the reason.

    Source:
        Megatron-LM's ``num_floating_point_operations``, which counts no windows.
    """
    decoder, seq = read_megatron(args), args.seq_length
    weights = decoder.count_weights(is_active=True, has_router=False)
    window = min(decoder.window or seq, seq)
    full, windowed = seq / 2, window - window**2 / (2 * seq)
    pairs = decoder.num_full_layers * full + decoder.num_windowed_layers * windowed
    attention = TIMES_6 * decoder.pair_size * pairs
    heads = (1 + decoder.num_predicted) * decoder.head_weights
    layers = TIMES_6 * (weights - heads) + attention
    modules = getattr(args, "recompute_modules", None) or ["core_attn"]
    uniform = getattr(args, "recompute_method", None) != "block"
    repeated: dict[tuple[object, bool], float] = {
        (None, True): 0.0,
        ("full", True): REPEATED * layers,
        ("selective", modules == ["core_attn"]): REPEATED * attention,
    }
    return ModelFlops(
        flops_per_token=TIMES_6 * weights + attention,
        convention="Megatron-LM: causal mask halved, routers and recomputation not counted;"
        f" seq {seq}",
        recomputed_flops_per_token=repeated.get(
            (getattr(args, "recompute_granularity", None), uniform)
        ),
    )


def unwrap(model: Any) -> Any:  # noqa: ANN401
    """Return the model inside the wrappers of `torch.compile` and data parallelism."""
    for _ in range(MAX_WRAPPERS):
        inner = [model._modules[name] for name in WRAPPERS if name in model._modules]
        if len(model._modules) != 1 or not inner:
            break
        model = inner[0]
    return model


def compute_dtype(model: Any) -> str:  # noqa: ANN401
    """Return the number type of the model's matrix products, "" if unknown.

    It is known from autocast, from FSDP2's mixed precision, and from 16-bit weights. It is unknown
    for 32-bit weights: autocast may begin inside the forward, and whether float32 runs as TF32 is a
    setting. To be called in a forward.
    """
    with contextlib.suppress(Exception):
        torch = sys.modules["torch"]
        dtypes = {p.dtype for p in model.parameters() if p.dtype.is_floating_point}
        device_type = next(model.parameters()).device.type
        if torch.is_autocast_enabled(device_type):
            dtypes = {torch.get_autocast_dtype(device_type)}
        elif hasattr(model, "_get_fsdp_state"):
            mixed = model._get_fsdp_state()._mp_policy.param_dtype
            dtypes = dtypes if mixed is None else {mixed}
        if len(dtypes) == 1 and dtypes != {torch.float32}:
            return str(dtypes.pop()).removeprefix("torch.")
    return ""


def _is_titan(model: Any) -> bool:  # noqa: ANN401
    package, _, name = type(model).__module__.partition(".models.")
    return package == "torchtitan" and name.partition(".")[0] in TITAN_MODELS


def _titan_flops(model: Any, weights: Sequence[Matrix]) -> ModelFlops:  # noqa: ANN401
    args = model.model_args
    parts = model.tok_embeddings, model.output
    if len(model.layers) != args.n_layers or None in parts:
        raise UnknownFlopsError("only a part of the model is here")
    if getattr(args, "every_n_layers_nope", None):
        raise UnknownFlopsError("every_n_layers_nope is not known")
    experts = getattr(args, "moe_args", None)
    share = 1.0 if experts is None else experts.top_k / experts.num_experts
    num = sum(each.num * share if each.is_of_experts else each.num for each in weights)
    if hasattr(args, "kv_lora_rank"):
        head_sizes = args.qk_nope_head_dim + args.qk_rope_head_dim + args.v_head_dim
    else:
        head_sizes = 2 * (getattr(args, "head_dim", None) or args.dim // args.n_heads)
    window = plain_int(getattr(args, "sliding_window_size", None))
    num_windowed = (args.n_layers + 1) // 2 if window else 0  # those with an even number
    per_pair = TIMES_6 * args.n_heads * head_sizes
    repeats = _recomputes(model, args.n_layers)
    again = None if repeats is None else REPEATED * repeats
    in_layers = TIMES_6 * (num - args.dim * args.vocab_size)
    return ModelFlops(
        flops_per_token=TIMES_6 * num,
        flops_per_squared_length=float(per_pair * (args.n_layers - num_windowed)),
        flops_per_windowed_length=float(per_pair * num_windowed),
        window=window,
        convention=CONVENTION,
        recomputed_flops_per_token=None if again is None else again * in_layers,
        recomputed_attention_ratio=again,
    )


class Matrix(NamedTuple):
    """Weights of one or more matrix products."""

    num: int
    is_of_experts: bool


def _list_matrices(model: Any) -> list[Matrix]:  # noqa: ANN401
    """Return the weights of the model's products, each once; lookups are none.

    Raises:
        UnknownFlopsError: Some are frozen or quantised, so that their backward costs less.
    """
    nn = sys.modules["torch"].nn
    found: dict[int, Matrix] = {}
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            continue
        for name, weight in module.named_parameters(recurse=False):
            # The shape of a DTensor is that of the whole tensor; ZeRO-3 keeps it in an attribute.
            shape = tuple(getattr(weight, "ds_shape", weight.shape))
            if len(shape) < MATRIX_DIMS or "bias" in name:
                continue
            if not weight.requires_grad or not weight.dtype.is_floating_point:
                raise UnknownFlopsError("weights are frozen or quantised")
            found[id(weight)] = Matrix(math.prod(shape), len(shape) == EXPERT_DIMS)
    return list(found.values())


def _recomputes(model: Any, num_layers: int) -> bool | None:  # noqa: ANN401
    """Return whether the forward of every layer is repeated; None if only parts may be."""
    wrappers = [module for module in model.modules() if type_name(module) == CHECKPOINTED]
    if not wrappers:  # Hugging Face sets an attribute of each module.
        return any(vars(module).get("gradient_checkpointing") for module in model.modules())
    keywords = getattr(wrappers[0].checkpoint_fn, "keywords", {})
    return True if len(wrappers) == num_layers and not keywords.get("context_fn") else None
