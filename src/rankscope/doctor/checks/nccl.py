"""Checks of NCCL: the network that it really used, its timeouts, its settings."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rankscope.analysis.report.text import format_count

from ..result import Outcome, error, healthy, not_applicable, warning
from .rdma import ACTIVE, ETHERNET, INFINIBAND, is_used_by_nccl, read_ports, training_ports
from .versions import package_version

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ..host import Host

LINE = re.compile(
    r"(?:^|[\s:>])(?P<host>[\w.-]*):\d+:\d+ \[\d+\] (?:\S+ )?NCCL (?P<level>INFO|WARN) "
    r"(?P<text>.*)$"
)
"""A line of NCCL. A launcher may put its own prefix before it, and a log be without host names."""

ADAPTERS = re.compile(r"\[(\d+)\]\s?([\w+]+):(\d+)/(?:IB|RoCE|uverbs)")
INTERFACES = re.compile(r"\[\d+\]([\w.@-]+):")
CHANNEL = re.compile(
    r"^(?:Channel|Ring) \d+(?:/\d+)? : \d+\[\w+\] -> \d+\[\w+\](?: \[\w+\])? via"
    r" (\S.*?)(?: comm .*)?$"
)
PROVIDER = re.compile(r"Selected [Pp]rovider is ([\w;-]+)")
NO_GPUDIRECT = re.compile(r"GPU Direct RDMA Disabled for HCA \S+ '?([\w+]+)")
SETTING = re.compile(r"^(NCCL_\w+) set by environment to (.*?)\.?$")
NOT_A_NETWORK = re.compile(r"^(lo|docker|virbr|veth|cni|br-)")
"""Interfaces that lead to no other host."""

IB_TIMEOUT_UNIT_S = 4.096e-6
MAX_TIMEOUT, MAX_RETRIES = 31, 7
"""Largest values of the two fields of a queue pair.
Source: InfiniBand architecture specification 12.7.34 (local ACK timeout), 12.7.38 (retry count)."""

DEFAULT_TIMEOUTS = (((2, 23), 20), ((2, 14), 18), ((0, 0), 14))
DEFAULT_RETRIES = 7
"""Defaults by the first version of NCCL that has them. Source: NCCL's environment variables."""

MIN_OUTAGE_S = 10.0
"""Outage of a link that a job should survive. Source: MegaScale (arXiv 2402.15627) 3.6 and 6.3:
links flap for some seconds, and with NCCL's former defaults a job failed before they were back."""

WATCHDOG_S = 600.0
"""Time after which torch ends a collective of NCCL by default: later retries save no job."""

LINK_REMEDY = "check the link and the peer that it names; see the timeout below"
WARNINGS = {
    r"Got completion|status=12": (error, LINK_REMEDY),
    r"Got async event : port|link down": (error, "check its cable, transceiver and switch port"),
    r"ibv_(?:reg_mr|create_cq|create_qp)\w* failed.*Cannot allocate memory": (
        error, "ulimit -l unlimited, or LimitMEMLOCK=infinity of slurmd or the container runtime",
    ),
    r"/dev/shm": (  # noqa: S108  # what NCCL names
       error, "start the container with --shm-size=16g or --ipc=host"),
    r"ibv_modify_qp": (error, "check NCCL_IB_GID_INDEX, and that the adapters reach each other"),
    r"Cuda failure|CUDA failure|unhandled cuda": (error, "see dmesg for an Xid of the GPU"),
    r"No route to host|Connection refused|Connection timed out|[Cc]onnect to \S+ failed": (
        error, "set NCCL_SOCKET_IFNAME to the network of the hosts; check the firewall",
    ),
    r"[Mm]ismatch": (error, "give all hosts the same NCCL, driver and settings"),
    r"NET/OFI .*(?:Couldn't find|Unable to|failed)": (
        error, "check EFA: fi_info -p efa, its security group, and FI_PROVIDER",
    ),
}  # fmt: skip
"""Warnings of NCCL that fail or slow a job, with what to do. Source: issues of NVIDIA/nccl and of
aws/aws-ofi-nccl that the tests name."""

SLOW_PROVIDERS = ("tcp", "sockets", "udp", "shm")
"""Providers of libfabric that use no RDMA. Source: fabric(7)."""

SLOW_SETTINGS = {
    ("NCCL_P2P_DISABLE", "1"): "GPUs of this host do not use NVLink",
    ("NCCL_SHM_DISABLE", "1"): "GPUs of this host talk over the network",
    ("NCCL_NET_GDR_LEVEL", "0"): "NCCL copies through the host's memory",
    ("NCCL_NET_GDR_LEVEL", "LOC"): "NCCL copies through the host's memory",
    ("NCCL_NET_GDR_READ", "0"): "NCCL sends through the host's memory",
    ("NCCL_DEBUG", "TRACE"): "NCCL logs each call",
    ("CUDA_LAUNCH_BLOCKING", "1"): "each kernel is waited for",
    ("TORCH_DISTRIBUTED_DEBUG", "DETAIL"): "torch compares each collective over all ranks",
}
"""Settings for a search of errors that make each step slow."""

PACKAGES = ("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11")
FORCED_SETTINGS = ("NCCL_ALGO", "NCCL_PROTO", "NCCL_MAX_NCHANNELS")


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclLog:
    """The network that NCCL uses, as it wrote it."""

    version: str
    network: str
    """``IB``, ``Socket`` or the name of a plugin; "" if unknown."""

    adapters: dict[int, tuple[str, str]]
    """Device and port of each RDMA adapter by its number."""

    interfaces: tuple[str, ...]
    """Network interfaces of TCP sockets."""

    transports: Counter[str]
    """Channels by transport, such as ``P2P/CUMEM`` and ``NET/IB/0/GDRDMA``."""

    settings: dict[str, str]
    warnings: tuple[str, ...]
    provider: str
    """Provider of libfabric, such as ``efa``; "" if it is not used."""

    without_gpudirect: tuple[str, ...]
    """Adapters for which NCCL says that it does not use GPUDirect RDMA."""

    has_nvlink: bool
    num_lines: int

    @property
    def has_verbs(self) -> bool:
        """True if it uses InfiniBand or RoCE by itself."""
        is_used = any("NET/IB" in name for name in self.transports)
        return bool(self.adapters or is_used or self.network.startswith("IB"))

    @property
    def over_network(self) -> Counter[str]:
        """Channels to other hosts by transport."""
        return Counter({name: num for name, num in self.transports.items() if "NET/" in name})


def parse_log(text: str, *, host: str = "") -> NcclLog:
    """Return what NCCL wrote with ``NCCL_DEBUG=INFO``, of one host if the log has lines of it."""
    lines = [match for line in text.splitlines() if (match := LINE.search(line))]
    if any(match["host"] == host for match in lines):
        lines = [match for match in lines if match["host"] == host]
    infos = [match["text"].strip() for match in lines if match["level"] == "INFO"]
    adapters: dict[int, tuple[str, str]] = {}
    interfaces: dict[str, None] = {}
    network = ""
    settings = {}
    for line in infos:
        if re.search(r"NET/IB\w* : Using", line):
            adapters |= {
                int(number): (device, port) for number, device, port in ADAPTERS.findall(line)
            }
        elif "NET/Socket : Using" in line:
            interfaces |= dict.fromkeys(INTERFACES.findall(line.partition("Using")[2]))
        elif line.startswith("Using network "):
            network = line.removeprefix("Using network ").strip()
        elif match := SETTING.match(line):
            settings[match[1]] = match[2]
    found = re.search(r"NCCL version (\S+)", text)
    providers = [match[1] for line in infos if (match := PROVIDER.search(line))]
    disabled = [match[1] for line in infos if (match := NO_GPUDIRECT.search(line))]
    return NcclLog(
        provider=providers[0] if providers else "",
        without_gpudirect=tuple(dict.fromkeys(disabled)),
        version="" if found is None else found[1],
        network=network,
        adapters=adapters,
        interfaces=tuple(interfaces),
        transports=Counter(match[1] for line in infos if (match := CHANNEL.match(line))),
        settings=settings,
        warnings=tuple(match["text"].strip() for match in lines if match["level"] == "WARN"),
        has_nvlink=any("NVL[" in line for line in infos),
        num_lines=len(lines),
    )


def read_log(host: Host) -> NcclLog | None:
    """Return the log that was given; None if there is none, or it has no line of NCCL."""
    log = host.once("nccl log", lambda: parse_log(host.nccl_log or "", host=host.name))
    return log if log.num_lines else None


def read_settings(host: Host) -> Mapping[str, str]:
    """Return NCCL's settings: of its file, then of the environment, then those of its log."""
    lines = [line.partition("#")[0] for line in (host.read("/etc/nccl.conf") or "").splitlines()]
    pairs = (line.partition("=") for line in lines if "=" in line)
    of_file = {name.strip(): value.strip() for name, _, value in pairs}
    log = read_log(host)
    return {**of_file, **host.environment, **({} if log is None else log.settings)}


def nccl_version(host: Host) -> str | None:
    """Return NCCL's version: of its log, or of this Python's package; None if it is unknown."""
    log = read_log(host)
    if log is not None and log.version:
        return log.version
    packages = () if host.is_recorded else PACKAGES
    return next(filter(None, map(package_version, packages)), None)


def check_version(host: Host) -> Iterator[Outcome]:
    """Report the version of NCCL."""
    found = nccl_version(host)
    if found:
        yield healthy(f"NCCL {found}", value=found)
    else:
        yield not_applicable("no NCCL is installed here")


def check_transport(host: Host) -> Iterator[Outcome]:
    """Check which network and which adapters NCCL used, from its own log."""
    log = read_log(host)
    if log is None:
        text = "no log of NCCL: run with NCCL_DEBUG=INFO and give the output with --nccl-log"
        if host.nccl_log:
            text = "the log has no line of NCCL: run the job with NCCL_DEBUG=INFO"
        yield not_applicable(text)
        return
    over_network = log.over_network
    is_socket = any("NET/Socket" in name for name in over_network) or (
        not over_network and (log.network == "Socket" or not (log.adapters or log.network))
    )
    outcomes = [*(_judge_sockets(host, log) if is_socket else _judge_adapters(host, log))]
    if log.provider.startswith(SLOW_PROVIDERS):
        text = f"libfabric uses {log.provider}, and no RDMA"
        outcomes.append(warning(text, "check EFA: fi_info -p efa, FI_PROVIDER, the security group"))
    if log.has_nvlink and any(name.startswith("SHM") for name in log.transports):
        num = sum(num for name, num in log.transports.items() if name.startswith("SHM"))
        text = f"{format_count(num, 'channel')} between GPUs of one host go through its memory"
        remedy = "unset NCCL_P2P_DISABLE; check IOMMU, ACS and the container's access to all GPUs"
        outcomes.append(warning(f"{text}, though there is NVLink", remedy))
    outcomes += _judge_warnings(log)
    if not (outcomes or over_network or log.network or log.adapters or log.interfaces):
        yield not_applicable("the log does not say which network NCCL used")
        return
    used = ", ".join(log.interfaces) if is_socket else _names(log, _used(log))
    inside = Counter(
        {name.split("/")[0]: num for name, num in log.transports.items() if "NET/" not in name}
    )
    text = f"{log.network or ('Socket' if is_socket else 'IB')} over {used or 'unknown adapters'}"
    if inside:
        text += f"; within the host {', '.join(sorted(inside))}"
    if not is_socket and any("GDRDMA" in name for name in over_network):
        text += "; GPUDirect RDMA"
    yield from outcomes or [healthy(text)]


def _used(log: NcclLog) -> list[int]:
    """Return the numbers of the adapters that channels use; all, if none is logged."""
    found = {int(match[1]) for name in log.over_network if (match := re.search(r"/(\d+)", name))}
    return sorted(found & log.adapters.keys()) or sorted(log.adapters)


def _names(log: NcclLog, numbers: list[int]) -> str:
    return ", ".join(":".join(log.adapters[number]) for number in numbers)


def _judge_sockets(host: Host, log: NcclLog) -> Iterator[Outcome]:
    where = ", ".join(log.interfaces) or "an unknown interface"
    bad = [name for name in log.interfaces if NOT_A_NETWORK.match(name)]
    if bad:
        yield error(
            f"NCCL uses the interface {bad[0]}, which leads to no other host",
            "set NCCL_SOCKET_IFNAME to the interface of the network",
        )
    ports = [port for port in training_ports(host) if port.state == ACTIVE]
    if ports:
        yield error(
            f"NCCL uses TCP sockets on {where}, though {format_count(len(ports), 'RDMA port')} are"
            " active",
            "unset NCCL_IB_DISABLE; give the container /dev/infiniband and an unlimited memlock",
        )
    elif log.over_network:
        yield warning(
            f"NCCL uses TCP sockets on {where} to other hosts",
            "if the hosts have RDMA adapters, see the lines NET/IB of the log",
        )


def _judge_adapters(host: Host, log: NcclLog) -> Iterator[Outcome]:
    over_network = log.over_network
    direct = sum(num for name, num in over_network.items() if "GDRDMA" in name)
    total = sum(over_network.values())
    if total and direct < total and not any("SHARED" in name for name in over_network):
        yield warning(
            f"{total - direct} of {format_count(total, 'channel')} to other hosts without GPUDirect"
            " RDMA",
            _gpudirect_remedy(log),
        )
    elif not total and log.without_gpudirect:
        yield warning(
            f"GPUDirect RDMA is off for {', '.join(log.without_gpudirect)}", _gpudirect_remedy(log)
        )
    # Ports that NCCL uses as one are joined by a plus.
    used = {
        (device, port)
        for number in _used(log)
        for device in log.adapters[number][0].split("+")
        for port in log.adapters[number][1]
    }
    ports = [port for port in training_ports(host) if port.state == ACTIVE]
    unused = [port.name for port in ports if used and (port.device, port.port) not in used]
    if unused:
        yield warning(
            f"NCCL uses {_names(log, _used(log))}, and not {', '.join(unused)}",
            "check NCCL_IB_HCA and the adapters' places beside the GPUs",
        )


def _gpudirect_remedy(log: NcclLog) -> str:
    if log.provider:
        return "set FI_EFA_USE_DEVICE_RDMA=1, on instances that have it"
    return "modprobe nvidia_peermem; check NCCL_NET_GDR_LEVEL and the adapter's place"


def _judge_warnings(log: NcclLog) -> Iterator[Outcome]:
    """Yield the first warning of each known kind, or the first one of all."""
    by_kind: dict[str, list[str]] = {}
    for text in log.warnings:
        kind = next((pattern for pattern in WARNINGS if re.search(pattern, text)), "")
        by_kind.setdefault(kind, []).append(text)
    for kind, texts in by_kind.items():
        make, remedy = WARNINGS.get(kind, (warning, "see the log"))
        more = f" (and {len(texts) - 1:,} more of its kind)" if len(texts) > 1 else ""
        yield make(f"NCCL: {texts[0][:200]}{more}", remedy)


def check_timeout(host: Host) -> Iterator[Outcome]:
    """Check how long an outage of a link may last until NCCL gives up.

    The time is ``4.096 us * 2^NCCL_IB_TIMEOUT * NCCL_IB_RETRY_CNT``.
    """
    log = read_log(host)
    verbs = [port for port in training_ports(host) if port.layer in {INFINIBAND, ETHERNET, ""}]
    if not verbs if log is None else not log.has_verbs:
        yield not_applicable("NCCL uses no InfiniBand or RoCE port here")
        return
    settings = read_settings(host)
    timeout, retries = (settings.get(f"NCCL_IB_{name}") for name in ("TIMEOUT", "RETRY_CNT"))
    default = _default_timeout(nccl_version(host) or "")
    value = int(timeout) if timeout and timeout.isdigit() else default
    if value is None:
        yield not_applicable("NCCL_IB_TIMEOUT is not set, and the version of NCCL is unknown")
        return
    num = int(retries) if retries and retries.isdigit() else DEFAULT_RETRIES
    shown = f"NCCL_IB_TIMEOUT={value}, NCCL_IB_RETRY_CNT={num}"
    shown += "" if timeout else " (NCCL's default)"
    if not 0 < value <= MAX_TIMEOUT or num > MAX_RETRIES:
        limits = f"1 to {MAX_TIMEOUT} and 0 to {MAX_RETRIES}"
        yield warning(f"{shown}: adapters know {limits}", "set them to 22 and 7")
        return
    outage_s = IB_TIMEOUT_UNIT_S * 2**value * num
    text = f"{shown}: a link may be down for {outage_s:,.3g} s"
    if outage_s < MIN_OUTAGE_S:
        yield warning(f"{text}, and links flap for several", "set NCCL_IB_TIMEOUT=22: 120 s")
    elif outage_s > WATCHDOG_S:
        yield warning(
            f"{text}, longer than torch's watchdog waits ({WATCHDOG_S:.0f} s)",
            "set NCCL_IB_TIMEOUT=22: 120 s",
        )
    else:
        routing = settings.get("NCCL_IB_ADAPTIVE_ROUTING", "the default")
        yield healthy(f"{text}; adaptive routing: {routing}", value=f"{value}, {num}")


def _default_timeout(nccl: str) -> int | None:
    match = re.match(r"(\d+)\.(\d+)", nccl)
    if match is None:
        return None
    number = int(match[1]), int(match[2])
    return next(value for first, value in DEFAULT_TIMEOUTS if number >= first)


def check_settings(host: Host) -> Iterator[Outcome]:
    """Find settings that make NCCL slow, and names of devices that are not there."""
    settings = read_settings(host)
    outcomes = []
    for (name, value), effect in SLOW_SETTINGS.items():
        if settings.get(name, "").upper() == value:
            outcomes.append(warning(f"{name}={value}: {effect}", "unset it"))
    forced = [name for name in FORCED_SETTINGS if settings.get(name)]
    if forced:
        text = f"{', '.join(forced)} forced: NCCL cannot choose by size and topology"
        outcomes.append(warning(text, "unset it, unless it was measured to be faster"))
    active = [port for port in read_ports(host) if port.state == ACTIVE]
    if active and (settings.get("NCCL_IB_DISABLE") == "1" or settings.get("NCCL_NET") == "Socket"):
        name = "NCCL_IB_DISABLE=1" if settings.get("NCCL_IB_DISABLE") == "1" else "NCCL_NET=Socket"
        text = f"{name}: TCP is used, and {format_count(len(active), 'RDMA port')} are idle"
        outcomes.append(error(text, "unset it"))
    hcas, ports = settings.get("NCCL_IB_HCA"), read_ports(host)
    if hcas and ports and not any(is_used_by_nccl(port, hcas) for port in ports):
        outcomes.append(error(f"NCCL_IB_HCA={hcas} names no port of this host", "correct it"))
    names = [path.name for path in host.glob("/sys/class/net/*")]
    wanted = settings.get("NCCL_SOCKET_IFNAME", "")
    if wanted and names and not wanted.startswith("^"):
        prefixes = [name for name in wanted.lstrip("=").split(",") if name]
        is_exact = wanted.startswith("=")
        if not any(
            name == prefix if is_exact else name.startswith(prefix)
            for name in names
            for prefix in prefixes
        ):
            text = f"NCCL_SOCKET_IFNAME={wanted} names no interface of this host"
            outcomes.append(error(text, f"name one of {', '.join(names[:6])}"))
    set_here = [name for name in settings if name.startswith("NCCL_")]
    if not set_here and not outcomes:
        yield not_applicable("no variable of NCCL is set here")
        return
    text = f"{format_count(len(set_here), 'variable')} of NCCL, none slows it"
    yield from outcomes or [healthy(text)]
