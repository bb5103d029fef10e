"""Checks of this installation: its packages, its variables, its store and its spool."""

from __future__ import annotations

import os
import re
import shutil
import sys
from importlib.metadata import requires
from importlib.util import find_spec
from typing import TYPE_CHECKING

from rankscope.analysis.report.text import format_bytes, format_count

from ...errors import find_exit_code, format_error
from ...extras import installed_version
from ..places import MOUNTS, NETWORK_FILE_SYSTEMS, file_system, nearest_folder
from ..result import Outcome, error, healthy, not_applicable, warning
from .versions import package_version

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ..host import Host

MIN_FREE_BYTES = 1 << 30
"""A store merges parts of this size, and a spool of one busy rank holds some minutes in it."""

KNOWN_VARIABLES = frozenset(
    f"RANKSCOPE_{name}"
    for name in (
        "ALERT_WEBHOOK",
        "COUNT_FLOPS",
        "DISABLE",
        "EPOCH",
        "FLOPS_PER_TOKEN",
        "HOST",
        "LEVEL",
        "PEAK_FLOPS",
        "PURE_PYTHON",
        "RECORDING",
        "RUN",
        "SAMPLE_EVERY",
        "SEGMENT_BYTES",
        "SPOOL_BYTES",
        "STORE",
        "TOKEN",
        "TOKENS",
        "TOKEN_FILE",
        "TRACE",
        "TRACED",
        "TRACE_DIR",
    )
)
"""Variables that rankscope or its tests read; a test compares them with the sources."""


def check_packages(_host: Host) -> Iterator[Outcome]:
    """Find missing packages that every command needs, and name the extras that are complete."""
    missing = {extra: _missing_packages(extra) for extra in ("agent", "server", "embedded")}
    if missing["agent"]:
        text = f"not installed: {', '.join(missing['agent'])}"
        yield error(text, "pip install 'rankscope[agent]'")
        return
    complete = ", ".join(extra for extra, packages in missing.items() if not packages)
    own, python = installed_version(), ".".join(map(str, sys.version_info[:3]))
    yield healthy(f"rankscope {own} ({complete}), Python {python}", value=own)


def _missing_packages(extra: str) -> list[str]:
    missing = []
    for requirement in requires("rankscope") or ():
        package, _, condition = requirement.partition(";")
        name = re.split(r"[^\w.-]", package, maxsplit=1)[0]
        is_of_extra = re.search(rf"""extra == ['"]{extra}['"]""", condition)
        if is_of_extra and package_version(name) is None:
            missing.append(name)
    return missing


def check_extensions(_host: Host) -> Iterator[Outcome]:
    """Find extensions in C that were not built."""
    missing = [
        warning(
            f"the C extension was not built, and {effect}",
            "install a C compiler, then rankscope again",
            part=name,
        )
        for name, module, effect in (
            ("tracer", "rankscope.tracer.native._hot", "a traced span takes seven times as long"),
            ("replay", "rankscope.analysis.replay._loop", "the analysis does not start"),
        )
        if find_spec(module) is None
    ]
    yield from missing or [healthy("the C extensions of tracer and replay are installed")]


def check_variables(host: Host) -> Iterator[Outcome]:
    """Find variables that switch the tracer off, or that nothing reads."""
    outcomes = [
        warning(f"{name}=1: {effect}", "unset it")
        for name, effect in (
            ("RANKSCOPE_PURE_PYTHON", "the C extension of the tracer is not used"),
            ("RANKSCOPE_DISABLE", "no job of this environment is traced"),
        )
        if host.environment.get(name) == "1"
    ]
    own = {name for name in host.environment if name.startswith("RANKSCOPE_")}
    if unknown := sorted(own - KNOWN_VARIABLES):
        text = f"nothing reads {', '.join(unknown)}"
        outcomes.append(warning(text, "check the spelling (docs/tracer.md)"))
    yield from outcomes or [
        healthy(f"{format_count(len(own), 'variable')} of rankscope, all known")
    ]


def check_store(host: Host) -> Iterator[Outcome]:
    """Open the store, if there is one. Nothing is changed, except the tables of an older store."""
    from rankscope.collector.client.served_store import ServedStore, open_for_reading
    from rankscope.collector.store.location import (
        EmbeddedLocation,
        default_store_url,
        parse_store_url,
        printable_url,
    )
    from rankscope.collector.store.store import read_damage

    from ...sources.store_source import StoreSource

    try:
        url = host.store_url or default_store_url()
        location = parse_store_url(url)
        outcomes: list[Outcome] = []
        if isinstance(location, EmbeddedLocation):
            outcomes += _little_space(location.path)
            if not location.path.exists():
                text = f"{printable_url(url)} does not exist yet: serve, import and demo create it"
                yield from outcomes or [healthy(text)]
                return
        with open_for_reading(url) as store:
            num = len(StoreSource(store).runs())
            via = f", through {store.server.url}" if isinstance(store, ServedStore) else ""
            outcomes += [error(damage, "restore a backup") for damage in read_damage(store)]
        text = f"{printable_url(url)}: {format_count(num, 'run')}{via}"
        yield from outcomes or [healthy(text)]
    except Exception as problem:
        if find_exit_code(problem) is None:
            raise
        yield error(format_error(problem), "check --store and RANKSCOPE_STORE")


def check_spool(host: Host) -> Iterator[Outcome]:
    """Check that a tracer could write into the spool's folder."""
    path = host.spool
    if path is None:
        yield not_applicable("RANKSCOPE_TRACE is not set here")
        return
    if path.exists() and not path.is_dir():
        yield error(f"{path} is no folder, so nothing is traced", "give a folder")
        return
    existing = nearest_folder(path)
    outcomes = []
    if not os.access(existing, os.W_OK | os.X_OK):
        text = f"{existing} can't be written, so nothing is traced"
        outcomes.append(error(text, "change its owner or mode"))
    kind = file_system(existing, MOUNTS)
    if kind.startswith(NETWORK_FILE_SYSTEMS):
        text = f"{path} is on a network file system ({kind}), which can kill the ranks with SIGBUS"
        outcomes.append(error(text, "use a local disk or /dev/shm"))
    outcomes += _little_space(path)
    yield from outcomes or [healthy(f"{path} can be written")]


def _little_space(path: Path) -> Iterator[Outcome]:
    free = shutil.disk_usage(nearest_folder(path)).free
    if free < MIN_FREE_BYTES:
        text = f"{format_bytes(free)} are free at {path}: less than {format_bytes(MIN_FREE_BYTES)}"
        yield warning(text, "free some")
