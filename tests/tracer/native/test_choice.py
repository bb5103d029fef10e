"""The extension is used if it can be built, and behaves like its Python counterpart."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import subprocess
import sys
import sysconfig
import threading
from operator import length_hint
from pathlib import Path
from typing import Any

import pytest

from rankscope.tracer.native.choice import (
    IS_COMPILED,
    DropCount,
    Finder,
    ReadySpan,
    numbers,
    ready_span,
)
from rankscope.tracer.record.lane import head_word
from rankscope.tracer.span import KIND_CODES, SpanKind
from rankscope.tracer.spool import DropReason, RecordType
from tests.support.paths import ROOT
from tests.support.tracer.reading import count_dropped, dropped, read_spans
from tests.support.tracer.recording import recorder_in

SHARED_TESTS = {
    "quick": ("native/test_compute_span.py", "record/test_current.py", "record/test_recorder.py"),
    "others": (
        "capture/test_single_process.py",
        "capture/test_matrix.py",
        "capture/test_forward_backward.py",
        "device/test_communication.py",
        "job/test_running.py",
        "job/test_slow_step_stacks.py",
        "native/test_host_launch.py",
        "record/test_no_room.py",
        "record/test_overflow.py",
        "record/test_segment_pool.py",
        "record/test_span_faults.py",
        "test_harmless.py",
    ),
}
"""Tests that must pass with and without the extension."""


class Rows:
    """A segment with arbitrary row offsets."""

    def __init__(self, *offsets: object, num_bytes: int = 4096) -> None:
        self.rows = iter(offsets)
        self.buffer = bytearray(num_bytes)
        self.capacity = 0

    def seal(self) -> None:
        pass

    def num_claimed(self) -> int:
        return 0


def head_of(name_id: int) -> int:
    return head_word(RecordType.SPAN, kind=KIND_CODES[SpanKind.HOST], flags=16, name_id=name_id)


def can_compile() -> bool:
    compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    return shutil.which(compiler) is not None and header.is_file()


def is_python_requested() -> bool:
    return os.environ.get("RANKSCOPE_PURE_PYTHON", "0") not in {"", "0"}


def test_the_extension_is_used_if_there_is_a_compiler() -> None:
    assert (can_compile() and not is_python_requested()) == IS_COMPILED


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("part", ["quick", pytest.param("others", marks=pytest.mark.nightly)])
def test_python_without_the_extension_passes_the_same_tests(tmp_path: Path, part: str) -> None:
    options = ("-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not nightly")
    tests = [f"tests/tracer/{name}" for name in SHARED_TESTS[part]]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *options, f"--basetemp={tmp_path}/python", *tests],
        cwd=ROOT,
        env={**os.environ, "RANKSCOPE_PURE_PYTHON": "1"},
        capture_output=True,
        text=True,
        check=False,
    )

    assert run.returncode == 0, run.stdout[-4000:]
    assert "passed" in run.stdout


@pytest.mark.parametrize(
    "segment",
    [Rows(1 << 40), Rows(4096 - 8), Rows(4096 - 48), Rows("no number")],
    ids=["past the end", "too near", "one word short", "no number"],
)
def test_an_invalid_row_is_counted_and_nothing_is_raised(tmp_path: Path, segment: Rows) -> None:
    recorder = recorder_in(tmp_path)
    lane = recorder.lane()
    own = lane.segment
    lane.segment = segment  # type: ignore[assignment]

    with recorder.span("x"):
        pass

    lane.segment = own
    with recorder.span("y"):
        pass
    recorder.shutdown()
    assert segment.buffer == bytes(4096)
    assert dropped(tmp_path)[DropReason.INTERNAL_ERROR] == count_dropped(tmp_path) == 1
    assert [(row.name, row.depth) for row in read_spans(tmp_path)] == [("y", 0)]


def test_a_span_left_before_it_is_entered_or_entered_twice_is_recorded_once_at_most(
    tmp_path: Path,
) -> None:
    recorder = recorder_in(tmp_path)
    span: Any = recorder.span("x")

    span.__exit__(None, None, None)
    recorder.lane().depth = 0
    span.__enter__()
    span.__enter__()
    span.__exit__(None, None, None)
    span.__exit__(None, None, None)

    assert recorder.lane().depth == 0
    recorder.shutdown()
    assert [row.name for row in read_spans(tmp_path)] == ["x"]
    assert count_dropped(tmp_path) == 0


@pytest.mark.parametrize("wrong", [(), (None, 1), ("lane", 1)])
def test_a_ready_span_needs_a_lane(wrong: tuple[Any, ...]) -> None:
    with pytest.raises((TypeError, AttributeError)):
        ReadySpan(*wrong)


@pytest.mark.slow
def test_unreferenced_spans_and_lanes_are_collected(tmp_path: Path) -> None:
    recorder = recorder_in(tmp_path)

    def num_objects() -> int:
        gc.collect()
        return sum(type(one).__name__ in {"Lane", "ReadySpan", "Span"} for one in gc.get_objects())

    before = num_objects()
    num_lanes = 20
    for number in range(num_lanes):
        lane = recorder.lanes.add(f"track {number}")
        for name_id in range(5):
            lane.ready[name_id] = ready_span(lane, head_of(name_id))
            lane.ready[name_id].enter()
            lane.ready[name_id].leave(None, None, None)
        lane.seal()
        recorder.lanes._lanes.remove(lane)
        del lane

    # Objects of earlier tests may be freed meanwhile; one left by each lane would be 20 more.
    assert num_objects() < before + num_lanes
    recorder.shutdown()


@pytest.mark.slow
def test_a_million_spans_leak_no_reference(tmp_path: Path) -> None:
    recorder = recorder_in(tmp_path, spool_bytes=1 << 17)
    recorder.begin_steps()
    error = ValueError("the job's")
    spans: list[Any] = [recorder.span(name) for name in "abc"]
    references = [sys.getrefcount(one) for one in (None, error, ValueError, *spans)]

    def some(num: int) -> None:
        for number in range(num):
            span = spans[number % 3]
            span.__enter__()
            if number % 100:
                span.__exit__(None, None, None)
            else:
                span.__exit__(ValueError, error, None)

    some(1_000_000)
    now = [sys.getrefcount(one) for one in (None, error, ValueError, *spans)]
    more = [two - one for one, two in zip(references, now, strict=True)]
    # Not 0: the background thread changes the number of references to None too.
    assert max(map(abs, more)) < 1_000, more
    recorder.shutdown()
    assert count_dropped(tmp_path) + len(read_spans(tmp_path)) == 1_000_000


@pytest.mark.parametrize("bounds", [(4096, 4096 + 5 * 128, 128), (0, 7, 3), (5, 5, 1), (9, 5, 1)])
def test_numbers_are_those_of_a_range_each_taken_once(bounds: tuple[int, int, int]) -> None:
    left, expected = numbers(*bounds), list(range(*bounds))
    for number, offset in enumerate(expected):
        assert length_hint(left) == len(expected) - number
        assert next(left) == offset

    assert length_hint(left) == 0
    assert list(left) == []


@pytest.mark.skipif(not IS_COMPILED, reason="only compiled numbers check their range")
@pytest.mark.parametrize("bounds", [(-8, 8, 8), (0, 8, 0), (0, 8, -8), (0, 2**63 - 1, 8)])
def test_numbers_reject_an_invalid_range(bounds: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="step positive"):
        numbers(*bounds)


def test_a_drop_count_is_written_at_its_offset_and_can_change_its_buffer() -> None:
    buffer, another = bytearray(32), bytearray(32)
    drops = DropCount(buffer, 8)
    for _ in range(3):
        drops.add()
    drops.write_to(another)
    drops.add()

    assert drops.count == 4
    assert [int.from_bytes(one[8:16], "little") for one in (buffer, another)] == [3, 4]
    assert sum(buffer) == 3


@pytest.mark.skipif(not IS_COMPILED, reason="only compiled counts check their buffer")
@pytest.mark.parametrize("offset", [32, 28, 3, -8, 1 << 40])
def test_a_drop_count_rejects_an_offset_outside_its_buffer(offset: int) -> None:
    buffer = bytearray(32)
    with pytest.raises(IndexError):
        DropCount(buffer, offset)

    drops = DropCount(buffer, 24)
    for wrong in (bytes(32), None, bytearray(24)):
        with pytest.raises((BufferError, TypeError, IndexError)):
            drops.write_to(wrong)  # type: ignore[arg-type]
    drops.add()
    assert buffer[24] == 1


def found_by(finder: Finder, name: str) -> object:
    """Return the span that another thread finds."""
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(finder.find(name)))
    thread.start()
    thread.join()
    return found[0]


def test_a_thread_finds_its_own_spans_by_name_and_not_those_of_others(tmp_path: Path) -> None:
    recorder = recorder_in(tmp_path)
    finder, lane = recorder.lanes.finder, recorder.lane()
    names = [f"name {number}" for number in range(50)]  # more than the cache holds
    spans = [recorder.span(name) for name in names]

    for _ in range(2):
        assert [finder.find(name) for name in names] == spans
        assert [found_by(finder, name) for name in names[:3]] == [None] * 3
    assert [lane.ready_by_name[name].span for name in names] == spans
    assert finder.find("".join(["name", " 7"])) is spans[7]  # equal but a different object

    with spans[7]:
        assert finder.find(names[7]) is None
    assert finder.find(names[7]) is spans[7]
    finder.forget()
    assert finder.find(names[7]) is spans[7]
    recorder.shutdown()


class Loud(str):
    """A name whose hash is the job's code."""

    __slots__ = ()

    def __hash__(self) -> int:
        raise AssertionError


@pytest.mark.parametrize("name", [Loud("x"), 1, None, [], "y", "\ud800"])
def test_an_unknown_or_invalid_name_is_not_found(tmp_path: Path, name: object) -> None:
    recorder = recorder_in(tmp_path)
    with recorder.span("x"):
        pass

    assert recorder.lanes.finder.find(name) is None  # type: ignore[arg-type]
    assert Finder(None).find("x") is None
    recorder.shutdown()
    assert count_dropped(tmp_path) == 0


def test_the_span_of_an_ended_thread_is_not_found_by_the_next_thread_of_its_lane(
    tmp_path: Path,
) -> None:
    recorder = recorder_in(tmp_path)
    lanes: list[object] = []

    def work() -> None:
        with recorder.span("x"):
            lanes.append(recorder.lane())
        lanes.append(recorder.lanes.finder.find("x"))

    for _ in range(3):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    first, span = lanes[:2]

    assert lanes == [first, span] * 3
    assert found_by(recorder.lanes.finder, "x") is None
    recorder.shutdown()
    assert [row.name for row in read_spans(tmp_path)] == ["x"] * 3


def test_a_span_is_entered_and_left_by_any_lookup_of_its_methods(tmp_path: Path) -> None:
    recorder = recorder_in(tmp_path)
    span: Any = recorder.span("x")

    with contextlib.ExitStack() as stack:
        stack.enter_context(span)
    type(span).__enter__(span) if IS_COMPILED else type(span).__enter__()
    span.__exit__(None, None, None)
    with span:
        pass
    enter, leave = span.__enter__, span.__exit__
    enter()
    leave(None, None, None)

    assert recorder.lane().depth == 0
    recorder.shutdown()
    assert [row.name for row in read_spans(tmp_path)] == ["x"] * 4


@pytest.mark.skipif(not IS_COMPILED, reason="only compiled spans check their arguments")
def test_a_span_called_with_other_arguments_raises_and_is_unchanged(tmp_path: Path) -> None:
    recorder = recorder_in(tmp_path)
    span: Any = recorder.span("x")
    kind = type(span)

    for call in (
        lambda: span(1),
        lambda: span(name="x"),
        kind.__enter__,
        lambda: kind.__enter__(1),
        lambda: kind.__enter__(span, 1),
        lambda: kind.__exit__(span),
        lambda: kind.__exit__(span, None, None, None, x=1),
        lambda: kind.__exit__(1, None, None, None),
        lambda: kind.__dict__["__enter__"].__get__(1),
    ):
        with pytest.raises(TypeError):
            call()

    assert (span.start_ns, recorder.lane().depth) == (None, 0)
    recorder.shutdown()
    assert count_dropped(tmp_path) == len(read_spans(tmp_path)) == 0


@pytest.mark.skipif(not IS_COMPILED, reason="the Python lane does not hold the buffer")
def test_the_segment_of_a_lane_remains_mapped_until_the_lane_leaves_it(tmp_path: Path) -> None:
    recorder = recorder_in(tmp_path)
    lane = recorder.lane()
    segment = lane.segment
    mapped: Any = segment.buffer
    with pytest.raises(BufferError):
        mapped.close()
    for wrong in (None, Rows(4096, num_bytes=0).rows):
        with pytest.raises(AttributeError):
            lane.segment = wrong  # type: ignore[assignment]
    assert lane.segment is segment

    lane.seal()
    mapped.close()
    recorder.shutdown()
