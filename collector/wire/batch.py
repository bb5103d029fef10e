"""Many cuts with the rows of each table together: what a body carries and an insert stores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..spool.cut import Cut
from ..spool.records import Decoded

if TYPE_CHECKING:
    import pyarrow as pa
    from numpy.typing import NDArray

    from ..spool.cut import CutKey

TABLES = ("spans", "steps", "microbatches", "bad_rows")
"""The tables that a cut has rows of, as `collector.spool.records.Decoded` names them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CutBatch:
    """Cuts, and their rows in the order of the cuts."""

    keys: tuple[CutKey, ...]
    sha256: tuple[str, ...]
    num_torn: tuple[int, ...]
    tables: dict[str, pa.Table]
    """By name in `TABLES`, the columns as the store has them."""

    offsets: dict[str, NDArray[np.int64]]
    """Shape (cuts + 1,): where the rows of each cut begin in its table."""

    unknown_columns: tuple[str, ...] = ()
    """What a newer sender told that this code does not keep."""

    @classmethod
    def of(cls, cut: Cut) -> CutBatch:
        """Return the batch of one cut."""
        tables = {table: getattr(cut.rows, table) for table in TABLES}
        return cls(
            keys=(cut.key,),
            sha256=(cut.sha256,),
            num_torn=(cut.num_torn,),
            tables=tables,
            offsets={
                table: np.array([0, rows.num_rows], dtype=np.int64)
                for table, rows in tables.items()
            },
        )

    @property
    def num_rows(self) -> int:
        """Rows of all tables."""
        return sum(table.num_rows for table in self.tables.values())

    def rows(self, table: str, place: int) -> pa.Table:
        """Return the rows of one cut: a slice and no copy."""
        first, end = self.offsets[table][place : place + 2].tolist()
        return self.tables[table].slice(first, end - first)

    def cut(self, place: int) -> Cut:
        """Return one cut; its rows are slices and no copies."""
        return Cut(
            key=self.keys[place],
            sha256=self.sha256[place],
            num_torn=self.num_torn[place],
            rows=Decoded(**{table: self.rows(table, place) for table in TABLES}),
        )
