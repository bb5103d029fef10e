"""Reader of `nvidia-smi`: its XML report, its NVLink listings, its topology matrix.

Source: nvidia-smi(1), and the recorded outputs of the tests.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

UNKNOWN_TEXTS = frozenset({"", "N/A", "[N/A]", "[Not Supported]", "Not Supported", "None"})
REPORT = re.compile(r"<nvidia_smi_log>.*</nvidia_smi_log>", re.DOTALL)
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")

GPU_LINE = re.compile(r"^\s*GPU (\d+):.*?(?:UUID: ([\w-]+))?\)?\s*$")
LINK_STATE = re.compile(r"^\s*Link (\d+): (?:(<inactive>)|([\d.]+) GB/s)")
LINK_ERROR = re.compile(r"^\s*Link (\d+): (.*?Errors?|.*?Recovery): (\d+)\s*$")
NIC_COLUMN = re.compile(r"NIC\d+|(?:mlx|bnxt_re|efa|irdma|rocep|ibp|hfi)\w*")
NIC_LEGEND = re.compile(r"^\s*(NIC\d+): (\S+)\s*$", re.MULTILINE)
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


@dataclass(slots=True, kw_only=True)
class Links:
    """NVLink links of one GPU."""

    speeds_gb_per_s: dict[int, float] = field(default_factory=dict)
    """Of the active links."""

    inactive: list[int] = field(default_factory=list)
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
