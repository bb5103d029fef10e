"""Processes with more segments than a reader may have open."""

from __future__ import annotations

import os
import resource
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from rankscope.collector.spool.process_tail import MAX_READERS, MAX_SKIPPED_LOGGED
from rankscope.collector.spool.tail import CUTS_PER_POLL, SegmentPolicy, SpoolTail
from rankscope.collector.store.writer import StoreWriter
from tests.support.collector.kept_cuts import KeptCuts
from tests.support.collector.spool_builder import SpoolBuilder, this_host
from tests.support.collector.stored import names_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rankscope.collector.identity import Row
    from rankscope.collector.store.store import Store
    from tests.collector.conftest import FakeClock

pytestmark = pytest.mark.slow

NUM_SEGMENTS = 3 * MAX_READERS
SECOND_NS = 1_000_000_000


def num_open(folder: Path) -> int:
    """Return how many files of a folder this process has open."""
    return sum(folder in link.resolve().parents for link in Path("/proc/self/fd").iterdir())


@contextmanager
def few_descriptors(num_left: int) -> Iterator[None]:
    """Leave this process a few descriptors, as other processes' segments would."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    held: list[int] = []
    # Above all that are open: in a large process, numbers further below may be in use.
    highest = max(int(each.name) for each in Path("/proc/self/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 65, before[1]))
    try:
        with suppress(OSError):
            while True:
                held.append(os.open("/dev/null", os.O_RDONLY))
        for _ in range(num_left):
            os.close(held.pop())
        yield
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def many_segments(spool: Path, run_id: str, *, sealed: bool) -> SpoolBuilder:
    """Return a running process with a row in each of its many segments."""
    builder = SpoolBuilder(spool, run_id=run_id, capacity=2, **this_host())
    add_segments(builder, sealed=sealed)
    return builder


def add_segments(builder: SpoolBuilder, *, sealed: bool) -> None:
    for number in range(NUM_SEGMENTS):
        if number:
            builder.new_segment()
        builder.span(f"s{number}", start_ns=number)
        if sealed:
            builder.seal()


def test_thousands_of_small_segments_are_read_with_few_open(
    store: Store, run_id: str, tmp_path: Path, clock: FakeClock
) -> None:
    builder = many_segments(tmp_path, run_id, sealed=True)
    tail = SpoolTail(
        tmp_path, StoreWriter(store), segment_policy=SegmentPolicy.DELETE, monotonic_ns=clock
    )

    tail.poll()

    assert num_open(tmp_path) <= MAX_READERS
    assert sorted(names_of(store, run_id)) == sorted(f"s{n}" for n in range(NUM_SEGMENTS))
    assert not list(builder.folder.glob("seg-*"))
    tail.close()


def test_a_poll_of_many_small_segments_ends_early_and_the_process_after_all(
    tmp_path: Path, clock: FakeClock
) -> None:
    # GIVEN an ended process with more small segments than a poll reads
    builder = SpoolBuilder(tmp_path, run_id="run", capacity=1, **this_host())
    num_segments = 2 * CUTS_PER_POLL
    for number in range(num_segments):
        if number:
            builder.new_segment()
        builder.span("a", start_ns=number)
    builder.end()
    sink = KeptCuts()
    tail = SpoolTail(tmp_path, sink, monotonic_ns=clock)

    # WHEN it is polled until the process has ended
    num_cuts: list[int] = []
    while not num_cuts or tail.poll().num_running:
        num_cuts.append(len(sink.cuts))

    # THEN no poll read all
    assert len(sink.cuts) == num_segments
    assert max(b - a for a, b in pairwise(num_cuts)) <= CUTS_PER_POLL + MAX_READERS


def test_segments_that_are_all_written_to_take_turns(
    store: Store, run_id: str, tmp_path: Path, clock: FakeClock
) -> None:
    # GIVEN more lanes than open segments, each with a row that is final at its second reading
    builder = many_segments(tmp_path, run_id, sealed=False)
    tail = SpoolTail(tmp_path, StoreWriter(store), monotonic_ns=clock)

    for _ in range(12):
        tail.poll()
        assert num_open(tmp_path) <= MAX_READERS
        clock.now_ns += SECOND_NS

    # THEN the rows of all are stored once, and later ones too
    assert sorted(names_of(store, run_id)) == sorted(f"s{n}" for n in range(NUM_SEGMENTS))
    builder.end()
    tail.close()


class KeptRows(KeptCuts):
    """A sink that also keeps the texts of events."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def upsert(self, table: str, rows: Sequence[Row]) -> None:
        self.texts += [row["text"] for row in rows if table == "events"]


@pytest.mark.parametrize("num_left", [0, 1, 3, 4, 5, 8, 20])
def test_a_reader_without_free_descriptors_gives_up_no_process(
    tmp_path: Path, clock: FakeClock, num_left: int
) -> None:
    # GIVEN a reader that follows a process with many segments and a line file
    builder = SpoolBuilder(tmp_path, run_id="run", capacity=2, **this_host())
    sink = KeptRows()
    tail = SpoolTail(tmp_path, sink, monotonic_ns=clock)
    tail.poll()
    add_segments(builder, sealed=True)
    builder.append_line("events.jsonl", '{"at_ns": 1, "kind": "note", "text": "x", "data": {}}')

    # WHEN it has few descriptors for some polls, and then enough
    problems: list[str] = []
    with few_descriptors(num_left):
        for _ in range(3):
            with suppress(OSError):  # of the listing of the spool
                problems += tail.poll().problems
    builder.end()
    for _ in range(3):
        problems += tail.poll().problems

    # THEN the sink has all rows once
    assert problems == []
    names = [str(name) for cut in sink.cuts for name in cut.rows.spans["name"].to_pylist()]
    assert sorted(names) == sorted(f"s{n}" for n in range(NUM_SEGMENTS))
    assert sink.texts[0] == "x"
    tail.close()


def test_many_segments_that_cannot_be_read_are_few_lines_of_the_log(
    store: Store, run_id: str, tmp_path: Path, clock: FakeClock
) -> None:
    builder = SpoolBuilder(tmp_path, run_id=run_id, **this_host())
    for number in range(1, 100):
        (builder.folder / f"seg-{number:06d}.rsp").write_bytes(b"x" * 5_000)
    tail = SpoolTail(tmp_path, StoreWriter(store), monotonic_ns=clock)

    problems = [problem for _ in range(3) for problem in tail.poll().problems]

    assert len(problems) == MAX_SKIPPED_LOGGED + 1
    tail.close()
