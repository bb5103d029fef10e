"""Memory that a backlog takes, however large it is."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from rankscope.collector.errors import StoreError
from rankscope.collector.spool.cut import CutKey, Placement, Resume
from rankscope.collector.spool.tail import CHUNKS_PER_BATCH, SpoolTail
from tests.support.collector.spool_builder import SpoolBuilder

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from rankscope.collector.identity import Row
    from rankscope.collector.spool.cut import Cut, ProcessFacts
    from tests.collector.conftest import FakeClock

BATCH_ROWS = 256
NUM_RANKS = 3
ROWS_PER_RANK = 2_000


class UnavailableSink:
    """A sink that fails until it is available; it keeps the keys that it was given."""

    def __init__(self) -> None:
        self.is_available = False
        self.failed: list[list[CutKey]] = []
        self.stored: list[list[CutKey]] = []

    def place(self, processes: Sequence[ProcessFacts]) -> list[Placement | None]:
        return [Placement(run_id=one.run_id, epoch=one.epoch) for one in processes]

    def resume(self, _run_id: str) -> Resume:
        return Resume(end_rows={}, unanswered=(), source_format=None)

    def clocks(self) -> list[Row]:
        return []

    def upsert(self, table: str, rows: Sequence[Row]) -> None: ...

    def ingest(self, cuts: Sequence[Cut]) -> None:
        keys = [cut.key for cut in cuts]
        if not self.is_available:
            self.failed.append(keys)
            raise StoreError("no answer")
        self.stored.append(keys)


def num_rows(keys: Sequence[CutKey]) -> int:
    return sum(key.end_row - key.first_row for key in keys)


def test_an_outage_and_its_backlog_hold_one_batch_in_memory(tmp_path: Path) -> None:
    for rank in range(NUM_RANKS):
        builder = SpoolBuilder(tmp_path, run_id="run", rank=rank, capacity=512)
        for number in range(ROWS_PER_RANK):
            if builder.next_row == 512:
                builder.seal()
                builder.new_segment()
            builder.span(start_ns=number * 20)
        builder.end()
    sink = UnavailableSink()
    tail = SpoolTail(tmp_path, sink, batch_rows=BATCH_ROWS)
    most = BATCH_ROWS + BATCH_ROWS // CHUNKS_PER_BATCH

    # GIVEN an outage of several polls: the same batch is held, and nothing else
    for _ in range(3):
        with pytest.raises(StoreError):
            tail.poll()
    assert sink.failed == [sink.failed[0]] * 3
    assert BATCH_ROWS <= num_rows(sink.failed[0]) <= most

    # WHEN the sink is available again
    sink.is_available = True
    tail.poll()

    # THEN the whole backlog is stored, in batches that are no larger
    assert sink.stored[0] == sink.failed[0]
    assert max(num_rows(keys) for keys in sink.stored) <= most
    held = [key for keys in sink.stored for key in keys]
    assert num_rows(held) == NUM_RANKS * ROWS_PER_RANK
    assert len(set(held)) == len(held)
    tail.close()


class SlowPlaces(UnavailableSink):
    """A sink that takes a second for each call of `place`."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__()
        self.is_available = True
        self._clock = clock

    def place(self, processes: Sequence[ProcessFacts]) -> list[Placement | None]:
        self._clock.advance_s(1)
        return super().place(processes)


def test_the_newest_run_is_first_and_many_others_have_later_turns(
    tmp_path: Path, clock: FakeClock
) -> None:
    names = [f"run-{number}" for number in range(5)]
    for number, name in enumerate(names):
        builder = SpoolBuilder(tmp_path, run_id=name)
        builder.span()
        builder.end()
        at_ns = 10**18 + (number if name != "run-1" else 100) * 10**9
        os.utime(tmp_path / name, ns=(at_ns, at_ns))
    sink = SlowPlaces(clock)
    tail = SpoolTail(tmp_path, sink, monotonic_ns=clock)

    left = [tail.poll().num_later]
    assert {key.run_id for keys in sink.stored for key in keys} == {"run-1", "run-4"}
    new = SpoolBuilder(tmp_path, run_id="new")
    new.span()
    new.end()
    left += [tail.poll().num_later for _ in range(3)]
    tail.close()

    order = [key.run_id for keys in sink.stored for key in keys]
    assert left == [3, 2, 0, 0]
    assert order[2] == "new"
    assert sorted(set(order)) == ["new", *names]
