"""Cuts: ranges of rows that leave the spool together, and the sinks that receive them.

`SpoolTail` makes cuts. A sink is the store of this process (`store.writer.StoreWriter`) or the
agent's outbox, which sends them to a collector.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ..identity import Row
    from .records import CutRows


@dataclass(frozen=True, slots=True, kw_only=True)
class CutKey:
    """Identity of a cut: a range of rows in one segment of one process."""

    run_id: str
    epoch: int
    rank: int
    process: str
    """UUID of the process in hex."""

    segment: int
    """As returned by `identity.segment_id`."""

    first_row: int
    end_row: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A range of rows of one segment, decoded."""

    key: CutKey
    sha256: str
    """Hash of the rows' bytes in the segment."""

    num_torn: int
    """Rows of the range that were never committed."""

    rows: CutRows


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """State of a run in a sink, from which reading continues."""

    end_rows: dict[int, int] = field(default_factory=dict)
    """First row that is not stored, by segment."""

    unanswered: tuple[CutKey, ...] = ()
    """Cuts that were sent and not acknowledged; they are sent again with the same bounds."""

    source_format: str | None = None
    """Format of the run of that name; None if there is no such run."""

    dropped: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Number of rows that the sink gave up, by process and reason. The sink may update it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessFacts:
    """Facts about a traced process that is not stored yet."""

    run_id: str
    """Run that the process declares; ``epoch`` likewise."""

    epoch: int
    rank: int
    process: str
    """UUID in hex."""

    host: str = ""
    world_size: int = 0
    """0 if unknown."""

    layout: str = ""
    """Declared layout as JSON; "" if unknown."""

    job: str = ""
    """Key of the launch: equal on all its ranks, different for any other; "" if unknown."""

    started_ns: int = 0
    """Unix time."""

    first_step: int | None = None
    """First step that the process recorded; None before."""

    has_ended: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Run and epoch under which a process is stored."""

    run_id: str
    epoch: int
    note: str = ""
    """Why they differ from those that the process declares, in a sentence; "" if they do not."""


class Sink(Protocol):
    """Receiver of cuts and descriptions. Each method returns when its rows are durable."""

    def place(self, processes: Sequence[ProcessFacts]) -> list[Placement | None]:
        """Return where each process is stored; None while that cannot be decided.

        The answer for a process never changes.
        """
        ...

    def resume(self, run_id: str) -> Resume:
        """Return what the sink has stored of a run."""
        ...

    def clocks(self) -> list[Row]:
        """Return the known host clocks as rows of table ``clock``."""
        ...

    def upsert(self, table: str, rows: Sequence[Row]) -> None:
        """Store descriptions; a row replaces the one with the same identity."""
        ...

    def ingest(self, cuts: Sequence[Cut]) -> None:
        """Store the rows of cuts, each row once even if a cut comes several times."""
        ...
