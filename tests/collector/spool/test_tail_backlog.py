"""A backlog is read in pieces that memory is asked for, whatever waits in the spool."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from rankscope.collector.errors import StoreError
from rankscope.collector.spool.cut import CutKey, Resume
from rankscope.collector.spool.tail import CHUNKS_A_BATCH, SpoolTail
from tests.support.collector.spool_builder import SpoolBuilder

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from rankscope.collector.identity import Row
    from rankscope.collector.spool.cut import Cut

BATCH_ROWS = 256
NUM_RANKS = 3
ROWS_A_RANK = 2_000


class Away:
    """A sink that takes nothing until it is back, and keeps what it was given."""

    def __init__(self) -> None:
        self.is_back = False
        self.refused: list[list[CutKey]] = []
        self.taken: list[list[CutKey]] = []

    def resume(self, _run_id: str) -> Resume:
        return Resume(end_rows={}, unanswered=(), source_format=None)

    def clocks(self) -> list[Row]:
        return []

    def upsert(self, table: str, rows: Sequence[Row]) -> None: ...

    def ingest(self, cuts: Sequence[Cut]) -> None:
        keys = [cut.key for cut in cuts]
        if not self.is_back:
            self.refused.append(keys)
            raise StoreError("nobody answers")
        self.taken.append(keys)


def num_rows(keys: Sequence[CutKey]) -> int:
    return sum(key.end_row - key.first_row for key in keys)


def test_an_outage_and_its_backlog_are_held_a_batch_at_a_time(tmp_path: Path) -> None:
    for rank in range(NUM_RANKS):
        builder = SpoolBuilder(tmp_path, run_id="run", rank=rank, capacity=512)
        for number in range(ROWS_A_RANK):
            if builder.next_row == 512:
                builder.seal()
                builder.new_segment()
            builder.span(start_ns=number * 20)
        builder.end()
    sink = Away()
    tail = SpoolTail(tmp_path, sink, batch_rows=BATCH_ROWS)
    most = BATCH_ROWS + BATCH_ROWS // CHUNKS_A_BATCH

    # GIVEN an outage of several looks: the same batch is held, and nothing beside it
    for _ in range(3):
        with pytest.raises(StoreError):
            tail.poll()
    assert sink.refused == [sink.refused[0]] * 3
    assert BATCH_ROWS <= num_rows(sink.refused[0]) <= most

    # WHEN the sink is back
    sink.is_back = True
    tail.poll()

    # THEN all of the backlog comes, no batch larger than that
    assert sink.taken[0] == sink.refused[0]
    assert max(num_rows(keys) for keys in sink.taken) <= most
    held = [key for keys in sink.taken for key in keys]
    assert num_rows(held) == NUM_RANKS * ROWS_A_RANK
    assert len(set(held)) == len(held)
    tail.close()
