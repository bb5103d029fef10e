from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from rankscope.tracer.span import NONE, SpanFlag, SpanKind
from rankscope.tracer.spool import DropReason, RecordType
from tests.support.tracer.reading import dropped, open_names, read_rows, read_spans
from tests.support.tracer.recording import recorder_in
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from rankscope.tracer.record.recorder import Recorder


class Hostile:
    """An object whose methods all raise."""

    def _raise(self, *about: object) -> Any:  # noqa: ANN401
        raise RuntimeError("do not ask")

    __str__ = __repr__ = __hash__ = __eq__ = __bool__ = _raise


def record(recorder: Recorder, name: Any, **place: Any) -> None:  # noqa: ANN401
    with recorder.span(name, **place):
        pass


def test_a_nested_span_is_inside_the_outer_one_and_one_level_deeper(tmp_path: Path) -> None:
    recorder = recorder_in(tmp_path)
    with recorder.span("outer"):
        record(recorder, "inner", kind=SpanKind.DATA, microbatch=3, chunk=1)
    recorder.shutdown()

    outer, inner = read_spans(tmp_path)
    assert (outer.name, outer.kind, outer.depth, outer.microbatch) == ("outer", "host", 0, NONE)
    assert (inner.name, inner.kind, inner.depth) == ("inner", "data", 1)
    assert (inner.microbatch, inner.chunk) == (3, 1)
    assert outer.track == inner.track == "main"
    assert outer.start_ns <= inner.start_ns
    assert inner.end_ns <= outer.end_ns
    assert outer.flags == SpanFlag.HOST_CLOCK


def test_steps_follow_each_other_without_a_gap(tmp_path: Path) -> None:
    recorder = recorder_in(tmp_path)
    record(recorder, "before")
    recorder.begin_steps(7)
    record(recorder, "within")
    recorder.microbatch(2, tokens=10, sum_squared_lengths=58)
    recorder.step(tokens=512, loss=2.5)
    recorder.step()
    recorder.shutdown()

    rows = read_rows(tmp_path)
    assert {row.name: row.step for row in rows if row.record == RecordType.SPAN} == {
        "before": NONE,
        "within": 7,
    }
    first, second = (row for row in rows if row.record == RecordType.STEP)
    assert (first.step, second.step) == (7, 8)
    assert first.end_ns == second.start_ns
    assert struct.unpack_from("<qdq", first.second) == (512, 2.5, -1)
    tokens, loss, peak = struct.unpack_from("<qdq", second.second)
    assert (tokens, peak) == (-1, -1)
    assert math.isnan(loss)
    (held,) = (row for row in rows if row.record == RecordType.MICROBATCH)
    assert (held.step, held.microbatch) == (7, 2)
    assert struct.unpack_from("<qq", held.second) == (10, 58)


def test_without_begin_steps_the_first_step_call_begins_step_0(tmp_path: Path) -> None:
    recorder = recorder_in(tmp_path)
    recorder.step(tokens=1)
    recorder.step(tokens=2)
    recorder.shutdown()

    (only,) = read_rows(tmp_path)
    assert (only.step, struct.unpack_from("<q", only.second)) == (0, (2,))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (None, "<NoneType>"),
        (b"bytes", "<bytes>"),
        (7, "<int>"),
        ("", "<empty>"),
        (Hostile(), "<Hostile>"),
        (["list"], "<list>"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_invalid_name_is_replaced_and_counted(
    tmp_path: Path, name: object, expected: str
) -> None:
    recorder = recorder_in(tmp_path)
    record(recorder, name)
    recorder.shutdown()

    (row,) = read_spans(tmp_path)
    assert row.name == expected
    assert dropped(tmp_path) == {DropReason.BAD_ARGUMENT: 1}


def test_long_names_are_truncated_between_characters(tmp_path: Path) -> None:
    recorder = recorder_in(tmp_path)
    record(recorder, "a" + "ä" * 200)  # 1 + 2 * 200 bytes; the 127th ä would end at byte 255
    record(recorder, "b" * 10_000_000)
    recorder.shutdown()

    umlauts, bs = read_spans(tmp_path)
    assert umlauts.name == "a" + "ä" * 126
    assert bs.name == "b" * 254


def test_names_beyond_the_table_share_one(tmp_path: Path) -> None:
    recorder = recorder_in(tmp_path, segment_bytes=1 << 20)
    for number in range(4096 + 10):
        record(recorder, f"name {number}")
    recorder.shutdown()

    names = [row.name for row in read_spans(tmp_path)]
    # Names in use before: "__other__", the track "comm" and, with the first span, the track "main".
    assert names[:4093] == [f"name {number}" for number in range(4093)]
    assert set(names[4093:]) == {"__other__"}


def test_without_any_space_everything_is_dropped_and_nothing_raised(tmp_path: Path) -> None:
    recorder = recorder_in(tmp_path, spool_bytes=0)
    for _ in range(10):
        record(recorder, "lost")
    recorder.shutdown()

    assert read_rows(tmp_path) == []
    assert dropped(tmp_path) == {DropReason.SPOOL_FULL: 10}


def test_a_folder_that_vanishes_drops_records_and_raises_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "spool"
    folder.mkdir()
    recorder = recorder_in(folder, segment_bytes=4096 + 4 * 128)
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    for _ in range(50):
        record(recorder, "unseen")
    recorder.event("note", "unseen", {})
    recorder.shutdown()

    assert not folder.exists()


def test_a_long_span_is_in_the_open_table_until_it_ends(tmp_path: Path) -> None:
    recorder = recorder_in(tmp_path)
    with recorder.span("outer"), recorder.span("inner"):
        wait_until(lambda: open_names(tmp_path) == ["outer"])
    wait_until(lambda: open_names(tmp_path) == [])
    recorder.shutdown()


def test_a_captured_span_is_in_the_open_table_at_once(tmp_path: Path) -> None:
    recorder = recorder_in(tmp_path)
    with recorder.host_span("optimizer", SpanKind.OPTIMIZER), recorder.span("inner"):
        assert open_names(tmp_path) == ["optimizer"]
    assert open_names(tmp_path) == []
    recorder.shutdown()


def test_shutdown_twice_and_spans_after_it_do_nothing(tmp_path: Path) -> None:
    recorder = recorder_in(tmp_path)
    late = recorder.span("late")
    late.__enter__()
    recorder.shutdown()
    recorder.shutdown()
    late.__exit__(None, None, None)
    record(recorder, "later")

    assert read_spans(tmp_path) == []


def test_after_shutdown_no_file_is_mapped_while_the_recorder_is_referenced(tmp_path: Path) -> None:
    def num_mapped() -> int:
        return Path("/proc/self/maps").read_text().count(str(tmp_path))

    recorder = recorder_in(tmp_path)
    record(recorder, "x")
    assert num_mapped() > 1  # process file, current segment and a spare
    recorder.shutdown()

    assert num_mapped() == 0
    assert [row.name for row in read_spans(tmp_path)] == ["x"]
