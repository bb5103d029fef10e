"""Sink that keeps its cuts in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankscope.collector.spool.cut import Resume

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankscope.collector.identity import Row
    from rankscope.collector.spool.cut import Cut


class KeptCuts:
    """A sink that keeps the cuts of a tail, in order."""

    def __init__(self) -> None:
        self.cuts: list[Cut] = []

    def resume(self, run_id: str) -> Resume:
        return Resume()

    def clocks(self) -> list[Row]:
        return []

    def upsert(self, table: str, rows: Sequence[Row]) -> None:
        pass

    def ingest(self, cuts: Sequence[Cut]) -> None:
        self.cuts += cuts
