"""The simulated cluster: what stays the same from step to step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from trainer.simulator.chance import Purpose, stream
from trainer.simulator.effects import Effects
from trainer.simulator.groups import Axis, Groups, make_groups
from trainer.simulator.placement import Placement, place
from trainer.simulator.scenario import Scenario, Sends, TpDetail
from trainer.simulator.schedule import Action, exchange_order, run_order

if TYPE_CHECKING:
    from numpy.typing import NDArray

NS_PER_MS = 1e6
MAX_BIAS_SIGMAS = 3.0
BLOCKS_PER_LAYER = 2
"""Attention and feed-forward: each ends with a reduction over its tensor-parallel partners."""


@dataclass(frozen=True, slots=True)
class Sync:
    """One collective inside a compute span."""

    axis: Axis
    name: str
    passes: int
    """1 for reduce-scatter and all-gather, 2 for all-reduce."""

    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Places, groups, schedule and speeds of one scenario."""

    scenario: Scenario
    placement: Placement
    groups: Groups
    order: tuple[Action, ...]
    """What all stages do, in an order in which each can be done."""

    syncs: tuple[Sync, ...]
    """Collectives inside each forward and backward, recorded unless TP is collapsed."""

    bias: NDArray[np.float64]
    """Shape (pp, dp, cp, tp): how many times as long each rank computes, healthy."""

    effects: Effects

    def compute_ms(self, stage: int) -> tuple[float, float]:
        """Return the forward and backward time of one chunk of a stage."""
        scenario = self.scenario
        weight = scenario.stage_weights[stage] if scenario.stage_weights else 1.0
        share = weight / scenario.vpp
        return scenario.forward_ms * share, scenario.backward_ms * share


def make_cluster(scenario: Scenario) -> Cluster:
    """Build the cluster of a scenario.

    Raises:
        ScenarioError: A fault is planted on a link that the job does not use.
    """
    placement = place(scenario)
    rng = stream(scenario.seed, Purpose.RANKS)
    deviation = np.clip(
        rng.standard_normal(placement.rank.shape), -MAX_BIAS_SIGMAS, MAX_BIAS_SIGMAS
    )
    return Cluster(
        scenario=scenario,
        placement=placement,
        groups=make_groups(placement),
        order=_order(scenario),
        syncs=syncs_of(scenario),
        bias=1 + scenario.noise.rank_bias_ratio * deviation,
        effects=Effects(scenario, placement),
    )


def _order(scenario: Scenario) -> tuple[Action, ...]:
    pp, num_microbatches = scenario.pp, scenario.num_microbatches
    if scenario.sends is Sends.BLOCKING:
        return exchange_order(pp=pp, num_microbatches=num_microbatches)
    return run_order(pp=pp, vpp=scenario.vpp, num_microbatches=num_microbatches)


def syncs_of(scenario: Scenario) -> tuple[Sync, ...]:
    """Return the collectives inside one forward or backward, in order.

    Where not every layer's are recorded, one stands for all of them, with their
    bytes: equal bandwidth takes equal time at every detail.
    """
    num_layers, num_bytes = scenario.layers_per_chunk, scenario.tp_bytes
    gather, scatter, reduce = "all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"
    joined = scenario.tp_detail in (TpDetail.COLLAPSED, TpDetail.COARSE)
    times = num_layers if joined else 1
    of_layer = [Sync(Axis.CP, gather, 1, num_bytes * times)] if scenario.cp > 1 else []
    if scenario.tp > 1 and joined:
        of_layer.append(Sync(Axis.TP, reduce, 2, num_bytes * BLOCKS_PER_LAYER * times))
    elif scenario.tp > 1:
        sequence = [Sync(Axis.TP, gather, 1, num_bytes), Sync(Axis.TP, scatter, 1, num_bytes)]
        whole = [Sync(Axis.TP, reduce, 2, num_bytes)]
        block = sequence if scenario.tp_detail is TpDetail.SEQUENCE else whole
        of_layer += block * BLOCKS_PER_LAYER
    return tuple(of_layer * (1 if joined else num_layers))
