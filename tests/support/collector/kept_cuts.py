"""Cuts kept in memory by a sink, or decoded from a body."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankscope.collector.spool.cut import Placement, Resume
from rankscope.collector.wire.codec import decode_batch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankscope.collector.identity import Row
    from rankscope.collector.spool.cut import Cut, ProcessFacts


class KeptCuts:
    """A sink that keeps the cuts of a tail, in order."""

    def __init__(self) -> None:
        self.cuts: list[Cut] = []

    def place(self, processes: Sequence[ProcessFacts]) -> list[Placement | None]:
        return [Placement(run_id=one.run_id, epoch=one.epoch) for one in processes]

    def resume(self, run_id: str) -> Resume:
        return Resume()

    def clocks(self) -> list[Row]:
        return []

    def upsert(self, table: str, rows: Sequence[Row]) -> None:
        pass

    def ingest(self, cuts: Sequence[Cut]) -> None:
        self.cuts += cuts


def decode_cuts(body: bytes) -> list[Cut]:
    """Return the cuts of a body, in its order: the inverse of `encode_cuts`."""
    batch = decode_batch(body)
    return [batch.cut(index) for index in range(len(batch.keys))]
