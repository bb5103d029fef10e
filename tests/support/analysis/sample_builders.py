"""Tables of samples with one reading a second."""

from __future__ import annotations

import numpy as np

from rankscope.analysis.trace.context import SampleTable

S = 1_000_000_000


def samples(name: str, rows: dict[tuple[str, int], list[float]]) -> SampleTable:
    """Return readings of one name, from second 0 on.

    Args:
        name: As the collector stores it: ``gpu-clock-hz``.
        rows: By (host, device), one reading a second; device -1 for the host itself.
    """
    hosts = tuple(sorted({host for host, _ in rows}))
    flat = [
        (hosts.index(host), device, second * S, value)
        for (host, device), values in rows.items()
        for second, value in enumerate(values)
    ]
    host, device, at, value = zip(*flat, strict=True)
    return SampleTable(
        host=np.array(host, np.int32),
        device=np.array(device, np.int32),
        at_ns=np.array(at, np.int64),
        name=np.zeros(len(flat), np.int32),
        value=np.array(value, np.float64),
        hosts=hosts,
        names=(name,),
    )


def join(one: SampleTable, other: SampleTable) -> SampleTable:
    """Return the readings of two tables with the same hosts."""
    joined = {
        column: np.concatenate((getattr(one, column), getattr(other, column)))
        for column in ("host", "device", "at_ns", "value")
    }
    name = np.concatenate((one.name, other.name + len(one.names)))
    return SampleTable(**joined, name=name, hosts=one.hosts, names=one.names + other.names)
