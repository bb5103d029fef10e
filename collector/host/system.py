"""CPU, memory, disks and the busiest processes of a host."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import psutil

from rankscope.tracer.span import NS_PER_MS

from ..names import storable_name
from .sample import PART_MARK, WHOLE_HOST, Sample, SourceAbsentError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

PROC = Path("/proc")
NUM_PROCESSES = 10
HZ_PER_MHZ = 1e6
STAT_BYTES = 1024
USER_TICKS, SYSTEM_TICKS, START_TICKS = 11, 12, 19
"""Fields of ``/proc/PID/stat`` after the command. Source: proc_pid_stat(5)."""

PROCESS_NAME = "process-cpu-cores"
KERNEL_WORKER = re.compile(r"^(k\w+|irq|migration|ksoftirqd)/.*")
BLOCK_ROOT = Path("/sys/block")
NOT_DISKS = ("loop", "ram", "zram")


class MemorySource:
    """Memory and swap of the host."""

    name = "memory"

    def read(self, at_ns: int) -> list[Sample]:
        """Return sizes, and the bytes swapped in and out since the host started."""
        memory, swap = psutil.virtual_memory(), psutil.swap_memory()
        values = {
            "memory-total-bytes": memory.total,
            "memory-available-bytes": memory.available,
            "memory-used-bytes": memory.used,
            "swap-total-bytes": swap.total,
            "swap-used-bytes": swap.used,
            "swap-in-bytes": swap.sin,
            "swap-out-bytes": swap.sout,
        }
        return [Sample(at_ns, name, float(value)) for name, value in values.items()]


class CpuSource:
    """Busy share and mean frequency of the CPUs."""

    name = "cpu"

    def __init__(self) -> None:
        self._last: tuple[float, float] | None = None

    def read(self, at_ns: int) -> list[Sample]:
        """Return the busy share since the last reading (none in the first) and the frequency."""
        samples = []
        times = psutil.cpu_times()
        # Guest time is already included in user and nice.
        all_s = sum(times) - times.guest - times.guest_nice
        busy_s = all_s - times.idle - times.iowait
        last, self._last = self._last, (busy_s, all_s)
        if last is not None and all_s > last[1]:
            busy = min(max((busy_s - last[0]) / (all_s - last[1]), 0.0), 1.0)
            samples.append(Sample(at_ns, "cpu-busy-ratio", busy))
        # None if the kernel does not know it, although the stub of psutil does not allow it.
        frequency_mhz = getattr(psutil.cpu_freq(), "current", 0.0)
        if frequency_mhz > 0:
            samples.append(Sample(at_ns, "cpu-frequency-hz", frequency_mhz * HZ_PER_MHZ))
        return samples


@dataclass(frozen=True, slots=True)
class _Process:
    command: str
    ticks: int
    start_ticks: int


class ProcessSource:
    """The ten commands that used most CPU time since the last reading.

    Processes of one command are summed, except ranks: each rank has its own sample, with its
    local rank as device.

    Args:
        root: Folder of the kernel's processes.
        local_rank_of: Returns the local ranks by process id.
        ticks_per_s: Frequency of the kernel's clock of CPU time.
    """

    name = "processes"

    def __init__(
        self,
        root: Path = PROC,
        *,
        local_rank_of: Callable[[], Mapping[int, int]] = dict,
        ticks_per_s: int | None = None,
    ) -> None:
        self._root = root
        self._local_rank_of = local_rank_of
        self._ticks_per_s = ticks_per_s or os.sysconf("SC_CLK_TCK")
        self._last: dict[int, _Process] = {}
        self._last_ns = 0

    def read(self, at_ns: int) -> list[Sample]:
        """Return the CPUs used since the last reading; the first reading returns none.

        Raises:
            SourceAbsentError: No process is visible.
        """
        now = _processes(self._root)
        if not now:
            raise SourceAbsentError(f"no visible process under {self._root}: no process samples")
        last, self._last = self._last, now
        elapsed_s, self._last_ns = (at_ns - self._last_ns) / 1e9, at_ns
        if not last or elapsed_s <= 0:
            return []
        used = _used_ticks(last, now, self._local_rank_of())
        top = sorted(used.items(), key=lambda item: (-item[1], item[0]))[:NUM_PROCESSES]
        return [
            Sample(
                at_ns,
                f"{PROCESS_NAME}{PART_MARK}{command}",
                ticks / self._ticks_per_s / elapsed_s,
                device,
            )
            for (command, device), ticks in top
            if ticks
        ]


def parse_stat(line: bytes) -> tuple[str, int, int] | None:
    """Return (command, CPU time, start time) of a ``/proc/PID/stat``, times in ticks.

    None if the line is invalid. A command may contain spaces and parentheses. The numbers of the
    kernel's worker threads are cut from their names.
    """
    head, closing, tail = line.rpartition(b")")
    fields = tail.split()
    command = head.partition(b"(")[2].decode("utf-8", "replace")
    if not closing or len(fields) <= START_TICKS:
        return None
    try:
        ticks = int(fields[USER_TICKS]) + int(fields[SYSTEM_TICKS])
        start = int(fields[START_TICKS])
    except ValueError:
        return None
    return storable_name(KERNEL_WORKER.sub(r"\1", command)), ticks, start


def _processes(root: Path) -> dict[int, _Process]:
    """Return the visible processes, with one read each: psutil would need several."""
    found = {}
    pids: list[int] = []
    with suppress(OSError):
        pids = [int(name) for name in os.listdir(root) if name.isdigit()]  # noqa: PTH208
    for pid in pids:
        try:
            descriptor = os.open(f"{root}/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            parsed = parse_stat(os.read(descriptor, STAT_BYTES))
        except OSError:
            continue
        finally:
            os.close(descriptor)
        if parsed is not None:
            found[pid] = _Process(*parsed)
    return found


def _used_ticks(
    last: Mapping[int, _Process], now: Mapping[int, _Process], local_rank_of: Mapping[int, int]
) -> dict[tuple[str, int], int]:
    """Return the ticks used by each (command, device). All ticks of a new process count."""
    used: dict[tuple[str, int], int] = {}
    for pid, process in now.items():
        before = last.get(pid)
        is_same = before is not None and before.start_ticks == process.start_ticks
        ticks = process.ticks - (before.ticks if before is not None and is_same else 0)
        key = (process.command, local_rank_of.get(pid, WHOLE_HOST))
        used[key] = used.get(key, 0) + max(ticks, 0)
    return used


class DiskCounts(NamedTuple):
    """The kernel's counters of a disk; times in ms."""

    read_count: int
    write_count: int
    read_bytes: int
    write_bytes: int
    read_time: int
    write_time: int


def disk_counts() -> Mapping[str, DiskCounts]:
    """Return the counters of each disk and partition."""
    found = psutil.disk_io_counters(perdisk=True, nowrap=False)
    return {disk: DiskCounts(*counts[: len(DiskCounts._fields)]) for disk, counts in found.items()}


class DiskSource:
    """Free space of some folders, and traffic and latency of each disk.

    Args:
        folders: Folders whose file systems are read.
        block_root: The kernel's list of whole disks.
        counts: Returns the counters.
    """

    name = "disk"

    def __init__(
        self,
        folders: Sequence[Path] = (Path("/"),),
        *,
        block_root: Path = BLOCK_ROOT,
        counts: Callable[[], Mapping[str, DiskCounts]] = disk_counts,
    ) -> None:
        self._folders = folders
        self._block_root = block_root
        self._counts = counts
        self._last: dict[str, tuple[int, int, int, int]] = {}

    def read(self, at_ns: int) -> list[Sample]:
        """Return free space, bytes moved, and the mean latency since the last reading.

        A disk without requests since then has no latency.

        Raises:
            SourceAbsentError: No folder and no disk can be read.
        """
        found = [sample for folder in self._folders for sample in _free_space(folder, at_ns)]
        for disk, counts in self._counts().items():
            if (self._block_root / disk).exists() and not disk.startswith(NOT_DISKS):
                found += self._disk(disk, counts, at_ns)
        if not found:
            raise SourceAbsentError("no visible disk: no disk samples")
        return found

    def _disk(self, disk: str, counts: DiskCounts, at_ns: int) -> list[Sample]:
        now = (counts.read_count, counts.read_time, counts.write_count, counts.write_time)
        last, self._last[disk] = self._last.get(disk), now
        values = {
            "disk-read-bytes": float(counts.read_bytes),
            "disk-written-bytes": float(counts.write_bytes),
        }
        if last is not None:
            reads, read_ms, writes, write_ms = (b - a for a, b in zip(last, now, strict=True))
            if reads > 0 and read_ms >= 0:
                values["disk-read-latency-ns"] = read_ms * NS_PER_MS / reads
            if writes > 0 and write_ms >= 0:
                values["disk-write-latency-ns"] = write_ms * NS_PER_MS / writes
        return [Sample(at_ns, f"{name}{PART_MARK}{disk}", value) for name, value in values.items()]


def _free_space(folder: Path, at_ns: int) -> list[Sample]:
    try:
        usage = psutil.disk_usage(str(folder))
    except OSError:
        return []
    return [
        Sample(at_ns, f"disk-total-bytes{PART_MARK}{folder}", float(usage.total)),
        Sample(at_ns, f"disk-free-bytes{PART_MARK}{folder}", float(usage.free)),
    ]
