"""Labels of a simulated run: its faults, as the diagnosis should find them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..faults.spec import ALL_RANK_CAUSES, FaultCause
from .placement import tp_crosses_hosts
from .scenario import TpDetail
from .schedule import Schedule

if TYPE_CHECKING:
    from ..faults.spec import Fault
    from .cluster import Cluster

LAYOUT = "layout"
LARGE_BUBBLE_RATIO = 0.5
"""Smallest ratio of bubble to ideal time at which a scenario has too few micro-batches."""

FOUND_AS = {
    FaultCause.CPU_HOG: FaultCause.HOST_STALL,
    FaultCause.MEMORY_HOG: FaultCause.DATA_STALL,
    FaultCause.MISMATCH: FaultCause.HANG,
}
"""Causes of findings by which other faults are found: what they make slow, or stop."""

OF_COMPUTE = frozenset({FaultCause.SLOW_COMPUTE, FaultCause.CLOCK_THROTTLE})


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """A fault, or a property of the layout that costs time."""

    cause: str
    """The cause of the finding."""

    ranks: tuple[int, ...]
    """Global ranks at fault, ascending; empty if all are."""

    visible_ranks: tuple[int, ...]
    """Ranks that the trace cannot distinguish from them: with TP collapsed, also the partners."""

    steps: tuple[int, int]
    """First and last step in which the fault acts."""

    factor: float | None = None
    """Factor of the fault; None if it adds a constant time."""

    extra_ns: int | None = None
    detail: str = ""
    """Further details: the reason, the kind of crash, the variable, ..."""

    spec: str = ""
    """The text of the fault; "" for a property of the layout."""


def labels_of(cluster: Cluster) -> tuple[Label, ...]:
    """Return the labels of a cluster: its faults in their order, then costs of its layout."""
    faults = cluster.scenario.faults
    return (
        *(_fault_label(cluster, number, fault) for number, fault in enumerate(faults)),
        *_layout_labels(cluster),
    )


def bubble_ratio(cluster: Cluster) -> float:
    """Return the pipeline bubble over the ideal time.

    ::

        (pp - 1) / (vpp * num_microbatches)

    A zero-bubble schedule fills twice the time of the weights' gradients W, which leaves the share
    ``(F + B - W) / (F + B + W)``. As a V with ``F = B = W`` only the first forwards remain, because
    the step ends on all stages together: the share is ``F / (F + B + W)``.

    Source:
        Narayanan et al., arXiv 2104.04473, section 2.2; Qi et al., arXiv 2401.10241, table 2.
    """
    scenario = cluster.scenario
    whole = (scenario.pp - 1) / (scenario.vpp * scenario.num_microbatches)
    if scenario.schedule is Schedule.ONE_F_ONE_B:
        return whole
    total_ms = scenario.forward_ms + scenario.backward_ms
    if scenario.schedule is Schedule.ZERO_BUBBLE_V:
        return whole * scenario.forward_ms / total_ms
    weights_ms = scenario.weight_ratio * scenario.backward_ms
    return whole * max(total_ms - 2 * weights_ms, 0.0) / total_ms


def _fault_label(cluster: Cluster, number: int, fault: Fault) -> Label:
    ranks = () if fault.cause in ALL_RANK_CAUSES else cluster.effects.ranks_of(number)
    last_step = cluster.scenario.num_steps - 1
    if fault.step is not None:
        steps = (fault.step, fault.step)
    else:
        first, last = fault.steps or (0, last_step)
        steps = (first, min(last, last_step))
    return Label(
        cause=FOUND_AS.get(fault.cause, fault.cause).value,
        ranks=ranks,
        visible_ranks=_with_partners(cluster, fault, ranks),
        steps=steps,
        factor=fault.factor if fault.factor > 1 else None,
        extra_ns=fault.extra_ns or None,
        detail=_detail(fault),
        spec=str(fault),
    )


def _with_partners(cluster: Cluster, fault: Fault, ranks: tuple[int, ...]) -> tuple[int, ...]:
    """Return the ranks that the trace cannot distinguish from the culprits."""
    scenario, at = cluster.scenario, cluster.placement
    # Messages between the ranks of one worker are not traced.
    workers = {(int(at.stage[rank]), int(at.dp[rank])) for rank in ranks}
    are_partners = len(ranks) > 1 and len(workers) == 1
    is_inside = fault.cause in OF_COMPUTE or (fault.cause is FaultCause.SLOW_LINK and are_partners)
    hidden = is_inside and scenario.tp_detail is TpDetail.COLLAPSED
    if not ranks or not hidden or scenario.tp * scenario.cp == 1:
        return ranks
    partners = {
        rank
        for culprit in ranks
        for rank in at.rank[at.stage[culprit], at.dp[culprit]].ravel().tolist()
    }
    return tuple(sorted(partners))


def _detail(fault: Fault) -> str:
    match fault.cause:
        case FaultCause.NETWORK_DEGRADATION:
            return fault.reason.value
        case FaultCause.CRASH:
            return fault.crash_kind.value
        case FaultCause.MISCONFIGURATION:
            return f"{fault.variable}={fault.value}"
        case FaultCause.GC_PAUSE | FaultCause.DATA_STALL | FaultCause.CHECKPOINT:
            return "as spans" if fault.has_spans else "as gaps"
        case _:
            return ""


def _layout_labels(cluster: Cluster) -> tuple[Label, ...]:
    found = []
    steps = (0, cluster.scenario.num_steps - 1)
    if cluster.scenario.tp > 1 and tp_crosses_hosts(cluster.placement):
        hosts = cluster.placement.host[cluster.placement.rank]
        across = (hosts != hosts[..., :1]).any(axis=-1)
        ranks = tuple(np.sort(cluster.placement.rank[across].ravel()).tolist())
        found.append(
            Label(cause=LAYOUT, ranks=ranks, visible_ranks=ranks, steps=steps,
                  detail="tensor parallel across hosts")
        )  # fmt: skip
    ratio = bubble_ratio(cluster)
    if ratio >= LARGE_BUBBLE_RATIO:
        found.append(
            Label(cause=LAYOUT, ranks=(), visible_ranks=(), steps=steps, factor=1 + ratio,
                  detail="too few micro-batches for the stages")
        )  # fmt: skip
    return tuple(found)
