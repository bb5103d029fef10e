"""CPU, memory, disks, pressure and the busiest processes of a host."""

from __future__ import annotations

import heapq
import os
import re
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import psutil

from rankscope.tracer.span import NS_PER_MS, NS_PER_S, NS_PER_US

from ..names import storable_name
from .sample import PART_MARK, WHOLE_HOST, Sample, SourceAbsentError, read_text

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

PROC = Path("/proc")
NUM_PROCESSES = 10
HZ_PER_MHZ = 1e6
STAT_BYTES = 1024
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
PARENT, USER_TICKS, SYSTEM_TICKS, START_TICKS, RESIDENT_PAGES = 1, 11, 12, 19, 21
"""Fields of ``/proc/PID/stat`` after the command. Source: proc_pid_stat(5)."""

PROCESS_NAME = "process-cpu-cores"
QUEUE_NAME = "run-queue-wait-ratio"
STORAGE_NAME = "process-storage-bytes-per-s"
MEMORY_NAME = "process-memory-bytes"
STALLED_RATIO = 0.1
"""Pressure from which processes are named that use the disks or hold the memory: at other times,
reading all of them would cost for nothing."""

NUM_USERS = 3
BUSY_CORES = 0.1
"""CPUs from which a process is named with its number."""

MAX_PROCESSES = 250
"""Processes of one round: a host with more is read in every second, third, ... round, so that the
cost does not grow with their number."""

IDLE_READINGS = 2
IDLE_ROUNDS = 5
"""A process without CPU time in this number of readings is read in every fifth round only: most of
a host's processes are idle, and to read them is most of the cost of all samples."""

MAX_COMMANDS = 1024
MAX_ANCESTORS = 16
PRESSURES = ("cpu", "memory", "io")
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


class Pressure:
    """Shares of the time in which a process waited for a CPU, for memory or for a disk."""

    def __init__(self, root: Path = PROC / "pressure") -> None:
        self._root = root
        self._last: dict[str, tuple[int, int]] = {}

    def read(self, at_ns: int) -> dict[str, float] | None:
        """Return the shares since the last reading, by what it was waited for.

        The first reading returns none. None if the kernel does not account for pressure.
        """
        ratios = {}
        now = {}
        for what in PRESSURES:
            stalled_us = _stalled_us(read_text(self._root / what))
            if stalled_us is None:
                continue
            now[what] = at_ns, stalled_us
            last = self._last.get(what)
            if last is not None and at_ns > last[0]:
                ratio = (stalled_us - last[1]) * NS_PER_US / (at_ns - last[0])
                ratios[what] = min(max(ratio, 0.0), 1.0)
        self._last = now
        return ratios if now else None


class PressureSource:
    """Pressure of the host."""

    name = "pressure"

    def __init__(self, root: Path = PROC / "pressure") -> None:
        self._root = root
        self._pressure = Pressure(root)

    def read(self, at_ns: int) -> list[Sample]:
        """Return the shares since the last reading; the first reading returns none.

        Raises:
            SourceAbsentError: The kernel does not account for pressure.
        """
        ratios = self._pressure.read(at_ns)
        if ratios is None:
            raise SourceAbsentError(f"no file under {self._root}: no samples of pressure")
        return [Sample(at_ns, f"{what}-pressure-ratio", ratio) for what, ratio in ratios.items()]


def _stalled_us(text: str | None) -> int | None:
    """Return the time of "some avg10=0.00 avg60=0.00 avg300=0.00 total=123", in us."""
    first = (text or "").split("\n")[0]
    total = first.rpartition("total=")[2]
    return int(total) if first.startswith("some ") and total.isdigit() else None


class _Process(NamedTuple):
    command: str
    ticks: int
    start_ticks: int
    parent: int
    resident_pages: int


class _Known(NamedTuple):
    process: _Process
    at_ns: int
    num_idle: int
    """Readings in a row in which it had used no CPU time."""


class ProcessSource:
    """The ten commands that used most CPU time since the last reading.

    Processes of one command are summed, with two exceptions. Each rank has its own sample, of
    itself and the processes that it started, with its local rank as device. A process that used at
    least `BUSY_CORES` and belongs to no rank is named with its number: "gcc[4242]".

    Ranks also have the share of the time in which their main thread was ready and waited for a CPU.

    While processes wait for a disk or for memory for `STALLED_RATIO` of the time, those that move
    most bytes to and from disks, or hold most memory, are named too. The bytes of processes of
    other users can only be read by root.

    Args:
        local_rank_of: Returns the local ranks by process id.
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
        self._known: dict[int, _Known] = {}
        self._last_ns = 0
        self._num_rounds = 0
        self._queued: dict[int, tuple[int, int]] = {}
        self._pressure = Pressure(root / "pressure")
        self._moved: tuple[int, dict[int, int]] = (0, {})
        """Time of the last reading of bytes that processes moved, and these bytes."""

        self._rank_of: tuple[dict[int, int], dict[int, int]] = ({}, {})
        self._rounds_to_skip = 0

    def local_rank_of_process(self) -> dict[int, int]:
        """Return the local ranks of ranks and of what they started, at the last two readings."""
        before, now = self._rank_of
        return before | now

    def read(self, at_ns: int) -> list[Sample]:
        """Return the CPUs used since the last reading; the first reading returns none.

        Raises:
            SourceAbsentError: No process is visible.
        """
        queued = self._queue_waits(at_ns)
        if self._rounds_to_skip:
            self._rounds_to_skip -= 1
            return queued
        last, last_ns = self._known, self._last_ns
        self._last_ns = at_ns
        num_read = self._read_processes(at_ns)
        self._rounds_to_skip = num_read // MAX_PROCESSES
        if not self._known:
            raise SourceAbsentError(f"no visible process under {self._root}: no process samples")
        now = {pid: known.process for pid, known in self._known.items()}
        rank_of = _ranks_of_processes(now, self._local_rank_of())
        self._rank_of = self._rank_of[1], rank_of
        others = {pid: process for pid, process in now.items() if pid not in rank_of}
        queued += self._users(at_ns, others)
        if not last or at_ns <= last_ns:
            return queued
        read = {pid: known for pid, known in self._known.items() if known.at_ns == at_ns}
        used = _used_ticks_per_s(last, read, rank_of, last_ns, BUSY_CORES * self._ticks_per_s)
        top = sorted(used.items(), key=lambda item: (-item[1], item[0]))[:NUM_PROCESSES]
        return queued + [
            Sample(at_ns, f"{PROCESS_NAME}{PART_MARK}{command}", ticks / self._ticks_per_s, device)
            for (command, device), ticks in top
            if ticks
        ]

    def _read_processes(self, at_ns: int) -> int:
        """Read the processes that are due, and forget those that ended; return how many."""
        self._num_rounds += 1
        last, self._known, num_read = self._known, {}, 0
        for pid in _process_ids(self._root):
            known = last.get(pid)
            if (
                known is not None
                and known.num_idle >= IDLE_READINGS
                and (pid + self._num_rounds) % IDLE_ROUNDS
            ):
                self._known[pid] = known
                continue
            num_read += 1
            process = _read_process(self._root, pid)
            if process is not None:
                is_idle = known is not None and process.ticks == known.process.ticks
                num_idle = known.num_idle + 1 if known is not None and is_idle else 0
                self._known[pid] = _Known(process, at_ns, num_idle)
        return num_read

    def _users(self, at_ns: int, others: Mapping[int, _Process]) -> list[Sample]:
        """Return who uses the disks and the memory, if processes wait for them."""
        ratios = self._pressure.read(at_ns) or {}
        users: dict[str, dict[int, float]] = {}
        before_ns, before = self._moved
        self._moved = at_ns, {}
        if ratios.get("io", 0.0) >= STALLED_RATIO:
            moved = {pid: self._moved_bytes(pid) for pid in others}
            self._moved = at_ns, {pid: num for pid, num in moved.items() if num is not None}
            users[STORAGE_NAME] = {
                pid: (num - before[pid]) * NS_PER_S / (at_ns - before_ns)
                for pid, num in self._moved[1].items()
                if pid in before and at_ns > before_ns
            }
        if ratios.get("memory", 0.0) >= STALLED_RATIO:
            users[MEMORY_NAME] = {
                pid: float(process.resident_pages * PAGE_BYTES) for pid, process in others.items()
            }
        return [
            Sample(at_ns, f"{name}{PART_MARK}{others[pid].command}[{pid}]", of_process[pid])
            for name, of_process in users.items()
            for pid in heapq.nlargest(NUM_USERS, of_process, key=of_process.__getitem__)
            if of_process[pid] > 0
        ]

    def _moved_bytes(self, pid: int) -> int | None:
        """Return the bytes that a process read from disks and wrote to them; None if unknown.

        Source: proc_pid_io(5).
        """
        text = read_text(self._root / str(pid) / "io") or ""
        fields = dict(line.split(": ", 1) for line in text.splitlines() if ": " in line)
        try:
            return int(fields["read_bytes"]) + int(fields["write_bytes"])
        except (KeyError, ValueError):
            return None

    def _queue_waits(self, at_ns: int) -> list[Sample]:
        """Return for which share of the time each rank's main thread waited for a CPU.

        Source: Linux, ``Documentation/scheduler/sched-stats.rst``: "time spent on the cpu, time
        spent waiting on a runqueue, timeslices".
        """
        samples, last, self._queued = [], self._queued, {}
        for pid, local_rank in self._local_rank_of().items():
            fields = (read_text(self._root / str(pid) / "schedstat") or "").split()
            if len(fields) < 2 or not fields[1].isdigit() or fields[0] == "0":  # noqa: PLR2004
                continue
            self._queued[pid] = at_ns, int(fields[1])
            before_ns, before = last.get(pid, (at_ns, 0))
            if at_ns > before_ns:
                ratio = (int(fields[1]) - before) / (at_ns - before_ns)
                ratio = min(max(ratio, 0.0), 1.0)
                samples.append(Sample(at_ns, QUEUE_NAME, ratio, local_rank))
        return samples


def parse_stat(line: bytes) -> _Process | None:
    """Return command, CPU time, start time and parent of a ``/proc/PID/stat``, times in ticks.

    None if the line is invalid. A command may contain spaces and parentheses. The numbers of the
    kernel's worker threads are cut from their names.
    """
    head, closing, tail = line.rpartition(b")")
    fields = tail.split(None, RESIDENT_PAGES + 1)
    if not closing or len(fields) <= RESIDENT_PAGES:
        return None
    try:
        ticks = int(fields[USER_TICKS]) + int(fields[SYSTEM_TICKS])
        start, parent = int(fields[START_TICKS]), int(fields[PARENT])
        resident_pages = int(fields[RESIDENT_PAGES])
    except ValueError:
        return None
    return _Process(_read_command(head.partition(b"(")[2]), ticks, start, parent, resident_pages)


@lru_cache(MAX_COMMANDS)
def _read_command(name: bytes) -> str:
    return storable_name(KERNEL_WORKER.sub(r"\1", name.decode("utf-8", "replace")))


def _process_ids(root: Path) -> list[int]:
    with suppress(OSError):
        return [int(name) for name in os.listdir(root) if name.isdigit()]  # noqa: PTH208
    return []


def _read_process(root: Path, pid: int) -> _Process | None:
    """Return a visible process, with one read: psutil would need several."""
    try:
        descriptor = os.open(f"{root}/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return parse_stat(os.read(descriptor, STAT_BYTES))
    except OSError:
        return None
    finally:
        os.close(descriptor)


def _ranks_of_processes(
    processes: Mapping[int, _Process], local_rank_of: Mapping[int, int]
) -> dict[int, int]:
    """Return the local rank of each rank, and of the processes below it."""
    found = {}
    for start in processes if local_rank_of else ():
        pid = start
        for _ in range(MAX_ANCESTORS):
            if pid in local_rank_of:
                found[start] = local_rank_of[pid]
                break
            process = processes.get(pid)
            if process is None or process.parent <= 1:
                break
            pid = process.parent
    return found


def _used_ticks_per_s(
    last: Mapping[int, _Known],
    now: Mapping[int, _Known],
    rank_of: Mapping[int, int],
    last_ns: int,
    busy_ticks_per_s: float,
) -> dict[tuple[str, int], float]:
    """Return the ticks a second of each (command, device), each process since it was last read.

    All ticks of a new process count, since the last round.
    """
    used: dict[tuple[str, int], float] = {}
    for pid, (process, at_ns, _) in now.items():
        before = last.get(pid)
        is_same = before is not None and before.process.start_ticks == process.start_ticks
        ticks = process.ticks - (before.process.ticks if before is not None and is_same else 0)
        since_ns = before.at_ns if before is not None else last_ns
        rate = max(ticks, 0) * NS_PER_S / (at_ns - since_ns)
        device = rank_of.get(pid, WHOLE_HOST)
        is_busy = device == WHOLE_HOST and rate >= busy_ticks_per_s
        key = (f"{process.command}[{pid}]" if is_busy else process.command, device)
        used[key] = used.get(key, 0.0) + rate
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
