from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from rankscope.collector.read.runs import read_events
from rankscope.collector.read.spans import read_spans
from rankscope.collector.spool.tail import SegmentPolicy, SpoolTail
from rankscope.collector.store.writer import StoreWriter
from rankscope.sources.store_source import StoreSource
from rankscope.tracer.spool import PROCESS_FILE
from tests.support.collector.spool_builder import SpoolBuilder, this_host
from tests.support.collector.stored import names_of

if TYPE_CHECKING:
    from rankscope.collector.store.store import Store
    from tests.collector.conftest import FakeClock

pytestmark = pytest.mark.slow


def gone_host() -> dict[str, Any]:
    """Return the identity of a process of an earlier boot of this host."""
    return this_host() | {"boot_id": bytes(15) + b"x"}


def test_a_folder_that_is_removed_while_it_is_read_is_reported(
    store: Store, run_id: str, tmp_path: Path, clock: FakeClock
) -> None:
    gone = SpoolBuilder(tmp_path, run_id=run_id, rank=0, **this_host())
    stays = SpoolBuilder(tmp_path, run_id=run_id, rank=1, **this_host())
    tail = SpoolTail(tmp_path, StoreWriter(store), monotonic_ns=clock)
    tail.poll()
    shutil.rmtree(gone.folder)
    stays.span("still here")
    stays.end()

    progress = tail.poll()

    assert [str(gone.folder) in problem for problem in progress.problems] == [True]
    assert names_of(store, run_id) == ["still here"]
    ranks = StoreSource(store).run_info(run_id).epochs[0].ranks
    assert [rank.exit_state for rank in ranks] == ["lost", "ended"]


def test_a_rank_whose_names_are_removed_keeps_no_other_from_being_stored(
    store: Store, run_id: str, tmp_path: Path
) -> None:
    gone, stays = (
        SpoolBuilder(tmp_path, run_id=run_id, rank=rank, **this_host()) for rank in (0, 1)
    )
    for spool in (gone, stays):
        spool.span("first")
        spool.span("second")

    def clock() -> int:
        """Remove the names when the segments have been read."""
        if segments <= {os.path.realpath(file) for file in Path("/proc/self/fd").iterdir()}:
            (gone.folder / PROCESS_FILE).unlink(missing_ok=True)
        return 10**12

    segments = {str(gone.segment), str(stays.segment)}

    progress = SpoolTail(tmp_path, StoreWriter(store), monotonic_ns=clock).poll()

    assert [str(gone.folder) in problem for problem in progress.problems] == [True]
    assert names_of(store, run_id) == ["first"]


def test_a_half_written_line_waits_for_its_end(
    store: Store, run_id: str, tmp_path: Path, clock: FakeClock
) -> None:
    spool = SpoolBuilder(tmp_path, run_id=run_id, **this_host())
    spool.append_line("events.jsonl", "not JSON")
    spool.append_line("events.jsonl", '{"at_ns": 1, "kind": "note", ', end="")
    tail = SpoolTail(tmp_path, StoreWriter(store), monotonic_ns=clock)
    tail.poll()
    assert read_events(store, run_id) == []

    spool.append_line("events.jsonl", '"text": "whole", "data": {}}')
    tail.poll()

    assert [event["text"] for event in read_events(store, run_id)] == ["whole"]


def test_stored_segments_are_deleted_and_live_ones_are_kept(
    store: Store, run_id: str, tmp_path: Path, clock: FakeClock
) -> None:
    spool = SpoolBuilder(tmp_path, run_id=run_id, capacity=2, **this_host())
    spool.span("a")
    spool.span("b", start_ns=1)
    spool.seal()
    finished = spool.segment
    spool.new_segment()
    spool.span("c", start_ns=2)
    tail = SpoolTail(
        tmp_path, StoreWriter(store), segment_policy=SegmentPolicy.DELETE, monotonic_ns=clock
    )

    tail.poll()
    tail.poll()

    assert not finished.exists()
    assert spool.segment.exists()
    assert names_of(store, run_id) == ["a", "b"]


def test_a_stored_segment_with_an_open_span_is_kept(
    store: Store, run_id: str, tmp_path: Path, clock: FakeClock
) -> None:
    spool = SpoolBuilder(tmp_path, run_id=run_id, capacity=1, **this_host())
    spool.open_span(0, "step", start_ns=5, step=0)
    spool.span("a")
    spool.seal()

    SpoolTail(
        tmp_path, StoreWriter(store), segment_policy=SegmentPolicy.DELETE, monotonic_ns=clock
    ).poll()

    assert names_of(store, run_id) == ["a"]
    assert spool.segment.exists()


@pytest.mark.parametrize("end", ["ended", "failed", "lost"])
def test_an_ended_process_leaves_no_segment_and_keeps_its_end(
    store: Store, run_id: str, tmp_path: Path, end: str
) -> None:
    # GIVEN a process that ended in any way, with a span that was open
    spool = SpoolBuilder(tmp_path, run_id=run_id, capacity=1, **gone_host())
    spool.open_span(0, "all-reduce", start_ns=5, step=7)
    spool.span("a")
    spool.seal()
    spool.new_segment()
    if end != "lost":
        spool.write_json("exit.json", {"state": end, "at_ns": 9})

    # WHEN it is read, and read again by a reader that is started later
    for _ in range(2):
        tail = SpoolTail(tmp_path, StoreWriter(store), segment_policy=SegmentPolicy.DELETE)
        tail.poll()
        tail.poll()
        tail.close()

        # THEN its segments are gone, and its event has the open span
        assert list(spool.folder.glob("seg-*")) == []
        assert names_of(store, run_id) == ["a"]
        (event,) = read_events(store, run_id)
        assert event["kind"] == ("lost" if end == "lost" else "exit")
        assert ("all-reduce" in event["text"]) == (end == "lost")
    (rank,) = StoreSource(store).run_info(run_id).epochs[0].ranks
    assert rank.exit_state == end


def test_the_open_spans_of_a_process_without_a_record_are_kept(
    store: Store, run_id: str, tmp_path: Path
) -> None:
    # After a restart, nothing in the store would say that its end is known.
    spool = SpoolBuilder(tmp_path, run_id=run_id, **gone_host())
    spool.open_span(0, "init", start_ns=5, step=0)
    for _ in range(2):
        SpoolTail(tmp_path, StoreWriter(store), segment_policy=SegmentPolicy.DELETE).poll()

        (event,) = read_events(store, run_id)
        assert "init" in event["text"]


def test_a_long_segment_is_read_to_its_end_in_one_poll(
    store: Store, run_id: str, tmp_path: Path
) -> None:
    # Longer than the first read of 512 rows, with a torn row in the middle.
    spool = SpoolBuilder(tmp_path, run_id=run_id, capacity=3_000)
    for row in range(3_000):
        spool.claim() if row == 600 else spool.span(start_ns=row, step=row)
    spool.end()

    progress = SpoolTail(tmp_path, StoreWriter(store)).poll()

    assert (progress.num_spans, progress.num_torn) == (2_999, 1)
    assert read_spans(store, run_id)["step"].to_pylist() == [
        step for step in range(3_000) if step != 600
    ]
