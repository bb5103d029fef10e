"""Network topology from a file: switch, rack and rail of each rank."""

from __future__ import annotations

import time
from collections.abc import Mapping  # pydantic reads it
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError

from rankscope.tracer.spool import read_regular_file
from rankscope.trainer.simulator.scenario_file import parse_document

from ..errors import BadInputError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from rankscope.collector.identity import Row
    from rankscope.collector.spool.cut import Sink
    from rankscope.collector.store.store import Store

MAX_FILE_BYTES = 16 << 20
"""A hundred times the size of a file for 1,536 hosts."""

MAX_SHOWN_KEY = 40

SELECT_RANKS = "SELECT * FROM ranks FINAL WHERE host != '' ORDER BY run_id, epoch, rank, process"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Switch, rack and rail of a rank; "" if unknown."""

    switch: str = ""
    rack: str = ""
    rail: str = ""


Rails = Annotated[
    Mapping[Annotated[int, Field(ge=0)], str],
    BeforeValidator(lambda rails: dict(enumerate(rails)) if isinstance(rails, list) else rails),
]
"""Rails by local rank; a file may hold a list in the order of local ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPlace:
    """Topology of the hosts of one name or pattern."""

    switch: str = ""
    rack: str = ""
    rails: Rails = field(default_factory=dict)
    """A missing one has the rail of `Topology.rails`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Network topology of a cluster."""

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    hosts: Mapping[str, HostPlace] = field(default_factory=dict)
    """By name or pattern. An exact name is preferred, then the first matching pattern."""

    rails: Rails = field(default_factory=dict)
    """For all hosts."""

    def find_place(self, host: str, local_rank: int) -> Place:
        """Return switch, rack and rail of a rank.

        Args:
            host: Name of the rank's host.
            local_rank: Position among the ranks of the host; -1 if unknown.
        """
        matching = (at for pattern, at in self.hosts.items() if fnmatchcase(host, pattern))
        at_host = self.hosts.get(host) or next(matching, HostPlace())
        rail = at_host.rails.get(local_rank, self.rails.get(local_rank, ""))
        return Place(switch=at_host.switch, rack=at_host.rack, rail=rail)

    def placed(self, row: Row) -> Row:
        """Return a row of table ``ranks`` with those of switch, rack and rail that are known."""
        place = self.find_place(row.get("host", ""), row.get("local_rank", -1))
        columns = {"switch": place.switch, "rack": place.rack, "rail": place.rail}
        return {**row, **{name: text for name, text in columns.items() if text}}


def read_topology(path: Path) -> Topology:
    """Read a topology file: JSON if its name ends in ``.json``, else TOML.

    docs/settings.md describes the format.

    Raises:
        BadInputError: The file cannot be read, or has another format.
    """
    try:
        text = read_regular_file(path, max_bytes=MAX_FILE_BYTES).decode()
        return TypeAdapter(Topology).validate_python(parse_document(text, suffix=path.suffix))
    except OSError as error:
        raise BadInputError(
            f"--topology {path} cannot be read ({error.strerror}): check the path"
        ) from error
    except ValidationError as invalid:
        first = invalid.errors(include_url=False)[0]
        keys = [str(key)[:MAX_SHOWN_KEY] for key in first["loc"] if key != "[key]"]
        reason = first["msg"]
        if first["type"] == "unexpected_keyword_argument":
            table = HostPlace if keys[0] == "hosts" else Topology
            reason = f"unknown key; expected {', '.join(key.name for key in fields(table))}"
        raise BadInputError(
            f"--topology {path}: {'.'.join(keys) or 'the file'}: {reason}"
        ) from invalid
    except ValueError as error:
        raise BadInputError(f"--topology {path} cannot be parsed ({error})") from error


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
