"""Spans on a fake device, from their marks to their records."""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING

import pytest

from rankscope.tracer.capture.forward_backward import ComputeCapture
from rankscope.tracer.device.span import timed_span
from rankscope.tracer.span import COMM_KINDS, SpanFlag, SpanKind
from rankscope.tracer.spool import DropReason
from tests.support.tracer.reading import dropped, missing_kinds, open_names, read_spans
from tests.support.tracer.timing import TimedRecorder
from tests.support.tracer.torch.fake_cuda import CudaError, FakeCuda, FakeEvent, FakeTensor

if TYPE_CHECKING:
    from pathlib import Path

MS = 1_000_000
ON_DEVICE = SpanFlag.DEVICE_BEGIN_KNOWN | SpanFlag.DEVICE_END_KNOWN


@pytest.fixture
def cuda() -> FakeCuda:
    return FakeCuda(drift=20e-6)


@pytest.fixture
def timed(tmp_path: Path, cuda: FakeCuda) -> TimedRecorder:
    timed = TimedRecorder(tmp_path, cuda)
    timed.recorder.begin_steps(3)
    return timed


def events(folder: Path) -> list[dict[str, object]]:
    path = folder / "events.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_a_span_is_as_long_as_the_device_took_not_the_host(timed: TimedRecorder) -> None:
    compute = ComputeCapture(timed.recorder)
    timed.turns()
    with compute.span("forward", SpanKind.FORWARD, microbatch=2, chunk=1, on=[FakeTensor(0)]):
        end_ns = timed.cuda.kernel(50 * MS)
    issued_ns = timed.cuda.now_ns
    timed.turns(1)
    assert read_spans(timed.recorder.folder) == []  # The device has not reached it yet.
    timed.shutdown(turns=5)

    (row,) = read_spans(timed.recorder.folder)
    assert (row.name, row.kind, row.step, row.microbatch, row.chunk) == (
        "forward",
        "forward",
        3,
        2,
        1,
    )
    assert (row.track, row.depth, row.flags) == ("cuda:0 stream 0", 0, ON_DEVICE)
    assert row.duration_ns == pytest.approx(50 * MS, abs=10_000)
    assert row.end_ns == pytest.approx(end_ns, abs=25_000)
    assert row.end_ns > issued_ns
    assert dropped(timed.recorder.folder) == {}


def test_the_optimizer_is_timed_on_the_device_of_its_parameters(timed: TimedRecorder) -> None:
    for on in ([FakeTensor(1)], ["on no device"]):
        span = timed_span(timed.recorder, "optimizer", SpanKind.OPTIMIZER, on=on)
        with span:
            timed.cuda.kernel(3 * MS, timed.cuda.stream(1))
    timed.shutdown(turns=3)

    device, host = sorted(read_spans(timed.recorder.folder), key=lambda row: row.track)
    assert (device.track, device.flags) == ("cuda:1 stream 0", ON_DEVICE)
    assert device.duration_ns == pytest.approx(3 * MS, abs=10_000)
    assert (host.track, host.flags) == ("main", SpanFlag.HOST_CLOCK)


def test_each_stream_of_each_device_has_a_track(timed: TimedRecorder) -> None:
    for device in (0, 1):
        for stream in (
            timed.cuda.stream(device),
            timed.cuda.new_stream(device),
            timed.cuda.new_stream(device),
        ):
            timed.cuda.current[device] = stream
            with timed_span(
                timed.recorder, "optimizer", SpanKind.OPTIMIZER, on=[FakeTensor(device)]
            ):
                timed.cuda.kernel(MS, stream)
    timed.shutdown(turns=3)

    assert [
        row.track for row in sorted(read_spans(timed.recorder.folder), key=lambda row: row.track)
    ] == [f"cuda:{device} stream {stream}" for device in (0, 1) for stream in (0, 1, 2)]


def test_a_span_that_ends_on_another_stream_waits_for_both(timed: TimedRecorder) -> None:
    first, second = timed.cuda.stream(0), timed.cuda.new_stream()
    timed.cuda.kernel(100 * MS, first)
    with timed_span(timed.recorder, "optimizer", SpanKind.OPTIMIZER, on=[FakeTensor(0)]):
        timed.cuda.current[0] = second
    timed.turns(2)
    assert timed.timing.active
    assert timed.timing.num_resolved == 0
    timed.shutdown(turns=10)

    # Its end is before its begin: counted, not recorded.
    assert read_spans(timed.recorder.folder) == []
    assert dropped(timed.recorder.folder) == {DropReason.DEVICE_ERROR: 1}


def test_only_the_oldest_record_of_a_stream_is_queried(timed: TimedRecorder) -> None:
    timed.turns()
    timed.cuda.kernel(500 * MS)
    for _ in range(50):
        with timed_span(timed.recorder, "optimizer", SpanKind.OPTIMIZER, on=[FakeTensor(0)]):
            timed.cuda.kernel(MS)
    timed.turns(5)
    anchors = timed.timing._clocks[0]
    assert not anchors.renewing
    before = timed.cuda.num_queries

    timed.timing.turn()

    assert timed.cuda.num_queries == before + 1
    timed.shutdown()


def test_an_exhausted_pool_loses_spans_counts_them_and_never_waits(
    tmp_path: Path, cuda: FakeCuda
) -> None:
    timed = TimedRecorder(tmp_path, cuda, capacity=16)
    cuda.kernel(100 * MS)
    begun_ns = cuda.now_ns
    for _ in range(20):
        with timed_span(timed.recorder, "optimizer", SpanKind.OPTIMIZER, on=[FakeTensor(0)]):
            pass
    assert cuda.now_ns - begun_ns < MS
    timed.turns(1)  # No event is left for an anchor either, so nothing can be mapped,
    cuda.now_ns += 200 * MS
    timed.shutdown(turns=3)

    counts = dropped(tmp_path)
    assert counts[DropReason.NO_EVENT] == 12
    assert len(read_spans(tmp_path)) + counts.get(DropReason.DEVICE_ERROR, 0) == 8


def test_nothing_is_recorded_into_a_capture_and_losses_are_counted_and_reported(
    timed: TimedRecorder,
) -> None:
    stream = timed.cuda.stream(0)
    timed.cuda.begin_capture(stream)
    for _ in range(3):
        with timed_span(timed.recorder, "optimizer", SpanKind.OPTIMIZER, on=[FakeTensor(0)]):
            timed.cuda.kernel(MS)
    timed.cuda.end_capture(stream)
    with timed_span(timed.recorder, "optimizer", SpanKind.OPTIMIZER, on=[FakeTensor(0)]):
        timed.cuda.kernel(MS)
    timed.shutdown(turns=3)

    assert timed.cuda.num_in_graph == 0
    assert len(read_spans(timed.recorder.folder)) == 1
    assert dropped(timed.recorder.folder) == {DropReason.CAPTURING: 3}
    assert [event["text"] for event in events(timed.recorder.folder)] == [
        "work that is captured into a CUDA graph is not timed, nor are its parts"
    ]


def test_a_capture_that_begins_inside_a_span_gets_no_mark(timed: TimedRecorder) -> None:
    with timed_span(timed.recorder, "optimizer", SpanKind.OPTIMIZER, on=[FakeTensor(0)]):
        timed.cuda.begin_capture(timed.cuda.stream(0))
    timed.cuda.end_capture(timed.cuda.stream(0))
    timed.shutdown(turns=3)

    assert timed.cuda.num_in_graph == 0
    assert dropped(timed.recorder.folder) == {DropReason.CAPTURING: 1}


def test_queries_during_a_capture_of_another_thread_do_not_invalidate_it(
    timed: TimedRecorder,
) -> None:
    with timed_span(timed.recorder, "optimizer", SpanKind.OPTIMIZER, on=[FakeTensor(0)]):
        timed.cuda.kernel(MS)
    captured = timed.cuda.new_stream()
    timed.cuda.begin_capture(captured, "global")
    timed.turns(5)
    timed.cuda.end_capture(captured)
    timed.shutdown()

    assert len(read_spans(timed.recorder.folder)) == 1
    assert dropped(timed.recorder.folder) == {}


def test_the_fake_invalidates_a_capture_if_a_strict_thread_queries(cuda: FakeCuda) -> None:
    event = cuda.new_event()
    event.record(cuda.new_stream())
    captured = cuda.new_stream()
    cuda.begin_capture(captured, "global")

    with pytest.raises(CudaError):
        event.query()
    with pytest.raises(CudaError):
        cuda.end_capture(captured)


def test_an_asynchronous_error_turns_device_timing_off_and_host_spans_go_on(
    timed: TimedRecorder,
) -> None:
    timed.turns()
    for _ in range(2):
        with timed_span(timed.recorder, "optimizer", SpanKind.OPTIMIZER, on=[FakeTensor(0)]):
            timed.cuda.kernel(MS)
    timed.cuda.error = CudaError("CUDA error: device-side assert triggered")
    timed.turns(2)
    assert not timed.timing.active
    timed.recorder.step()
    with timed_span(timed.recorder, "optimizer", SpanKind.OPTIMIZER, on=[FakeTensor(0)]):
        pass
    timed.recorder.step()
    timed.shutdown()

    (row,) = read_spans(timed.recorder.folder)
    assert row.flags == SpanFlag.HOST_CLOCK
    assert dropped(timed.recorder.folder) == {DropReason.DEVICE_ERROR: 2}
    # When a device received its work does not say when it did it.
    on_device = {*COMM_KINDS, "forward", "backward", "optimizer", "other", "wait"}
    assert missing_kinds(timed.recorder.folder) == [on_device, on_device]
    (event,) = events(timed.recorder.folder)
    assert event["text"] == "device timing turned itself off"
    assert event["data"] == {
        "error": "CudaError('CUDA error: device-side assert triggered')",
        "num_lost": 2,
    }


def test_an_error_in_the_middle_of_resolving_loses_no_count(
    timed: TimedRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed.turns()
    for _ in range(3):
        with timed_span(timed.recorder, "optimizer", SpanKind.OPTIMIZER, on=[FakeTensor(0)]):
            timed.cuda.kernel(30 * MS)

    def fails(*about: object) -> float:
        raise CudaError("CUDA error: unspecified launch failure")

    timed.turns()  # An anchor; none of the three is done.
    monkeypatch.setattr(FakeEvent, "elapsed_time", fails)
    timed.shutdown(turns=3)

    assert read_spans(timed.recorder.folder) == []
    assert dropped(timed.recorder.folder) == {DropReason.DEVICE_ERROR: 3}


def test_a_device_error_at_a_mark_reaches_the_job_at_its_next_call(timed: TimedRecorder) -> None:
    error = CudaError("CUDA error: device-side assert triggered")
    span = timed_span(timed.recorder, "optimizer", SpanKind.OPTIMIZER, on=[FakeTensor(0)])
    timed.cuda.error = error

    with pytest.raises(CudaError) as caught, span:
        timed.cuda.kernel(MS)

    assert caught.value is error
    timed.shutdown(turns=1)
    assert dropped(timed.recorder.folder) == {DropReason.DEVICE_ERROR: 1}


def test_an_exception_inside_passes_and_marks_the_span(timed: TimedRecorder) -> None:
    raised = KeyError("mine")
    span = timed_span(timed.recorder, "optimizer", SpanKind.OPTIMIZER, on=[FakeTensor(0)])

    with pytest.raises(KeyError) as caught, span:
        raise raised
    timed.shutdown(turns=3)

    assert caught.value is raised
    assert read_spans(timed.recorder.folder)[0].flags == ON_DEVICE | SpanFlag.ERROR


def test_shutdown_counts_what_the_device_never_reached(timed: TimedRecorder) -> None:
    timed.cuda.kernel(1 << 50)
    with timed_span(timed.recorder, "optimizer", SpanKind.OPTIMIZER, on=[FakeTensor(0)]):
        pass
    timed.shutdown(turns=2)

    assert read_spans(timed.recorder.folder) == []
    assert dropped(timed.recorder.folder) == {DropReason.DEVICE_ERROR: 1}


def test_a_top_level_span_is_open_while_the_host_is_in_it(timed: TimedRecorder) -> None:
    with timed_span(timed.recorder, "optimizer", SpanKind.OPTIMIZER, on=[FakeTensor(0)]):
        assert open_names(timed.recorder.folder) == ["optimizer"]
    assert open_names(timed.recorder.folder) == []
    timed.shutdown()


def test_the_resolver_lag_is_reported_while_something_is_pending(timed: TimedRecorder) -> None:
    timed.cuda.kernel(50 * MS)
    with timed_span(timed.recorder, "optimizer", SpanKind.OPTIMIZER, on=[FakeTensor(0)]):
        pass
    timed.turns(2)
    assert timed.recorder.resolver_lag_ns == pytest.approx(40 * MS, abs=MS)
    timed.turns(2)
    assert timed.recorder.resolver_lag_ns == 0
    timed.shutdown()


def test_anchors_are_written_with_drift_and_error(timed: TimedRecorder) -> None:
    with timed_span(timed.recorder, "optimizer", SpanKind.OPTIMIZER, on=[FakeTensor(0)]):
        timed.cuda.kernel(MS)
    timed.turns(500)  # 10 s
    timed.shutdown()

    path = timed.recorder.folder / "device_clock.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[0]["drift_error_ppb"] == 100_000
    last = lines[-1]
    assert (last["device"], last["uuid"]) == (0, "GPU-fake-0")
    assert last["error_ns"] < 10_000
    assert abs(last["drift_ppb"] - 20_000) <= last["drift_error_ppb"] < 3_000


def test_the_resolver_selects_the_jobs_device_before_any_query(timed: TimedRecorder) -> None:
    timed.turns(2)
    assert timed.cuda.thread_devices == {}  # The job has not used a device yet.
    with timed_span(timed.recorder, "optimizer", SpanKind.OPTIMIZER, on=[FakeTensor(5)]):
        timed.cuda.kernel(MS, timed.cuda.stream(5))
    assert timed.cuda.num_queries == 0
    timed.shutdown(turns=2)

    assert timed.cuda.thread_devices == {threading.get_ident(): 5}


def test_the_recorders_own_thread_resolves(tmp_path: Path, cuda: FakeCuda) -> None:
    timed = TimedRecorder(tmp_path, cuda)
    timed.recorder.on_tick(timed.timing.turn)
    for _ in range(100):
        with timed_span(timed.recorder, "optimizer", SpanKind.OPTIMIZER, on=[FakeTensor(0)]):
            cuda.kernel(MS // 100)
    cuda.now_ns += 100 * MS
    timed.shutdown()  # The shutdown makes the thread take its turn.

    assert len(read_spans(tmp_path)) == 100
    assert dropped(tmp_path) == {}
