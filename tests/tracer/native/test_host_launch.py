"""Communications by the host clock, and a lane's records and open entries."""

from __future__ import annotations

import gc
import sys
from typing import TYPE_CHECKING, Any

import pytest

from rankscope.tracer.capture.group import CommGroup
from rankscope.tracer.capture.launch import Launch, intern_heads
from rankscope.tracer.native.choice import IS_COMPILED
from rankscope.tracer.native.host_launch import ASYNC, BLOCKED_NS, HOST_CLOCK
from rankscope.tracer.record.sampling import Settings
from rankscope.tracer.span import NONE, SpanFlag, SpanKind
from rankscope.tracer.spool import OPEN_CAPACITY, RECORD_BYTES, RecordType
from tests.support.tracer.reading import count_dropped, dropped, open_comms, open_names, read_spans
from tests.support.tracer.recording import recorder_in

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from rankscope.tracer.native.host_launch import Instance
    from rankscope.tracer.record.recorder import Recorder

GROUP_ID = (1 << 64) - 3
SMALL_BYTES = 4096 + 8 * RECORD_BYTES
"""A segment of eight records."""


class Job:
    """A rank that communicates in one group."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.lane = recorder.lane()
        self.group = CommGroup(
            group_id=GROUP_ID,
            axis="dp",
            name="0",
            members=(0, 1),
            rank=0,
            track_id=recorder.name_id("comm dp"),
        )
        self.heads = intern_heads(recorder, "all_reduce", SpanKind.DP_COMM)

    def launch(self, instance: Instance = (4, NONE, NONE, 1024, 0), flags: int = ASYNC) -> Launch:
        launch = Launch(
            self.recorder, self.group, self.lane, instance, self.heads, HOST_CLOCK | flags
        )
        launch.show()
        return launch


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    recorder = recorder_in(tmp_path)
    recorder.begin_steps(3)
    yield Job(recorder)
    recorder.shutdown()


def test_a_launch_and_its_wait_record_their_communication(job: Job, tmp_path: Path) -> None:
    job.lane.set_place(3, 5, 1)
    launch = job.launch((7, NONE, NONE, 1 << 40, 9))
    job.lane.set_place(3, 6, 0)
    shown = open_names(tmp_path)
    end_ns = launch.start_ns + 10 * BLOCKED_NS
    launch.waited_on_host(job.lane, launch.start_ns + 3, end_ns, 0)
    job.recorder.shutdown()

    (span, wait) = read_spans(tmp_path)
    assert shown == ["all_reduce"]
    assert open_names(tmp_path) == []
    assert (launch.seq, launch.end_ns, launch.is_collective, launch.on_device) == (
        *(7, end_ns),
        *(True, False),
    )
    for row in (span, wait):
        comm = (row.group_id, row.seq, row.src_rank, row.dst_rank, row.num_bytes, row.interval_id)
        assert comm == (GROUP_ID, 7, NONE, NONE, 1 << 40, 9)
    assert (span.name, span.kind, span.track, span.flags) == (
        *("all_reduce", "dp-comm", "comm dp"),
        SpanFlag.ASYNC | SpanFlag.HOST_CLOCK,
    )
    assert (span.step, span.microbatch, span.chunk, span.depth) == (3, 5, 1, 0)
    assert (span.start_ns, span.end_ns) == (launch.start_ns, end_ns)
    assert (wait.name, wait.kind, wait.track, wait.flags) == (
        *("wait all_reduce", "wait", "main"),
        SpanFlag.HOST_CLOCK,
    )
    assert (wait.step, wait.microbatch, wait.chunk) == (3, 6, 0)
    assert (wait.start_ns, wait.end_ns) == (launch.start_ns + 3, end_ns)


@pytest.mark.parametrize(
    ("flags", "blocked_ns", "is_bound"),
    [(ASYNC, BLOCKED_NS - 1, True), (ASYNC, BLOCKED_NS, False), (0, 1, False)],
)
def test_the_end_is_a_bound_if_an_asynchronous_launch_was_found_done(
    job: Job, tmp_path: Path, flags: int, blocked_ns: int, *, is_bound: bool
) -> None:
    launch = job.launch(flags=flags)
    launch.waited_on_host(job.lane, launch.start_ns, launch.start_ns + blocked_ns, 0)
    job.recorder.shutdown()

    span, wait = sorted(read_spans(tmp_path), key=lambda row: row.name)
    assert bool(span.flags & SpanFlag.END_BOUND) is is_bound
    assert not wait.flags & SpanFlag.END_BOUND


def test_the_first_caller_sets_the_end(job: Job, tmp_path: Path) -> None:
    launch = job.launch()
    launch.end(launch.start_ns + 20, SpanFlag.ERROR)
    launch.end(launch.start_ns + 30)
    launch.waited_on_host(job.lane, launch.start_ns, launch.start_ns + 40, 0)
    claimed = (launch.claim(), job.launch().claim(), launch.end_ns)
    job.recorder.shutdown()

    assert claimed == (False, True, launch.start_ns + 20)
    assert sorted((row.name, row.duration_ns) for row in read_spans(tmp_path)) == [
        ("all_reduce", 20),
        ("wait all_reduce", 40),
    ]


def test_a_call_that_waited_by_itself_was_blocked_from_start_to_end(
    job: Job, tmp_path: Path
) -> None:
    launch = job.launch((0, 0, 1, 8, 0), flags=0)
    launch.set_source(5, 11)
    launch.returned_on_host(job.lane, launch.start_ns + 70)
    job.recorder.shutdown()

    rows = read_spans(tmp_path)
    assert [(row.src_rank, row.dst_rank, row.seq, row.num_bytes) for row in rows] == [
        (5, 1, 11, 8)
    ] * 2
    assert [row.duration_ns for row in rows] == [70, 70]
    assert (launch.seq, launch.is_collective) == (11, False)


def test_a_lost_launch_is_neither_shown_nor_written(job: Job, tmp_path: Path) -> None:
    launch = Launch(job.recorder, job.group, job.lane, (0, NONE, NONE, 8, 0), job.heads, ASYNC)
    launch.lose()
    launch.show()
    shown = open_names(tmp_path)
    launch.end(launch.start_ns + 1)
    launch.hide()
    job.recorder.shutdown()

    assert shown == []
    assert read_spans(tmp_path) == []


def test_a_launch_left_out_by_request_is_not_counted_as_dropped(tmp_path: Path) -> None:
    job = Job(recorder_in(tmp_path, settings=Settings(recording=False)))
    job.recorder.begin_steps()
    launch = job.launch()
    launch.waited_on_host(job.lane, launch.start_ns, launch.start_ns + 9, 0)
    job.recorder.step()
    job.recorder.shutdown()

    assert read_spans(tmp_path) == []
    assert dropped(tmp_path) == {}


def test_launches_continue_in_the_next_segment_and_drops_are_counted(tmp_path: Path) -> None:
    job = Job(recorder_in(tmp_path, segment_bytes=SMALL_BYTES, spool_bytes=3 * SMALL_BYTES))
    for seq in range(100):
        launch = job.launch((seq, NONE, NONE, 8, 0))
        launch.returned_on_host(job.lane, launch.start_ns + 1)
    job.recorder.shutdown()

    rows = read_spans(tmp_path)
    assert len(rows) + count_dropped(tmp_path) == 200
    assert len(rows) >= 16
    assert [row.seq for row in rows if row.kind != "wait"][:8] == list(range(8))


def test_an_open_entry_has_the_size_and_the_sides_and_leaves_none_to_the_next(
    job: Job, tmp_path: Path
) -> None:
    launch = job.launch((7, 3, 5, 1 << 40, 9))
    (received,) = open_comms(tmp_path)
    launch.end(launch.start_ns + 1)
    entry = job.recorder.comm_lane.open(5, job.heads[0])  # takes the same place
    assert entry is not None
    (span,) = open_comms(tmp_path)

    assert received == (1 << 40, 3, 5)
    assert span[1] == span[2]


def test_an_open_entry_is_freed_once(job: Job) -> None:
    segment = job.lane.segment
    entry = job.lane.open(5, 1 << 32)
    assert entry is not None
    num_left = len(segment.open_slots)
    entry.close()
    entry.close()

    assert (num_left, len(segment.open_slots)) == (OPEN_CAPACITY - 1, OPEN_CAPACITY)


def test_a_full_open_table_raises_nothing(job: Job, tmp_path: Path) -> None:
    launches = [job.launch() for _ in range(OPEN_CAPACITY + 3)]
    num_shown = len(open_names(tmp_path))
    for launch in launches:
        launch.end(launch.start_ns + 1)
    job.recorder.shutdown()

    assert num_shown == OPEN_CAPACITY
    assert open_names(tmp_path) == []
    assert len(read_spans(tmp_path)) == OPEN_CAPACITY + 3


@pytest.mark.slow
def test_launches_leak_no_reference(tmp_path: Path) -> None:
    job = Job(recorder_in(tmp_path, spool_bytes=1 << 17))
    lanes = (job.lane, job.recorder.comm_lane)
    second = bytes(RECORD_BYTES // 2)

    def some(num: int) -> list[int]:
        for seq in range(num):
            launch = job.launch((seq, NONE, NONE, 8, 0))
            launch.waited_on_host(job.lane, launch.start_ns, launch.start_ns + 1, 0)
            job.lane.append(int(RecordType.STEP), 5, 1, job.lane.place, 4, 0, second)
        gc.collect()
        held = (job.recorder, job.group, job.heads, second, None, True, *lanes)
        return [sys.getrefcount(one) for one in (*held, *(lane.segment for lane in lanes))]

    before, after = some(1_000), some(20_000)
    job.recorder.shutdown()

    # A leak would add 20,000; other objects of this process vary by some dozens.
    grown = [two - one for one, two in zip(before, after, strict=True)]
    assert max(map(abs, grown)) < 1_000, grown


@pytest.mark.skipif(not IS_COMPILED, reason="only the compiled lane checks its arguments")
@pytest.mark.parametrize(
    "wrong",
    [
        (),
        (1, 2, 3),
        ("head", 5, 6, bytes(16), 5, 0),
        (1, None, 6, bytes(16), 5, 0),
        (1, 1 << 62, 1 << 62, bytes(16), 5, 0),
        (1, 5, 6, bytes(15), 5, 0),
        (1, 5, 6, "place", 5, 0),
        (1, 5, 6, bytes(16), 5, 0, bytes(63)),
        (1, 5, 6, bytes(16), 5, 0, "second"),
        (1, 5, 6, bytes(16), 5, 0, None, None),
    ],
)
def test_invalid_record_arguments_are_rejected_and_take_no_row(
    job: Job, wrong: tuple[Any, ...]
) -> None:
    num_claimed = job.lane.num_claimed()

    for write in (job.lane.write, job.lane.append):
        with pytest.raises((TypeError, OverflowError)):
            write(*wrong)
    assert job.lane.num_claimed() == num_claimed


@pytest.mark.skipif(not IS_COMPILED, reason="only the compiled type checks its arguments")
@pytest.mark.parametrize(
    ("at", "wrong"),
    [
        (0, None),
        (1, None),
        (2, None),
        (3, (1, 2, 3)),
        (3, (1, 1 << 40, 0, 0, 0)),
        (3, ("seq", 0, 0, 0, 0)),
        (4, (1,)),
        (5, "flags"),
    ],
)
def test_invalid_launch_arguments_are_rejected(job: Job, at: int, wrong: object) -> None:
    arguments: list[Any] = [
        *(job.recorder, job.group, job.lane),
        *((0, NONE, NONE, 8, 0), job.heads, ASYNC),
    ]
    make: Any = Launch
    make(*arguments)
    with pytest.raises(TypeError):
        make(*arguments, flags=0)
    arguments[at] = wrong

    with pytest.raises((TypeError, AttributeError, OverflowError)):
        make(*arguments)
