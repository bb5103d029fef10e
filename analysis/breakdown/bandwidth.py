"""Achieved bandwidth of communications, by kind, operation and size."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rankscope.tracer.span import NS_PER_S

from ..report.report import Bandwidth

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..replay.model import Transfers

BUS_FACTORS = (
    ("all_reduce", 2.0),
    ("allreduce", 2.0),
    ("all_gather", 1.0),
    ("allgather", 1.0),
    ("reduce_scatter", 1.0),
    ("all_to_all", 1.0),
    ("alltoall", 1.0),
)
"""Bytes that each member's link carries over the bytes of the operation, for a large group, by a
word in the operation's name; for n members it is ``factor * (n - 1) / n``.
Source: NVIDIA nccl-tests, doc/PERFORMANCE.md."""


def measure_bandwidths(transfers: Transfers, hosts: Mapping[int, str]) -> tuple[Bandwidth, ...]:
    """Return the achieved bandwidth of each class of alike transfers of known size.

    The algorithm bandwidth is the bytes over the median transfer time. The bus bandwidth counts the
    bytes on the links; it is None for operations that `BUS_FACTORS` does not list.

    Args:
        transfers: One row per instance.
        hosts: Host of each rank, "" if unknown.

    Returns:
        By kind and name, the largest transfers first.
    """
    found = []
    for kind in range(int(transfers.alike.max(initial=-1)) + 1):
        rows = np.flatnonzero((transfers.alike == kind) & (transfers.num_bytes > 0))
        if not len(rows):
            continue
        link = transfers.links[int(transfers.link[rows[0]])]
        name = "p2p" if link.is_pair else transfers.names[int(transfers.name[rows[0]])]
        median_ns = float(np.median(transfers.transfer_ns[rows]))
        if median_ns <= 0:
            continue
        num_bytes = int(transfers.num_bytes[rows[0]])
        algorithm = num_bytes * NS_PER_S / median_ns
        factor = 1.0 if link.is_pair else _bus_factor(name, len(link.members))
        names = {hosts.get(rank, "") for rank in link.members}
        found.append(
            Bandwidth(
                kind=link.kind,
                name=name,
                num_members=len(link.members),
                across_hosts=None if "" in names else len(names) > 1,
                num_bytes=num_bytes,
                num_instances=len(rows),
                transfer_ns=median_ns,
                algorithm_bytes_per_s=algorithm,
                bus_bytes_per_s=None if factor is None else algorithm * factor,
            )
        )
    return tuple(sorted(found, key=lambda one: (one.kind, one.name, -one.num_bytes)))


def _bus_factor(name: str, num_members: int) -> float | None:
    for word, factor in BUS_FACTORS:
        if word in name:
            return factor * (num_members - 1) / num_members
    return None
