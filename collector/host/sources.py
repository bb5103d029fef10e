"""The sources of this host, put together."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from .dcgm import DcgmSource
from .disk import DiskSource
from .gpu import GpuSource
from .heartbeat import HeartbeatSource
from .memory import MemorySource
from .nic import NicSource
from .rdma import RdmaSource
from .system import CpuSource, ProcessSource

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .heartbeat import Heartbeat
    from .sample import Source


def host_sources(
    spool: Path,
    *,
    dcgm_url: str | None = None,
    on_heartbeats: Callable[[Sequence[Heartbeat]], None] = lambda _beats: None,
) -> list[Source]:
    """Return everything that this host can be asked once a second.

    Args:
        spool: Where its ranks write: heartbeats and local ranks come from there.
        dcgm_url: Ask this exporter of the devices, and not the driver.
        on_heartbeats: Takes the heartbeats of each second.

    Raises:
        DcgmError: The exporter's address is none.
    """
    rdma = RdmaSource()
    heartbeat = HeartbeatSource(spool, sink=on_heartbeats, traffic_bytes=rdma.traffic_bytes)
    devices: Source = (
        GpuSource(local_rank_of=heartbeat.local_rank_of_device)
        if dcgm_url is None
        else DcgmSource(dcgm_url, local_rank_of=heartbeat.local_rank_of_device)
    )
    folders = [Path("/")] + ([spool] if spool.is_dir() else [])
    return [
        heartbeat,
        CpuSource(),
        ProcessSource(local_rank_of=heartbeat.local_rank_of_process),
        MemorySource(),
        DiskSource(folders),
        NicSource(),
        rdma,
        devices,
    ]
