"""Reads which switch, rack and rail each rank hangs on, and writes it beside the ranks."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from rankscope.tracer.spool import read_regular_file
from rankscope.trainer.simulator.document import parse_document

from ..errors import BadInputError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from rankscope.collector.identity import Row
    from rankscope.collector.spool.cut import Cut, Resume, Sink
    from rankscope.collector.store.store import Store

MAX_FILE_BYTES = 16 << 20
"""A hundred times what 1,536 hosts take."""

MAX_DIGITS = 9
"""Of a local rank: Python reads no number of more than 4,300."""

HOST_KEYS = ("switch", "rack", "rails")

SELECT_RANKS = "SELECT * FROM ranks FINAL WHERE host != '' ORDER BY run_id, epoch, rank, process"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where one rank hangs; "" where nothing is said of it."""

    switch: str = ""
    rack: str = ""
    rail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPlace:
    """What the file says of the hosts of one name or pattern."""

    pattern: str
    switch: str = ""
    rack: str = ""
    rails: Mapping[int, str] = field(default_factory=dict)
    """By local rank; one that is missing has the rail that holds for every host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """A cluster's network, as a file tells it."""

    hosts: tuple[HostPlace, ...] = ()
    """In the file's order; the first that matches a host counts, an exact name before a pattern."""

    rails: Mapping[int, str] = field(default_factory=dict)
    """By local rank, for every host."""

    def place_of(self, host: str, local_rank: int) -> Place:
        """Return where a rank hangs.

        Args:
            host: Name of its host.
            local_rank: Its position among the host's ranks, -1 where unknown.
        """
        exact = (known for known in self.hosts if known.pattern == host)
        alike = (known for known in self.hosts if fnmatchcase(host, known.pattern))
        found = next(exact, None) or next(alike, None)
        if found is None:
            return Place(rail=self.rails.get(local_rank, ""))
        rail = found.rails.get(local_rank, self.rails.get(local_rank, ""))
        return Place(switch=found.switch, rack=found.rack, rail=rail)

    def placed(self, row: Row) -> Row:
        """Return a row of table ``ranks`` with switch, rack and rail; what is unknown stays."""
        place = self.place_of(row.get("host", ""), row.get("local_rank", -1))
        told = {"switch": place.switch, "rack": place.rack, "rail": place.rail}
        return {**row, **{name: text for name, text in told.items() if text}}


def read_topology(path: Path) -> Topology:
    """Read a topology file, TOML or (by its name's ending) JSON; docs/operations.md has the form.

    Raises:
        BadInputError: It cannot be read, or says something else than the form does.
    """
    document = _document(path)
    unknown = document.keys() - {"hosts", "rails"}
    if unknown:
        raise _bad(path, f"has {min(unknown)!r}, and only 'hosts' and 'rails' are known")
    hosts = document.get("hosts", {})
    if not isinstance(hosts, dict):
        raise _bad(path, "has 'hosts' that is no table of host names")
    return Topology(
        hosts=tuple(_host(path, pattern, told) for pattern, told in hosts.items()),
        rails=_rails(path, "rails", document.get("rails", {})),
    )


def place_ranks(store: Store, topology: Topology) -> int:
    """Write switch, rack and rail beside the ranks that a store holds; return how many changed."""
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
    """A sink that adds switch, rack and rail to the ranks that go through it."""

    def __init__(self, sink: Sink, topology: Topology) -> None:
        self._sink = sink
        self._topology = topology

    def resume(self, run_id: str) -> Resume:
        """Return what the sink behind holds of a run."""
        return self._sink.resume(run_id)

    def clocks(self) -> list[Row]:
        """Return the host clocks that the sink behind knows."""
        return self._sink.clocks()

    def upsert(self, table: str, rows: Sequence[Row]) -> None:
        """Store descriptions, those of ranks with their place."""
        placed = [self._topology.placed(row) for row in rows] if table == "ranks" else rows
        self._sink.upsert(table, placed)

    def ingest(self, cuts: Sequence[Cut]) -> None:
        """Store the rows of these cuts."""
        self._sink.ingest(cuts)


def _document(path: Path) -> dict[str, Any]:
    try:
        text = read_regular_file(path, max_bytes=MAX_FILE_BYTES).decode()
    except OSError as error:
        raise _bad(path, f"cannot be read ({error.strerror}): check the path") from error
    except UnicodeDecodeError as error:
        raise _bad(path, "is no UTF-8 text") from error
    try:
        found = parse_document(text, suffix=path.suffix)
    except ValueError as error:
        raise _bad(path, f"cannot be parsed ({error})") from error
    if not isinstance(found, dict):
        raise _bad(path, "holds no table")
    return found


def _host(path: Path, pattern: str, told: object) -> HostPlace:
    if not isinstance(told, dict):
        raise _bad(path, f"has hosts.{pattern} that is no table")
    unknown = told.keys() - set(HOST_KEYS)
    if unknown:
        known = ", ".join(HOST_KEYS)
        raise _bad(path, f"has hosts.{pattern}.{min(unknown)}, and only {known} are known")
    return HostPlace(
        pattern=pattern,
        switch=_text(path, f"hosts.{pattern}.switch", told.get("switch", "")),
        rack=_text(path, f"hosts.{pattern}.rack", told.get("rack", "")),
        rails=_rails(path, f"hosts.{pattern}.rails", told.get("rails", {})),
    )


def _rails(path: Path, name: str, told: object) -> dict[int, str]:
    """Return rails by local rank, from a table of them or a list in their order."""
    if isinstance(told, list):
        told = {str(place): rail for place, rail in enumerate(told)}
    if not isinstance(told, dict):
        raise _bad(path, f"has {name} that is neither a list nor a table by local rank")
    wrong = [key for key in told if not _is_local_rank(key)]
    if wrong:
        raise _bad(path, f"has {name}.{wrong[0][:40]}, which is no local rank (0, 1, ...)")
    return {int(key): _text(path, f"{name}.{key}", rail) for key, rail in told.items()}


def _is_local_rank(key: str) -> bool:
    return key.isascii() and key.isdigit() and len(key) <= MAX_DIGITS


def _text(path: Path, name: str, value: object) -> str:
    if not isinstance(value, str):
        raise _bad(path, f"has {name} = {value!r}, which must be a text in quotes")
    return value


def _bad(path: Path, what: str) -> BadInputError:
    return BadInputError(f"--topology {path} {what}")
