"""Network topology from a file: switch, rack and rail of each rank."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from rankscope.tracer.spool import read_regular_file
from rankscope.trainer.simulator.scenario_file import parse_document

from ..errors import BadInputError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from rankscope.collector.identity import Row
    from rankscope.collector.spool.cut import Sink
    from rankscope.collector.store.store import Store

MAX_FILE_BYTES = 16 << 20
"""A hundred times the size of a file for 1,536 hosts."""

MAX_DIGITS = 9
"""Digits of a local rank. Python refuses to parse numbers of more than 4,300 digits."""

HOST_KEYS = ("switch", "rack", "rails")

SELECT_RANKS = "SELECT * FROM ranks FINAL WHERE host != '' ORDER BY run_id, epoch, rank, process"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Switch, rack and rail of a rank; "" if unknown."""

    switch: str = ""
    rack: str = ""
    rail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPlace:
    """Topology of the hosts of one name or pattern."""

    pattern: str
    switch: str = ""
    rack: str = ""
    rails: Mapping[int, str] = field(default_factory=dict)
    """By local rank. A missing one has the rail of `Topology.rails`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Network topology of a cluster."""

    hosts: tuple[HostPlace, ...] = ()
    """In the order of the file. An exact name is preferred, then the first matching pattern."""

    rails: Mapping[int, str] = field(default_factory=dict)
    """By local rank, for all hosts."""

    def find_place(self, host: str, local_rank: int) -> Place:
        """Return switch, rack and rail of a rank.

        Args:
            host: Name of the rank's host.
            local_rank: Position among the ranks of the host; -1 if unknown.
        """
        exact = (known for known in self.hosts if known.pattern == host)
        matching = (known for known in self.hosts if fnmatchcase(host, known.pattern))
        found = next(exact, None) or next(matching, None)
        if found is None:
            return Place(rail=self.rails.get(local_rank, ""))
        rail = found.rails.get(local_rank, self.rails.get(local_rank, ""))
        return Place(switch=found.switch, rack=found.rack, rail=rail)

    def placed(self, row: Row) -> Row:
        """Return a row of table ``ranks`` with those of switch, rack and rail that are known."""
        place = self.find_place(row.get("host", ""), row.get("local_rank", -1))
        columns = {"switch": place.switch, "rack": place.rack, "rail": place.rail}
        return {**row, **{name: text for name, text in columns.items() if text}}


def read_topology(path: Path) -> Topology:
    """Read a topology file: JSON if its name ends in ``.json``, else TOML.

    docs/operations.md describes the format.

    Raises:
        BadInputError: The file cannot be read, or has another format.
    """
    document = _document(path)
    unknown = document.keys() - {"hosts", "rails"}
    if unknown:
        raise _bad(
            path, f"has the unknown key {min(unknown)!r}: only 'hosts' and 'rails' are known"
        )
    hosts = document.get("hosts", {})
    if not isinstance(hosts, dict):
        raise _bad(path, "has 'hosts' that is not a table of host names")
    return Topology(
        hosts=tuple(_host(path, pattern, value) for pattern, value in hosts.items()),
        rails=_rails(path, "rails", document.get("rails", {})),
    )


def place_ranks(store: Store, topology: Topology) -> int:
    """Write switch, rack and rail of the ranks in a store; return the number of changed rows."""
    if topology == Topology():
        return 0
    revision = time.time_ns()
    rows = store.rows(SELECT_RANKS)
    changed = [
        {**placed, "revision": revision}
        for row, placed in zip(rows, map(topology.placed, rows), strict=True)
        if placed != row
    ]
    store.insert_rows("ranks", changed)
    return len(changed)


class PlacedSink:
    """A sink that adds switch, rack and rail to the rows of table ``ranks``."""

    def __init__(self, sink: Sink, topology: Topology) -> None:
        self._sink = sink
        self._topology = topology
        self.place, self.resume = sink.place, sink.resume
        self.clocks, self.ingest = sink.clocks, sink.ingest

    def upsert(self, table: str, rows: Sequence[Row]) -> None:
        """Store descriptions, with the topology of ranks."""
        placed = [self._topology.placed(row) for row in rows] if table == "ranks" else rows
        self._sink.upsert(table, placed)


def _document(path: Path) -> dict[str, Any]:
    try:
        text = read_regular_file(path, max_bytes=MAX_FILE_BYTES).decode()
    except OSError as error:
        raise _bad(path, f"cannot be read ({error.strerror}): check the path") from error
    except UnicodeDecodeError as error:
        raise _bad(path, "is not UTF-8 text") from error
    try:
        found = parse_document(text, suffix=path.suffix)
    except ValueError as error:
        raise _bad(path, f"cannot be parsed ({error})") from error
    if not isinstance(found, dict):
        raise _bad(path, "is not a table")
    return found


def _host(path: Path, pattern: str, value: object) -> HostPlace:
    if not isinstance(value, dict):
        raise _bad(path, f"has hosts.{pattern} that is not a table")
    unknown = value.keys() - set(HOST_KEYS)
    if unknown:
        known = ", ".join(HOST_KEYS)
        raise _bad(
            path, f"has the unknown key hosts.{pattern}.{min(unknown)}: only {known} are known"
        )
    return HostPlace(
        pattern=pattern,
        switch=_text(path, f"hosts.{pattern}.switch", value.get("switch", "")),
        rack=_text(path, f"hosts.{pattern}.rack", value.get("rack", "")),
        rails=_rails(path, f"hosts.{pattern}.rails", value.get("rails", {})),
    )


def _rails(path: Path, name: str, value: object) -> dict[int, str]:
    """Return rails by local rank, from a table or from a list in the order of local ranks."""
    if isinstance(value, list):
        value = {str(local_rank): rail for local_rank, rail in enumerate(value)}
    if not isinstance(value, dict):
        raise _bad(path, f"has {name} that is neither a list nor a table by local rank")
    wrong = [
        key for key in value if not (key.isascii() and key.isdigit() and len(key) <= MAX_DIGITS)
    ]
    if wrong:
        raise _bad(path, f"has {name}.{wrong[0][:40]}, which is not a local rank (0, 1, ...)")
    return {int(key): _text(path, f"{name}.{key}", rail) for key, rail in value.items()}


def _text(path: Path, name: str, value: object) -> str:
    if not isinstance(value, str):
        raise _bad(path, f"has {name} = {value!r}, which must be a string in quotes")
    return value


def _bad(path: Path, what: str) -> BadInputError:
    return BadInputError(f"--topology {path} {what}")
