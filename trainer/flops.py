"""Model FLOPs of a token, and the peak that a paced run declares. Standard library only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .config import layers_of_stage
from .pace import BACKWARD_PACES, FORWARD_PACES, SEGMENTS_PER_LAYER

if TYPE_CHECKING:
    from .config import ModelConfig, TrainerConfig

FLOPS_CONVENTION = (
    "torchtitan: 6 N_matmul + 6 L heads (d_qk + d_v) seq per token, causal mask not halved,"
    " recomputation not counted"
)
"""How `flops_per_token` counts, in words."""


def matmul_parameters(model: ModelConfig) -> int:
    """Return N_matmul: the weights that multiply a token, the head but not the embedding."""
    attention = 4 * model.hidden_size * model.hidden_size
    mlp = 3 * model.hidden_size * model.ffn_size
    return model.num_layers * (attention + mlp) + model.hidden_size * model.vocab_size


def flops_per_token(model: ModelConfig) -> float:
    """Return the model FLOPs of training on one token, forward and backward.

    ``6 N_matmul + 6 L heads (d_qk + d_v) seq``.

    Source:
        torchtitan's ``get_num_flops_per_token``; see `FLOPS_CONVENTION`.
    """
    head_sizes = 2 * model.head_size
    attention = 6 * model.num_layers * model.num_heads * head_sizes * model.seq_length
    return float(6 * matmul_parameters(model) + attention)


def paced_compute_s(config: TrainerConfig, *, stage: int) -> float:
    """Return the seconds of paced compute in one healthy step of a rank of ``stage``.

    Forward and backward; the optimizer does no model FLOPs.

    Raises:
        ValueError: The run is not paced.
    """
    if config.pace_ms is None:
        raise ValueError("TrainerConfig.pace_ms is None: an unpaced run has no paced compute")
    num_layers = len(
        layers_of_stage(stage, num_layers=config.model.num_layers, num_stages=config.layout.pp)
    )
    num_segments = config.num_microbatches * num_layers * SEGMENTS_PER_LAYER
    return num_segments * (FORWARD_PACES + BACKWARD_PACES) * config.pace_ms / 1e3


def paced_peak_flops_per_s(config: TrainerConfig) -> float:
    """Return the peak of the paced device: the rate at which it would never wait.

    With the MFU of a step, ``model FLOPs of all tokens / (world * peak * step
    time)``, this peak makes MFU the share of the step that healthy ranks spend
    in paced compute, averaged over the ranks::

        peak = flops_per_token * num_tokens / sum over ranks of paced compute

    Raises:
        ValueError: The run is not paced.
    """
    ranks_per_stage = config.layout.dp * config.layout.tp
    total_s = ranks_per_stage * sum(
        paced_compute_s(config, stage=stage) for stage in range(config.layout.pp)
    )
    return flops_per_token(config.model) * config.num_tokens / total_s
