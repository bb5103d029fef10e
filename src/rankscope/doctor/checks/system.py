"""Checks of the operating system: disk, memory, processors, clock, limits, container."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from rankscope.analysis.report.text import format_bytes, format_count, format_duration
from rankscope.collector.host.sample import read_number
from rankscope.tracer.span import NS_PER_MS

from ..host import is_container
from ..places import nearest_folder
from ..result import Outcome, error, healthy, not_applicable, warning
from .gpu import read_gpus
from .rdma import read_ports

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..host import Host

MIN_FREE_RATIO = 0.05
"""Share of a file system below which writes fragment and tools fail. Source: choice, the share that
ext4 reserves."""

DF_LINE = re.compile(
    r"^(?P<device>\S+)(?: +[a-z]\w+)? +(?P<size>[\d.]+[KMGTP]?) +(?P<used>[\d.]+[KMGTP]?)"
    r" +(?P<free>[\d.]+[KMGTP]?) +\d+% (?P<folder>/\S*)$"
)

NUM_WRITES = 8
WRITE_BYTES = 4096
SLOW_WRITE_NS = 100 * NS_PER_MS
"""Time of a small durable write that a local disk never takes: a hard disk needs 20 ms.
Source: choice."""

MIN_OPEN_FILES = 65_536
"""Open files of a process. Each rank has several sockets for each peer, and each worker of a data
loader a pipe. Source: choice; systemd's and Slurm's default of 1,024 is too small."""

DOCKER_SHM_BYTES = 64 << 20
"""Docker's default. NCCL and data loaders fail with "No space left on device" or SIGBUS."""

MIN_SHM_BYTES = 1 << 30
"""Source: choice: NVIDIA asks for `--shm-size=1g` at least."""

FULL_RATIO = 0.9
"""Share of a limit from which on it is nearly reached. Source: choice."""

LOCAL_FILE_SYSTEMS = frozenset({"ext3", "ext4", "xfs", "btrfs"})
READ_ONLY = frozenset({"ro", "emergency_ro"})

SHM = "/dev/shm"  # noqa: S108  # what is checked
UNLIMITED = "unlimited"

TAINTS = {
    4: ("a processor reported a machine check", True),
    5: ("a bad page was found", True),
    7: ("the kernel has died (oops)", True),
    9: ("the kernel has warned", False),
    14: ("a processor was locked up", True),
}
"""Bits of the kernel's taint, with whether jobs must stay away. Others, such as a proprietary
module, are usual. Source: Linux, ``admin-guide/tainted-kernels``."""

MAX_OFFSET_S = 0.1
"""Offset of a clock from which on logs of several hosts are in a wrong order. Source: choice."""

STA_UNSYNC, TIME_ERROR = 0x0040, 5
"""Source: adjtimex(2)."""


def check_disk_space(host: Host) -> Iterator[Outcome]:
    """Check the free space of the file systems of the root, the spool and temporary files."""
    folders = _recorded_space(host) if host.is_recorded else _measured_space(host)
    if not folders:
        yield not_applicable("the disks of a recorded host cannot be read, and df was not recorded")
        return
    outcomes = []
    for folder, (free, total) in sorted(folders.items()):
        if total and free / total < MIN_FREE_RATIO:
            text = f"{format_bytes(free)} of {format_bytes(total)} are free"
            make = warning if free else error
            outcomes.append(make(text, "delete what is not needed", part=folder))
    text = f"{format_count(len(folders), 'folder')} with free space"
    yield from outcomes or [healthy(text)]


def _measured_space(host: Host) -> dict[str, tuple[int, int]]:
    folders = {Path("/"), Path(tempfile.gettempdir())} | ({host.spool} if host.spool else set())
    usages = {folder: shutil.disk_usage(nearest_folder(folder)) for folder in folders}
    return {str(folder): (usage.free, usage.total) for folder, usage in usages.items()}


def _recorded_space(host: Host) -> dict[str, tuple[int, int]]:
    """Return the same of the output of `df`; file systems in memory have no device."""
    return {
        folder: (free, total)
        for folder, (device, free, total) in _read_df(host).items()
        if device.startswith(("/", "overlay"))
    }


def _read_df(host: Host) -> dict[str, tuple[str, int, int]]:
    """Return device, free bytes and size by folder, of the output of `df`. Source: df(1)."""
    text = host.tool_text(("df",), ("df", "-h"), ("df", "-k"), ("df", "-hT"), ("df", "-T"))
    found = {}
    for line in text.splitlines():
        match = DF_LINE.match(line)
        if match is not None:
            size, used, free = (_df_bytes(match[name]) for name in ("size", "used", "free"))
            # The share that is kept for root is neither used nor free.
            found[match["folder"]] = match["device"], free, max(size, used + free)
    return found


def _df_bytes(text: str) -> int:
    """Return the bytes of a size of `df`: 1.2T with a unit, else in KiB."""
    unit = text[-1] if text[-1].isalpha() else "K"
    return int(float(text.rstrip("KMGTP")) * 1024 ** (1 + "KMGTP".index(unit)))


def check_disk_latency(host: Host) -> Iterator[Outcome]:
    """Measure small durable writes in the spool's folder, or where temporary files are."""
    if host.is_recorded:
        yield not_applicable("the disks of a recorded host cannot be written")
        return
    folder = nearest_folder(host.spool or Path(tempfile.gettempdir()))
    times_ns = []
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            for _ in range(NUM_WRITES):
                begun_ns = time.monotonic_ns()
                file.write(bytes(WRITE_BYTES))
                file.flush()
                os.fsync(file.fileno())
                times_ns.append(time.monotonic_ns() - begun_ns)
    except OSError as problem:
        remedy = "free space, or remount the file system"
        yield error(f"writing fails: {problem.strerror}", remedy, part=str(folder))
        return
    median_ns = sorted(times_ns)[len(times_ns) // 2]
    text = f"a durable write of 4 KiB takes {format_duration(median_ns)}"
    if median_ns > SLOW_WRITE_NS:
        yield warning(text, "use a local disk; see dmesg for its errors", part=str(folder))
    else:
        yield healthy(text)


def check_read_only(host: Host) -> Iterator[Outcome]:
    """Find local file systems that the kernel has made read-only after an error."""
    mounts = [line.split(" ") for line in (host.read("/proc/self/mounts") or "").splitlines()]
    local = {mount[1]: mount[3].split(",") for mount in mounts if mount[2] in LOCAL_FILE_SYSTEMS}
    if not local:
        yield not_applicable("no local file system is mounted")
        return
    remedy = "see dmesg for errors of its disk, unless it is so on purpose"
    outcomes = [
        warning("mounted read-only", remedy, part=point)
        for point, options in sorted(local.items())
        if READ_ONLY & {*options}
    ]
    text = f"{format_count(len(local), 'local file system')} can be written"
    yield from outcomes or [healthy(text)]


def _table(text: str | None) -> dict[str, int]:
    """Return the numbers of a file with a name and a number in each line."""
    rows = re.findall(r"^(\S+?):?[ \t]+(\d+)(?: kB)?$", text or "", re.MULTILINE)
    return {name: int(number) for name, number in rows}


def check_swap(host: Host) -> Iterator[Outcome]:
    """Check whether memory was, or is now, swapped out."""
    memory = _table(host.read("/proc/meminfo"))
    if "SwapTotal" not in memory:
        yield not_applicable("the memory's state cannot be read")
        return
    used = (memory["SwapTotal"] - memory.get("SwapFree", 0)) << 10
    before = _table(host.read("/proc/vmstat"))
    host.pause(1.0)
    after = _table(host.read("/proc/vmstat"))
    moved = sum(after.get(name, 0) - before.get(name, 0) for name in ("pswpin", "pswpout"))
    remedy = "find what uses the memory; swapoff -a on hosts that train"
    if moved > 0:
        yield error(f"{moved:,} pages were swapped in or out within 1 s", remedy)
    elif used > 0:
        total = format_bytes(memory["SwapTotal"] << 10)
        yield warning(f"{format_bytes(used)} of {total} of swap are used", remedy)
    else:
        yield healthy("no swap is used" if memory["SwapTotal"] else "there is no swap")


def check_governor(host: Host) -> Iterator[Outcome]:
    """Check that the processors run at full frequency: governor, or preference of the driver."""
    governors, preferences = (
        {
            path.parents[1].name: host.read(path) or ""
            for path in host.glob(f"/sys/devices/system/cpu/cpu[0-9]*/cpufreq/{name}")
        }
        for name in ("scaling_governor", "energy_performance_preference")
    )
    if not governors:
        yield not_applicable("the processors' frequency is not controlled here, as in a VM")
        return
    slow = [
        cpu
        for cpu, governor in governors.items()
        if governor != "performance" and preferences.get(cpu) != "performance"
    ]
    if slow:
        names = ", ".join(sorted({governors[cpu] for cpu in slow}))
        yield warning(
            f"{len(slow)} of {format_count(len(governors), 'processor')} have the governor {names}",
            "cpupower frequency-set -g performance",
        )
    else:
        yield healthy(f"{format_count(len(governors), 'processor')} at full frequency")


def check_processors(host: Host) -> Iterator[Outcome]:
    """Find processors that are offline or were throttled by heat."""
    present, online = (
        _num_in_list(host.read(f"/sys/devices/system/cpu/{name}")) for name in ("present", "online")
    )
    if present is None or online is None:
        yield not_applicable("the processors cannot be read")
        return
    outcomes = []
    if online < present:
        text = f"{present - online} of {present} processors are offline"
        remedy = "see dmesg for machine checks, unless it is so on purpose"
        outcomes.append(warning(text, remedy))
    counts = "/sys/devices/system/cpu/cpu[0-9]*/thermal_throttle/package_throttle_count"
    throttled = [number for path in host.glob(counts) if (number := read_number(path) or 0) > 0]
    if throttled:
        processors = format_count(len(throttled), "processor")
        text = f"heat has throttled {processors}, up to {max(throttled):,} times"
        outcomes.append(warning(text, "check the host's cooling"))
    text = f"{format_count(online, 'processor')} online, none throttled"
    yield from outcomes or [healthy(text)]


def _num_in_list(text: str | None) -> int | None:
    """Return the number of processors in a list such as ``0-3,8``; None if there is none."""
    if not text or not re.fullmatch(r"[\d,-]+", text):
        return None
    ends = [part.partition("-") for part in text.split(",")]
    return sum(int(last or first) - int(first) + 1 for first, _, last in ends)


def check_load(host: Host) -> Iterator[Outcome]:
    """Find processes that use the processors before the job."""
    load = re.match(r"[\d.]+", host.read("/proc/loadavg") or "")
    online = _num_in_list(host.read("/sys/devices/system/cpu/online"))
    if load is None or online is None or not host.is_before_job:
        yield not_applicable("checked before a job only: a running job is load")
        return
    text = f"the load of the last minute is {load[0]} on {format_count(online, 'processor')}"
    if float(load[0]) > online / 2:
        yield warning(text, "end what is left of an earlier job (top)")
    else:
        yield healthy(text)


def check_clock(host: Host) -> Iterator[Outcome]:
    """Check that the clock is synchronised: chrony, systemd, or the kernel's own flag."""
    found = _ask_chrony(host) or _ask_systemd(host)
    if found is None:
        kernel = None if host.is_recorded else kernel_is_synchronised()
        if kernel is None:
            yield not_applicable("neither chronyc nor timedatectl nor the kernel answers")
            return
        found = kernel, f"the kernel's clock is {'' if kernel else 'not '}synchronised"
    is_synchronised, text = found
    if is_synchronised:
        yield healthy(text)
    elif is_container(host):
        yield not_applicable(f"{text}; the clock is that of the container's host")
    else:
        yield warning(text, "start chronyd or systemd-timesyncd, and check its servers")


def _ask_chrony(host: Host) -> tuple[bool, str] | None:
    """Return whether the clock is synchronised, and how; None if chrony does not say."""
    text = host.tool_text(("chronyc", "-n", "tracking"), ("chronyc", "tracking"))
    fields = dict(re.findall(r"^([A-Z][\w ]*?) *: (.+)$", text, re.MULTILINE))
    leap = fields.get("Leap status", "").strip()
    if not leap:
        return None
    offset = fields.get("System time", "").strip()
    seconds = re.match(r"[\d.]+", offset)
    is_near = seconds is None or float(seconds[0]) < MAX_OFFSET_S
    text = ", ".join(filter(None, (f"chrony: {leap.lower()}", offset)))
    return is_near and not leap.startswith("Not"), text


def _ask_systemd(host: Host) -> tuple[bool, str] | None:
    """Return the same of systemd."""
    show = ("timedatectl", "show", "-p", "NTPSynchronized")
    text = host.tool_text(show, ("timedatectl",), ("timedatectl", "status"))
    answer = re.search(r"(?:NTPSynchronized=|(?:System clock|NTP) synchronized: )(yes|no)", text)
    return None if answer is None else (
        answer[1] == "yes", f"systemd: {'' if answer[1] == 'yes' else 'not '}synchronised"
    )  # fmt: skip


def kernel_is_synchronised() -> bool | None:
    """Return whether the kernel's clock is synchronised; None if it does not answer."""
    buffer = ctypes.create_string_buffer(256)  # struct timex has 208 bytes; modes 0: only read
    try:
        state = ctypes.CDLL(None, use_errno=True).adjtimex(buffer)
    except (AttributeError, OSError):
        return None
    status = int.from_bytes(buffer.raw[40:44], "little")
    return None if state < 0 else state != TIME_ERROR and not status & STA_UNSYNC


def check_limits(host: Host) -> Iterator[Outcome]:
    """Check the limits of open files, and of locked memory if there are RDMA ports."""
    files, locked = _read_limits(host)
    if not files and not locked:
        yield not_applicable("the limits cannot be read")
        return
    outcomes = []
    if files.isdigit() and int(files) < MIN_OPEN_FILES:
        text = f"a process may open {int(files):,} files"
        remedy = f"ulimit -n {MIN_OPEN_FILES}, or LimitNOFILE of the service"
        outcomes.append(warning(text, remedy, part="nofile"))
    if read_ports(host) and locked not in {"", UNLIMITED}:
        size = format_bytes(int(locked)) if locked.isdigit() else locked
        text = f"a process may lock {size} of memory, and RDMA locks its buffers"
        remedy = "ulimit -l unlimited, or LimitMEMLOCK=infinity of slurmd or the container runtime"
        outcomes.append(error(text, remedy, part="memlock"))
    text = f"{files or 'unknown'} open files, {locked or 'unknown'} locked memory"
    yield from outcomes or [healthy(text)]


def _read_limits(host: Host) -> tuple[str, str]:
    """Return the numbers of open files and of locked bytes, or `UNLIMITED`; "" if unknown."""
    text = host.read(f"/proc/{host.process}/limits")
    if text is not None:
        limits = {
            match[1].strip(): match[2]
            for line in text.splitlines()
            if (match := re.match(r"^(Max [a-z ]+?)\s{2,}(\S+)", line))
        }
        return limits.get("Max open files", ""), limits.get("Max locked memory", "")
    output = host.tool("ulimit", "-a") if host.is_recorded else None
    flags = dict(re.findall(r"-([a-z])\) (\S+)", "" if output is None else output.text))
    locked = flags.get("l", "")  # KiB
    return flags.get("n", ""), str(int(locked) << 10) if locked.isdigit() else locked


def check_shm(host: Host) -> Iterator[Outcome]:
    """Check the size of the shared memory, which NCCL and data loaders use."""
    size = _shm_bytes(host)
    if size is None:
        yield not_applicable(f"there is no {SHM}")
        return
    text = f"{SHM} has {format_bytes(size)}"
    wanted = MIN_SHM_BYTES * max(1, len(read_gpus(host)))
    if size <= DOCKER_SHM_BYTES:
        yield error(text, "start the container with --shm-size=16g or --ipc=host")
    elif size < wanted:
        remedy = f"give it {format_bytes(wanted)}: --shm-size, or mount -o remount,size="
        yield warning(text, remedy)
    else:
        yield healthy(text)


def _shm_bytes(host: Host) -> int | None:
    if not host.is_recorded:
        try:
            return shutil.disk_usage(SHM).total
        except OSError:
            return None
    mounts = (host.read("/proc/self/mounts") or "").splitlines()
    line = next((line for line in mounts if f" {SHM} " in line), "")
    match = re.search(r"[ ,]size=(\d+)([kmg]?)", line)
    if match is not None:
        return int(match[1]) << {"": 0, "k": 10, "m": 20, "g": 30}[match[2]]
    if SHM in (listed := _read_df(host)):
        return listed[SHM][2]
    # A tmpfs without a size has half of the memory.
    total = _table(host.read("/proc/meminfo")).get("MemTotal")
    return None if not line or total is None else total << 9


def check_container(host: Host) -> Iterator[Outcome]:
    """Check the limits of the container or the control group, and what has reached them."""
    group = "/sys/fs/cgroup"
    quota = host.read(f"{group}/cpu.max") or ""
    most, used = (read_number(host.path(f"{group}/memory.{name}")) for name in ("max", "current"))
    processes, num = (read_number(host.path(f"{group}/pids.{name}")) for name in ("max", "current"))
    outcomes = []
    stalls = _table(host.read(f"{group}/cpu.stat"))
    if stalls.get("nr_throttled"):
        share = stalls["nr_throttled"] / max(1, stalls.get("nr_periods", 1))
        text = f"the limit of processor time (cpu.max {quota}) has stopped it in {share:.0%} of"
        outcomes.append(warning(f"{text} the periods", "raise or remove the limit of processors"))
    kills = _table(host.read(f"{group}/memory.events")).get("oom_kill", 0)
    if kills:
        text = f"the OOM killer has ended processes of it: {kills}"
        outcomes.append(warning(text, "raise the memory limit, or use less"))
    if most and used is not None and used > FULL_RATIO * most:
        text = f"{format_bytes(used)} of its {format_bytes(most)} of memory are used"
        outcomes.append(warning(text, "raise the memory limit, or use less"))
    if processes and num is not None and num > FULL_RATIO * processes:
        text = f"it has {num:,} of at most {processes:,} processes and threads"
        outcomes.append(warning(text, "raise pids.max (--pids-limit)"))
    is_inside = is_container(host)
    if not is_inside and not outcomes and not most:
        yield not_applicable("this is no container, and its control group has no limit")
        return
    parts = ["a container" if is_inside else "a control group"]
    parts += [f"memory {format_bytes(most)}"] if most else []
    parts += [f"processors {quota.split()[0]}/{quota.split()[-1]}"] if quota[:1].isdigit() else []
    yield from outcomes or [healthy(", ".join(parts))]


def check_taint(host: Host) -> Iterator[Outcome]:
    """Read what the kernel has recorded of its own failures since it was booted."""
    taint = read_number(host.path("/proc/sys/kernel/tainted"))
    if taint is None:
        yield not_applicable("the kernel's taint cannot be read")
        return
    outcomes = []
    for bit, (text, is_serious) in TAINTS.items():
        if taint >> bit & 1:
            make = error if is_serious else warning
            outcomes.append(make(f"{text}, since the last boot", "see dmesg, then reboot the host"))
    text = f"no failure of the kernel (taint {taint})"
    yield from outcomes or [healthy(text)]


def check_huge_pages(host: Host) -> Iterator[Outcome]:
    """Report the mode of transparent huge pages; none is wrong."""
    text = host.read("/sys/kernel/mm/transparent_hugepage/enabled")
    mode = re.search(r"\[(\w+)\]", text or "")
    if mode is None:
        yield not_applicable("the kernel has no transparent huge pages")
    else:
        yield healthy(f"transparent huge pages: {mode[1]}", value=mode[1])
