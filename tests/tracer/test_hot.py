"""The compiled lines: they are there where they can be, and cannot be told from the Python ones."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.tracer.reading import dropped, num_lost, read_spans
from tests.tracer.recording import ROOT, recorder_in
from tracer.hot import IS_COMPILED, ReadySpan, ready_span
from tracer.lane import head_word
from tracer.span import KIND_CODES, SpanKind
from tracer.spool import DropReason, RecordType

ALIKE = (
    "test_span_faults.py",
    "test_recorder.py",
    "test_spare.py",
    "test_overflow.py",
    "test_running.py",
    "test_room_faults.py",
)
"""Tests of what spans do, whoever enters and leaves them."""


class Rows:
    """A segment whose rows lie anywhere."""

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


def resident_bytes() -> int:
    """Return what this process holds now: its largest so far hides what comes after a peak."""
    gc.collect()
    return int(psutil.Process().memory_info().rss)


def can_compile() -> bool:
    compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    return shutil.which(compiler) is not None and header.is_file()


def is_asked_for_python() -> bool:
    return os.environ.get("RANKSCOPE_PURE_PYTHON", "0") not in {"", "0"}


def test_where_there_is_a_compiler_the_compiled_lines_are_used() -> None:
    assert (can_compile() and not is_asked_for_python()) == IS_COMPILED


@pytest.mark.timeout(600)
def test_python_alone_passes_the_same_tests(tmp_path: Path) -> None:
    run = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"),
            f"--basetemp={tmp_path}/twin",
            *(f"tests/tracer/{name}" for name in ALIKE),
        ],
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
def test_a_row_that_is_none_is_counted_and_nothing_is_raised(tmp_path: Path, segment: Rows) -> None:
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
    assert dropped(tmp_path)[DropReason.INTERNAL_ERROR] == num_lost(tmp_path) == 1
    assert [(row.name, row.depth) for row in read_spans(tmp_path)] == [("y", 0)]


def test_left_before_it_was_entered_and_entered_twice_a_span_is_recorded_once_at_most(
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
    assert num_lost(tmp_path) == 0


@pytest.mark.parametrize("wrong", [(), (None, 1), ("lane", 1)])
def test_a_ready_span_of_no_lane_is_refused(wrong: tuple[Any, ...]) -> None:
    with pytest.raises((TypeError, AttributeError)):
        ReadySpan(*wrong)


def test_spans_and_lanes_that_nobody_holds_are_collected(tmp_path: Path) -> None:
    recorder = recorder_in(tmp_path)

    def num_objects() -> int:
        gc.collect()
        return sum(type(one).__name__ in {"Lane", "ReadySpan", "Span"} for one in gc.get_objects())

    before = num_objects()
    for number in range(20):
        lane = recorder.lanes.new(f"track {number}")
        for name_id in range(5):
            lane.ready[name_id] = ready_span(lane, head_of(name_id))
            lane.ready[name_id].enter()
            lane.ready[name_id].leave(None, None, None)
        lane.seal()
        recorder.lanes._lanes.remove(lane)
        del lane

    assert num_objects() == before
    recorder.shutdown()


def test_a_million_spans_of_any_end_leave_nothing_behind(tmp_path: Path) -> None:
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

    some(100_000)
    before = resident_bytes()
    some(1_000_000)

    growth_bytes = resident_bytes() - before
    now = [sys.getrefcount(one) for one in (None, error, ValueError, *spans)]
    assert growth_bytes < 4 << 20
    assert all(abs(one - two) < 50 for one, two in zip(references, now, strict=True))
    recorder.shutdown()
    assert num_lost(tmp_path) + len(read_spans(tmp_path)) == 1_100_000
