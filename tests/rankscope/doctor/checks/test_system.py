"""Checks of the operating system, on recorded files, and one of this machine."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from rankscope.doctor.checks.table import CHECKS, HOST_CHECKS, Section
from rankscope.doctor.examination import DEADLINE_S, examine_host
from rankscope.doctor.host import Host, ToolOutput, run_tool
from rankscope.doctor.result import State
from tests.support.rankscope.recorded_host import RecordedHost

if TYPE_CHECKING:
    from pathlib import Path

SYNCHRONISED = """\
Reference ID    : D9723B42 (ns0.luns.net.uk)
Stratum         : 3
Ref time (UTC)  : Sat Dec 04 15:37:15 2021
System time     : 7.810536861 seconds slow of NTP time
Last offset     : -0.243152961 seconds
Leap status     : Normal
"""
"""Source: omniosorg/omnios-build issue 2576."""


@pytest.fixture
def recorded(tmp_path: Path) -> RecordedHost:
    return RecordedHost(tmp_path)


def test_an_empty_host_has_nothing_healthy(recorded: RecordedHost) -> None:
    found = recorded.results()

    own = {"cuda", "nccl", "torch"}  # of this Python
    assert {
        r.check: r.state for r in found if r.check not in own and r.state is State.HEALTHY
    } == {}
    assert [result for result in found if result.is_deviation] == []


@pytest.mark.parametrize(
    ("path", "text", "check", "line"),
    [
        ("/proc/meminfo", "MemTotal: 1000 kB\nSwapTotal: 2048 kB\nSwapFree: 1024 kB\n", "swap",
         "warning: 1.00 MiB of 2.00 MiB of swap are used"),
        ("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor", "powersave", "cpu-governor",
         "warning: 1 of 1 processor have the governor powersave"),
        ("/proc/sys/kernel/tainted", "16", "kernel-taint",
         "error: a processor reported a machine check, since the last boot"),
        ("/proc/sys/kernel/tainted", "12289", "kernel-taint",
         "healthy: no failure of the kernel (taint 12289)"),
        ("/proc/self/mounts", "shm /dev/shm tmpfs rw,nosuid,size=65536k 0 0\n", "shared-memory",
         "error: /dev/shm has 64.0 MiB"),
        ("/proc/self/mounts", "/dev/sda1 / ext4 ro,relatime 0 0\n", "disk-read-only",
         "warning /: mounted read-only"),
        ("/sys/fs/cgroup/cpu.stat", "nr_periods 100\nnr_throttled 25\n", "container",
         "warning: the limit of processor time (cpu.max ) has stopped it in 25% of the periods"),
        ("/sys/fs/cgroup/memory.events", "low 0\noom 3\noom_kill 2\n", "container",
         "warning: the OOM killer has ended processes of it: 2"),
        ("/sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never", "huge-pages",
         "healthy: transparent huge pages: madvise"),
        ("commands/timedatectl_show_-p_NTPSynchronized", "NTPSynchronized=no\n", "clock-sync",
         "warning: systemd: not synchronised"),
        ("commands/chronyc_-n_tracking", "Leap status    : Not synchronised\n", "clock-sync",
         "warning: chrony: not synchronised"),
        ("commands/chronyc_-n_tracking", SYNCHRONISED, "clock-sync",
         "warning: chrony: normal, 7.810536861 seconds slow of NTP time"),
        ("commands/chronyc_tracking", SYNCHRONISED.replace(": 7.8", ": 0.0"), "clock-sync",
         "healthy: chrony: normal, 0.010536861 seconds slow of NTP time"),
    ],
)  # fmt: skip
def test_one_file_decides(
    recorded: RecordedHost, path: str, text: str, check: str, line: str
) -> None:
    recorded.write(path, text)

    assert recorded.lines(check) == [line]


def test_a_powersave_governor_is_healthy_if_the_driver_prefers_performance(
    recorded: RecordedHost,
) -> None:
    folder = "/sys/devices/system/cpu/cpu0/cpufreq"
    recorded.write(f"{folder}/scaling_governor", "powersave")
    recorded.write(f"{folder}/energy_performance_preference", "performance")

    assert recorded.lines("cpu-governor") == ["healthy: 1 processor at full frequency"]


def test_offline_and_hot_processors_are_found(recorded: RecordedHost) -> None:
    cpu = "/sys/devices/system/cpu"
    recorded.write(f"{cpu}/present", "0-63")
    recorded.write(f"{cpu}/online", "0-47,50-63")
    recorded.write(f"{cpu}/cpu0/thermal_throttle/package_throttle_count", "1234")

    assert recorded.lines("cpu-online") == [
        "warning: 2 of 64 processors are offline",
        "warning: heat has throttled 1 processor, up to 1,234 times",
    ]


def test_the_load_counts_before_a_job_only(recorded: RecordedHost) -> None:
    recorded.write("/proc/loadavg", "31.5 20.0 10.0 3/900 4711")
    recorded.write("/sys/devices/system/cpu/online", "0-31")

    assert recorded.results("cpu-load")[0].state is State.NOT_APPLICABLE
    assert recorded.results("cpu-load", is_before_job=True)[0].state is State.WARNING


def test_limits_are_those_of_the_given_process(recorded: RecordedHost) -> None:
    recorded.write("/proc/77/limits", "Max open files   4096   4096   files\n")
    recorded.write("/proc/77/environ", "NCCL_IB_TIMEOUT=14\0HOME=/root\0")

    (result,) = recorded.results("limits", process=77, environment=None)
    assert "4,096 files" in result.reason
    (settings,) = recorded.results("nccl-settings", process=77, environment=None)
    assert settings.reason.startswith("1 variable of NCCL")


def test_this_machine_is_examined_within_its_deadline() -> None:
    begun_s = time.monotonic()

    found = examine_host(Host())

    assert time.monotonic() - begun_s < DEADLINE_S + 1.0
    assert {result.check for result in found} == {check.name for check in HOST_CHECKS}
    assert not [result for result in found if "the check failed" in result.reason]
    assert not [r for r in found if r.section == "GPUs" and r.state is State.HEALTHY] or [
        r for r in found if r.check == "gpu-count" and r.state is State.HEALTHY
    ]


def test_a_tool_that_hangs_delays_no_other_check() -> None:
    def hang(command: tuple[str, ...]) -> ToolOutput | None:
        return ToolOutput(text="", status=None) if command[0] == "nvidia-smi" else None

    def block(_command: tuple[str, ...]) -> ToolOutput | None:
        time.sleep(0.5)
        return None

    (count,) = (r for r in examine_host(Host(tool=hang)) if r.check == "gpu-count")
    assert count.state is State.ERROR
    late = [r for r in examine_host(Host(tool=block), deadline_s=0.1) if "in time" in r.reason]
    assert {r.state for r in late} == {State.WARNING}
    assert "gpu-count" in {r.check for r in late}


def test_a_tool_is_killed_after_its_timeout() -> None:
    assert run_tool(("a-tool-that-is-not-installed",)) is None
    assert run_tool(("echo", "a")) == ToolOutput(text="a\n", status=0)
    assert run_tool(("sleep", "30"), timeout_s=0.05) == ToolOutput(text="", status=None)


def test_each_check_has_a_name_of_its_own_and_a_deviation() -> None:
    names = [check.name for check in CHECKS]

    assert len(names) == len(set(names))
    assert {check.section for check in CHECKS} == {*Section}
    assert [c.name for c in CHECKS if not (c.warning or c.error)] == ["huge-pages"]
