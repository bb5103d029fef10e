"""Effects of the faults in one step, on the (pp, dp, cp, tp) grid."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..errors import ScenarioError
from ..faults.spec import (
    COMPUTE_CAUSES,
    ENDING_CAUSES,
    SKEW_PERIOD_STEPS,
    Fault,
    FaultCause,
    NetworkReason,
)
from .chance import Purpose, stream
from .network import Links, ring_links
from .placement import Axis, expert_blocks
from .schedule import Schedule

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .placement import Placement
    from .scenario import Scenario

NETWORK_CAUSES = frozenset({FaultCause.SLOW_LINK, FaultCause.NETWORK_DEGRADATION})
SLICE_NS = 3_000_000
"""Time slice of a process, for which another one on the same core waits. Source: Linux,
``sched_base_slice_ns`` on 8 processors or more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEffects:
    """Effects of the faults in one step; arrays have the shape (pp, dp, cp, tp)."""

    compute_factor: NDArray[np.float64]
    """Factor on the duration of compute."""

    gap_ns: NDArray[np.int64]
    """Extra gap before each compute span."""

    data_ns: NDArray[np.int64]
    """Extra time for the input, before the first forward."""

    records_input: bool
    """Whether the job has ``data`` spans: no data stall has ``spans=no``."""

    skew_ns: NDArray[np.int64]
    """Delay of each member before the reduction of the gradients."""

    recompile_ns: NDArray[np.int64]
    """Recompilation in the first forward."""

    evaluation_ns: NDArray[np.int64]
    """Forwards without gradients after the update."""

    checkpoint_ns: int
    checkpoint_has_spans: bool
    sequence_spread: float
    pauses: tuple[tuple[int, Fault], ...]
    """Faults of garbage collection, each with its number."""

    links: Links
    ending: Fault | None
    """The crash or hang of this step."""


class Effects:
    """Computes the effects of a scenario's faults in each step."""

    def __init__(self, scenario: Scenario, placement: Placement) -> None:
        self._scenario = scenario
        self._placement = placement
        self._links: dict[tuple[int, ...], Links] = {}
        self.slow_hosts = {
            number: _slow_hosts(scenario, number, fault)
            for number, fault in enumerate(scenario.faults)
            if fault.cause is FaultCause.NETWORK_DEGRADATION
        }
        for number, fault in enumerate(scenario.faults):
            if fault.cause in NETWORK_CAUSES:
                _check_used(scenario, placement, fault, self.slow_hosts.get(number))
        self.baseline = Links(scenario, placement)

    def ranks_of(self, number: int) -> tuple[int, ...]:
        """Return the global ranks on which fault ``number`` acts, ascending."""
        fault, at = self._scenario.faults[number], self._placement
        if fault.ranks:
            return fault.ranks
        if fault.src is not None and fault.dst is not None:
            return tuple(sorted((fault.src, fault.dst)))
        if fault.host is not None:
            found = at.host == fault.host
        elif fault.rack is not None:
            found = at.rack == fault.rack
        elif fault.cause is FaultCause.LAUNCH_SKEW:
            found = (at.stage == (fault.stage or 0)) & (at.tp == fault.tp)
        elif fault.stage is not None:
            found = at.stage == fault.stage
        elif number in self.slow_hosts:
            found = self.slow_hosts[number][at.host]
        else:
            found = np.ones(self._scenario.world_size, dtype=np.bool_)
        return tuple(np.flatnonzero(found).tolist())

    def of_step(self, step: int) -> StepEffects:
        """Return the effects in ``step``."""
        shape = self._placement.rank.shape
        factor = np.ones(shape)
        gap, data, skew, recompile, evaluation = (np.zeros(shape, dtype=np.int64) for _ in range(5))
        spread = self._scenario.noise.sequence_spread
        checkpoint_ns, checkpoint_has_spans = 0, True
        active = [
            (number, fault)
            for number, fault in enumerate(self._scenario.faults)
            if fault.is_active(step)
        ]
        for number, fault in active:
            named = np.zeros(self._scenario.world_size, dtype=np.bool_)
            named[list(self.ranks_of(number))] = True
            here = named[self._placement.rank]
            match fault.cause:
                case cause if cause in COMPUTE_CAUSES:
                    factor[here] *= fault.factor_at(step)
                case FaultCause.HOST_STALL:
                    gap[here] += fault.extra_ns
                case FaultCause.CPU_HOG:
                    gap[here] += round((fault.factor - 1) * SLICE_NS)
                    data[here] += self._longer_input_ns(fault)
                case FaultCause.MEMORY_HOG:
                    data[here] += self._longer_input_ns(fault)
                case FaultCause.DATA_STALL:
                    data[here] += fault.extra_ns
                case FaultCause.RECOMPILE:
                    recompile[here] += fault.extra_ns
                case FaultCause.EVALUATION:
                    evaluation[here] += fault.extra_ns
                case FaultCause.LAUNCH_SKEW:
                    skew += self._skew_ns(fault, step)
                case FaultCause.SEQUENCE_IMBALANCE:
                    spread = float(np.hypot(spread, fault.spread))
                case FaultCause.CHECKPOINT if (step + 1) % fault.every == 0:
                    checkpoint_ns += fault.extra_ns
                    checkpoint_has_spans = fault.has_spans
                case _:
                    pass
        return StepEffects(
            compute_factor=factor,
            gap_ns=gap,
            data_ns=data,
            records_input=all(
                fault.has_spans
                for fault in self._scenario.faults
                if fault.cause is FaultCause.DATA_STALL
            ),
            skew_ns=skew,
            recompile_ns=recompile,
            evaluation_ns=evaluation,
            checkpoint_ns=checkpoint_ns,
            checkpoint_has_spans=checkpoint_has_spans,
            sequence_spread=spread,
            pauses=tuple(item for item in active if item[1].cause is FaultCause.GC_PAUSE),
            links=self._links_of(step, active),
            ending=next(
                (
                    fault
                    for fault in self._scenario.faults
                    if fault.cause in ENDING_CAUSES and fault.step == step
                ),
                None,
            ),
        )

    def is_degraded(self, number: int, step: int) -> bool:
        """Return whether network fault ``number`` slows ``step``.

        A flapping link is slow in half of its steps, at random, one with a probability in that
        share of them, and both always in the first one.
        """
        fault = self._scenario.faults[number]
        if not fault.is_active(step):
            return False
        first = fault.steps[0] if fault.steps else 0
        share = fault.probability
        if fault.cause is FaultCause.NETWORK_DEGRADATION and fault.reason is NetworkReason.FLAP:
            share = 1 / 2
        if not share or step == first:
            return True
        return bool(stream(self._scenario.seed, Purpose.NETWORK, number, step).random() < share)

    def _longer_input_ns(self, fault: Fault) -> int:
        return round((fault.factor - 1) * self._scenario.data_ms * 1e6)

    def _skew_ns(self, fault: Fault, step: int) -> NDArray[np.int64]:
        """Return a delay that moves from member to member and grows over the steps of the fault."""
        shape = self._placement.rank.shape
        first, last = fault.steps or (0, self._scenario.num_steps - 1)
        grown = fault.extra_ns * (step - first + 1) / (last - first + 1)
        num_members = shape[1] * shape[2]
        turn = step / SKEW_PERIOD_STEPS + np.arange(num_members) / num_members
        lag = np.rint(grown * (1 + np.sin(2 * np.pi * turn)) / 2).astype(np.int64)
        skew = np.zeros(shape, dtype=np.int64)
        skew[fault.stage or 0, :, :, fault.tp] = lag.reshape(shape[1], shape[2])
        return skew

    def _links_of(self, step: int, active: list[tuple[int, Fault]]) -> Links:
        """Return the links of this step, computed once for each set of active faults."""
        numbers = tuple(
            number
            for number, fault in active
            if (fault.cause in NETWORK_CAUSES and self.is_degraded(number, step))
        )
        if not numbers:
            return self.baseline
        if numbers not in self._links:
            slow = [self.slow_hosts[number] for number in numbers if number in self.slow_hosts]
            self._links[numbers] = Links(
                self._scenario,
                self._placement,
                [self._scenario.faults[number] for number in numbers],
                np.logical_or.reduce(slow) if slow else None,
            )
        return self._links[numbers]


def _slow_hosts(scenario: Scenario, number: int, fault: Fault) -> NDArray[np.bool_]:
    """Choose the hosts with a degraded network at random: a share of them, at least one."""
    slow = np.zeros(scenario.num_hosts, dtype=np.bool_)
    size = max(1, round(fault.share * scenario.num_hosts))
    rng = stream(scenario.seed, Purpose.NETWORK, number)
    slow[rng.choice(scenario.num_hosts, size=size, replace=False)] = True
    return slow


def used_links(scenario: Scenario, placement: Placement) -> NDArray[np.int32]:
    """Return every pair of ranks that exchange data, the lower rank first.

    The reduction of the gradient norm is left out: four bytes do not show a slow link.

    Returns:
        Shape (links, 2), each pair once.
    """
    grid = placement.rank
    ends = [ring_links(placement, axis) for axis in (Axis.TP, Axis.CP, Axis.DP)]
    ends.append((grid[:-1], grid[1:]))
    if scenario.vpp > 1 and scenario.schedule is not Schedule.ZERO_BUBBLE_V:
        ends.append((grid[-1], grid[0]))
    if scenario.ep > 1:
        experts = expert_blocks(grid, scenario.ep)
        ends += [(experts, np.roll(experts, turn, axis=2)) for turn in range(1, scenario.ep)]
    pairs = np.concatenate([np.stack((src.ravel(), dst.ravel()), axis=1) for src, dst in ends])
    pairs = np.sort(pairs[pairs[:, 0] != pairs[:, 1]], axis=1)
    found: NDArray[np.int32] = np.unique(pairs, axis=0)
    return found


def _check_used(
    scenario: Scenario,
    placement: Placement,
    fault: Fault,
    slow_hosts: NDArray[np.bool_] | None,
) -> None:
    links = used_links(scenario, placement)
    state = Links(scenario, placement, [fault], slow_hosts)
    if (state.slowing(links[:, 0], links[:, 1]) > 1).any():
        return
    if fault.src is None:
        raise ScenarioError(
            f"fault {str(fault)!r}: nothing is sent over these links; use more hosts"
            " (ranks_per_host) or racks (hosts_per_rack), or choose other links"
        )
    partners = np.setdiff1d(links[(links == fault.src).any(axis=1)], [fault.src])
    raise ScenarioError(
        f"fault {str(fault)!r}: nothing is sent between these ranks; rank {fault.src}"
        f" sends to and receives from {', '.join(map(str, partners.tolist())) or 'no rank'}"
    )
