"""Settings of a job: layout, schedule, timing, recording."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.independent.layout import Places


@dataclass(frozen=True, kw_only=True)
class Job:
    """Settings of a job."""

    places: Places
    num_steps: int = 10
    num_microbatches: int = 4
    num_layers: int = 2
    """Layers of each chunk."""

    sharded: bool = False
    """FSDP: weights are gathered one layer ahead, gradients scattered one layer behind."""

    layer_ms: float = 3.0
    """Forward time of one layer; the backward takes twice as long."""

    is_device: bool = True
    """Whether a device computes and the host runs ahead of it; else the host computes."""

    synchronised: bool = True
    """Whether the host waits for its device at the end of each step; else one step later."""

    tp_traced: bool = True
    records_waits: bool = True
    eager_sends: bool = False
    """Whether a transfer between two ranks begins without its receive, and a receive that is posted
    meanwhile ends with it."""

    as_bounds: bool = False
    """Whether asynchronous communication is recorded as bounded by marks on the compute stream."""

    noise: float = 0.015
    rank_spread: float = 0.005
    link_noise: float = 0.03
    length_spread: float = 0.0
    """Standard deviation of the logarithm of a micro-batch's sum of squared lengths."""

    records_lengths: bool = False
    last_stage: float = 1.0
    """Additional time of the last stage for the head."""

    warm_up: float = 1.0
    """Factor on the compute of the first step."""

    checkpoint_every: int = 0
    checkpoint_ms: float = 300.0
    records_checkpoints: bool = False
    evaluate_every: int = 0
    expert_share: float = 0.5
    routing_noise: float = 0.0
    """Standard deviation of the tokens of a rank's experts per micro-batch."""

    seed: int = 0
