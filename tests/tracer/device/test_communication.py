"""Communications on a fake device: launches, waits, and the bounds of a stream."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from rankscope.tracer.capture.group import CommGroup
from rankscope.tracer.capture.launch import Launch, intern_heads
from rankscope.tracer.capture.stream_waits import StreamWaits
from rankscope.tracer.device.communication import Bounds, CommStream
from rankscope.tracer.device.span import timed_span
from rankscope.tracer.span import NONE, SpanFlag, SpanKind
from rankscope.tracer.spool import DropReason
from tests.support.tracer.reading import Row, dropped, open_names, read_spans
from tests.support.tracer.timing import TimedRecorder
from tests.support.tracer.torch.fake_cuda import (
    CudaError,
    FakeCuda,
    FakeEvent,
    FakeStream,
    FakeTensor,
)

if TYPE_CHECKING:
    from pathlib import Path

MS = 1_000_000

EXACT = SpanFlag.DEVICE_BEGIN_KNOWN | SpanFlag.DEVICE_END_KNOWN

NEAR_NS = 30_000


class Job:
    """One communicator with its own stream, as with NCCL, and the compute stream."""

    def __init__(self, folder: Path, cuda: FakeCuda) -> None:
        self.folder = folder
        self.cuda = cuda
        self.timed = TimedRecorder(folder, cuda)
        self.comm: FakeStream = cuda.new_stream()
        recorder = self.timed.recorder
        self.chain = CommStream()
        self.group = CommGroup(
            group_id=7,
            axis="dp",
            name="0",
            members=(0, 1),
            rank=0,
            track_id=recorder.name_id("comm dp"),
        )

    def begin(self, flags: SpanFlag = SpanFlag.ASYNC) -> Launch:
        launch = Launch(
            self.timed.recorder,
            self.group,
            self.timed.recorder.lane(),
            (self.group.next_seq(), NONE, NONE, 1024, 0),
            intern_heads(self.timed.recorder, "all_reduce", SpanKind.DP_COMM),
            SpanFlag.HOST_CLOCK | flags,
        )
        launch.enter_device(0, self.chain, chained=True)
        launch.show()
        return launch

    def issue(self, duration_ns: int) -> tuple[Launch, int, int]:
        """Launch asynchronously; return the launch with its true begin and end."""
        launch = self.begin()
        self.cuda.wait_for(self.comm, self.cuda.stream(0))
        begin_ns = max(self.comm.end_ns, self.cuda.now_ns)
        return launch, begin_ns, self.cuda.kernel(duration_ns, self.comm)

    def wait(self, *launches: Launch) -> None:
        for number, launch in enumerate(launches):
            launch.reach_wait(first=number == 0, alone=len(launches) == 1)
        self.cuda.wait_for(self.cuda.stream(0), self.comm)
        for launch in launches:
            launch.pass_wait()

    def rows(self) -> tuple[list[Row], list[Row]]:
        """Return communications and waits, by number."""
        self.timed.shutdown(turns=30)
        rows = sorted(read_spans(self.folder), key=lambda row: row.seq)
        return [r for r in rows if r.kind != "wait"], [r for r in rows if r.kind == "wait"]


@pytest.fixture
def cuda() -> FakeCuda:
    return FakeCuda()


@pytest.fixture
def job(tmp_path: Path, cuda: FakeCuda) -> Job:
    job = Job(tmp_path, cuda)
    job.timed.timing._pool(0)
    job.timed.turns()
    return job


def test_a_wait_that_blocks_the_stream_gives_the_exact_end(job: Job) -> None:
    first, begin_ns, end_ns = job.issue(40 * MS)
    job.cuda.kernel(10 * MS)  # Beside it.
    compute_ns = job.cuda.stream(0).end_ns
    job.wait(first)
    (row,), (wait,) = job.rows()

    assert row.end_ns == pytest.approx(end_ns, abs=NEAR_NS)
    assert row.start_ns == pytest.approx(begin_ns, abs=NEAR_NS)
    # The work of the communication stream before the first launch is unknown.
    assert row.flags == SpanFlag.ASYNC | SpanFlag.DEVICE_END_KNOWN
    assert row.track == "comm dp"
    assert (wait.name, wait.track, wait.flags) == ("wait all_reduce", "cuda:0 stream 0", EXACT)
    assert wait.start_ns == pytest.approx(compute_ns, abs=NEAR_NS)
    assert wait.end_ns == pytest.approx(end_ns, abs=NEAR_NS)
    assert (wait.group_id, wait.seq) == (row.group_id, row.seq) == (7, 0)
    assert dropped(job.folder) == {}


def test_an_overlapped_communication_has_bounds_not_exact_times(job: Job) -> None:
    first, _, end_ns = job.issue(10 * MS)
    job.cuda.kernel(40 * MS)
    job.wait(first)
    (row,), (wait,) = job.rows()

    assert row.flags == SpanFlag.ASYNC | SpanFlag.END_BOUND
    assert row.end_ns > end_ns + 25 * MS
    assert wait.duration_ns < 20_000


def test_on_an_idle_communication_stream_begin_and_end_are_exact(job: Job) -> None:
    first, *_ = job.issue(5 * MS)
    job.wait(first)
    job.cuda.kernel(3 * MS)
    second, begin_ns, end_ns = job.issue(5 * MS)
    job.wait(second)
    (_, row), _ = job.rows()

    assert row.flags == SpanFlag.ASYNC | EXACT
    assert row.start_ns == pytest.approx(begin_ns, abs=NEAR_NS)
    assert row.end_ns == pytest.approx(end_ns, abs=NEAR_NS)
    assert row.duration_ns == pytest.approx(5 * MS, abs=NEAR_NS)


def test_a_queued_communication_begins_when_the_one_before_it_ends(job: Job) -> None:
    first, _, first_end_ns = job.issue(20 * MS)
    second, _, end_ns = job.issue(10 * MS)
    # A wait for the first only: torch waits for an event of that work.
    first.reach_wait(first=True, alone=True)
    job.cuda.stream(0).end_ns = first_end_ns
    first.pass_wait()
    job.wait(second)
    (_, row), _ = job.rows()

    assert row.flags == SpanFlag.ASYNC | EXACT
    assert row.start_ns == pytest.approx(first_end_ns, abs=NEAR_NS)
    assert row.end_ns == pytest.approx(end_ns, abs=NEAR_NS)


def test_if_a_stream_waits_for_several_at_once_no_end_is_exact(job: Job) -> None:
    first, *_ = job.issue(20 * MS)
    second, *_ = job.issue(10 * MS)
    reached_ns = job.cuda.stream(0).end_ns
    job.wait(first, second)
    rows, waits = job.rows()

    assert all(SpanFlag.END_BOUND in row.flags for row in rows)
    # One of the waits contains the whole time, so that nothing is counted twice.
    assert sum(wait.duration_ns for wait in waits) == pytest.approx(
        job.comm.end_ns - max(reached_ns, 0), abs=100_000
    )
    assert waits[1].duration_ns == 0


def test_a_call_that_runs_on_the_launching_stream_is_exact_on_both_sides(job: Job) -> None:
    launch = job.begin(SpanFlag.NOTHING)
    end_ns = job.cuda.kernel(7 * MS)
    launch.returned_on_device()
    (row,), (wait,) = job.rows()

    assert row.flags == EXACT
    assert row.end_ns == pytest.approx(end_ns, abs=NEAR_NS)
    assert row.duration_ns == pytest.approx(7 * MS, abs=10_000)
    assert (wait.start_ns, wait.duration_ns) == (row.start_ns, row.duration_ns)


def test_a_launch_into_a_capture_leaves_no_record_and_is_counted(job: Job) -> None:
    job.cuda.begin_capture(job.cuda.stream(0))
    launch = job.begin()
    job.wait(launch)
    job.cuda.end_capture(job.cuda.stream(0))

    assert job.rows() == ([], [])
    assert job.cuda.num_in_graph == 0
    assert open_names(job.folder) == []
    assert dropped(job.folder) == {DropReason.CAPTURING: 1}


def test_a_communication_that_hangs_stays_open_and_is_counted_at_shutdown(job: Job) -> None:
    launch, *_ = job.issue(1 << 50)
    job.wait(launch)
    job.timed.turns(5)

    assert open_names(job.folder) == ["all_reduce"]
    assert job.rows() == ([], [])
    assert dropped(job.folder) == {DropReason.DEVICE_ERROR: 2}  # Including its wait.


def test_a_communication_without_a_wait_is_timed_by_the_host_and_marked_so(job: Job) -> None:
    launch, *_ = job.issue(MS)
    launch.end(launch.start_ns + 5, SpanFlag.OPEN)
    (row,), waits = job.rows()

    assert row.flags == SpanFlag.ASYNC | SpanFlag.HOST_CLOCK | SpanFlag.OPEN
    assert waits == []


def test_after_an_error_of_the_device_waits_are_counted_as_lost(job: Job) -> None:
    launch, *_ = job.issue(MS)
    job.cuda.error = CudaError("CUDA error: an illegal memory access was encountered")
    launch.reach_wait(first=True, alone=True)
    launch.pass_wait()

    assert job.rows() == ([], [])
    # The communication and its wait.
    assert dropped(job.folder)[DropReason.DEVICE_ERROR] == 2


@pytest.mark.parametrize("connections", [1, 8])
def test_marks_cost_no_time_on_a_device_whose_streams_run_concurrently(
    tmp_path: Path, connections: int
) -> None:
    untraced_ns = _rounds(FakeCuda(connections=connections), None)
    cuda = FakeCuda(connections=connections)
    job = Job(tmp_path, cuda)
    traced_ns = _rounds(cuda, job)
    job.rows()

    # Ten rounds of 7 ms; without overlap a round would take 12 ms.
    assert untraced_ns == pytest.approx(70 * MS, rel=0.01)
    assert traced_ns == pytest.approx(untraced_ns, rel=0.001)


def _rounds(cuda: FakeCuda, job: Job | None) -> int:
    """Compute, then communicate while computing, ten times; return when the device is done."""
    begun_ns = cuda.now_ns
    compute = cuda.stream(0)
    comm = cuda.new_stream() if job is None else job.comm
    for _ in range(10):
        cuda.kernel(2 * MS)
        launches = [] if job is None else [job.issue(5 * MS)[0]]
        if job is None:
            cuda.wait_for(comm, compute)
            cuda.kernel(5 * MS, comm)
        cuda.kernel(5 * MS)  # Beside it.
        if job is None:
            cuda.wait_for(compute, comm)
        else:
            job.wait(*launches)
    return compute.end_ns - begun_ns


def test_after_a_launch_with_a_bounded_end_the_begin_is_a_bound() -> None:
    stream = CommStream()
    first, second = stream.launch(), stream.launch()
    stream.bound(first, 0, (200_000, 201_000))

    assert stream.bound(second, 50_000, (210_000, 300_000)).begin_known is False


def test_after_an_unknown_launch_the_begin_is_a_bound() -> None:
    stream = CommStream()
    stream.launch()
    lost, late = stream.launch(), stream.launch()
    assert lost == 1

    assert stream.bound(late, 50_000, (60_000, 300_000)) == Bounds(
        50_000, 300_000, begin_known=False, end_known=True
    )


def test_contradicting_bounds_are_not_exact() -> None:
    stream = CommStream()
    first, second = stream.launch(), stream.launch()
    stream.bound(first, 0, (10_000, 200_000))

    # It passed its wait before the one in front of it ended: an error of the clock mapping.
    assert stream.bound(second, 150_000, (190_000, 195_000)) == Bounds(
        150_000, 195_000, begin_known=False, end_known=False
    )


class EventJob:
    """A job that calls on streams of its own and makes others wait by events, as FSDP does."""

    def __init__(self, job: Job) -> None:
        self.job, self.cuda = job, job.cuda
        waits = StreamWaits(job.timed.recorder)
        self._record = waits.wrap_record(FakeEvent.record)
        self.wait = waits.wrap_wait(FakeEvent.wait)

    def call(self, stream: FakeStream, duration_ns: int) -> int:
        """Call on a stream, which then runs the communication; return its end."""
        compute, self.cuda.current[0] = self.cuda.stream(0), stream
        launch = self.job.begin(SpanFlag.NOTHING)
        end_ns = self.cuda.kernel(duration_ns, stream)
        launch.returned_on_device()
        self.cuda.current[0] = compute
        return end_ns

    def event(self, stream: FakeStream) -> FakeEvent:
        event = FakeEvent(self.cuda)
        self._record(event, stream)
        return event


@pytest.fixture
def event_job(job: Job) -> EventJob:
    return EventJob(job)


def forward(job: Job) -> Any:  # noqa: ANN401 - a span
    return timed_span(job.timed.recorder, "forward", SpanKind.FORWARD, on=[FakeTensor(0)])


def test_compute_waits_by_an_event_for_a_call_on_another_stream(
    job: Job, event_job: EventJob
) -> None:
    compute, gather = job.cuda.stream(0), job.cuda.new_stream()
    with forward(job):
        hidden_ns = event_job.call(gather, 4 * MS)
        first = event_job.event(gather)
        computed_ns = job.cuda.kernel(10 * MS)
        end_ns = event_job.call(gather, 40 * MS)
        second = event_job.event(gather)
        for event in (first, second, second):
            event_job.wait(event, compute)
        job.cuda.kernel(5 * MS)
    rows, waits = job.rows()
    (forward_row,) = (row for row in rows if row.name == "forward")
    hidden, exposed = (row for row in rows if row.name == "all_reduce")

    assert {row.flags for row in (hidden, exposed)} == {EXACT | SpanFlag.ASYNC}
    assert hidden.end_ns == pytest.approx(hidden_ns, abs=NEAR_NS)
    assert exposed.end_ns == pytest.approx(end_ns, abs=NEAR_NS)
    # One wait for each, on the stream that computes and inside its span.
    assert [(row.seq, row.track, row.depth) for row in waits] == [
        (0, "cuda:0 stream 0", 1),
        (1, "cuda:0 stream 0", 1),
    ]
    assert waits[0].duration_ns < NEAR_NS
    assert waits[1].start_ns == pytest.approx(computed_ns, abs=NEAR_NS)
    assert waits[1].end_ns == pytest.approx(end_ns, abs=NEAR_NS)
    assert forward_row.end_ns == pytest.approx(end_ns + 5 * MS, abs=NEAR_NS)


def test_a_stream_between_two_others_passes_the_wait_on(job: Job, event_job: EventJob) -> None:
    scatter, copy = job.cuda.new_stream(), job.cuda.new_stream()
    with forward(job):
        end_ns = event_job.call(scatter, 20 * MS)
        event_job.wait(event_job.event(scatter), copy)
        copied_ns = job.cuda.kernel(3 * MS, copy)
        event_job.wait(event_job.event(copy), job.cuda.stream(0))
    rows, (wait,) = job.rows()

    assert rows[-1].end_ns == pytest.approx(end_ns, abs=NEAR_NS)
    assert (wait.seq, wait.track) == (0, "cuda:0 stream 0")
    assert wait.end_ns == pytest.approx(copied_ns, abs=NEAR_NS)


def test_events_of_streams_without_communication_are_left_alone(
    job: Job, event_job: EventJob
) -> None:
    other = job.cuda.new_stream()
    with forward(job):
        event_job.call(job.cuda.stream(0), MS)  # where it computes: it is its own wait
        job.cuda.kernel(9 * MS, other)
        event_job.wait(event_job.event(other), job.cuda.stream(0))
    rows, (wait,) = job.rows()

    assert [row.flags for row in rows if row.name == "all_reduce"] == [EXACT]
    assert wait.duration_ns == pytest.approx(MS, abs=NEAR_NS)


def test_an_event_that_is_recorded_again_means_its_new_place(job: Job, event_job: EventJob) -> None:
    gather, other = job.cuda.new_stream(), job.cuda.new_stream()
    with forward(job):
        event_job.call(gather, MS)
        event = event_job.event(gather)
        event_job._record(event, other)
        event_job.wait(event, job.cuda.stream(0))
    _, waits = job.rows()

    assert waits == []
