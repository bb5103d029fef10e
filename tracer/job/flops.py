"""Model FLOPs per token, from the model itself: for known architectures only, never guessed."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass
from typing import Any

from ..record.plain_values import plain_int, plain_text, type_name

WRAPPERS = ("_orig_mod", "module")
"""Attributes in which `torch.compile` and `DistributedDataParallel` keep the wrapped model."""

MAX_WRAPPERS = 8

DENSE_MODEL_TYPES = frozenset(
    {"gpt2", "gpt_neox", "granite", "llama", "mistral", "olmo", "olmo2", "phi", "qwen2", "qwen3"}
)
"""Hugging Face decoders in which every token passes every linear layer once, and attends to every
earlier token once per layer. For all other types (mixtures of experts, encoders, hybrids) the
FLOPs are unknown."""

LINEAR_TYPES = frozenset({"Linear", "Conv1D"})
"""Modules that are one matrix product: torch's, and the transposed one of GPT-2."""

TIMES_6 = 6
"""FLOPs per weight and token: 2 forward, 4 backward."""

FLOPS_KEYS = ("flops_per_token", "flops_per_squared_length", "flops_convention")
"""Entries of the manifest that describe them."""

CONVENTION = (
    "torchtitan: 6 N_matmul per token and 6 L heads (d_qk + d_v) per squared length, causal mask"
    " not halved, padding and recomputation not counted"
)
"""How `model_flops` counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFlops:
    """The FLOPs of training on a sequence, and the convention by which they are counted."""

    flops_per_token: float
    convention: str
    flops_per_squared_length: float = 0.0
    """FLOPs that grow with the squared length of a sequence, over it: those of the attention."""

    max_length: int | None = None
    """Longest sequence for which this holds; None if for each."""

    def derived(self) -> dict[str, object]:
        """Return the entries of the manifest's ``derived``."""
        values = self.flops_per_token, self.flops_per_squared_length, self.convention
        return dict(zip(FLOPS_KEYS, values, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """The sizes on which the products of the attention depend."""

    num_layers: int
    num_heads: int
    head_size: int
    """Of queries and keys, and of values: they are equal in every architecture known here."""

    window: int | None = None
    """Tokens to which a token attends at most; None if to all."""


def model_flops(model: Any) -> ModelFlops | None:  # noqa: ANN401 - a Module
    """Return the model FLOPs of training on a sequence; None for an unknown architecture.

    ``6 N_matmul`` per token and ``12 L heads head_size`` per squared length. N_matmul counts the
    weights of all linear layers, including the head and excluding the embedding.

    Known are the Hugging Face decoders of `DENSE_MODEL_TYPES` and torchtitan's dense Transformer.
    The result is also None if only a part of the model is here (a pipeline stage, FSDP1's flat
    parameters), or if weights are frozen or quantised.

    Args:
        model: The root module. Wrappers of `torch.compile` and DDP are removed.

    Source:
        torchtitan's ``get_num_flops_per_token`` (attention with ``d_qk + d_v``, the causal mask not
        halved); arXiv 2204.02311, appendix B.
    """
    with contextlib.suppress(Exception):  # any error of a foreign class: the FLOPs are unknown
        whole = unwrap(model)
        attention = _attention(whole)
        num_weights = None if attention is None else _matmul_weights(whole, attention.num_layers)
        if attention is not None and num_weights is not None:
            width = attention.num_heads * attention.head_size
            return ModelFlops(
                flops_per_token=float(TIMES_6 * num_weights),
                flops_per_squared_length=float(2 * TIMES_6 * attention.num_layers * width),
                convention=CONVENTION,
                max_length=attention.window,
            )
    return None


def megatron_flops(  # noqa: PLR0913 - the formula has these
    *,
    hidden: int,
    num_layers: int,
    num_heads: int,
    num_groups: int,
    ffn: int,
    vocabulary: int,
    seq_length: int,
    is_gated: bool,
    head_size: int | None = None,
) -> ModelFlops:
    """Return the model FLOPs per token of a dense model as Megatron-LM counts them.

    ``6 h ffn k L + 6 L [h (Q + 2 K) + Q h] + 6 h V + 6 Q L seq`` with k = 3 for a gated unit, else
    2; Q = head size x heads, K = head size x groups. Half of the attention's products are counted:
    those that a causal mask leaves.

    Args:
        hidden: h.
        num_layers: L, of all stages together.
        num_heads: Attention heads of a layer, of all TP ranks together.
        num_groups: Key-value groups, likewise.
        ffn: Width of the feed-forward layer.
        vocabulary: V, padded.
        seq_length: Tokens of a sequence.
        is_gated: Whether the feed-forward layer is gated (SwiGLU).
        head_size: Of one head; ``hidden / num_heads`` if None.

    Source:
        Megatron-LM's ``num_floating_point_operations``.
    """
    size = head_size or hidden // num_heads
    queries, keys = size * num_heads, size * num_groups
    feed_forward = hidden * ffn * (3 if is_gated else 2) * num_layers
    projections = num_layers * hidden * (2 * queries + 2 * keys)
    products = queries * num_layers * seq_length
    total = TIMES_6 * (feed_forward + projections + hidden * vocabulary + products)
    return ModelFlops(
        flops_per_token=float(total),
        convention=f"Megatron-LM, dense: causal mask halved, recomputation not counted;"
        f" seq {seq_length}",
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


def _attention(model: Any) -> Attention | None:  # noqa: ANN401
    """Return the attention sizes of a known architecture."""
    config = getattr(model, "config", None)
    if plain_text(getattr(config, "model_type", None)) in DENSE_MODEL_TYPES:
        return _hugging_face_attention(config)
    if type_name(model) == "Transformer" and type(model).__module__.startswith("torchtitan."):
        return _torchtitan_attention(model)
    return None


def _hugging_face_attention(config: Any) -> Attention | None:  # noqa: ANN401
    window = getattr(config, "sliding_window", None)
    uses_window = getattr(config, "use_sliding_window", True)
    num_heads = plain_int(config.num_attention_heads)
    hidden = plain_int(config.hidden_size)
    num_layers = plain_int(config.num_hidden_layers)
    if not num_heads or not hidden or not num_layers:
        return None
    head_size = plain_int(getattr(config, "head_dim", None)) or hidden // num_heads
    return Attention(
        num_layers=num_layers,
        num_heads=num_heads,
        head_size=head_size,
        window=plain_int(window) if uses_window else None,
    )


def _torchtitan_attention(model: Any) -> Attention | None:  # noqa: ANN401
    arguments: Any = model.model_args
    num_heads, width = plain_int(arguments.n_heads), plain_int(arguments.dim)
    num_layers = plain_int(arguments.n_layers)
    if not num_heads or not width or not num_layers or getattr(arguments, "moe_enabled", False):
        return None
    return Attention(num_layers=num_layers, num_heads=num_heads, head_size=width // num_heads)


def _matmul_weights(model: Any, num_layers: int) -> int | None:  # noqa: ANN401
    """Return the number of weights that multiply a token; None if not all are here and trained."""
    nn = sys.modules["torch"].nn
    modules = list(model.modules())
    lists = [module for module in modules if isinstance(module, (nn.ModuleList, nn.ModuleDict))]
    weights = [
        module.weight
        for module in modules
        if any(base.__name__ in LINEAR_TYPES for base in type(module).__mro__)
    ]
    if not weights or max(map(len, lists), default=0) != num_layers:
        return None
    if not all(weight.requires_grad and weight.dtype.is_floating_point for weight in weights):
        return None
    if any(getattr(weight, "_is_flat_param", False) for weight in model.parameters()):
        return None
    if any(weight.numel() == 0 for weight in weights):  # sharded by ZeRO-3 or FSDP1
        return None
    # The numel of a DTensor is that of the whole tensor, not of its local part.
    return sum(int(weight.numel()) for weight in weights)
