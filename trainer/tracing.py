"""Facts that the job declares to the tracer: model FLOPs, pace, micro-batches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankscope import tracer

from .config import ModelConfig, coords_of
from .data import sum_squared_lengths
from .pace import BACKWARD_PACES, FORWARD_PACES, OPTIMIZER_PACES, OVERRUN_RATIO, SEGMENTS_PER_LAYER
from .parallel import local_part

if TYPE_CHECKING:
    from .config import TrainerConfig
    from .loop import RankState
    from .pace import SegmentTimer

PACED_DEVICE_NAME = "paced-cpu"
"""Device name of a paced run."""


def start_tracing(state: RankState, *, spool: str | None, run: str | None) -> None:
    """Install the tracer on this rank; without a folder it does nothing."""
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
    """Return the pace settings, as in the manifest."""
    pace_ns = round(pace_ms * 1e6)
    return {
        "pace_ns": pace_ns,
        "forward_ns": pace_ns * FORWARD_PACES,
        "backward_ns": pace_ns * BACKWARD_PACES,
        "optimizer_ns": pace_ns * OPTIMIZER_PACES,
        "overrun_ratio": OVERRUN_RATIO,
    }


def note_microbatches(config: TrainerConfig, documents: tuple[tuple[int, ...], ...] | None) -> None:
    """Record tokens and squared lengths of this step's micro-batches; None: whole sequences."""
    whole = ((config.model.seq_length,),) * config.num_microbatches
    for index, lengths in enumerate(documents or whole):
        tracer.microbatch(
            index,
            tokens=config.rows_per_microbatch,
            sum_squared_lengths=sum_squared_lengths(config, lengths) // config.layout.cp**2,
        )


def report_pace(timer: SegmentTimer, pace_ms: float) -> None:
    """Record how many segments were paced so far, and how many overran."""
    tracer.event(
        "pace",
        f"{timer.num_overruns} of {timer.num_segments} paced segments took more than"
        f" {OVERRUN_RATIO:g} x their target",
        num_segments=timer.num_segments,
        num_overruns=timer.num_overruns,
        pace_ms=pace_ms,
    )


def report_position(state: RankState, step: int) -> range:
    """Record the samples of the next step of this rank; return those of all positions.

    The samples of a later step follow from it::

        first sample of step s = first_sample + (s - step) * samples_per_step
    """
    own, config = state.loader.next_samples(), state.config
    tracer.event(
        "data-position",
        f"step {step} reads samples {own[0]} to {own[-1]}, and each later one"
        f" {config.num_samples} further",
        step=step,
        first_sample=own[0],
        num_samples=len(own),
        samples_per_step=config.num_samples,
    )
    return range(state.loader.position, state.loader.position + config.num_samples)


def report_memory(state: RankState) -> None:
    """Record the bytes of weights, gradients and optimizer state that this rank holds."""
    tensors = [local_part(parameter) for parameter in state.stage.parameters()] * 2
    for values in state.optimizer.state.values():
        tensors += [local_part(value) for value in values.values()]
    num_bytes = sum(tensor.nbytes for tensor in tensors)
    tracer.event(
        "memory",
        f"weights, gradients and optimizer state take {num_bytes} bytes",
        state_bytes=num_bytes,
    )


FLOPS_CONVENTION = (
    "torchtitan: 6 N_matmul + 6 L heads (d_qk + d_v) min(seq, window) per token, causal mask not"
    " halved, recomputation not counted"
)
"""Description of how `flops_per_token` counts."""


def matmul_parameters(model: ModelConfig) -> int:
    """Return N_matmul: weights that multiply a token, with the head and without the embedding.

    Of the experts, those that are chosen for it.
    """
    kv_size = model.num_kv_heads * model.head_size
    attention = 2 * model.hidden_size * (model.hidden_size + kv_size)
    mlp = 3 * model.hidden_size * model.ffn_size
    if model.num_experts:
        mlp = mlp * model.experts_per_token + model.hidden_size * model.num_experts
    return model.num_layers * (attention + mlp) + model.hidden_size * model.vocab_size


def flops_per_token(model: ModelConfig) -> float:
    """Return the model FLOPs of training on one token, forward and backward.

    ``6 N_matmul + 6 L heads (d_qk + d_v) min(seq, window)``.

    Source:
        torchtitan's ``get_num_flops_per_token``; see `FLOPS_CONVENTION`.
    """
    head_sizes = 2 * model.head_size
    length = min(model.seq_length, model.window or model.seq_length)
    attention = 6 * model.num_layers * model.num_heads * head_sizes * length
    return float(6 * matmul_parameters(model) + attention)


def paced_compute_s(config: TrainerConfig, *, stage: int) -> float:
    """Return the seconds of paced compute in one healthy step of a rank of ``stage``.

    Forward and backward only: the optimizer does no model FLOPs.

    Raises:
        ValueError: The run is not paced.
    """
    if config.pace_ms is None:
        raise ValueError("TrainerConfig.pace_ms is None: the run is not paced")
    num_layers = len(config.layers_of_position(stage))
    num_segments = config.num_microbatches * num_layers * SEGMENTS_PER_LAYER
    return num_segments * (FORWARD_PACES + BACKWARD_PACES) * config.pace_ms / 1e3


def paced_peak_flops_per_s(config: TrainerConfig) -> float:
    """Return the peak FLOPs/s that a paced run declares.

    With it, the MFU of a step, ``model FLOPs of all tokens / (world * peak * step time)``, is the
    share of the step that healthy ranks spend in paced compute, averaged over the ranks::

        peak = flops_per_token * num_tokens / sum over ranks of paced compute

    Raises:
        ValueError: The run is not paced.
    """
    ranks_per_stage = config.layout.world_size // config.layout.pp
    total_s = ranks_per_stage * sum(
        paced_compute_s(config, stage=stage) for stage in range(config.layout.pp)
    )
    return flops_per_token(config.model) * config.num_tokens / total_s
