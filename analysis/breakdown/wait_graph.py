"""The graph of who waits for whom, from a culprit outward."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..arrays.grouping import sorted_unique
from ..arrays.sorting import argsort_rows, find_positions
from ..report.network import DirectWaits
from .starved import MAX_CULPRITS, MIN_WAIT_RATIO

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from rankscope.tracer.topology import Coords

    from ..report.report import Finding, RunReport
    from .starved import WaitAttribution
    from .waterfall import Waterfall

MAX_NODES = 512
"""Ranks of a graph that are nodes of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitNode:
    """A rank, or several of one pipeline stage at equal distance from the culprit."""

    ranks: tuple[int, ...]
    """Ascending."""

    stage: int
    distance: int
    """Ranks that a delay passes from the culprit to here; 0: the culprit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitEdge:
    """Waiting of one node for another one, which is nearer to the culprit."""

    node: int
    """The node that waits ..."""

    on_node: int
    """... for this one."""

    ranks: tuple[int, ...]
    """The ranks of ``node`` that do, ascending."""

    ratio: float
    """Share of a step, mean of ``ranks``; at least `MIN_WAIT_RATIO`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitGraph:
    """Ranks that wait for a culprit, directly or for ranks that do."""

    nodes: tuple[WaitNode, ...]
    """By distance, the culprits first."""

    edges: tuple[WaitEdge, ...]
    num_ranks: int
    """Ranks in ``nodes``."""


def sum_direct_waits(
    waterfall: Waterfall, waited: WaitAttribution, *, num_ranks: int, total_ns: int
) -> DirectWaits:
    """Sum the waiting beyond the bubble by the rank that waits and the last member to arrive.

    Of each rank, the `MAX_CULPRITS` longest are kept: 12,288 ranks wait on few others each.

    Args:
        num_ranks: The highest rank and 1.
        total_ns: Time of all steps.
    """
    waits, waiting_ns, on = waterfall.waits, waterfall.waiting_ns, waited.arrived_last
    rows = np.flatnonzero((waiting_ns > 0) & (on != waits.rank))
    pair = waits.rank[rows].astype(np.int64) * num_ranks + on[rows]
    pairs = sorted_unique(pair)
    index = find_positions(pair, pairs)
    sums = np.zeros(len(pairs), dtype=np.int64)
    np.add.at(sums, index, waiting_ns[rows])
    rank, on_rank = np.divmod(pairs, num_ranks)
    order = argsort_rows(rank, -sums)
    rank, on_rank, sums = rank[order], on_rank[order], sums[order]
    first = np.flatnonzero(np.diff(rank, prepend=-1))
    place = np.arange(len(rank)) - np.repeat(first, np.diff(np.append(first, len(rank))))
    kept = place < MAX_CULPRITS
    return DirectWaits(
        rank=rank[kept], on_rank=on_rank[kept], waiting_ns=sums[kept], total_ns=total_ns
    )


def follow_waits(
    waits: DirectWaits, culprits: Sequence[int], coords: Mapping[int, Coords], *, max_nodes: int
) -> WaitGraph:
    """Return the ranks that wait for the culprits, outward by the number of ranks between.

    A rank waits for another one if that takes at least `MIN_WAIT_RATIO` of a step. Above
    ``max_nodes`` ranks, those of one pipeline stage at equal distance are one node.

    Args:
        max_nodes: Largest number of ranks that are nodes of their own, at most `MAX_NODES`.
    """
    is_long = _is_long(waits)
    rank, on = waits.rank[is_long], waits.on_rank[is_long]
    ratio = waits.waiting_ns[is_long] / max(waits.total_ns, 1)
    waiting_on: dict[int, list[int]] = defaultdict(list)
    for waiter, other in zip(rank.tolist(), on.tolist(), strict=True):
        waiting_on[other].append(waiter)
    distance = dict.fromkeys(culprits, 0)
    front = list(distance)
    for other in front:  # grows while it is walked
        for waiter in waiting_on[other]:
            if waiter not in distance:
                distance[waiter] = distance[other] + 1
                front.append(waiter)
    by_rank = len(distance) <= min(max_nodes, MAX_NODES)
    nodes: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for member in sorted(distance, key=lambda member: (distance[member], member)):
        is_alone = by_rank or distance[member] == 0
        nodes[distance[member], coords[member].pp, member if is_alone else -1].append(member)
    number = {member: node for node, members in enumerate(nodes.values()) for member in members}
    sums: dict[tuple[int, int], float] = defaultdict(float)
    waiting: dict[tuple[int, int], set[int]] = defaultdict(set)
    for waiter, other, share in zip(rank.tolist(), on.tolist(), ratio.tolist(), strict=True):
        if other in distance and distance[waiter] > distance[other]:
            sums[number[waiter], number[other]] += share
            waiting[number[waiter], number[other]].add(waiter)
    return WaitGraph(
        nodes=tuple(
            WaitNode(ranks=tuple(sorted(mine)), stage=key[1], distance=key[0])
            for key, mine in nodes.items()
        ),
        edges=tuple(
            WaitEdge(
                node=edge[0],
                on_node=edge[1],
                ranks=tuple(sorted(waiting[edge])),
                ratio=total / len(waiting[edge]),
            )
            for edge, total in sums.items()
        ),
        num_ranks=len(distance),
    )


def follow_finding(report: RunReport, finding: Finding, *, max_nodes: int) -> WaitGraph:
    """Return the ranks that wait for what a finding names, which is one node.

    A rank waits for it if that takes at least `MIN_WAIT_RATIO` of a step; the shares are those of
    ``starved``. Above ``max_nodes`` ranks, those of one pipeline stage are one node.
    """
    culprits = tuple(rank for rank in finding.ranks if rank in report.coords)
    shares = {
        waiting.rank: report.share_held_up(waiting, finding)
        for waiting in report.starved
        if waiting.rank not in culprits
    }
    shares = {rank: ratio for rank, ratio in shares.items() if ratio >= MIN_WAIT_RATIO}
    by_rank = len(shares) < min(max_nodes, MAX_NODES)
    nodes: dict[tuple[int, int], list[int]] = defaultdict(list)
    for rank in sorted(shares):
        nodes[report.coords[rank].pp, rank if by_rank else -1].append(rank)
    stage = report.coords[culprits[0]].pp if culprits else 0
    return WaitGraph(
        nodes=(
            WaitNode(ranks=culprits, stage=stage, distance=0),
            *(
                WaitNode(ranks=tuple(ranks), stage=pp, distance=1)
                for (pp, _), ranks in nodes.items()
            ),
        ),
        edges=tuple(
            WaitEdge(
                node=number,
                on_node=0,
                ranks=tuple(ranks),
                ratio=sum(shares[rank] for rank in ranks) / len(ranks),
            )
            for number, ranks in enumerate(nodes.values(), start=1)
        ),
        num_ranks=len(culprits) + len(shares),
    )


def most_waited_for(waits: DirectWaits) -> int | None:
    """Return the rank that others wait for longest, in sum; None if none waits long for one."""
    is_long = _is_long(waits)
    if not is_long.any():
        return None
    sums = np.bincount(waits.on_rank[is_long], weights=waits.waiting_ns[is_long])
    return int(sums.argmax())


def _is_long(waits: DirectWaits) -> NDArray[np.bool_]:
    return waits.waiting_ns >= MIN_WAIT_RATIO * waits.total_ns
