"""What this job tells the tracer of itself; everything else the tracer sees on its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankscope import tracer

from .config import ModelConfig, coords_of, layers_of_stage
from .data import sum_squared_lengths
from .pace import BACKWARD_PACES, FORWARD_PACES, OPTIMIZER_PACES, OVERRUN_RATIO, SEGMENTS_PER_LAYER

if TYPE_CHECKING:
    from .config import TrainerConfig
    from .loop import RankState
    from .pace import SegmentTimer

PACED_DEVICE_NAME = "paced-cpu"
"""The device that a paced run pretends to have."""


def start_tracing(state: RankState, *, spool: str | None, run: str | None) -> None:
    """Install the tracer on this rank; nothing happens where no folder is named.

    Args:
        state: The rank, its model already sharded and the process group joined.
        spool: Folder for the records; None: what ``RANKSCOPE_TRACE`` says.
        run: Name of the run; None: what the tracer finds or makes up.
    """
    config = state.config
    paced = config.pace_ms is not None
    tracer.install(
        spool=spool,
        run=run,
        model=state.stage,
        layout=config.layout,
        coords=coords_of(state.rank, config.layout),
        model_name="llama-toy",
        flops_per_token=flops_per_token(config.model),
        flops_convention=FLOPS_CONVENTION,
        dtype="float32",
        config=config.to_dict(),
        seeds={"weights and tokens": config.seed},
        device_name=PACED_DEVICE_NAME if paced else "",
        peak_flops_per_s=paced_peak_flops_per_s(config) if paced else None,
        paced=describe_pace(config.pace_ms) if config.pace_ms is not None else None,
    )


def describe_pace(pace_ms: float) -> dict[str, object]:
    """Return how a paced run paces, as the manifest holds it."""
    pace_ns = round(pace_ms * 1e6)
    return {
        "pace_ns": pace_ns,
        "forward_ns": pace_ns * FORWARD_PACES,
        "backward_ns": pace_ns * BACKWARD_PACES,
        "optimizer_ns": pace_ns * OPTIMIZER_PACES,
        "overrun_ratio": OVERRUN_RATIO,
    }


def note_microbatches(config: TrainerConfig, documents: tuple[tuple[int, ...], ...] | None) -> None:
    """Tell the tracer what the micro-batches of this step hold.

    Args:
        config: Sizes.
        documents: Of each micro-batch, the lengths of its sequences' documents; None: each
            sequence is one document.
    """
    length = config.model.seq_length
    whole = ((length,),) * config.num_microbatches
    for index, lengths in enumerate(documents or whole):
        tracer.microbatch(
            index,
            tokens=config.microbatch_size * length,
            sum_squared_lengths=sum_squared_lengths(config, lengths),
        )


def report_pace(timer: SegmentTimer, pace_ms: float) -> None:
    """Tell the tracer how many segments were paced so far, and how many overran."""
    tracer.event(
        "pace",
        f"{timer.num_overruns} of {timer.num_segments} paced segments took more than"
        f" {OVERRUN_RATIO:g} x their target",
        num_segments=timer.num_segments,
        num_overruns=timer.num_overruns,
        pace_ms=pace_ms,
    )


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
