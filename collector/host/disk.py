"""How much room the disks of a host have left, and how long they take."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import psutil

from .sample import PART_MARK, Sample, SourceAbsentError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

BLOCK_ROOT = Path("/sys/block")
NOT_DISKS = ("loop", "ram", "zram")
NS_PER_MS = 1_000_000


class DiskCounts(NamedTuple):
    """What the kernel has counted of a disk; times in ms."""

    read_count: int
    write_count: int
    read_bytes: int
    write_bytes: int
    read_time: int
    write_time: int


def disk_counts() -> Mapping[str, DiskCounts]:
    """Return the counts of each disk and partition."""
    found = psutil.disk_io_counters(perdisk=True, nowrap=False)
    return {disk: DiskCounts(*counts[: len(DiskCounts._fields)]) for disk, counts in found.items()}


class DiskSource:
    """Room in some folders, and traffic and latency of each disk.

    Args:
        folders: Whose file systems are looked at.
        block_root: The kernel's list of whole disks.
        counts: Returns what was counted.
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
        """Return room, bytes moved, and the mean latency since the last reading.

        A disk that answered nothing since then has no latency.

        Raises:
            SourceAbsentError: No folder and no disk can be looked at.
        """
        found = [sample for folder in self._folders for sample in _room(folder, at_ns)]
        for disk, counts in self._counts().items():
            if (self._block_root / disk).exists() and not disk.startswith(NOT_DISKS):
                found += self._disk(disk, counts, at_ns)
        if not found:
            raise SourceAbsentError("no disk to be seen: no disk samples")
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


def _room(folder: Path, at_ns: int) -> list[Sample]:
    try:
        usage = psutil.disk_usage(str(folder))
    except OSError:
        return []
    return [
        Sample(at_ns, f"disk-total-bytes{PART_MARK}{folder}", float(usage.total)),
        Sample(at_ns, f"disk-free-bytes{PART_MARK}{folder}", float(usage.free)),
    ]
