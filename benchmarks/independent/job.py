"""What is trained, how, and what of it is told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.independent.layout import Places


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is trained, how, and what of it is told."""

    places: Places
    num_steps: int = 10
    num_microbatches: int = 4
    num_layers: int = 2
    """Of each chunk."""

    sharded: bool = False
    """FSDP: weights are gathered a layer ahead, gradients scattered a layer behind."""

    layer_ms: float = 3.0
    """Forward of one layer; the backward takes twice as long."""

    is_device: bool = True
    """A device behind a host that runs ahead; otherwise the host computes."""

    synchronised: bool = True
    """Whether the host waits for its device at each step's end; otherwise a step later."""

    tp_traced: bool = True
    waits_told: bool = True
    as_bounds: bool = False
    """Asynchronous communication is told as marks on the compute stream bound it."""

    noise: float = 0.015
    rank_spread: float = 0.005
    link_noise: float = 0.03
    length_spread: float = 0.0
    """Deviation of the logarithm of a micro-batch's sum of squared lengths."""

    lengths_told: bool = False
    last_stage: float = 1.0
    """The head's work makes the last stage longer by this."""

    warm_up: float = 1.0
    """The first step's compute takes this many times as long."""

    checkpoint_every: int = 0
    checkpoint_ms: float = 300.0
    checkpoint_told: bool = False
    evaluate_every: int = 0
    expert_share: float = 0.5
    routing_noise: float = 0.0
    """Deviation of the tokens that a rank's experts get, for each micro-batch."""

    seed: int = 0
