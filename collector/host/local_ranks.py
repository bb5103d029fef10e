"""Ranks of this host, as their files in the spool show them without reading spans.

`heartbeat` reports them; the reading of the files is separate from the reports.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

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
from ..spool.folder import all_process_folders, open_spool_file, segment_paths
from ..spool.liveness import Liveness, read_liveness
from ..spool.process import ProcessFiles, SpoolFolderError
from ..spool.segment import read_open_spans
from .gpu import plain_uuid

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

MAX_RANKS = 256
"""Largest number of processes followed at once: more than any host has devices."""

STEP_READINGS = 5
"""Readings of a rank's state of which one looks for its newest step and its device, which takes
most of the time: it bisects the segments of all of its threads."""

MAX_SEGMENTS = 8
"""Newest segments of a process that are read for its step, by number."""

STEP_FIELD, COMMIT_FIELD = 4, 11
"""Positions of fields in `CORE`."""


@dataclass(slots=True, kw_only=True)
class LocalRank:
    """One traced process of this host."""

    files: ProcessFiles
    newest_step: int = -1
    num_readings: int = 0
    run_id: str = field(init=False)
    epoch: int = field(init=False)
    rank: int = field(init=False)
    pid: int = field(init=False)
    local_rank: int = field(init=False)
    """Local rank from the manifest; the rank if unknown."""

    pod: str = field(init=False)
    device_name: str = field(init=False, default="")
    device_uuid: str = field(init=False, default="")
    started_ns: int = field(init=False)

    def __post_init__(self) -> None:
        identity, manifest = self.files.identity, self.files.manifest
        self.run_id, self.epoch = self.files.run_id, identity.epoch
        self.rank, self.pid = identity.rank, identity.pid
        local_rank = manifest.get("local_rank")
        if not isinstance(local_rank, int) or not 0 <= local_rank <= MAX_INT32:
            local_rank = identity.rank
        self.local_rank = local_rank
        self.pod = storable_name(str(manifest.get("pod") or ""))
        self.started_ns = identity.anchor_unix_ns

    def read_state(self) -> tuple[str, int]:
        """Return the state of the process (`RUNNING`, or its end) and its newest step.

        Step and device of a running process may be those of `STEP_READINGS` - 1 readings before.
        """
        state = self._read_state()
        if state != RUNNING or self.newest_step < 0 or not self.num_readings % STEP_READINGS:
            self._refresh_device()
            self.newest_step = max(self.newest_step, newest_step(self.files.folder))
        self.num_readings += 1
        return state, self.newest_step

    def _read_state(self) -> str:
        try:
            record = self.files.exit_record()
        except (OSError, SpoolFolderError):
            record = {}
        if record is not None:
            return exit_state(record)
        return LOST if read_liveness(self.files.identity) is Liveness.GONE else RUNNING

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
