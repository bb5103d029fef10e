"""The columns of a ByteDance trace that its replay reads, as wide as their holder has them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Whole = NDArray[np.integer[Any]]


class Columns(Protocol):
    """Operations in any order. `analysis.trace.tables.SpanTable` is one, `TraceColumns` another."""

    @property
    def step(self) -> Whole:
        """Step numbers."""

    @property
    def rank(self) -> Whole:
        """Global ranks."""

    @property
    def name(self) -> Whole:
        """Types, as codes into ``names``."""

    @property
    def start_ns(self) -> NDArray[np.int64]:
        """Starts; steps need no common clock."""

    @property
    def duration_ns(self) -> NDArray[np.int64]:
        """Durations."""

    @property
    def seq(self) -> Whole:
        """Numbers among the operations of one type on one worker in one step."""

    @property
    def chunk(self) -> Whole:
        """Model chunks on the stage."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the types."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceColumns:
    """A trace read for its what-if alone. Fields as in `Columns`."""

    step: Whole
    rank: Whole
    name: Whole
    start_ns: NDArray[np.int64]
    duration_ns: NDArray[np.int64]
    seq: Whole
    chunk: Whole
    names: tuple[str, ...]


def rows_of_columns(columns: Columns, rows: NDArray[np.int64]) -> TraceColumns:
    """Return some of the rows."""
    return TraceColumns(
        step=columns.step[rows],
        rank=columns.rank[rows],
        name=columns.name[rows],
        start_ns=columns.start_ns[rows],
        duration_ns=columns.duration_ns[rows],
        seq=columns.seq[rows],
        chunk=columns.chunk[rows],
        names=columns.names,
    )
