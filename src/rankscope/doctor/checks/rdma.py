"""Checks of the RDMA ports (InfiniBand, RoCE): their state, rate, errors and place beside a GPU."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rankscope.analysis.report.text import format_count
from rankscope.collector.host.sample import read_number

from ..host import is_container
from ..result import Outcome, error, healthy, not_applicable, warning
from .gpu import NO_GPU, bus_gpus, read_gpus, read_report
from .nvidia_smi import DISTANCES, parse_topology

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from ..host import Host

CLASS = "/sys/class/infiniband"
NO_PORT = "this host has no RDMA port"
PAUSE_S = 1.0
"""Time between two readings of the error counters: a counter that grows in it is an error."""

ACTIVE, INFINIBAND, ETHERNET = "ACTIVE", "InfiniBand", "Ethernet"
DISABLED, LINK_UP = "Disabled", "LinkUp"

SLOWEST_GB_PER_S = 10.0
"""Four lanes at the first data rate (SDR), at which links fall back to before they train.
Source: InfiniBand architecture specification 5.1."""

ERROR_COUNTERS = (
    "symbol_error",
    "link_error_recovery",
    "link_downed",
    "port_rcv_errors",
    "port_rcv_remote_physical_errors",
    "port_xmit_discards",
    "local_link_integrity_errors",
    "excessive_buffer_overrun_errors",
    "VL15_dropped",
    "hw/local_ack_timeout_err",
    "hw/packet_seq_err",
    "hw/out_of_sequence",
    "hw/req_transport_retries_exceeded",
    "hw/rx_icrc_encapsulated",
    "hw/rnr_nak_retry_err",
    "hw/max_retry_exceeded",
    "hw/seq_err_naks_rcvd",
    "hw/retrans_timeout_events",
    "hw/unresponsive_remote_events",
    "hw/rdma_read_wr_err",
    "hw/rdma_write_wr_err",
)
"""Files below ``counters`` and, after ``hw/``, below ``hw_counters`` of a port.
Source: Linux, ``drivers/infiniband/core/sysfs.c``; hardware counters of mlx5, bnxt_re and efa."""

EXPECTED_COUNTERS = frozenset(
    {
        "link_downed",
        "hw/out_of_sequence",
        "hw/packet_seq_err",
        "hw/seq_err_naks_rcvd",
        "hw/retrans_timeout_events",
        "hw/unresponsive_remote_events",
    }
)
"""Counters that grow on healthy hosts too: at a reboot, and with adaptive routing. They are
compared with those of the host's other ports."""

ADAPTER_CLASS = "0x0207"
"""PCI class of an InfiniBand controller."""

TOOL_FAILURE = re.compile(r"^.*(?:ibpanic|ibwarn|Fatal error).*$", re.MULTILINE)
SLOT_NAME = re.compile(r"PCI_SLOT_NAME=(\S+)")
ADDRESS = re.compile(r"^([0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.\d)$")
NO_ADAPTER = "sys files not found"
"""Message of `ibstatus` on a host without any adapter."""

CA_LINE = re.compile(r"^CA '([^']+)'", re.MULTILINE)
PORT_LINE = re.compile(r"^\s*Port (\d+):\s*$", re.MULTILINE)
RATE = re.compile(r"^([\d.]+)(?: Gb/sec)?(?: \((\d+)X)?")
STATE_NUMBER = re.compile(r"^\d+:\s*")
IBSTATUS_LINE = re.compile(r"^Infiniband device '([^']+)' port (\d+) status:\s*$", re.MULTILINE)
RDMA_LINK = re.compile(
    r"^(?:\d+/\d+: |link )(?P<device>[\w.-]+)/(?P<port>\d+):? .*?state (?P<state>\w+)"
    r"(?: physical_state (?P<physical>\w+))?(?P<rest>.*)$", re.MULTILINE
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Port:
    """One RDMA port."""

    device: str
    port: str
    state: str
    """``ACTIVE``, ``DOWN``, ``INIT``, ..."""

    physical: str
    """``LinkUp``, ``Polling``, ``Disabled``, ..."""

    rate: str = ""
    """Such as ``400 Gb/sec (4X NDR)``, or the number alone; "" if unknown."""

    layer: str = ""
    """``InfiniBand``, ``Ethernet``, or ``Unspecified`` of an EFA; "" if unknown."""

    card: str = ""
    """Equal for all ports of one card; "" if unknown."""

    kind: str = ""
    """Model of the adapter; "" if unknown."""

    firmware: str = ""
    counters: dict[str, int] = field(default_factory=dict)

    @property
    def rate_gb_per_s(self) -> float | None:
        """Gb/s; None if unknown."""
        match = RATE.match(self.rate)
        return None if match is None else float(match[1])

    @property
    def lanes(self) -> int | None:
        """Number of lanes; None if unknown."""
        match = RATE.match(self.rate)
        return None if match is None or match[2] is None else int(match[2])

    @property
    def name(self) -> str:
        """Name in results."""
        return f"{self.device}/{self.port}"


def read_ports(host: Host) -> list[Port]:
    """Return the ports that the kernel lists, or those of a tool if it lists none."""

    def read() -> list[Port]:
        ports = [_port(host, path) for path in host.glob(f"{CLASS}/*/ports/*")]
        for tool, parse in PARSERS.items():
            output = None if ports else host.tool(*tool)
            ports = ports if output is None else parse(output.text)
        return ports

    return host.once("rdma ports", read)


def _port(host: Host, path: Path) -> Port:
    device = path.parents[1]
    return Port(
        device=device.name,
        port=path.name,
        state=STATE_NUMBER.sub("", host.read(path / "state") or "").upper(),
        physical=STATE_NUMBER.sub("", host.read(path / "phys_state") or ""),
        rate=host.read(path / "rate") or "",
        layer=host.read(path / "link_layer") or "",
        card=host.read(device / "sys_image_guid") or "",
        kind=host.read(device / "hca_type") or host.read(device / "board_id") or "",
        firmware=host.read(device / "fw_ver") or "",
        counters=_read_counters(path),
    )


def _read_counters(path: Path) -> dict[str, int]:
    found = {}
    for name in ERROR_COUNTERS:
        file = path / (f"hw_counters/{name[3:]}" if name.startswith("hw/") else f"counters/{name}")
        value = read_number(file)
        if value is not None and value >= 0:
            found[name] = value
    return found


def parse_ibstat(text: str) -> list[Port]:
    """Return the ports in the output of `ibstat`. Source: ibstat(8)."""
    ports = []
    parts = CA_LINE.split(text)[1:]
    for device, body in zip(parts[::2], parts[1::2], strict=True):
        head, *port_parts = PORT_LINE.split(body)
        of_device = _fields(head)
        for number, port_body in zip(port_parts[::2], port_parts[1::2], strict=True):
            values = of_device | _fields(port_body)
            ports.append(
                Port(
                    device=device,
                    port=number,
                    state=values.get("State", "").upper(),
                    physical=values.get("Physical state", ""),
                    rate=values.get("Rate", ""),
                    layer=values.get("Link layer", ""),
                    card=values.get("System image GUID", ""),
                    kind=values.get("CA type", ""),
                    firmware=values.get("Firmware version", ""),
                )
            )
    return ports


def parse_ibstatus(text: str) -> list[Port]:
    """Return the ports in the output of `ibstatus`. Source: ibstatus(8)."""
    parts = IBSTATUS_LINE.split(text)[1:]
    ports = []
    for device, number, body in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
        values = _fields(body)
        ports.append(
            Port(
                device=device,
                port=number,
                state=STATE_NUMBER.sub("", values.get("state", "")).upper(),
                physical=STATE_NUMBER.sub("", values.get("phys state", "")),
                rate=values.get("rate", ""),
                layer=values.get("link_layer", ""),
            )
        )
    return ports


def parse_rdma_link(text: str) -> list[Port]:
    """Return the ports in the output of `rdma link`. Source: rdma-link(8)."""
    ports = []
    for match in RDMA_LINK.finditer(text):
        of_ethernet = ETHERNET if "netdev" in match["rest"] else ""
        ports.append(
            Port(
                device=match["device"],
                port=match["port"],
                state=match["state"].upper(),
                physical=(match["physical"] or "").title().replace("_", ""),
                layer=INFINIBAND if "sm_lid" in match[0] else of_ethernet,
            )
        )
    return ports


PARSERS: dict[tuple[str, ...], Callable[[str], list[Port]]] = {
    ("ibstat",): parse_ibstat,
    ("ibstatus",): parse_ibstatus,
    ("rdma", "link"): parse_rdma_link,
}
"""Tools that list ports, that with most details first."""


def _fields(text: str) -> dict[str, str]:
    pairs = (line.partition(":") for line in text.splitlines() if ":" in line)
    return {name.strip(): value.strip() for name, _, value in pairs}


def is_used_by_nccl(port: Port, setting: str | None) -> bool:
    """Return whether ``NCCL_IB_HCA`` lets NCCL use a port. Source: NCCL's environment variables."""
    if not setting:
        return True
    is_excluding, is_exact = setting.startswith("^"), setting.lstrip("^").startswith("=")
    names = [name for name in setting.lstrip("^=").split(",") if name]

    def matches(name: str) -> bool:
        device, _, number = name.partition(":")
        is_device = port.device == device if is_exact else port.device.startswith(device)
        return is_device and number in {"", port.port}

    return any(map(matches, names)) != is_excluding


def training_ports(host: Host) -> list[Port]:
    """Return the ports that NCCL may use: those of its list, and of InfiniBand if there is any."""
    setting = host.environment.get("NCCL_IB_HCA")
    ports = [port for port in read_ports(host) if is_used_by_nccl(port, setting)]
    layers = {port.layer for port in ports if port.state == ACTIVE}
    is_mixed = not setting and INFINIBAND in layers
    return [port for port in ports if not is_mixed or port.layer == INFINIBAND]


def _without_ports(host: Host) -> Iterator[Outcome]:
    """Yield adapters on the PCI bus without a port, and tools that fail to read one."""
    addresses = {_address(host, path / "device") for path in host.glob(f"{CLASS}/*")}
    is_known = "" not in addresses and not is_container(host)
    for path in host.glob("/sys/bus/pci/devices/*") if is_known else ():
        is_adapter = (host.read(path / "class") or "").startswith(ADAPTER_CLASS)
        is_virtual = (path / "physfn").exists() or (path / "driver").resolve().name == "vfio-pci"
        if is_adapter and not is_virtual and path.name not in addresses:
            text = "an InfiniBand adapter on the PCI bus has no port"
            remedy = "load its driver (mlx5_ib), and see dmesg for its firmware"
            yield error(text, remedy, part=path.name)
    for tool in PARSERS:
        output = None if host.glob(f"{CLASS}/*/ports/*") else host.tool(*tool)
        failure = None if output is None else TOOL_FAILURE.search(output.text)
        if failure is not None and NO_ADAPTER not in failure[0]:
            text = f"{' '.join(tool)}: {failure[0].strip()[:200]}"
            yield warning(text, "see dmesg: an adapter does not answer")


def _address(host: Host, path: Path) -> str:
    """Return the PCI address of a device; "" if it is unknown."""
    match = SLOT_NAME.search(host.read(path / "uevent") or "") or ADDRESS.search(
        path.resolve().name
    )
    return "" if match is None else match[1]


def check_state(host: Host) -> Iterator[Outcome]:
    """Find ports that NCCL may use and that are not active, and adapters without a port."""
    ports = training_ports(host)
    outcomes = [*_without_ports(host)]
    if not ports and not outcomes:
        yield not_applicable(NO_PORT)
        return
    active_cards = {port.card for port in ports if port.state == ACTIVE and port.card}
    for port in ports:
        if port.state == ACTIVE:
            continue
        text = f"the port is {port.state or 'unknown'}, its link {port.physical or 'unknown'}"
        if port.state in {"INIT", "ARMED"} or (
            port.physical == LINK_UP and port.layer == INFINIBAND
        ):
            remedy = "start the subnet manager, or see its log; a virtual function needs a GUID"
            outcomes.append(error(text, remedy, part=port.name))
        elif port.physical == DISABLED or port.card in active_cards:
            remedy = "if it has a cable, enable it; else name the used ports in NCCL_IB_HCA"
            outcomes.append(warning(text, remedy, part=port.name))
        else:
            remedy = "check its cable, transceiver and switch port"
            outcomes.append(error(text, remedy, part=port.name))
    text = f"{format_count(len(ports), 'port')} active"
    yield from outcomes or [healthy(text)]


def check_rate(host: Host) -> Iterator[Outcome]:
    """Compare the rate of each port with that of its like, and find links that lost lanes."""
    ports = [port for port in training_ports(host) if port.state == ACTIVE and port.rate_gb_per_s]
    if not ports:
        yield not_applicable("this host has no active RDMA port")
        return
    best: dict[str, float] = {}
    for port in ports:
        best[port.kind] = max(best.get(port.kind, 0.0), port.rate_gb_per_s or 0.0)
    outcomes = []
    remedy = "check its cable and transceiver; reseat them"
    for port in ports:
        rate = port.rate_gb_per_s or 0.0
        if port.layer != ETHERNET and port.lanes == 1:
            text = f"the link runs at {rate:g} Gb/s on one lane"
            outcomes.append(error(text, remedy, part=port.name))
        elif port.layer == INFINIBAND and rate <= SLOWEST_GB_PER_S:
            text = f"the link runs at {rate:g} Gb/s, the slowest rate of InfiniBand"
            outcomes.append(error(text, remedy, part=port.name))
        elif rate < best[port.kind]:
            text = f"the link runs at {rate:g} Gb/s, and its like at {best[port.kind]:g} Gb/s"
            make = error if port.kind else warning  # adapters of unknown model may be unlike
            outcomes.append(make(text, remedy, part=port.name))
    if outcomes:
        yield from outcomes
        return
    counted = Counter(f"{port.rate_gb_per_s:g} Gb/s" for port in ports)
    value = ", ".join(f"{number} x {rate}" for rate, number in sorted(counted.items()))
    yield healthy(value, value=value)


def check_errors(host: Host) -> Iterator[Outcome]:
    """Find ports whose error counters grow now, or have grown unlike those of other ports."""
    ports = [port for port in training_ports(host) if port.counters]
    if not ports:
        yield not_applicable("no RDMA port has error counters")
        return
    host.pause(PAUSE_S)
    least = {name: min(port.counters.get(name, 0) for port in ports) for name in EXPECTED_COUNTERS}
    outcomes = []
    for port in ports:
        later = _read_counters(host.path(f"{CLASS}/{port.device}/ports/{port.port}"))
        grown = {
            name: later[name] - value
            for name, value in port.counters.items()
            if later.get(name, value) > value
        }
        counted = {
            name: value
            for name, value in port.counters.items()
            if value > least.get(name, 0) and (name not in least or len(ports) > 1)
        }
        remedy = "check its cable, transceiver and switch port; compare the counters again later"
        if grown:
            text = f"counters grow within {PAUSE_S:g} s: {_counts(grown)}"
            outcomes.append(error(text, remedy, part=port.name))
        elif counted:
            outcomes.append(warning(f"counted: {_counts(counted)}", remedy, part=port.name))
    text = f"{format_count(len(ports), 'port')} without errors"
    yield from outcomes or [healthy(text)]


def _counts(counters: dict[str, int]) -> str:
    return ", ".join(f"{name.removeprefix('hw/')} {value:,}" for name, value in counters.items())


def check_gid(host: Host) -> Iterator[Outcome]:
    """Find RoCE ports without an address of RoCE v2, and a wrong ``NCCL_IB_GID_INDEX``."""
    ports = [port for port in training_ports(host) if port.layer == ETHERNET]
    tables = {
        port.name: types
        for port in ports
        if port.state == ACTIVE and (types := _gid_types(host, port))
    }
    if not tables:
        yield not_applicable("this host has no active RoCE port with a table of addresses")
        return
    index = host.environment.get("NCCL_IB_GID_INDEX", "")
    outcomes = []
    for name, types in tables.items():
        usable = [number for number, kind in sorted(types.items()) if "v2" in kind]
        if not usable:
            text = "the port has no address of RoCE v2"
            outcomes.append(error(text, "give its interface an address", part=name))
        elif index.isdigit() and int(index) not in usable:
            text = f"NCCL_IB_GID_INDEX={index} is no address of RoCE v2"
            remedy = f"unset it, or set it to {usable[-1]}"
            outcomes.append(error(text, remedy, part=name))
    text = f"{format_count(len(tables), 'port')} with an address of RoCE v2"
    yield from outcomes or [healthy(text)]


def _gid_types(host: Host, port: Port) -> dict[int, str]:
    folder = host.path(f"{CLASS}/{port.device}/ports/{port.port}")
    types = {}
    for file in (folder / "gid_attrs" / "types").glob("*"):
        kind, address = host.read(file), host.read(folder / "gids" / file.name)
        if kind and address and address.strip("0:"):
            types[int(file.name)] = kind
    return types


def check_pcie(host: Host) -> Iterator[Outcome]:
    """Find adapters whose PCIe link has fewer lanes than their like, or less than they support."""
    links = {}
    for device in host.glob(f"{CLASS}/*"):
        width, most = (
            read_number(device / "device" / f"{name}_link_width") for name in ("current", "max")
        )
        if width is not None and most is not None and width > 0:
            links[device] = (host.read(device / "hca_type") or "", width, most)
    if not links:
        yield not_applicable("no RDMA adapter shows its PCIe link")
        return
    outcomes = []
    for device, (kind, width, most) in links.items():
        widest = max(other for like, other, _ in links.values() if like == kind)
        if width < most:
            text = f"the PCIe link has {width} of {most} lanes"
            make = error if width < widest else warning
            remedy = "reseat the adapter, unless its slot has no more lanes"
            outcomes.append(make(text, remedy, part=device.name))
        speed, fastest = (
            _speed(host, device / "device" / f"{name}_link_speed") for name in ("current", "max")
        )
        if speed is not None and fastest is not None and speed < fastest:
            text = f"the PCIe link runs at {speed:g} of {fastest:g} GT/s"
            outcomes.append(warning(text, "use a slot of that speed", part=device.name))
    text = f"{format_count(len(links), 'adapter')} with all lanes at full speed"
    yield from outcomes or [healthy(text)]


def _speed(host: Host, path: Path) -> float | None:
    match = re.match(r"[\d.]+", host.read(path) or "")
    return None if match is None else float(match[0])


def check_affinity(host: Host) -> Iterator[Outcome]:
    """Find GPUs without a near RDMA adapter, and GPUs that are farther from one than others."""
    if read_report(host) is None and not bus_gpus(host):
        yield not_applicable(NO_GPU)
        return
    distances = read_distances(host)
    if not distances:
        yield not_applicable("neither nvidia-smi topo -m nor the PCI bus shows GPUs and adapters")
        return
    nearest = {
        gpu: min(nics.values(), key=DISTANCES.index) for gpu, nics in sorted(distances.items())
    }
    best = min(nearest.values(), key=DISTANCES.index)
    outcomes = []
    for gpu, distance in nearest.items():
        if distance == best and distance != DISTANCES[-1]:
            continue
        text = f"its nearest RDMA adapter is {distance} away"
        text += "" if distance == best else f", and {best} for other GPUs"
        remedy = (
            "move an adapter to the GPU's PCIe switch or socket, or leave this GPU out of jobs of"
            " several hosts"
        )
        outcomes.append(warning(text, remedy, part=f"GPU {gpu}"))
    text = f"each of {format_count(len(nearest), 'GPU')} has an RDMA adapter at {best}"
    yield from outcomes or [healthy(text)]


def read_distances(host: Host) -> dict[int, dict[str, str]]:
    """Return the distance of each RDMA adapter by GPU: GPU -> adapter -> one of `DISTANCES`."""
    if listed := parse_topology(host.tool_text(("nvidia-smi", "topo", "-m"))):
        return listed
    adapters = {path.name: path / "device" for path in host.glob(f"{CLASS}/*")}
    return {
        number: {name: _distance(host, gpu, link) for name, link in adapters.items()}
        for number, gpu in enumerate(bus_gpus(host))
        if adapters
    }


def _distance(host: Host, one: Path, other: Path) -> str:
    """Return the distance of two PCI devices by the bridges that their paths share."""
    paths = [
        [
            part
            for part in path.resolve().parts
            if re.match(r"pci[0-9a-f]{4}:|[0-9a-f]{4}:[0-9a-f]{2}:", part)
        ]
        for path in (one, other)
    ]
    shared = sum(1 for a, b in zip(*paths, strict=False) if a == b)
    bridges = max(len(path) for path in paths) - shared
    if shared > 1:  # beyond the host bridge: a switch
        return DISTANCES[0] if bridges <= 2 else DISTANCES[1]  # noqa: PLR2004
    if shared == 1:
        return DISTANCES[2]
    nodes = [host.read(path / "numa_node") for path in (one, other)]
    return DISTANCES[3] if nodes[0] == nodes[1] and nodes[0] not in {None, "-1"} else DISTANCES[4]


def check_gpudirect(host: Host) -> Iterator[Outcome]:
    """Check that adapters can read the memory of GPUs: by nvidia_peermem, or by DMA-BUF."""
    if not read_gpus(host):
        yield not_applicable(NO_GPU)
        return
    if not read_ports(host):
        yield not_applicable(NO_PORT)
        return
    modules = {line.split(" ", 1)[0] for line in (host.read("/proc/modules") or "").splitlines()}
    loaded = modules & {"nvidia_peermem", "nv_peer_mem"}
    version = host.read("/proc/driver/nvidia/version") or ""
    kernel = re.match(r"(\d+)\.(\d+)", host.read("/proc/sys/kernel/osrelease") or "")
    has_dmabuf = kernel is not None and (int(kernel[1]), int(kernel[2])) >= (5, 12)
    if loaded:
        yield healthy(f"module {loaded.pop()} is loaded")
    elif "Open Kernel Module" in version and has_dmabuf:
        yield healthy("the open driver and the kernel support DMA-BUF")
    else:
        yield warning(
            "neither nvidia_peermem is loaded nor DMA-BUF is supported: NCCL copies through the"
            " host's memory",
            "modprobe nvidia_peermem",
        )


def check_firmware(host: Host) -> Iterator[Outcome]:
    """Report the firmware of the RDMA adapters by model."""
    found = sorted({f"{port.kind} {port.firmware}" for port in read_ports(host) if port.firmware})
    if found:
        yield healthy(", ".join(found), value=", ".join(found))
    else:
        yield not_applicable(NO_PORT)
