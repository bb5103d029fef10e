"""What this job tells the tracer of itself; everything else the tracer sees on its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankscope import tracer

from .flops import FLOPS_CONVENTION, flops_per_token, paced_peak_flops_per_s
from .lengths import sum_squared_lengths
from .pace import BACKWARD_PACES, FORWARD_PACES, OPTIMIZER_PACES, OVERRUN_RATIO
from .ranks import coords_of

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
