"""The table of all static checks: what each one reads, and what makes it a warning or an error."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING

from . import dcgm, ethernet, gpu, installation, kernel_log, nccl, rdma, system, versions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ..host import Host
    from ..result import Outcome


class Section(StrEnum):
    """A part of the host, in the order of the output."""

    INSTALLATION = "installation"
    GPUS = "GPUs"
    VERSIONS = "versions"
    RDMA = "RDMA"
    ETHERNET = "Ethernet"
    NCCL = "NCCL"
    SYSTEM = "system"


@dataclass(frozen=True, slots=True)
class Check:
    """One static check."""

    name: str
    run: Callable[[Host], Iterable[Outcome]]
    """Yields one outcome, or one for each part that deviates."""

    source: str
    """What it reads."""

    _: KW_ONLY
    section: Section
    warning: str = ""
    error: str = ""
    causes: frozenset[str] = frozenset()
    """Causes of findings that it confirms when it deviates."""


COMPUTE = frozenset({"slow-compute", "clock-throttle"})
NETWORK = frozenset({"slow-link", "network-degradation"})
HOST = frozenset({"host-stall", "data-stall", "launch-skew"})
STORAGE = frozenset({"data-stall", "checkpoint"})
END = frozenset({"hang", "crash"})


_own = partial(Check, section=Section.INSTALLATION)
_gpu = partial(Check, section=Section.GPUS, causes=COMPUTE | END)
_version = partial(
    Check,
    section=Section.VERSIONS,
    warning="another version than on most hosts of the store",
    causes=frozenset({"misconfiguration"}),
)
_rdma = partial(Check, section=Section.RDMA, causes=NETWORK | END)
_ethernet = partial(Check, section=Section.ETHERNET, causes=NETWORK)
_nccl = partial(Check, section=Section.NCCL, causes=NETWORK)
_system = partial(Check, section=Section.SYSTEM, causes=HOST)

SMI = "`nvidia-smi -q -x`, else NVML"

CHECKS: tuple[Check, ...] = (
    _own("packages", installation.check_packages, "packages of Python",
         error="a package of `rankscope[agent]` is missing"),
    _own("extensions", installation.check_extensions, "packages of Python",
         warning="an extension in C was not built"),
    _own("variables", installation.check_variables, "variables `RANKSCOPE_*`",
         warning="the tracer is off, or nothing reads a variable"),
    _own("store", installation.check_store, "the store", warning="less than 1 GiB are free",
         error="it cannot be opened, or has damaged parts"),
    _own("spool", installation.check_spool, "`--spool` or `RANKSCOPE_TRACE`",
         warning="less than 1 GiB are free", error="it cannot be written, or is on a network"),
    _gpu("gpu-count", gpu.check_count, f"{SMI}, the PCI bus, `--expect-gpus`,"
         " `CUDA_VISIBLE_DEVICES`", warning="`CUDA_VISIBLE_DEVICES` hides all",
         error="a GPU is missing or lost, wants recovery, or the driver hangs"),
    _gpu("gpu-ecc", gpu.per_gpu(gpu.judge_ecc, healthy_text="no memory errors"), SMI,
         warning="ECC is off; corrected errors; uncorrectable ones of an earlier boot",
         error="uncorrectable errors since the driver was loaded; a pending repair"),
    _gpu("gpu-row-remap", gpu.per_gpu(gpu.judge_remaps, healthy_text="no row waits to be remapped"),
         SMI, warning="a bank has no spare row left", error="a remap is pending or has failed"),
    _gpu("gpu-throttle", gpu.per_gpu(gpu.judge_throttle, healthy_text="no clock is kept low"), SMI,
         warning="thermal slowdown by the driver; a power limit below the default",
         error="slowdown by the hardware: heat, power brake"),
    _gpu("gpu-pcie", gpu.check_pcie, SMI,
         warning="fewer lanes than possible, on all GPUs",
         error="fewer lanes than other GPUs; a lower generation while the GPU is busy",
         causes=COMPUTE | END | NETWORK | frozenset({"data-stall"})),
    _gpu("gpu-nvlink", gpu.check_nvlink, "`nvidia-smi nvlink -s` and `-e`",
         warning="errors are counted", error="inactive or slower links than its peers have",
         causes=NETWORK | END),
    _gpu("gpu-fabric", gpu.per_gpu(gpu.judge_fabric, healthy_text="the NVSwitch fabric is ready"),
         SMI, error="the GPU is not part of the NVSwitch fabric", causes=NETWORK | END),
    _gpu("gpu-persistence", gpu.per_gpu(gpu.judge_persistence, healthy_text="persistence is on"),
         SMI, warning="persistence is off", causes=frozenset()),
    _gpu("gpu-mode", gpu.per_gpu(gpu.judge_mode, healthy_text="whole, open to jobs"), SMI,
         warning="MIG is on", error="the compute mode prohibits jobs", causes=frozenset()),
    _gpu("gpu-processes", gpu.check_processes, SMI,
         error="with `--before-job`: a process of an earlier job", causes=frozenset()),
    _gpu("gpu-dcgm", dcgm.check_health, "`dcgmi health -c`", warning="DCGM warns",
         error="DCGM reports a failure"),
    _gpu("gpu-diagnostic", dcgm.check_diagnostic, "with `--active`: `dcgmi diag -r 1 -j`",
         warning="a test warns, or DCGM does not run", error="a test fails"),
    _version("driver", versions.check_driver, f"{SMI}, `/proc/driver/nvidia/version`",
             error="library and kernel module differ"),
    _version("cuda", versions.check_cuda, "torch's package",
             error="torch needs a newer CUDA than the driver supports"),
    _version("nccl", nccl.check_version, "the package, or `--nccl-log`"),
    _version("torch", versions.check_torch, "the package"),
    _version("kernel", versions.check_kernel, "`/proc/sys/kernel/osrelease`"),
    _version("nic-firmware", rdma.check_firmware, "`fw_ver` in sysfs, or `ibstat`"),
    _rdma("rdma-state", rdma.check_state, "sysfs, or `ibstat`; `NCCL_IB_HCA`",
          warning="a port is disabled, or the second one of its card is down",
          error="a port that NCCL may use is not active, or an adapter has none"),
    _rdma("rdma-rate", rdma.check_rate, "sysfs, or `ibstat`",
          error="a link on one lane, or slower than its like",),
    _rdma("rdma-errors", rdma.check_errors, "`counters` and `hw_counters` in sysfs, twice",
          warning="errors were counted", error="a counter grows within a second"),
    _rdma("rdma-gid", rdma.check_gid, "`gid_attrs` in sysfs, `NCCL_IB_GID_INDEX`",
          error="a RoCE port without an address of RoCE v2, or another index"),
    _rdma("rdma-pcie", rdma.check_pcie, "PCI devices in sysfs",
          warning="a slower generation, or fewer lanes, than possible",
          error="fewer lanes than its like"),
    _rdma("nic-affinity", rdma.check_affinity, "`nvidia-smi topo -m`, or the PCI bus",
          warning="the nearest adapter of a GPU is across sockets, or farther than that of others"),
    _rdma("gpudirect", rdma.check_gpudirect, "`/proc/modules`, `/proc/driver/nvidia/version`",
          warning="neither nvidia_peermem nor DMA-BUF"),
    _ethernet("ethernet-link", ethernet.check_link, "sysfs, `ethtool INTERFACE`",
              warning="no link, or slower than possible", error="half duplex"),
    _ethernet("ethernet-errors", ethernet.check_errors,
              "`statistics` in sysfs and `ethtool -S`, twice", warning="errors, many drops, or"
              " packets beyond the allowance of a cloud, were counted",
              error="a counter grows within a second"),
    _nccl("nccl-transport", nccl.check_transport, "`--nccl-log`",
          warning="TCP sockets; no GPUDirect RDMA; unused ports; SHM in spite of NVLink; warnings"
          " of NCCL", error="TCP in spite of active RDMA ports, or on a local interface;"
          " completions with errors"),
    _nccl("nccl-timeout", nccl.check_timeout,
          "`NCCL_IB_TIMEOUT`, `NCCL_IB_RETRY_CNT`, `/etc/nccl.conf`, `--nccl-log`",
          warning="a job does not survive an outage of 10 s, or NCCL waits for more than 10 min",
          causes=END),
    _nccl("nccl-settings", nccl.check_settings, "variables `NCCL_*` and others, `/etc/nccl.conf`",
          warning="a setting that slows each step",
          error="RDMA is off in spite of active ports; a name that no device has",
          causes=NETWORK | frozenset({"misconfiguration"})),
    _system("disk-space", system.check_disk_space, "the root, the spool, temporary files",
            warning="less than 5 % are free", error="nothing is free", causes=STORAGE | END),
    _system("disk-latency", system.check_disk_latency, "8 durable writes of 4 KiB",
            warning="a write takes more than 100 ms", error="writing fails", causes=STORAGE),
    _system("disk-read-only", system.check_read_only, "`/proc/self/mounts`",
            warning="a local file system is read-only", causes=STORAGE | END),
    _system("swap", system.check_swap, "`/proc/meminfo`, `/proc/vmstat` twice",
            warning="swap is used", error="pages are swapped now"),
    _system("cpu-governor", system.check_governor, "`cpufreq` in sysfs",
            warning="another governor than performance"),
    _system("cpu-online", system.check_processors, "processors in sysfs",
            warning="a processor is offline, or was throttled by heat"),
    _system("cpu-load", system.check_load, "`/proc/loadavg`",
            warning="with `--before-job`: more than half of the processors are busy"),
    _system("clock-sync", system.check_clock, "`chronyc tracking`, `timedatectl`, adjtimex(2)",
            warning="not synchronised", causes=frozenset()),
    _system("limits", system.check_limits, "`/proc/self/limits`",
            warning="fewer than 65,536 open files", error="RDMA ports, and memlock is limited",
            causes=END),
    _system("shared-memory", system.check_shm, "`/dev/shm`",
            warning="less than 1 GiB for each GPU", error="64 MiB or less", causes=END),
    _system("container", system.check_container, "`/sys/fs/cgroup`",
            warning="the limit of processors, memory or processes is or was reached",
            causes=HOST | END),
    _system("kernel-taint", system.check_taint, "`/proc/sys/kernel/tainted`",
            warning="the kernel has warned", error="machine check, bad page, oops",
            causes=HOST | END),
    _system("kernel-log", kernel_log.check_kernel_log, "`dmesg`, of the last day",
            warning="a message about a device, a link, a disk or a file system",
            error="an Xid, a fatal SXid, a PCIe or a memory error of the last hour that asks for"
            " a repair",
            causes=COMPUTE | NETWORK | HOST | END),
    _system("huge-pages", system.check_huge_pages, "`/sys/kernel/mm/transparent_hugepage`",
            causes=frozenset()),
)  # fmt: skip

HOST_CHECKS = tuple(check for check in CHECKS if check.section is not Section.INSTALLATION)
"""The checks that need no store: the agent and `--before-job` run them."""
