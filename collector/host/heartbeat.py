"""Heartbeats of this host's ranks, once a second: state, newest step and device."""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

import psutil

from rankscope.tracer.spool import (
    CORE,
    COUNTS_OFFSET,
    HEADER_BYTES,
    PROCESS_FILE,
    RECORD_BYTES,
    read_counts,
    record_offset,
)

from ..identity import MAX_INT32
from ..names import storable_name
from ..spool.descriptions import LOST, RUNNING, exit_state
from ..spool.folder import (
    all_process_folders,
    is_process_folder,
    open_spool_file,
    segment_paths,
)
from ..spool.liveness import Liveness, read_liveness
from ..spool.process import ProcessFiles, SpoolFolderError
from ..spool.segment import read_open_spans
from .gpu import plain_uuid
from .sample import Sample

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from pathlib import Path

    from ..identity import Row

MAX_COUNTS_AGE_NS = 5_000_000_000
"""A living rank whose tracer's counts are older is `SILENT`. They are written every second."""

HEARTBEAT_PERIOD_S = 10.0
"""Time between two requests of an agent, each with one row per rank and second. One request per
second and host would be more inserts than a collector of thousands of hosts can do."""

MAX_HEARTBEATS = 10_000
"""Heartbeats that may wait: some 10 MB, or 20 minutes of eight ranks."""

HEARTBEATS_PER_REQUEST = 1_000

STARTING, TRAINING, SILENT = "starting", "training", "silent"

STEP_NAME = "training-step"
ALIVE_NAME = "training-is-alive"

TEXTS = ("host", "address", "pod", "hardware", "state")

MAX_RANKS = 256
"""Largest number of processes followed at once: more than any host has devices."""

STEP_READINGS = 5
"""Readings of a rank's state of which one looks for its newest step and its device, which takes
most of the time: it bisects the segments of all of its threads."""

MAX_SEGMENTS = 8
"""Newest segments of a process that are read for its step, by number."""

STEP_FIELD, COMMIT_FIELD = 4, 11
"""Positions of fields in `CORE`."""


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


@dataclass(slots=True, kw_only=True)
class LocalRank:
    """One traced process of this host, as its files in the spool show it without reading spans."""

    files: ProcessFiles
    newest_step: int = -1
    num_readings: int = 0
    local_rank: int = field(init=False)
    """Local rank from the manifest; the rank if unknown."""

    device_name: str = field(init=False, default="")
    device_uuid: str = field(init=False, default="")

    def __post_init__(self) -> None:
        local_rank = self.files.manifest.get("local_rank")
        if not isinstance(local_rank, int) or not 0 <= local_rank <= MAX_INT32:
            local_rank = self.files.identity.rank
        self.local_rank = local_rank

    def read_state(self) -> tuple[str, int]:
        """Return the state of the process (`RUNNING`, or its end) and its newest step.

        Step and device of a running process may be those of `STEP_READINGS` - 1 readings before.
        """
        try:
            record = self.files.exit_record()
        except (OSError, SpoolFolderError):
            record = {}
        if record is not None:
            state = exit_state(record)
        else:
            is_gone = read_liveness(self.files.identity) is Liveness.GONE
            state = LOST if is_gone else RUNNING
        if state != RUNNING or self.newest_step < 0 or not self.num_readings % STEP_READINGS:
            self._refresh_device()
            self.newest_step = max(self.newest_step, newest_step(self.files.folder))
        self.num_readings += 1
        return state, self.newest_step

    def counts_written_ns(self) -> int | None:
        """Return the time at which the tracer last wrote its counts; None if it has not."""
        header = b""
        path = self.files.folder / PROCESS_FILE
        with suppress(OSError), os.fdopen(open_spool_file(path), "rb") as file:
            header = file.read(HEADER_BYTES)
        if len(header) <= COUNTS_OFFSET:
            return None
        return read_counts(header.ljust(HEADER_BYTES, b"\0")).at_ns or None

    def _refresh_device(self) -> None:
        self.files.refresh_derived()
        declared = self.files.manifest.get("device")
        device = declared if isinstance(declared, dict) else {}
        derived = self.files.derived
        name = device.get("name") or derived.get("device_name") or ""
        uuid = device.get("uuid") or derived.get("device_uuid") or ""
        self.device_name = storable_name(str(name))
        self.device_uuid = plain_uuid(str(uuid))


def find_local_ranks(
    spool: Path, host: str, known: Collection[Path]
) -> tuple[dict[Path, LocalRank], set[Path]]:
    """Return the unknown processes of this host, and the process folders of other hosts.

    Folders that cannot be read or are incomplete are in neither.
    """
    local: dict[Path, LocalRank] = {}
    foreign = set()
    folders: list[Path] = []
    with suppress(OSError):
        folders = all_process_folders(spool)
    for folder in folders:
        if folder in known or len(local) >= MAX_RANKS:
            continue
        try:
            files = ProcessFiles(folder)
        except (OSError, SpoolFolderError):
            continue
        if files.identity.host == host:
            local[folder] = LocalRank(files=files)
        else:
            foreign.add(folder)
    return local, foreign


def newest_step(folder: Path) -> int:
    """Return the newest step that a process recorded or is in; -1 if there is none.

    Rows are written in order, so the newest row of a segment is found by bisection.
    """
    steps = [-1]
    paths: list[Path] = []
    with suppress(OSError):
        paths = segment_paths(folder)[-MAX_SEGMENTS:]
    for path in paths:
        steps += [span.step for span in read_open_spans(path)]
        steps.append(_last_step(path))
    return max(steps)


def _last_step(path: Path) -> int:
    try:
        descriptor = open_spool_file(path)
    except OSError:
        return -1
    try:
        low, high = 0, (os.fstat(descriptor).st_size - HEADER_BYTES) // RECORD_BYTES
        step = -1
        while low < high:
            middle = (low + high) // 2
            core = os.pread(descriptor, CORE.size, record_offset(middle))
            fields = CORE.unpack(core) if len(core) == CORE.size else None
            if fields is not None and fields[COMMIT_FIELD] == record_offset(middle):
                low, step = middle + 1, max(step, fields[STEP_FIELD])
            else:
                high = middle
    except OSError:
        return -1
    else:
        return step
    finally:
        os.close(descriptor)


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
        for folder, rank in sorted(
            self._known.items(), key=lambda item: item[1].files.identity.anchor_unix_ns
        ):
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
        self._pids = {rank.files.identity.pid: rank.local_rank for rank in running}
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
        files, identity = rank.files, rank.files.identity
        return Heartbeat(
            at_ns=at_ns,
            host=self._host,
            address=self._address,
            pod=storable_name(str(files.manifest.get("pod") or "")),
            hardware=rank.device_name or f"{os.cpu_count()} x {os.uname().machine}",
            run_id=files.run_id,
            epoch=identity.epoch,
            rank=identity.rank,
            local_rank=rank.local_rank,
            pid=identity.pid,
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
