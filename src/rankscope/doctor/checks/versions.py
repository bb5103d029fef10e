"""Versions that must be equal on all hosts of a job."""

from __future__ import annotations

import os
import re
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from ..result import Outcome, error, healthy, not_applicable
from .gpu import NO_GPU, read_report

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..host import Host

MODULE_VERSION = re.compile(r"Kernel Module(?: for \S+)?\s+(\d+(?:\.\d+)+)")
TORCH_CUDA = re.compile(r"^cuda[^=]*= *'([^']+)'", re.MULTILINE)


def check_driver(host: Host) -> Iterator[Outcome]:
    """Compare the driver's library with its kernel module."""
    report = read_report(host)
    module = MODULE_VERSION.search(host.read("/proc/driver/nvidia/version") or "")
    if report is None or not report.gpus:
        yield not_applicable(NO_GPU)
    elif not report.driver:
        yield not_applicable("the report has no version of the driver")
    elif module is not None and module[1] != report.driver:
        text = f"the library of the driver is {report.driver}, its kernel module {module[1]}"
        yield error(text, "reload the kernel modules, or reboot the host")
    else:
        text = f"driver {report.driver}, CUDA up to {report.cuda or 'unknown'}"
        yield healthy(text, value=report.driver)


def check_cuda(host: Host) -> Iterator[Outcome]:
    """Compare the CUDA that torch was built with to what the driver supports."""
    report, built_with = read_report(host), _torch_cuda()
    if built_with is None:
        yield not_applicable("no torch with CUDA is installed here")
        return
    most = None if report is None else re.match(r"(\d+)", report.cuda)
    if most is not None and int(built_with.split(".")[0]) > int(most[1]):
        yield error(
            f"torch needs CUDA {built_with}, and the driver supports {most[1]}",
            "install a newer driver, or a torch for an older CUDA",
        )
        return
    yield healthy(f"torch was built with CUDA {built_with}", value=built_with)


def _torch_cuda() -> str | None:
    """Return the CUDA version of torch, without importing it."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    except OSError:
        return None
    match = TORCH_CUDA.search(text)
    return None if match is None else match[1]


def package_version(name: str) -> str | None:
    """Return the version of an installed package; None if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def check_torch(_host: Host) -> Iterator[Outcome]:
    """Report the version of torch."""
    if found := package_version("torch"):
        yield healthy(f"torch {found}", value=found)
    else:
        yield not_applicable("torch is not installed: needed only where a job trains")


def check_kernel(host: Host) -> Iterator[Outcome]:
    """Report the version of the kernel."""
    found = host.read("/proc/sys/kernel/osrelease")
    if not found and not host.is_recorded:
        found = os.uname().release
    if found:
        yield healthy(f"Linux {found}", value=found)
    else:
        yield not_applicable("the kernel's version cannot be read")
