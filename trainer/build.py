"""One rank's part of the job, put together from its configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .data import iter_batches
from .faults.planted import PlantedFaults
from .faults.spec import COMPUTE_CAUSES
from .loop import RankState
from .model import Stage, initialize
from .pace import MonotonicPaceClock, PacedSegments, StretchedSegments
from .parallel import parameter_groups, shard_stage
from .schedule import build_schedule
from .segments import time_optimizer, time_segments

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from .config import TrainerConfig
    from .pace import SegmentTimer


def build_rank(
    config: TrainerConfig, *, rank: int, mesh: DeviceMesh, device: torch.device
) -> RankState:
    """Return the sharded stage of ``rank`` with its schedule, optimizer, data and timer."""
    stage_number = mesh["pp"].get_local_rank()
    stage = Stage(config.model, stage=stage_number, num_stages=config.layout.pp)
    initialize(stage, seed=config.seed)
    stage.to(device)
    shard_stage(stage, mesh)
    optimizer = torch.optim.AdamW(parameter_groups(stage), lr=config.learning_rate, fused=True)
    timer = _attach_timer(stage, optimizer, config, rank=rank)
    planted = PlantedFaults(config, rank=rank, stage=stage, timer=timer)
    return RankState(
        config=config,
        rank=rank,
        is_first_stage=stage_number == 0,
        is_last_stage=stage_number == config.layout.pp - 1,
        stage=stage,
        schedule=build_schedule(stage, config, mesh=mesh, device=device, planted=planted),
        optimizer=optimizer,
        batches=iter_batches(config, dp_position=mesh["dp"].get_local_rank(), device=device),
        timer=timer,
        planted=planted,
    )


def _attach_timer(
    stage: Stage, optimizer: torch.optim.Optimizer, config: TrainerConfig, *, rank: int
) -> SegmentTimer:
    """Return the timer of this rank's segments; a rank that nothing slows is left untouched."""
    clock = MonotonicPaceClock()
    timer: SegmentTimer
    if config.pace_ms is not None:
        timer = PacedSegments(pace_ns=round(config.pace_ms * 1e6), clock=clock)
    else:
        timer = StretchedSegments(clock=clock)
        if not any(
            fault.cause in COMPUTE_CAUSES and rank in fault.culprits(config.layout)
            for fault in config.faults
        ):
            return timer
    time_segments(stage, timer)
    time_optimizer(optimizer, timer)
    return timer
