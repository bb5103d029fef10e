from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from rankscope.collector.host.kernel_log import MAX_EVENTS, KernelLogSource
from rankscope.collector.host.sample import Sample, SourceAbsentError, read_vmstat

if TYPE_CHECKING:
    from pathlib import Path

    from rankscope.collector.host.host_events import HostEvent

XID = "NVRM: Xid (PCI:0000:3b:00): 79, pid=4242, name=python3, GPU has fallen off the bus."


def test_messages_are_events_of_the_process_that_they_name(tmp_path: Path) -> None:
    # GIVEN: a kernel's log as /dev/kmsg has it, with old records
    log = tmp_path / "kmsg"
    log.write_text(f"4,1,100,-;{XID}\n")
    found: list[HostEvent] = []
    source = KernelLogSource(
        found.extend,
        path=log,
        local_rank_of_process=lambda: {4242: 3},
        local_rank_of_pci=lambda: {"0000:af:00": 5},
        kills=lambda: 2,
    )
    assert source.read(10)[0] == Sample(10, "kernel-log-lines", 0.0)

    # WHEN: four records come, of which one is not allow-listed, and one has a dictionary
    with log.open("a") as file:
        file.write(f"3,2,200,-;{XID}\n SUBSYSTEM=pci\n DEVICE=+pci:0000:3b:00.0\n")
        file.write("6,3,300,-;usb 1-1: new device\n")
        file.write("3,4,400,-;NVRM: Xid (PCI:0000:AF:00): 48, DBE\n")
        file.write("3,5,500,-;Out of memory: Killed process 77 (dataloader) total-vm:1kB\n")
    samples = source.read(20)

    # THEN
    assert samples == [
        Sample(20, "kernel-log-lines", 6.0),
        Sample(20, "oom-killed-processes", 2.0),
    ]
    assert [(event.text, event.pid, event.local_rank) for event in found] == [
        ("Xid 79: GPU has fallen off the bus", 4242, 3),
        ("Xid 48: double bit ECC error", None, 5),
        ("out of memory: killed process 77 (dataloader)", 77, None),
    ]
    assert found[0].data["line"] == XID
    assert found[0].data["ends_process"]


def test_a_flood_of_messages_is_bounded_and_counted(tmp_path: Path) -> None:
    log = tmp_path / "kern.log"
    log.write_text("")
    found: list[HostEvent] = []
    source = KernelLogSource(found.extend, path=log, kills=lambda: None)
    source.read(0)
    log.write_text(f"{XID}\n" * (MAX_EVENTS + 7))

    assert source.read(1)[1:] == [Sample(1, "kernel-log-gaps", 1.0)]
    assert len(found) == MAX_EVENTS


def test_without_permission_the_count_of_kills_is_still_read(tmp_path: Path) -> None:
    source = KernelLogSource(lambda _: None, path=tmp_path / "missing", kills=lambda: 1)

    assert source.read(5) == [Sample(5, "oom-killed-processes", 1.0)]
    assert source.problem is not None
    assert "cannot be read" in source.problem


def test_without_either_there_is_one_reason(tmp_path: Path) -> None:
    source = KernelLogSource(lambda _: None, path=tmp_path / "missing", kills=lambda: None)

    with pytest.raises(SourceAbsentError, match="no messages of the kernel"):
        source.read(5)


def test_a_counter_of_memory_is_read_by_its_whole_name(tmp_path: Path) -> None:
    vmstat = tmp_path / "vmstat"
    vmstat.write_text("oom_kill_other 5\noom_kill 3\nbroken\n")

    assert read_vmstat("oom_kill", vmstat) == 3
    assert read_vmstat("broken", vmstat) is None
    assert read_vmstat("oom_kill", tmp_path / "missing") is None
