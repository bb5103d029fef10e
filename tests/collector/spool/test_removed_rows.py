from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from rankscope.collector.identity import segment_id
from rankscope.collector.spool.process_tail import count_removed_rows
from rankscope.collector.spool.tail import SpoolTail
from rankscope.collector.store.writer import StoreWriter
from rankscope.sources.store_source import StoreSource
from rankscope.tracer.spool import COUNTS, COUNTS_OFFSET, PROCESS_FILE
from tests.support.collector.spool_builder import SpoolBuilder, this_host
from tests.support.collector.stored import names_of

if TYPE_CHECKING:
    from pathlib import Path

    from rankscope.collector.store.store import Store
    from tests.collector.conftest import FakeClock

PROCESS = "ab" * 16
FIRST = segment_id(PROCESS, 0)


def removed(
    end_rows: dict[int, int], *, found: frozenset[int] = frozenset(), num_dropped: int = 0
) -> int:
    return count_removed_rows(
        PROCESS, num_written=100, end_rows=end_rows, found=found, num_dropped=num_dropped
    )


def test_only_a_missing_number_between_others_was_a_segment() -> None:
    other = segment_id("cd" * 16, 7)

    assert removed({FIRST: 40, FIRST + 2: 30}) == 30
    assert removed({FIRST + 1: 60, other: 5}) == 40
    assert removed({FIRST: 40, FIRST + 2: 30}, num_dropped=10) == 20
    assert removed({FIRST: 40, FIRST + 1: 30}) == 0
    assert removed({FIRST: 40, FIRST + 2: 30}, found=frozenset({1})) == 0
    assert removed({FIRST: 80, FIRST + 2: 30}) == 0
    assert removed({}) == 0


@pytest.mark.slow
def test_rows_of_a_segment_that_was_removed_before_it_was_read_count_as_dropped(
    store: Store, run_id: str, tmp_path: Path, clock: FakeClock
) -> None:
    # GIVEN a process that wrote five rows, two of them in a segment that was removed
    spool = SpoolBuilder(tmp_path, run_id=run_id, **this_host())
    spool.span("a")
    spool.seal()
    spool.new_segment()
    unread = spool.segment
    spool.span("b")
    spool.span("c")
    spool.seal()
    spool.new_segment()
    spool.span("d")
    spool.span("e")
    account = bytearray((spool.folder / PROCESS_FILE).read_bytes())
    COUNTS.pack_into(account, COUNTS_OFFSET, 5, 5, 1, 0, -1)
    (spool.folder / PROCESS_FILE).write_bytes(account)
    unread.unlink()
    spool.end()

    # WHEN the rest is read
    progress = SpoolTail(tmp_path, StoreWriter(store), monotonic_ns=clock).poll()

    # THEN the account of the rank is complete, and the removal is reported
    assert names_of(store, run_id) == ["a", "d", "e"]
    assert StoreSource(store).run_info(run_id).num_dropped == 2
    assert any("segments with 2 rows were removed" in problem for problem in progress.problems)

    # AND a second tail counts the same
    SpoolTail(tmp_path, StoreWriter(store), monotonic_ns=clock).poll()
    assert StoreSource(store).run_info(run_id).num_dropped == 2
