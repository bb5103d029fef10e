"""Compute spans by the host clock, with and without the extension."""

from __future__ import annotations

import struct
import sys
from typing import TYPE_CHECKING, Any

import pytest

from rankscope.tracer.capture.forward_backward import ComputeCapture
from rankscope.tracer.native.choice import IS_COMPILED, ComputeSpan
from rankscope.tracer.span import NONE, SpanKind
from rankscope.tracer.spool import OPEN_CAPACITY
from tests.support.tracer.reading import count_dropped, dropped, open_names, read_spans
from tests.support.tracer.recording import AlarmError, recorder_in

if TYPE_CHECKING:
    from pathlib import Path

    from rankscope.tracer.native.host_span import SpanContext
    from rankscope.tracer.record.recorder import Recorder

SMALL_BYTES = 4096 + 8 * 128
"""A segment of eight records."""


def forward(compute: ComputeCapture, microbatch: int | None = None) -> SpanContext:
    return compute.span("forward", SpanKind.FORWARD, microbatch=microbatch, chunk=0)


def record(recorder: Recorder, name: str, times: int = 1) -> None:
    for _ in range(times):
        with recorder.span(name):
            pass


def test_spans_inside_belong_to_the_micro_batch_and_later_ones_to_the_step(tmp_path: Path) -> None:
    recorder = recorder_in(tmp_path)
    recorder.begin_steps(7)
    compute = ComputeCapture(recorder)
    for _ in range(2):
        with forward(compute):
            record(recorder, "inside")
        record(recorder, "after")
    with forward(compute, microbatch=5), forward(compute, microbatch=6):
        pass
    recorder.step()
    with forward(compute):
        pass
    recorder.shutdown()

    spans = read_spans(tmp_path)
    assert [(row.name, row.step, row.microbatch, row.chunk, row.depth) for row in spans] == [
        ("forward", 7, 0, 0, 0),
        ("inside", 7, 0, 0, 1),
        ("after", 7, NONE, NONE, 0),
        ("forward", 7, 1, 0, 0),
        ("inside", 7, 1, 0, 1),
        ("after", 7, NONE, NONE, 0),
        ("forward", 7, 5, 0, 0),
        ("forward", 8, 0, 0, 0),
    ]


def test_it_remains_in_the_open_table_if_its_lane_changes_the_segment(tmp_path: Path) -> None:
    recorder = recorder_in(tmp_path, segment_bytes=SMALL_BYTES)
    compute = ComputeCapture(recorder)
    with forward(compute):
        begun_in = recorder.lane().segment
        while recorder.lane().segment is begun_in:
            record(recorder, "inside")
        assert open_names(tmp_path) == ["forward"]
    assert open_names(tmp_path) == []
    assert len(begun_in.open_slots) == OPEN_CAPACITY
    with forward(compute), recorder.span("inside"):
        assert open_names(tmp_path) == ["forward"]
    recorder.shutdown()

    assert [row.name for row in read_spans(tmp_path)].count("forward") == 2


def test_with_a_full_open_table_it_is_recorded_all_the_same(tmp_path: Path) -> None:
    recorder = recorder_in(tmp_path)
    compute = ComputeCapture(recorder)
    slots = recorder.lane().segment.open_slots
    slots.clear()
    with forward(compute):
        assert open_names(tmp_path) == []
    assert not slots
    recorder.shutdown()

    assert [row.name for row in read_spans(tmp_path)] == ["forward"]
    assert dropped(tmp_path) == {}


def test_an_error_passes_it_and_sets_its_error_flag(tmp_path: Path) -> None:
    recorder = recorder_in(tmp_path)
    compute, error = ComputeCapture(recorder), ValueError("the job's")

    def fails() -> None:
        with forward(compute):
            raise error

    with pytest.raises(ValueError, match="the job's") as caught:
        fails()
    with forward(compute):
        pass
    recorder.shutdown()

    assert caught.value is error
    assert [int(row.flags) for row in read_spans(tmp_path)] == [16 + 64, 16]


@pytest.mark.parametrize("raised", [AlarmError, KeyboardInterrupt])
def test_a_handlers_exception_at_its_end_reaches_the_job_and_the_lane_is_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raised: type[BaseException]
) -> None:
    def interrupted(*about: object) -> None:
        raise raised

    recorder = recorder_in(tmp_path, segment_bytes=SMALL_BYTES)
    recorder.begin_steps()
    compute = ComputeCapture(recorder)
    record(recorder, "x", 8)  # so that the next record needs another segment
    span: Any = forward(compute)
    span.__enter__()
    with monkeypatch.context() as meanwhile:
        meanwhile.setattr("rankscope.tracer.record.lane.Lane.write_in_next_segment", interrupted)
        with pytest.raises(raised):
            span.__exit__(None, None, None)
    lane = recorder.lane()
    found = (lane.depth, lane.step, lane.microbatch, compute.thread_state.in_span)
    recorder.shutdown()

    assert found == (0, 0, NONE, False)
    assert open_names(tmp_path) == []


def test_a_hundred_thousand_leak_no_reference_and_no_entry(tmp_path: Path) -> None:
    recorder = recorder_in(tmp_path, spool_bytes=1 << 17)
    compute = ComputeCapture(recorder)
    lane = recorder.lane()

    def some(num: int) -> list[int]:
        for _ in range(num):
            with forward(compute):
                pass
        counted = (compute.thread_state, recorder, lane, lane.segment, None)
        return [sys.getrefcount(one) for one in counted]

    before, after = some(1_000), some(100_000)
    num_free = len(lane.segment.open_slots)
    recorder.shutdown()

    more = [two - one for one, two in zip(before, after, strict=True)]
    # Not 0: the background thread changes the number of references to None too.
    assert max(map(abs, more)) < 1_000, more
    assert num_free >= OPEN_CAPACITY - 1  # the compiled lane keeps one entry for reuse
    assert len(read_spans(tmp_path)) + count_dropped(tmp_path) == 101_000


@pytest.mark.skipif(not IS_COMPILED, reason="only the compiled function checks its arguments")
@pytest.mark.parametrize(
    ("at", "wrong"), [(2, None), (3, "head"), (3, -1), (4, 1 << 40), (5, None), (5, "0")]
)
def test_invalid_arguments_are_rejected(tmp_path: Path, at: int, wrong: object) -> None:
    recorder = recorder_in(tmp_path)
    arguments: list[Any] = [
        ComputeCapture(recorder).thread_state,
        recorder,
        recorder.lane(),
        1,
        0,
        0,
    ]
    ComputeSpan(*arguments)
    arguments[at] = wrong

    with pytest.raises((TypeError, OverflowError)):
        ComputeSpan(*arguments)
    with pytest.raises(TypeError):
        ComputeSpan(*arguments[:5])
    recorder.shutdown()


@pytest.mark.parametrize("place", [(1 << 31, 0, 0), (0, -(1 << 31) - 1, 0), ("0", 0, 0)])
def test_a_place_outside_32_bits_is_rejected_and_nothing_changes(
    tmp_path: Path, place: tuple[Any, ...]
) -> None:
    recorder = recorder_in(tmp_path)
    lane = recorder.lane()
    lane.set_place(3, 2, 1)
    before = lane.place

    with pytest.raises((OverflowError, TypeError, struct.error)):
        lane.set_place(*place)
    assert lane.place == before
    assert (lane.step, lane.microbatch, lane.chunk) == (3, 2, 1)
    recorder.shutdown()
