from __future__ import annotations

import os
import shutil
from pathlib import Path

import psutil
import pytest

from rankscope.collector.host.sample import Sample, SourceAbsentError
from rankscope.collector.host.system import (
    IDLE_ROUNDS,
    MAX_PROCESSES,
    PAGE_BYTES,
    CpuSource,
    DiskCounts,
    DiskSource,
    MemorySource,
    PressureSource,
    ProcessSource,
    parse_stat,
)

SECOND = 10**9


def process(
    root: Path, pid: int, command: str, ticks: int, *, start: int = 500, parent: int = 1
) -> None:
    """Write a ``/proc/PID/stat``, with half of the time as user and half as system time."""
    folder = root / str(pid)
    folder.mkdir(parents=True, exist_ok=True)
    user = ticks // 2
    times = [user, ticks - user, 0, 0, 20, 0, 1, 0]
    fields = ["S", parent, pid, pid, 0, -1, 4194560, 100, 0, 0, 0, *times]
    line = " ".join(map(str, [pid, f"({command})", *fields, start, 10_000_000, 500]))
    (folder / "stat").write_text(f"{line}\n")


def source(root: Path, local_ranks: dict[int, int] | None = None) -> ProcessSource:
    return ProcessSource(root, local_rank_of=lambda: local_ranks or {}, ticks_per_s=100)


@pytest.mark.parametrize(
    ("shown", "command"), [("a (b) c", "a (b) c"), ("kworker/u8:1-events_unbound", "kworker")]
)
def test_a_command_may_have_blanks_and_kernel_workers_are_one(shown: str, command: str) -> None:
    line = f"7 ({shown}) S 1 7 7 0 -1 0 0 0 0 0 30 12 0 0 20 0 1 0 900 0 0"
    assert parse_stat(line.encode()) == (command, 42, 900, 1, 0)


@pytest.mark.parametrize("line", [b"", b"7 (x", b"7 (x) S 1 2", b"7 (x) " + b"? " * 30])
def test_an_invalid_line_is_not_a_process(line: bytes) -> None:
    assert parse_stat(line) is None


def test_the_ten_busiest_commands_are_returned_with_their_processes_summed(tmp_path: Path) -> None:
    # GIVEN: twelve commands, the first of two processes
    for pid in range(12):
        process(tmp_path, 100 + pid, f"job{pid}", 1000)
    process(tmp_path, 200, "job0", 1000)
    (tmp_path / "meminfo").write_text("no process\n")
    top = source(tmp_path)
    assert top.read(0) == []

    # WHEN: two seconds later, job N has used N ticks and one process of job0 150
    for pid in range(12):
        process(tmp_path, 100 + pid, f"job{pid}", 1000 + pid)
    process(tmp_path, 200, "job0", 1150)
    found = top.read(2 * SECOND)

    # THEN
    assert found[0] == Sample(2 * SECOND, "process-cpu-cores:job0[200]", 0.75)
    assert found[1] == Sample(2 * SECOND, "process-cpu-cores:job11", 0.055)
    assert len(found) == 10


def test_a_rank_has_its_local_rank_as_device(tmp_path: Path) -> None:
    for pid in (1, 2, 3):
        process(tmp_path, pid, "python", 0)
    top = source(tmp_path, {1: 0, 2: 1})
    top.read(0)

    for pid, ticks in ((1, 100), (2, 90), (3, 80)):
        process(tmp_path, pid, "python", ticks)

    assert [(sample.name, sample.value, sample.device) for sample in top.read(SECOND)] == [
        ("process-cpu-cores:python", 1.0, 0),
        ("process-cpu-cores:python", 0.9, 1),
        ("process-cpu-cores:python[3]", 0.8, -1),
    ]


def test_what_a_rank_started_counts_as_its_own(tmp_path: Path) -> None:
    for pid, parent in ((10, 1), (11, 10), (12, 11), (20, 1)):
        process(tmp_path, pid, f"job{pid}", 0, parent=parent)
    top = source(tmp_path, {10: 4})
    top.read(0)

    for pid, parent in ((10, 1), (11, 10), (12, 11), (20, 1)):
        process(tmp_path, pid, f"job{pid}", 50, parent=parent)

    assert {(sample.name[-2:], sample.device) for sample in top.read(SECOND)} == {
        ("10", 4),
        ("11", 4),
        ("12", 4),
        ("0]", -1),
    }
    assert top.local_rank_of_process() == {10: 4, 11: 4, 12: 4}

    shutil.rmtree(tmp_path / "12")
    top.read(2 * SECOND)
    assert top.local_rank_of_process()[12] == 4  # it ended, and its message may still come


def test_a_rank_that_waits_for_a_cpu_says_so(tmp_path: Path) -> None:
    process(tmp_path, 10, "python", 0)
    top = source(tmp_path, {10: 2, 99: 3})
    (tmp_path / "10" / "schedstat").write_text("5000000 100000000 7\n")
    top.read(0)

    (tmp_path / "10" / "schedstat").write_text("6000000 500000000 9\n")

    assert Sample(SECOND, "run-queue-wait-ratio", 0.4, 2) in top.read(SECOND)


def stall(root: Path, **stalled_us: int) -> None:
    """Write the pressure of a host."""
    (root / "pressure").mkdir(exist_ok=True)
    for what, total in stalled_us.items():
        (root / "pressure" / what).write_text(f"some avg10=0.00 total={total}\n")


def test_who_uses_the_disks_and_the_memory_is_named_while_others_wait(tmp_path: Path) -> None:
    for pid, command in ((10, "python"), (77, "dd"), (78, "idle")):
        process(tmp_path, pid, command, 0)
    (tmp_path / "77" / "io").write_text("rchar: 9\nread_bytes: 1000\nwrite_bytes: 0\n")
    top = source(tmp_path, {10: 2})

    def users(at_s: int) -> dict[str, float]:
        found = top.read(at_s * SECOND)
        users = ("process-storage", "process-memory")
        return {each.name: each.value for each in found if each.name.startswith(users)}

    stall(tmp_path, io=0, memory=0)
    assert users(0) == {}
    stall(tmp_path, io=90_000, memory=90_000)  # 9 % of a second
    assert users(1) == {}
    stall(tmp_path, io=390_000, memory=390_000)
    assert users(2) == dict.fromkeys(
        ["process-memory-bytes:dd[77]", "process-memory-bytes:idle[78]"], 500 * PAGE_BYTES
    )
    stall(tmp_path, io=790_000, memory=390_000)
    (tmp_path / "77" / "io").write_text("rchar: 9\nread_bytes: 5000\nwrite_bytes: 3000\n")
    assert users(3) == {"process-storage-bytes-per-s:dd[77]": 7000.0}


@pytest.mark.parametrize("text", ["", "0 0 0", "x y", "5"])
def test_a_kernel_without_statistics_of_its_scheduler_gives_none(tmp_path: Path, text: str) -> None:
    process(tmp_path, 10, "python", 0)
    (tmp_path / "10" / "schedstat").write_text(text)
    top = source(tmp_path, {10: 2})
    top.read(0)

    assert [sample for sample in top.read(SECOND) if sample.name.startswith("run-queue")] == []


def test_an_idle_process_that_works_again_is_seen_with_its_mean_use(tmp_path: Path) -> None:
    process(tmp_path, 7, "backup", 40)
    top = source(tmp_path)
    idle = [top.read(second * SECOND) for second in range(10)]
    assert idle == [[]] * 10

    # WHEN: it uses one of two seconds of a CPU, from now on
    found = []
    for second in range(10, 20):
        process(tmp_path, 7, "backup", 40 + 50 * (second - 9))
        found.append({sample.name: sample.value for sample in top.read(second * SECOND)})

    # THEN: it is seen within a few rounds, and in each one since
    first = next(number for number, samples in enumerate(found) if samples)
    assert first < IDLE_ROUNDS
    name = "process-cpu-cores:backup[7]"
    assert found[first + 1 :] == [{name: 0.5}] * (9 - first)
    assert 0.1 <= found[first][name] <= 0.5


def test_a_host_of_thousands_of_processes_is_read_less_often(tmp_path: Path) -> None:
    for pid in range(100, 100 + 2 * MAX_PROCESSES):
        process(tmp_path, pid, "job", 0)
    top = source(tmp_path)

    top.read(0)
    process(tmp_path, 100, "job", 300)

    assert [len(top.read(second * SECOND)) for second in (1, 2, 3)] == [0, 0, 1]


def test_pressure_is_the_share_of_the_time_since_the_last_reading(tmp_path: Path) -> None:
    line = "some avg10=0.00 avg60=0.00 avg300=0.00 total={}\nfull avg10=0.00 total=1\n"
    (tmp_path / "cpu").write_text(line.format(1_000_000))
    (tmp_path / "io").write_text("no pressure here\n")
    pressure = PressureSource(tmp_path)
    assert pressure.read(0) == []

    (tmp_path / "cpu").write_text(line.format(1_250_000))

    assert pressure.read(SECOND) == [Sample(SECOND, "cpu-pressure-ratio", 0.25)]
    with pytest.raises(SourceAbsentError, match="no samples of pressure"):
        PressureSource(tmp_path / "missing").read(0)


def test_a_reused_process_id_is_a_new_process(tmp_path: Path) -> None:
    process(tmp_path, 1, "old", 5000)
    top = source(tmp_path)
    top.read(0)

    process(tmp_path, 1, "new", 25, start=900)

    assert top.read(SECOND) == [Sample(SECOND, "process-cpu-cores:new[1]", 0.25)]


def test_a_tree_without_processes_has_no_samples(tmp_path: Path) -> None:
    with pytest.raises(SourceAbsentError, match="no visible process"):
        source(tmp_path / "nothing").read(0)


def test_this_process_has_the_cpu_time_that_psutil_reports() -> None:
    """A reading of the real ``/proc`` is between two readings of psutil."""
    me = psutil.Process()
    before_s = sum(me.cpu_times()[:2])
    with open(f"/proc/{os.getpid()}/stat", "rb") as file:  # noqa: PTH123
        parsed = parse_stat(file.read())
    after_s = sum(me.cpu_times()[:2])

    assert parsed is not None
    command, ticks, start_ticks, parent, resident_pages = parsed
    assert parent == os.getppid()
    assert resident_pages * os.sysconf("SC_PAGE_SIZE") == pytest.approx(
        me.memory_info().rss, rel=0.2
    )
    ticks_per_s = os.sysconf("SC_CLK_TCK")
    assert command == me.name()[:15]
    assert before_s - 0.011 <= ticks / ticks_per_s <= after_s + 0.011
    assert start_ticks / ticks_per_s + psutil.boot_time() == pytest.approx(me.create_time(), abs=2)


def test_the_cpus_of_this_machine_are_partly_busy() -> None:
    cpu = CpuSource()
    assert "cpu-busy-ratio" not in {sample.name for sample in cpu.read(0)}
    began_s = sum(psutil.cpu_times())
    while sum(psutil.cpu_times()) < began_s + 0.1:
        pass

    values = {sample.name: sample.value for sample in cpu.read(1)}

    assert 0.0 < values["cpu-busy-ratio"] <= 1.0
    if psutil.cpu_freq() is not None:
        assert 1e8 < values["cpu-frequency-hz"] < 1e10


def blocks(root: Path, *names: str) -> Path:
    for name in names:
        (root / name).mkdir()
    return root


def test_latency_is_time_per_request_since_the_last_reading(tmp_path: Path) -> None:
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


def test_free_space_of_a_folder_on_this_machine(tmp_path: Path) -> None:
    source = DiskSource((tmp_path, tmp_path / "not-there"), counts=dict)

    found = {sample.name: sample.value for sample in source.read(0)}

    assert found[f"disk-total-bytes:{tmp_path}"] == shutil.disk_usage(tmp_path).total
    assert 0 <= found[f"disk-free-bytes:{tmp_path}"] <= found[f"disk-total-bytes:{tmp_path}"]
    assert len(found) == 2


def test_without_folders_and_disks_the_source_is_absent(tmp_path: Path) -> None:
    with pytest.raises(SourceAbsentError, match="no disk"):
        DiskSource((), block_root=tmp_path, counts=dict).read(0)


def test_memory_of_this_machine_equals_the_kernels() -> None:
    kernel = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())

    found = {sample.name: sample.value for sample in MemorySource().read(3)}

    assert found["memory-total-bytes"] == int(kernel["MemTotal"].split()[0]) * 1024
    assert found["swap-total-bytes"] == int(kernel["SwapTotal"].split()[0]) * 1024
    assert 0 < found["memory-available-bytes"] < found["memory-total-bytes"]
