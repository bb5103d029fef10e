"""Network adapters of a rank, each of which is measured on its own."""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..checks.nvidia_smi import DISTANCES
from ..checks.rdma import read_distances, read_ports
from ..host import Host

if TYPE_CHECKING:
    from collections.abc import Iterator

GLOO_VARIABLE = "GLOO_SOCKET_IFNAME"
"""Network interfaces of gloo, with commas between them. torch reads it whenever a group is made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """A network adapter that a rank uses."""

    part: str
    """Name in results; "" if the backend chooses one that is not known."""

    interface: str = ""
    """Network interface of gloo; "" if the backend chooses."""

    kind: str = ""
    """Nominal speed: adapters of one speed are compared. "" if unknown."""


def own_adapters(device: str, local_rank: int, *, host: Host | None = None) -> list[Adapter]:
    """Return the adapters that a rank tests with its counterparts.

    NCCL sends from the adapter that is nearest to the GPU, so that each rank tests its own. Without
    GPUs the first rank of a host tests each interface of `GLOO_VARIABLE`, or gloo's own choice.
    """
    host = Host() if host is None else host
    if device == "cuda":
        return [_of_gpu(host, local_rank)]
    if local_rank:
        return []
    names = [name for name in os.environ.get(GLOO_VARIABLE, "").split(",") if name]
    return [
        Adapter(part=name, interface=name, kind=host.read(f"/sys/class/net/{name}/speed") or "")
        for name in names
    ] or [Adapter(part="")]


def _of_gpu(host: Host, gpu: int) -> Adapter:
    distances = read_distances(host).get(gpu)
    if not distances:
        return Adapter(part=f"GPU {gpu}")
    name = min(distances, key=lambda adapter: DISTANCES.index(distances[adapter]))
    rates = {
        port.device: f"{port.rate_gb_per_s:g}" for port in read_ports(host) if port.rate_gb_per_s
    }
    return Adapter(part=f"GPU {gpu} over {name}", kind=rates.get(name, ""))


@contextmanager
def only_interface(name: str) -> Iterator[None]:
    """Let gloo make groups on one network interface; on its own choice if the name is empty."""
    before = os.environ.get(GLOO_VARIABLE)
    if name:
        os.environ[GLOO_VARIABLE] = name
    try:
        yield
    finally:
        if before is not None:
            os.environ[GLOO_VARIABLE] = before
