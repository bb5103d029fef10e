"""Durations of transfers: classes of links, rings, and faults on links."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from rankscope.tracer.span import NS_PER_S

from .placement import GRID_AXES, Axis, expert_blocks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ..faults.spec import Fault
    from .placement import Placement
    from .scenario import Scenario


class Links:
    """The network with some faults on its links.

    Args:
        scenario: Sizes, latencies, bandwidths.
        placement: Position of each rank.
        faults: Active faults on links.
        slow_hosts: Shape (hosts,): whether the network of the host is degraded.
    """

    def __init__(
        self,
        scenario: Scenario,
        placement: Placement,
        faults: Sequence[Fault] = (),
        slow_hosts: NDArray[np.bool_] | None = None,
    ) -> None:
        self._scenario = scenario
        self._placement = placement
        self._faults = faults
        self._slow_hosts = slow_hosts
        self._rings: dict[Axis, tuple[NDArray[np.float64], NDArray[np.float64]]] = {}
        self._pairs: dict[tuple[int, int], NDArray[np.float64]] = {}
        self._experts: tuple[NDArray[np.float64], NDArray[np.float64]] | None = None

    def p2p_ns(self, src: int, dst: int) -> NDArray[np.float64]:
        """Return the transfer time of an activation between two stages, shape (dp, cp, tp)."""
        if (src, dst) not in self._pairs:
            grid = self._placement.rank
            latency_ns, ns_per_byte = self._between(grid[src], grid[dst])
            self._pairs[src, dst] = latency_ns + self._scenario.activation_bytes * ns_per_byte
        return self._pairs[src, dst]

    def collective_ns(self, axis: Axis, *, num_bytes: int, passes: int) -> NDArray[np.float64]:
        """Return the time of a collective in each group, in the shape of the grid with size-1 axes.

        A ring is as slow as its slowest link; small messages use a tree::

            passes * (ceil(log2 n) * latency + (n - 1) / n * bytes / bandwidth)

        Args:
            axis: The axis of the groups.
            num_bytes: Bytes of the larger of input and output.
            passes: 1 for reduce-scatter and all-gather, 2 for all-reduce.

        Source:
            Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication
            Operations in MPICH" (2005): ring and tree costs.
        """
        latency_ns, ns_per_byte = self._ring(axis)
        size = math.prod(self._placement.rank.shape[at] for at in GRID_AXES[axis])
        rounds = math.ceil(math.log2(size)) if size > 1 else 0
        total: NDArray[np.float64] = passes * (
            rounds * latency_ns + (size - 1) / size * num_bytes * ns_per_byte
        )
        return total

    def all_to_all_ns(self, *, num_bytes: int) -> NDArray[np.float64]:
        """Return the time of an all-to-all of the experts' tokens in each expert-parallel group.

        Each member sends the other parts over one adapter, and the slowest member determines the
        end::

            latency + sum over the others of bytes / n / bandwidth

        Args:
            num_bytes: Bytes that one member sends, with its own part.

        Returns:
            Shape (pp, dp / ep, cp, tp).
        """
        if self._experts is None:
            members = np.moveaxis(expert_blocks(self._placement.rank, self._scenario.ep), 2, -1)
            src, dst = members[..., :, None], members[..., None, :]
            latency_ns, ns_per_byte = self._between(*np.broadcast_arrays(src, dst))
            others = ~np.eye(members.shape[-1], dtype=np.bool_)
            of_member = np.where(others, ns_per_byte, 0).sum(axis=-1) / members.shape[-1]
            latency_ns = np.where(others, latency_ns, 0).max(axis=(-1, -2))
            self._experts = latency_ns, of_member.max(axis=-1)
        latency_ns, ns_per_byte = self._experts
        total: NDArray[np.float64] = latency_ns + num_bytes * ns_per_byte
        return total

    def _ring(self, axis: Axis) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the largest latency and time per byte on the ring of each group."""
        if axis not in self._rings:
            src, dst = ring_links(self._placement, axis)
            latency_ns, ns_per_byte = self._between(src, dst)
            spanned = GRID_AXES[axis]
            self._rings[axis] = (
                np.expand_dims(latency_ns.max(axis=-1), spanned),
                np.expand_dims(ns_per_byte.max(axis=-1), spanned),
            )
        return self._rings[axis]

    def _between(
        self, src: NDArray[np.int32], dst: NDArray[np.int32]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        network, at = self._scenario.network, self._placement
        crosses = at.host[src] != at.host[dst]
        link_class = crosses.astype(np.int8) + (at.rack[src] != at.rack[dst])
        latency_ns = np.array(
            [network.host_latency_ns, network.rack_latency_ns, network.spine_latency_ns],
            dtype=np.float64,
        )[link_class]
        bytes_per_s = np.array(
            [network.host_bytes_per_s, network.rack_bytes_per_s, network.spine_bytes_per_s]
        )[link_class]
        return latency_ns, self.slowing(src, dst) * NS_PER_S / bytes_per_s

    def slowing(self, src: NDArray[np.int32], dst: NDArray[np.int32]) -> NDArray[np.float64]:
        """Return the factor of the faults on the time per byte of each link."""
        slowing = np.ones(src.shape)
        hosts, slow_hosts = self._placement.host, self._slow_hosts
        crosses = hosts[src] != hosts[dst]
        for fault in self._faults:
            if fault.src is not None:
                hit = ((src == fault.src) & (dst == fault.dst)) | (
                    (src == fault.dst) & (dst == fault.src)
                )
            elif fault.rack is not None:
                racks = self._placement.rack
                leaves = racks[src] != racks[dst]
                hit = leaves & ((racks[src] == fault.rack) | (racks[dst] == fault.rack))
            elif fault.ranks:
                hit = crosses & (np.isin(src, fault.ranks) | np.isin(dst, fault.ranks))
            elif slow_hosts is not None:
                hit = crosses & (slow_hosts[hosts[src]] | slow_hosts[hosts[dst]])
            else:
                continue
            slowing[hit] *= fault.factor
        return slowing


def ring_links(placement: Placement, axis: Axis) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return the links of each group's ring, which connects the ranks in ascending order.

    Returns:
        Source and destination, shape (groups..., members); the axes of the groups are those of the
        grid that the group does not span.
    """
    grid, spanned = placement.rank, GRID_AXES[axis]
    fixed = tuple(at for at in range(grid.ndim) if at not in spanned)
    members = grid.transpose(fixed + spanned).reshape(*(grid.shape[at] for at in fixed), -1)
    src = np.sort(members, axis=-1)
    return src, np.roll(src, -1, axis=-1)
