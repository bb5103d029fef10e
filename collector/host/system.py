"""How busy the processors of a host are, how fast they run, and which processes keep them so."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from ..names import storable_name
from .sample import PART_MARK, WHOLE_HOST, Sample, SourceAbsentError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

PROC = Path("/proc")
NUM_PROCESSES = 10
HZ_PER_MHZ = 1e6

STAT_BYTES = 1024
USER_TICKS, SYSTEM_TICKS, START_TICKS = 11, 12, 19
"""Fields of ``/proc/PID/stat`` after the command's closing bracket. Source: proc_pid_stat(5)."""

PROCESS_NAME = "process-cpu-cores"
KERNEL_WORKER = re.compile(r"^(k\w+|irq|migration|ksoftirqd)/.*")


class CpuSource:
    """The share of the processors' time in which they work, and their mean frequency."""

    name = "cpu"

    def __init__(self) -> None:
        self._last: tuple[float, float] | None = None

    def read(self, at_ns: int) -> list[Sample]:
        """Return the busy share since the last reading (the first has none), and the frequency."""
        found = []
        busy_s, all_s = _busy_and_all_s()
        last = self._last
        self._last = (busy_s, all_s)
        if last is not None and all_s > last[1]:
            busy = min(max((busy_s - last[0]) / (all_s - last[1]), 0.0), 1.0)
            found.append(Sample(at_ns, "cpu-busy-ratio", busy))
        # None where the kernel does not say, whatever its stub does.
        frequency_mhz = getattr(psutil.cpu_freq(), "current", 0.0)
        if frequency_mhz > 0:
            found.append(Sample(at_ns, "cpu-frequency-hz", frequency_mhz * HZ_PER_MHZ))
        return found


@dataclass(frozen=True, slots=True)
class _Process:
    command: str
    ticks: int
    start_ticks: int


class ProcessSource:
    """The ten commands that used the processors most since the last reading.

    Processes of one command are summed, except those that are ranks: each of
    these bears its local rank.

    Args:
        root: Folder of the kernel's processes.
        local_rank_of: Returns the local rank of each process that is one, by its id.
        ticks_per_s: Of the kernel's clock of processor time.
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
        """Return processors used since the last reading; the first has none.

        Raises:
            SourceAbsentError: No process can be seen.
        """
        now = _processes(self._root)
        if not now:
            raise SourceAbsentError(f"no process to be seen under {self._root}: no process samples")
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
    """Return (command, processor time, start), both in ticks, of a ``/proc/PID/stat``.

    None where the line is not of its form. A command may hold spaces and
    brackets; worker threads of the kernel lose the number in their name.
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


def _busy_and_all_s() -> tuple[float, float]:
    times = psutil.cpu_times()
    idle_s = times.idle + times.iowait
    # Time of guests is counted in user and nice already.
    all_s = sum(times) - times.guest - times.guest_nice
    return all_s - idle_s, all_s


def _processes(root: Path) -> dict[int, _Process]:
    """Return the processes to be seen. One read each: psutil's own walk costs several."""
    found = {}
    for pid in _pids(root):
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


def _pids(root: Path) -> Iterable[int]:
    try:
        return [int(name) for name in os.listdir(root) if name.isdigit()]  # noqa: PTH208
    except OSError:
        return []


def _used_ticks(
    last: Mapping[int, _Process], now: Mapping[int, _Process], local_rank_of: Mapping[int, int]
) -> dict[tuple[str, int], int]:
    """Return the ticks that each (command, device) used; a process that is new used all of its."""
    used: dict[tuple[str, int], int] = {}
    for pid, process in now.items():
        before = last.get(pid)
        is_same = before is not None and before.start_ticks == process.start_ticks
        ticks = process.ticks - (before.ticks if before is not None and is_same else 0)
        key = (process.command, local_rank_of.get(pid, WHOLE_HOST))
        used[key] = used.get(key, 0) + max(ticks, 0)
    return used
