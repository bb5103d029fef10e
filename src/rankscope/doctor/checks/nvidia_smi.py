"""Reader of `nvidia-smi`: its report as XML or text, its NVLink listings, its topology matrix.

Source: nvidia-smi(1), and the recorded outputs of the tests.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

UNKNOWN_TEXTS = frozenset(
    {
        "", "N/A", "[N/A]", "[Not Supported]", "Not Supported", "None",
        "Requested functionality has been deprecated",
    }
)  # fmt: skip
REPORT = re.compile(r"<nvidia_smi_log>.*</nvidia_smi_log>", re.DOTALL)
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")

GPU_LINE = re.compile(r"^\s*GPU (\d+):.*?(?:UUID: ([\w-]+))?\)?\s*$")
LINK_STATE = re.compile(r"^\s*Link (\d+): (?:(<inactive>)|([\d.]+) GB/s)")
LINK_ERROR = re.compile(
    r"^\s*Link (\d+): (.*?(?:Errors?|Recovery|discards|recovery failed events)): (\d+)\s*$"
)
"""Up to Hopper replay, recovery and CRC errors; since Blackwell those of a port, beside counts of
corrected errors."""

ALL_INACTIVE = "all links are inactive"
NIC_COLUMN = re.compile(r"NIC\d+|(?:mlx|bnxt_re|efa|irdma|rocep|ibp|hfi)\w*")
NIC_LEGEND = re.compile(r"^\s*(NIC\d+): (\S+)\s*$", re.MULTILINE)
SECTION_LINE = re.compile(r"^( *)(\S[^:]*?) *$")
VALUE_LINE = re.compile(r"^( *)(\S.*?) *:(?: +(.*?))? *$")
BUS_LINE = re.compile(r"^GPU [0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:")
TAGS = {
    "gpu_uuid": "uuid",
    "gpu_link_info": "pci_gpu_link_info",
    "pcie_generation": "pcie_gen",
    "link_width": "link_widths",
    "bank_remap_availability_histogram": "row_remapper_histogram",
    "pci/bus_id": "pci_bus_id",
    "mig_mode/current": "current_mig",
    "mig_mode/pending": "pending_mig",
    "ecc_mode/current": "current_ecc",
    "pcie_gen/current": "current_link_gen",
    "pcie_gen/max": "max_link_gen",
    "link_widths/current": "current_link_width",
    "link_widths/max": "max_link_width",
    "retired_pages/pending_page_blacklist": "pending_blacklist",
    "remapped_rows/pending": "remapped_row_pending",
    "remapped_rows/remapping_failure_occurred": "remapped_row_failure",
    "row_remapper_histogram/none": "row_remapper_histogram_none",
    "clocks/sm": "sm_clock",
    "max_clocks/sm": "sm_clock",
    "applications_clocks/graphics": "graphics_clock",
    "default_applications_clocks/graphics": "graphics_clock",
    "utilization/gpu": "gpu_util",
    "clocks_event_reasons_counters/hw_thermal_slowdown":
        "clocks_event_reasons_counters_hw_therm_slowdown",
    "clocks_event_reasons_counters/hw_power_braking":
        "clocks_event_reasons_counters_hw_power_brake",
}  # fmt: skip
"""Names of the XML report by those of the text, in small letters, with the section where needed."""

DISTANCES = ("PIX", "PXB", "PHB", "NODE", "SYS")
"""Distances of two PCI devices, the shortest first: one switch, several switches, the host bridge,
the socket, across sockets."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU of the XML report."""

    index: int
    element: ET.Element

    @property
    def part(self) -> str:
        """Name in results."""
        return f"GPU {self.index}"

    @property
    def uuid(self) -> str:
        """UUID as the driver writes it; "" if unknown."""
        return self.text("uuid") or ""

    def text(self, *paths: str) -> str | None:
        """Return the text of the first of some elements that is there and known."""
        for path in paths:
            text = (self.element.findtext(path) or "").strip()
            if text not in UNKNOWN_TEXTS:
                return text
        return None

    def number(self, *paths: str) -> float | None:
        """Return the number with which such a text begins (``16x``, ``1980 MHz``)."""
        match = NUMBER.match(self.text(*paths) or "")
        return None if match is None else float(match[0])

    def leaves(self, path: str) -> Iterator[tuple[str, str]]:
        """Yield the name and the text of each element below a path that has a known text."""
        parent = self.element.find(path)
        for element in () if parent is None else parent.iter():
            text = (element.text or "").strip()
            if not len(element) and text not in UNKNOWN_TEXTS:
                yield element.tag, text


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The XML report of `nvidia-smi -q -x`."""

    driver: str
    cuda: str
    num_attached: int | None
    gpus: tuple[Gpu, ...]


def parse_report(text: str) -> Report | None:
    """Return the report in a text; None if there is none."""
    match = REPORT.search(text)
    if match is None:
        return None
    try:
        root = ET.fromstring(match[0])  # noqa: S314  # output of the driver's own tool
    except ET.ParseError:
        return None
    attached = root.findtext("attached_gpus") or ""
    return Report(
        driver=(root.findtext("driver_version") or "").strip(),
        cuda=(root.findtext("cuda_version") or "").strip(),
        num_attached=int(attached) if attached.strip().isdigit() else None,
        gpus=tuple(Gpu(index, element) for index, element in enumerate(root.iter("gpu"))),
    )


def parse_text_report(text: str) -> Report | None:
    """Return the report of `nvidia-smi -q` with the names of the XML one; None if it is none."""
    gpus: list[ET.Element] = []
    head: dict[str, str] = {}
    sections: list[tuple[int, ET.Element]] = []
    for line in text.splitlines():
        if BUS_LINE.match(line):
            gpus.append(ET.Element("gpu"))
            sections = [(-1, gpus[-1])]
        elif match := VALUE_LINE.match(line):
            indent, label, value = len(match[1]), match[2], match[3] or ""
            if not gpus:
                head[label] = value
                continue
            parent = _enter(sections, indent)
            if (parent.tag, label) == ("processes", "Process ID"):
                parent, label = ET.SubElement(parent, "process_info"), "pid"
            ET.SubElement(parent, _tag(parent, label)).text = value
        elif gpus and (match := SECTION_LINE.match(line)):
            parent = _enter(sections, len(match[1]))
            sections.append((len(match[1]), ET.SubElement(parent, _tag(parent, match[2]))))
    attached = head.get("Attached GPUs", "")
    if not gpus and not attached:
        return None
    return Report(
        driver=head.get("Driver Version", ""),
        cuda=head.get("CUDA Version", ""),
        num_attached=int(attached) if attached.isdigit() else None,
        gpus=tuple(Gpu(index, element) for index, element in enumerate(gpus)),
    )


def _enter(sections: list[tuple[int, ET.Element]], indent: int) -> ET.Element:
    """Leave the sections that have ended, and return the one of a line with this indentation."""
    while sections[-1][0] >= indent:
        sections.pop()
    return sections[-1][1]


def _tag(parent: ET.Element, label: str) -> str:
    name = re.sub(r"[^a-z0-9]+", "_", label.lower()).strip("_")
    return TAGS.get(f"{parent.tag}/{name}", TAGS.get(name, name))


@dataclass(slots=True, kw_only=True)
class Links:
    """NVLink links of one GPU."""

    speeds_gb_per_s: dict[int, float] = field(default_factory=dict)
    """Of the active links."""

    inactive: list[int] = field(default_factory=list)
    has_no_active: bool = False
    """The driver says that all are inactive, and lists none."""

    errors: dict[str, int] = field(default_factory=dict)
    """Sum over the links by kind."""


def parse_links(*texts: str) -> dict[int, Links]:
    """Return the links of each GPU from `nvidia-smi nvlink -s` and `nvidia-smi nvlink -e`."""
    links: dict[int, Links] = {}
    for text in texts:
        of_gpu = Links()
        for line in text.splitlines():
            if match := GPU_LINE.match(line):
                of_gpu = links.setdefault(int(match[1]), Links())
            elif ALL_INACTIVE in line:
                of_gpu.has_no_active = True
            elif match := LINK_ERROR.match(line):
                of_gpu.errors[match[2]] = of_gpu.errors.get(match[2], 0) + int(match[3])
            elif match := LINK_STATE.match(line):
                if match[2]:
                    of_gpu.inactive.append(int(match[1]))
                else:
                    of_gpu.speeds_gb_per_s[int(match[1])] = float(match[3])
    return links


def parse_topology(text: str) -> dict[int, dict[str, str]]:
    """Return the distance of each NIC by GPU, from `nvidia-smi topo -m`.

    Returns:
        GPU -> name of the NIC -> one of `DISTANCES`; empty if there is no such matrix.
    """
    lines = [re.sub(r"\x1b\[[\d;]*m", "", line) for line in text.splitlines()]
    words = [line.split() for line in lines]
    head = next((line for line in words if line[:1] == ["GPU0"] and line[1:2] != ["X"]), [])
    columns = [word for word in head if re.fullmatch(r"GPU\d+", word) or NIC_COLUMN.fullmatch(word)]
    names = dict(NIC_LEGEND.findall("\n".join(lines)))
    found: dict[int, dict[str, str]] = {}
    for line in lines:
        match = re.match(r"^GPU(\d+)\s+(.*)", line)
        if match is None:
            continue
        cells = match[2].split()
        found[int(match[1])] = {
            names.get(column, column): cell
            for column, cell in zip(columns, cells, strict=False)
            if not column.startswith("GPU") and cell in DISTANCES
        }
    return {gpu: nics for gpu, nics in found.items() if nics}
