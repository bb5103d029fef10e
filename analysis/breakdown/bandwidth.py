"""Achieved bandwidth of communications, by kind, operation and size."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rankscope.tracer.span import NS_PER_S

from ..report.report import Bandwidth

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

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


P2P = "p2p"
"""The operation of a transfer between a pair."""


def measure_bandwidths(transfers: Transfers, hosts: Mapping[int, str]) -> tuple[Bandwidth, ...]:
    """Return the achieved bandwidth of each kind, operation and size of known bytes.

    The algorithm bandwidth is the bytes over the median transfer time. The bus bandwidth counts the
    bytes on the links; it is None for operations that `BUS_FACTORS` does not list. The two
    directions of a pipeline are one class.

    Args:
        transfers: One row per instance.
        hosts: Host of each rank, "" if unknown.

    Returns:
        By kind and name, the largest transfers first.
    """
    classes: dict[tuple[str, str, int, bool | None, int], list[NDArray[np.int64]]] = {}
    for kind in range(int(transfers.alike.max(initial=-1)) + 1):
        rows = np.flatnonzero((transfers.alike == kind) & (transfers.num_bytes > 0))
        if not len(rows):
            continue
        link = transfers.links[int(transfers.link[rows[0]])]
        name = P2P if link.is_pair else transfers.names[int(transfers.name[rows[0]])]
        names = {hosts.get(rank, "") for rank in link.members}
        across = None if "" in names else len(names) > 1
        num_bytes = int(transfers.num_bytes[rows[0]])
        key = (link.kind, name, len(link.members), across, num_bytes)
        classes.setdefault(key, []).append(rows)
    found = []
    for (kind_name, name, num_members, across, num_bytes), parts in classes.items():
        transfer_ns = transfers.transfer_ns[np.concatenate(parts)]
        median_ns = float(np.median(transfer_ns))
        if median_ns <= 0:
            continue
        algorithm = num_bytes * NS_PER_S / median_ns
        share = (num_members - 1) / num_members
        factors = (factor * share for word, factor in BUS_FACTORS if word in name)
        factor = 1.0 if name == P2P else next(factors, None)
        found.append(
            Bandwidth(
                kind=kind_name,
                name=name,
                num_members=num_members,
                across_hosts=across,
                num_bytes=num_bytes,
                num_instances=len(transfer_ns),
                transfer_ns=median_ns,
                algorithm_bytes_per_s=algorithm,
                bus_bytes_per_s=None if factor is None else algorithm * factor,
            )
        )
    return tuple(sorted(found, key=lambda one: (one.kind, one.name, -one.num_bytes)))
