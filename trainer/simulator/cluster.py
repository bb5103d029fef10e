"""The simulated cluster: everything that is constant over the steps."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from .chance import Purpose, stream
from .effects import Effects
from .placement import Axis, Groups, Placement, make_groups, place
from .scenario import Scenario, Sends, TpDetail
from .schedule import (
    Action,
    Schedule,
    Slot,
    deferring_slots,
    exchange_order,
    run_order,
    stage_slots,
    v_slots,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

NS_PER_MS = 1e6
MAX_BIAS_SIGMAS = 3.0
BLOCKS_PER_LAYER = 2
"""Attention and feed-forward; each ends with a reduction over the tensor-parallel group."""


@dataclass(frozen=True, slots=True)
class Sync:
    """A collective inside a compute span."""

    axis: Axis
    name: str
    passes: int
    """1 for reduce-scatter and all-gather, 2 for all-reduce."""

    num_bytes: int
    share: float
    """Share of the span's compute between the previous collective and this one."""

    is_of_experts: bool = False
    """Whether the experts compute in that share, so that it takes longer with more tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Placement, groups, schedule and speeds of a scenario."""

    scenario: Scenario
    placement: Placement
    groups: Groups
    order: tuple[Action, ...]
    """Actions of all stages, each after those that it depends on."""

    syncs: tuple[Sync, ...]
    """Collectives inside each forward and backward; not recorded if TP is collapsed."""

    bias: NDArray[np.float64]
    """Shape (pp, dp, cp, tp): factor on each rank's compute without faults."""

    effects: Effects

    def compute_ms(self, slot: Slot) -> float:
        """Return the compute time of a slot."""
        scenario = self.scenario
        weight = scenario.stage_weights[slot.stage] if scenario.stage_weights else 1.0
        share = weight / scenario.vpp
        if slot.is_forward:
            return scenario.forward_ms * share
        if scenario.schedule is not Schedule.ONE_F_ONE_B:
            ratio = scenario.weight_ratio
            share *= ratio if slot.is_weight else 1 - ratio
        return scenario.backward_ms * share


def make_cluster(scenario: Scenario) -> Cluster:
    """Build the cluster of a scenario.

    Raises:
        ScenarioError: A fault acts on links that the job does not use.
    """
    placement = place(scenario)
    rng = stream(scenario.seed, Purpose.RANKS)
    deviation = np.clip(
        rng.standard_normal(placement.rank.shape), -MAX_BIAS_SIGMAS, MAX_BIAS_SIGMAS
    )
    return Cluster(
        scenario=scenario,
        placement=placement,
        groups=make_groups(placement, ep=scenario.ep),
        order=_order(scenario),
        syncs=syncs_of(scenario),
        bias=1 + scenario.noise.rank_bias_ratio * deviation,
        effects=Effects(scenario, placement),
    )


def _order(scenario: Scenario) -> tuple[Action, ...]:
    pp, num_microbatches = scenario.pp, scenario.num_microbatches
    if scenario.sends is Sends.BLOCKING:
        return exchange_order(pp=pp, num_microbatches=num_microbatches)
    return run_order(
        [_stage_slots(scenario, stage) for stage in range(pp)],
        vpp=scenario.vpp,
        schedule=scenario.schedule,
    )


def _stage_slots(scenario: Scenario, stage: int) -> list[Slot]:
    pp, vpp, num_microbatches = scenario.pp, scenario.vpp, scenario.num_microbatches
    match scenario.schedule:
        case Schedule.ZERO_BUBBLE_V:
            return v_slots(stage, pp=pp, num_microbatches=num_microbatches)
        case Schedule.ZERO_BUBBLE:
            return deferring_slots(stage, pp=pp, vpp=vpp, num_microbatches=num_microbatches)
        case _:
            return stage_slots(stage, pp=pp, vpp=vpp, num_microbatches=num_microbatches)


def syncs_of(scenario: Scenario) -> tuple[Sync, ...]:
    """Return the collectives inside one forward or backward, in order.

    If not every layer is recorded, one collective with the bytes of all layers replaces theirs, so
    that the detail does not change the time. Tokens are sent to their experts after the attention
    and back after the experts.
    """
    joined = scenario.tp_detail in (TpDetail.COLLAPSED, TpDetail.COARSE)
    num_layers = 1 if joined else scenario.layers_per_chunk
    times = scenario.layers_per_chunk // num_layers
    of_layer = [
        *_of_context(scenario, times),
        *_of_tensors(scenario, times),
        *_of_experts(scenario, times),
        *([] if joined else _of_tensors(scenario, times)),
    ]
    plain = [sync for sync in of_layer if not sync.is_of_experts]
    expert_ratio = scenario.expert_ratio if scenario.ep > 1 else 0.0
    shared = [
        replace(
            sync,
            share=(expert_ratio if sync.is_of_experts else (1 - expert_ratio) / len(plain))
            / num_layers,
        )
        for sync in of_layer
    ]
    return tuple(shared * num_layers)


def _of_context(scenario: Scenario, times: int) -> list[Sync]:
    if scenario.cp == 1:
        return []
    return [Sync(Axis.CP, "all_gather_into_tensor", 1, scenario.tp_bytes * times, 0.0)]


def _of_tensors(scenario: Scenario, times: int) -> list[Sync]:
    """Return the collectives of one block of a layer; one for both blocks if they are joined."""
    if scenario.tp == 1:
        return []
    num_bytes = scenario.tp_bytes
    if scenario.tp_detail in (TpDetail.COLLAPSED, TpDetail.COARSE):
        return [Sync(Axis.TP, "all_reduce", 2, num_bytes * BLOCKS_PER_LAYER * times, 0.0)]
    if scenario.tp_detail is TpDetail.SEQUENCE:
        names = ("all_gather_into_tensor", "reduce_scatter_tensor")
        return [Sync(Axis.TP, name, 1, num_bytes, 0.0) for name in names]
    return [Sync(Axis.TP, "all_reduce", 2, num_bytes, 0.0)]


def _of_experts(scenario: Scenario, times: int) -> list[Sync]:
    if scenario.ep == 1:
        return []
    there = Sync(Axis.EP, "all_to_all_single", 1, scenario.ep_bytes * times, 0.0)
    return [there, replace(there, is_of_experts=True)]
