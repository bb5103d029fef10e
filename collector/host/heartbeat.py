"""Heartbeats of this host's ranks, once a second: state, newest step and device."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import psutil

from ..names import storable_name
from ..spool.descriptions import RUNNING
from ..spool.folder import is_process_folder
from .local_ranks import LocalRank, find_local_ranks
from .sample import Sample

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from ..identity import Row


MAX_COUNTS_AGE_NS = 5_000_000_000
"""A living rank whose tracer's counts are older is `SILENT`. They are written every second."""

STARTING, TRAINING, SILENT = "starting", "training", "silent"

STEP_NAME = "training-step"
ALIVE_NAME = "training-is-alive"

TEXTS = ("host", "address", "pod", "hardware", "state")


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """State of one rank at one time."""

    at_ns: int
    """Unix time."""

    host: str
    address: str
    """Address of the host's first interface that has one; "" if none has."""

    pod: str
    hardware: str
    """Name of the device. If unknown, number and architecture of the CPUs."""

    run_id: str
    epoch: int
    rank: int
    local_rank: int
    pid: int
    state: str
    """`STARTING` (no step yet), `TRAINING`, `SILENT` (the process lives and its tracer does not
    write), or the end of the process: ``ended``, ``failed``, ``lost``."""

    step: int
    """Newest step of which anything was recorded; -1 before the first."""

    rdma_sent_bytes: int | None
    """RDMA traffic of the host since the sampler started; None if no port counts it."""

    rdma_received_bytes: int | None


class HeartbeatSource:
    """Source of heartbeats, from the process folders of the spool.

    It also knows the local ranks of devices and processes, which other sources need.

    Args:
        traffic_bytes: Returns the host's RDMA traffic (sent, received); None if unknown.
        monotonic_ns: Clock of the tracers' counts.
        address: Address of the host. None: `host_address`.
    """

    name = "heartbeat"

    def __init__(
        self,
        spool: Path,
        *,
        sink: Callable[[Sequence[Heartbeat]], None] = lambda _beats: None,
        traffic_bytes: Callable[[], tuple[int, int] | None] = lambda: None,
        monotonic_ns: Callable[[], int] = time.monotonic_ns,
        address: str | None = None,
    ) -> None:
        self._spool = spool
        self._sink = sink
        self._traffic_bytes = traffic_bytes
        self._monotonic_ns = monotonic_ns
        self._address = host_address() if address is None else address
        self._host = socket.gethostname()
        self._known: dict[Path, LocalRank] = {}
        self._done: set[Path] = set()
        self._uuids: dict[str, int] = {}
        self._pids: dict[int, int] = {}

    def read(self, at_ns: int) -> list[Sample]:
        """Send a heartbeat of each rank, and return samples of step and liveness by local rank.

        A rank that ended is reported once more and then forgotten.
        """
        now_ns = self._monotonic_ns()
        seen = self._known.keys() | self._done
        local, foreign = find_local_ranks(self._spool, self._host, seen)
        self._known |= local
        self._done |= foreign
        beats: list[Heartbeat] = []
        samples: dict[int, list[Sample]] = {}
        running: list[LocalRank] = []
        for folder, rank in sorted(self._known.items(), key=lambda item: item[1].started_ns):
            if not is_process_folder(folder):
                self._forget(folder)
                continue
            state, step = rank.read_state()
            beat = self._beat(rank, self._state(rank, state, step, now_ns), step, at_ns)
            beats.append(beat)
            is_alive = float(beat.state in {STARTING, TRAINING})
            samples[rank.local_rank] = [Sample(at_ns, ALIVE_NAME, is_alive, rank.local_rank)]
            if step >= 0:
                reached = Sample(at_ns, STEP_NAME, float(step), rank.local_rank)
                samples[rank.local_rank].append(reached)
            if state == RUNNING:
                running.append(rank)
            else:
                self._forget(folder)
        self._uuids = {rank.device_uuid: rank.local_rank for rank in running if rank.device_uuid}
        self._pids = {rank.pid: rank.local_rank for rank in running}
        self._done = {folder for folder in self._done if is_process_folder(folder)}
        self._sink(beats)
        return [sample for of_rank in samples.values() for sample in of_rank]

    def local_rank_of_device(self) -> dict[str, int]:
        """Return the local ranks of devices, by `plain_uuid`."""
        return self._uuids

    def local_rank_of_process(self) -> dict[int, int]:
        """Return the local ranks of processes, by process id."""
        return self._pids

    def _forget(self, folder: Path) -> None:
        del self._known[folder]
        self._done.add(folder)

    def _state(self, rank: LocalRank, state: str, step: int, now_ns: int) -> str:
        if state != RUNNING:
            return state
        written_ns = rank.counts_written_ns()
        if written_ns is not None and now_ns - written_ns > MAX_COUNTS_AGE_NS:
            return SILENT
        return STARTING if step < 0 else TRAINING

    def _beat(self, rank: LocalRank, state: str, step: int, at_ns: int) -> Heartbeat:
        sent, received = self._traffic_bytes() or (None, None)
        return Heartbeat(
            at_ns=at_ns,
            host=self._host,
            address=self._address,
            pod=rank.pod,
            hardware=rank.device_name or f"{os.cpu_count()} x {os.uname().machine}",
            run_id=rank.run_id,
            epoch=rank.epoch,
            rank=rank.rank,
            local_rank=rank.local_rank,
            pid=rank.pid,
            state=state,
            step=step,
            rdma_sent_bytes=sent,
            rdma_received_bytes=received,
        )


def host_address() -> str:
    """Return the host's first address that is neither loopback nor link-local; "" if none is."""
    for family in (socket.AF_INET, socket.AF_INET6):
        for addresses in psutil.net_if_addrs().values():
            for address in addresses:
                plain = address.address.partition("%")[0]
                if address.family == family and not plain.startswith(("127.", "::1", "fe80")):
                    return plain
    return ""


def heartbeat_row(beat: Heartbeat) -> Row:
    """Return a heartbeat as a row of table ``heartbeats``, with texts that can be stored."""
    row = asdict(beat)
    return row | {name: storable_name(row[name]) for name in TEXTS}


def heartbeat_sink(add: Callable[[Sequence[Row]], None]) -> Callable[[Sequence[Heartbeat]], None]:
    """Return a function that passes heartbeats on to ``add`` as rows. ``add`` must not block."""

    def write(beats: Sequence[Heartbeat]) -> None:
        add([heartbeat_row(beat) for beat in beats])

    return write
