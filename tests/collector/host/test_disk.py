from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from rankscope.collector.host.sample import Sample, SourceAbsentError
from rankscope.collector.host.system import DiskCounts, DiskSource, disk_counts


def blocks(root: Path, *names: str) -> Path:
    for name in names:
        (root / name).mkdir()
    return root


def test_latency_is_time_over_answers_since_the_last_reading(tmp_path: Path) -> None:
    # GIVEN
    counts = {"nvme0n1": DiskCounts(100, 10, 4096, 512, 5000, 40)}
    root = blocks(tmp_path, "nvme0n1")
    source = DiskSource((), block_root=root, counts=lambda: counts)
    assert source.read(1) == [
        Sample(1, "disk-read-bytes:nvme0n1", 4096.0),
        Sample(1, "disk-written-bytes:nvme0n1", 512.0),
    ]

    # WHEN: four reads in 10 ms, and no write
    counts["nvme0n1"] = DiskCounts(104, 10, 8192, 512, 5010, 40)

    # THEN
    assert source.read(2) == [
        Sample(2, "disk-read-bytes:nvme0n1", 8192.0),
        Sample(2, "disk-written-bytes:nvme0n1", 512.0),
        Sample(2, "disk-read-latency-ns:nvme0n1", 2_500_000.0),
    ]


def test_partitions_and_loop_devices_are_left_out(tmp_path: Path) -> None:
    counts = dict.fromkeys(("sda", "sda1", "loop0"), DiskCounts(0, 0, 1, 1, 0, 0))

    root = blocks(tmp_path, "sda", "loop0")
    found = DiskSource((), block_root=root, counts=lambda: counts).read(0)

    assert {sample.name for sample in found} == {"disk-read-bytes:sda", "disk-written-bytes:sda"}


def test_room_of_a_folder_on_this_machine(tmp_path: Path) -> None:
    source = DiskSource((tmp_path, tmp_path / "not-there"), counts=dict)

    found = {sample.name: sample.value for sample in source.read(0)}

    assert found[f"disk-total-bytes:{tmp_path}"] == shutil.disk_usage(tmp_path).total
    assert 0 <= found[f"disk-free-bytes:{tmp_path}"] <= found[f"disk-total-bytes:{tmp_path}"]
    assert len(found) == 2


def test_this_machines_disks_are_those_of_the_kernel() -> None:
    kernel = {line.split()[2] for line in Path("/proc/diskstats").read_text().splitlines()}
    assert set(disk_counts()) <= kernel


def test_nothing_to_look_at_is_absent(tmp_path: Path) -> None:
    with pytest.raises(SourceAbsentError, match="no disk"):
        DiskSource((), block_root=tmp_path, counts=dict).read(0)
