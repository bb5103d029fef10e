"""A cut: the unit in which rows leave the spool, and where it goes.

`SpoolTail` makes cuts and hands them to a `Sink`: the store in this process
(`collector.store.writer.StoreWriter`), or one that ships them elsewhere.
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
    """Which rows a cut holds: a range of one segment of one process."""

    run_id: str
    epoch: int
    rank: int
    process: str
    """The process's uuid in hex."""

    segment: int
    """`collector.identity.segment_id`."""

    first_row: int
    end_row: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Rows of one segment, decoded."""

    key: CutKey
    sha256: str
    """Of the rows' bytes in the segment."""

    num_torn: int
    """Rows in the range that were never committed."""

    rows: CutRows


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """What a sink already holds of one run."""

    end_rows: dict[int, int] = field(default_factory=dict)
    """First row not yet stored, by segment."""

    unanswered: tuple[CutKey, ...] = ()
    """Cuts that were sent and never confirmed: to be sent again, exactly these."""

    source_format: str | None = None
    """Format of the run of that name; None where there is none yet."""

    dropped: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Rows that the sink gave up for good, by process and reason. It may go on counting."""


class Sink(Protocol):
    """Where cuts and descriptions go. Every method returns when its rows are durable."""

    def resume(self, run_id: str) -> Resume:
        """Return what is held of a run, so that reading goes on behind it."""
        ...

    def clocks(self) -> list[Row]:
        """Return the host clocks known so far, as rows of table ``clock``."""
        ...

    def upsert(self, table: str, rows: Sequence[Row]) -> None:
        """Store descriptions; a row replaces the one with the same identity."""
        ...

    def ingest(self, cuts: Sequence[Cut]) -> None:
        """Store the rows of these cuts, each once however often it comes."""
        ...
