"""`rankscope doctor`: what is wrong with this installation, its store and its spool."""

import json
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from pathlib import Path

import typer

from rankscope.analysis.report.text import format_bytes, format_count

from ..errors import FAILED, find_exit_code, format_error
from ..job.spool_place import MOUNTS, NETWORK_FILE_SYSTEMS, file_system, nearest_folder
from ..terminal.lines import emphasize, printable
from .flags import AsJson, Store

MIN_FREE_BYTES = 1 << 30
"""A store merges parts of this size, and a spool of one busy rank holds some minutes in it."""

KNOWN_VARIABLES = frozenset(
    f"RANKSCOPE_{name}"
    for name in (
        "ALERT_WEBHOOK", "COUNT_FLOPS", "DISABLE", "EPOCH",
        "FLOPS_PER_TOKEN", "LEVEL",
        "PEAK_FLOPS", "PURE_PYTHON", "RECORDING", "RUN", "SAMPLE_EVERY", "SEGMENT_BYTES",
        "SPOOL_BYTES", "STORE", "TOKEN", "TOKENS", "TOKEN_FILE", "TRACE",
        "TRACED", "TRACE_DIR",
    )
)  # fmt: skip
"""Variables that rankscope or its tests read; a test compares them with the sources."""


class State(StrEnum):
    """Result of a check."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


COLOUR = {State.OK: "green", State.WARNING: "yellow", State.ERROR: "red"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One check."""

    state: State
    name: str
    text: str
    """The result, and for a problem what to do."""


def doctor(*, as_json: AsJson = False, store: Store = None) -> None:
    """Check this installation, its store and its spool."""
    checks = [*run_checks(store_url=store, environment=os.environ)]
    if as_json:
        typer.echo(json.dumps({"checks": [asdict(check) for check in checks]}))
    for check in () if as_json else checks:
        state = emphasize(check.state.ljust(8), COLOUR[check.state])
        typer.echo(f"{state}{check.name.ljust(13)}{printable(check.text)}")
    if any(check.state is State.ERROR for check in checks):
        raise typer.Exit(FAILED)


def run_checks(*, store_url: str | None, environment: Mapping[str, str]) -> Iterator[Check]:
    """Yield the result of each check. Nothing is created or changed, except a store that is older.

    Args:
        store_url: URL of the store; None: the default.
        environment: Variables of the process.
    """
    yield from _check_packages()
    yield from _check_extensions(environment)
    yield from _check_variables(environment)
    yield from _check_store(store_url)
    yield from _check_spool(environment.get("RANKSCOPE_TRACE"))


def _check_packages() -> Iterator[Check]:
    python = ".".join(map(str, sys.version_info[:3]))
    yield Check(
        state=State.OK, name="version", text=f"rankscope {version('rankscope')}, Python {python}"
    )
    missing = []
    for requirement in requires("rankscope") or ():
        package, _, condition = requirement.partition(";")
        name = re.split(r"[^\w.-]", package, maxsplit=1)[0]
        if re.search(r"""extra == ['"]server['"]""", condition):
            try:
                version(name)
            except PackageNotFoundError:
                missing.append(name)
    yield Check(
        state=State.ERROR if missing else State.OK,
        name="packages",
        text=f"not installed: {', '.join(missing)}. Run: pip install 'rankscope[server]'"
        if missing
        else "all of rankscope[server] are installed",
    )
    try:
        text = f"torch {version('torch')}"
    except PackageNotFoundError:
        text = "torch is not installed: needed only where a job trains"
    yield Check(state=State.OK, name="torch", text=text)


def _check_extensions(environment: Mapping[str, str]) -> Iterator[Check]:
    for name, module, effect in (
        ("tracer", "rankscope.tracer.native._hot", "a traced span takes seven times as long"),
        ("replay", "rankscope.analysis.replay._loop", "the analysis does not start"),
    ):
        is_built = find_spec(module) is not None
        yield Check(
            state=State.OK if is_built else State.WARNING,
            name=name,
            text="the C extension is installed"
            if is_built
            else f"the C extension was not built, and {effect}: install a C compiler, then"
            " rankscope again",
        )
    for name, effect in (
        ("RANKSCOPE_PURE_PYTHON", "the C extension of the tracer is not used"),
        ("RANKSCOPE_DISABLE", "no job of this environment is traced"),
    ):
        if environment.get(name) == "1":
            yield Check(
                state=State.WARNING, name="environment", text=f"{name}=1: {effect}. Unset it"
            )


def _check_variables(environment: Mapping[str, str]) -> Iterator[Check]:
    own = {name for name in environment if name.startswith("RANKSCOPE_")}
    if unknown := sorted(own - KNOWN_VARIABLES):
        yield Check(
            state=State.WARNING,
            name="environment",
            text=f"nothing reads {', '.join(unknown)}: check the spelling (docs/tracer.md)",
        )


def _check_store(url: str | None) -> Iterator[Check]:
    from rankscope.collector.client.served_store import ServedStore, open_for_reading
    from rankscope.collector.store.location import (
        EmbeddedLocation,
        default_store_url,
        parse_store_url,
        printable_url,
    )
    from rankscope.collector.store.store import read_damage

    from ..sources.store_source import StoreSource

    try:
        url = url or default_store_url()
        location = parse_store_url(url)
        if isinstance(location, EmbeddedLocation):
            yield from _check_space("store", location.path)
            if not location.path.exists():
                text = f"{printable_url(url)} does not exist yet: serve, import and demo create it"
                yield Check(state=State.OK, name="store", text=text)
                return
        with open_for_reading(url) as store:
            num = len(StoreSource(store).runs())
            via = f", through {store.server.url}" if isinstance(store, ServedStore) else ""
            text = f"{printable_url(url)}: {format_count(num, 'run')}{via}"
            yield Check(state=State.OK, name="store", text=text)
            for damage in read_damage(store):
                yield Check(state=State.ERROR, name="store", text=damage)
    except Exception as error:
        if find_exit_code(error) is None:
            raise
        yield Check(state=State.ERROR, name="store", text=format_error(error))


def _check_spool(spool: str | None) -> Iterator[Check]:
    if not spool:
        return
    path = Path(spool)
    if path.exists() and not path.is_dir():
        text = f"RANKSCOPE_TRACE={spool} is no folder, so nothing is traced: give a folder"
        yield Check(state=State.ERROR, name="spool", text=text)
        return
    existing = nearest_folder(path)
    if not os.access(existing, os.W_OK | os.X_OK):
        text = f"{existing} can't be written, so nothing is traced: change its owner or mode"
        yield Check(state=State.ERROR, name="spool", text=text)
    kind = file_system(existing, MOUNTS)
    if kind.startswith(NETWORK_FILE_SYSTEMS):
        text = (
            f"{spool} is on a network file system ({kind}), which can kill the ranks with SIGBUS:"
            " use a local disk or /dev/shm"
        )
        yield Check(state=State.ERROR, name="spool", text=text)
    yield from _check_space("spool", path)


def _check_space(name: str, path: Path) -> Iterator[Check]:
    free = shutil.disk_usage(nearest_folder(path)).free
    is_enough = free >= MIN_FREE_BYTES
    yield Check(
        state=State.OK if is_enough else State.WARNING,
        name=name,
        text=f"{format_bytes(free)} are free at {path}"
        + ("" if is_enough else f": less than {format_bytes(MIN_FREE_BYTES)}, so free some"),
    )
