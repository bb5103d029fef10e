"""Keep what comes of deleted runs out of a sink."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..identity import Row
    from ..spool.cut import Cut, Resume, Sink
    from .deletion import Deletions


class UndeletedSink:
    """A sink that passes on what is of no deleted run; the rest counts as taken.

    A spool's tail goes on behind such cuts and frees their segments: nobody wants them.

    Args:
        sink: Where to.
        deletions: The tombstones.
    """

    def __init__(self, sink: Sink, deletions: Deletions) -> None:
        self._sink = sink
        self._deletions = deletions
        self.num_refused_rows = 0
        """Rows of cuts that were kept out."""

    def resume(self, run_id: str) -> Resume:
        """Return what the sink behind holds of a run."""
        return self._sink.resume(run_id)

    def clocks(self) -> list[Row]:
        """Return the host clocks that the sink behind knows."""
        return self._sink.clocks()

    def upsert(self, table: str, rows: Sequence[Row]) -> None:
        """Store descriptions of runs that are not deleted."""
        kept = [row for row in rows if not self._is_deleted(row.get("run_id", ""))]
        if kept:
            self._sink.upsert(table, kept)

    def ingest(self, cuts: Sequence[Cut]) -> None:
        """Store the rows of cuts whose runs are not deleted."""
        kept = [cut for cut in cuts if not self._is_deleted(cut.key.run_id)]
        if kept:
            self._sink.ingest(kept)
        offered = sum(cut.key.end_row - cut.key.first_row for cut in cuts)
        stored = sum(cut.key.end_row - cut.key.first_row for cut in kept)
        self.num_refused_rows += offered - stored

    def _is_deleted(self, run_id: str) -> bool:
        return self._deletions.is_deleted(run_id)
