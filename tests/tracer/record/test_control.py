from __future__ import annotations

import json
import struct
import threading
from typing import TYPE_CHECKING, Any

import pytest

from rankscope.tracer.record.control import Control, ControlError, read_control
from rankscope.tracer.record.sampling import ALL_KINDS, Settings
from rankscope.tracer.span import NONE, SpanKind
from rankscope.tracer.spool import CONTROL_FILE, DropReason, RecordType
from tests.support.tracer.reading import dropped, read_rows, read_spans
from tests.support.tracer.recording import recorder_in, write_control
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from rankscope.tracer.record.recorder import Recorder


def write_and_poll(recorder: Recorder, document: Mapping[str, object]) -> None:
    """Write the process's control file and poll it, without waiting for the next turn."""
    write_control(recorder.folder, document)
    recorder.sampling_control.control.poll()


def take_step(recorder: Recorder) -> None:
    with recorder.span("mine"):
        pass
    with recorder.span("forward", kind=SpanKind.FORWARD):
        pass
    recorder.step()


def steps_with(folder: Path, name: str) -> list[int]:
    return [row.step for row in read_spans(folder) if row.name == name]


def events(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


def left_out(folder: Path) -> dict[int, int]:
    """Return the kinds left out of each step, by its record."""
    return {
        row.step: struct.unpack_from("<I", row.second, 24)[0]
        for row in read_rows(folder)
        if row.record == RecordType.STEP
    }


def test_every_third_step_is_recorded_and_the_others_list_what_is_left_out(tmp_path: Path) -> None:
    recorder = recorder_in(tmp_path, settings=Settings(sample_every=3))
    recorder.begin_steps(4)
    for _ in range(6):
        take_step(recorder)
    recorder.shutdown()

    assert steps_with(tmp_path, "mine") == steps_with(tmp_path, "forward") == [6, 9]
    assert left_out(tmp_path) == {6: 0, 9: 0, **dict.fromkeys((4, 5, 7, 8), ALL_KINDS)}
    assert dropped(tmp_path) == {}


def test_recording_turns_off_and_on_at_step_boundaries(tmp_path: Path) -> None:
    recorder = recorder_in(tmp_path)
    recorder.begin_steps()
    write_and_poll(recorder, {"recording": False})
    take_step(recorder)  # step 0 has begun before: it is recorded completely
    take_step(recorder)
    write_and_poll(recorder, {"recording": True})
    take_step(recorder)
    take_step(recorder)
    recorder.shutdown()

    assert steps_with(tmp_path, "mine") == [0, 3]
    assert left_out(tmp_path) == {0: 0, 1: ALL_KINDS, 2: ALL_KINDS, 3: 0}


def test_a_change_applies_from_the_step_that_it_names(tmp_path: Path) -> None:
    recorder = recorder_in(tmp_path)
    recorder.begin_steps()
    write_and_poll(recorder, {"recording": False, "from_step": 3})
    for _ in range(5):
        take_step(recorder)
    recorder.shutdown()

    assert steps_with(tmp_path, "mine") == [0, 1, 2]
    (event,) = events(tmp_path)
    assert event["kind"] == "control"
    assert event["data"] == {"recording": False, "level": "all", "sample_every": 1, "step": 3}


@pytest.mark.parametrize(
    ("level", "kept"),
    [
        ("steps", []),
        ("comm", ["dp-comm", "wait"]),
        ("compute", ["dp-comm", "wait", "forward", "checkpoint"]),
        ("all", ["dp-comm", "wait", "forward", "checkpoint", "host"]),
    ],
)
def test_a_level_records_its_kinds_only(tmp_path: Path, level: str, kept: list[str]) -> None:
    recorder = recorder_in(tmp_path, settings=Settings(level=level))
    recorder.begin_steps()
    for kind in ("dp-comm", "wait", "forward", "checkpoint", "host"):
        with recorder.span("x", kind=SpanKind(kind)):
            pass
    recorder.append_span("x", SpanKind.HOST, 5, 6)
    recorder.microbatch(0, tokens=4)
    recorder.step()
    recorder.shutdown()

    assert [row.kind for row in read_spans(tmp_path) if row.start_ns != 5] == kept
    others = [row.record for row in read_rows(tmp_path) if row.record != RecordType.SPAN]
    assert others == [RecordType.STEP, RecordType.MICROBATCH]


def test_a_communication_is_recorded_by_the_settings_of_the_step_in_which_it_began(
    tmp_path: Path,
) -> None:
    recorder = recorder_in(tmp_path, settings=Settings(sample_every=2))
    recorder.begin_steps()
    lane = recorder.lane()
    for _ in range(4):
        head = recorder.head("all_reduce", SpanKind.DP_COMM)
        begun_in = lane.place
        recorder.step()  # ends in the next step
        recorder.comm_lane.append(head, 1, 2, begun_in, 1, 0)
    recorder.shutdown()

    assert steps_with(tmp_path, "all_reduce") == [0, 2]


def test_settings_apply_at_once_in_a_job_without_steps(tmp_path: Path) -> None:
    recorder = recorder_in(tmp_path)
    with recorder.span("before"):
        write_and_poll(recorder, {"recording": False})
    with recorder.span("off"):
        pass
    recorder.shutdown()

    assert [row.name for row in read_spans(tmp_path)] == ["before"]
    assert read_spans(tmp_path)[0].step == NONE


def test_the_background_thread_reads_the_file_of_the_run_and_calls_handlers(tmp_path: Path) -> None:
    folder = tmp_path / "process"
    folder.mkdir()
    recorder = recorder_in(folder)
    received: list[tuple[Mapping[str, object], str]] = []
    recorder.on_control(lambda asked: received.append((asked, threading.current_thread().name)))

    write_control(tmp_path, {"profile": {"ranks": [0]}, "sample_every": 5})
    wait_until(lambda: bool(received))
    recorder.shutdown()

    assert received == [({"profile": {"ranks": [0]}, "sample_every": 5}, "rankscope-spool")]
    assert recorder.sampling.settings.sample_every == 5


def test_a_process_overrides_its_run_and_a_removed_file_no_longer_applies(tmp_path: Path) -> None:
    folder = tmp_path / "process"
    folder.mkdir()
    problems: list[str] = []
    received: list[Mapping[str, object]] = []
    control = Control(folder, on_problem=problems.append)
    control.subscribe(received.append)
    control.poll()
    assert received == []

    write_control(tmp_path, {"level": "comm", "sample_every": 5})
    write_control(folder, {"level": "all"})
    control.poll()
    control.poll()
    (folder / CONTROL_FILE).unlink()
    control.poll()

    assert problems == []
    assert received == [{"level": "all", "sample_every": 5}, {"level": "comm", "sample_every": 5}]


def test_a_late_handler_receives_the_present_content(tmp_path: Path) -> None:
    recorder = recorder_in(tmp_path)
    write_and_poll(recorder, {"profile": 3})
    received: list[Mapping[str, object]] = []
    recorder.on_control(received.append)
    recorder.sampling_control.control.poll()
    recorder.sampling_control.control.poll()
    recorder.shutdown()

    assert received == [{"profile": 3}]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "not valid JSON"),
        ("[]", "one JSON object"),
        ("[" * 60_000, "not valid JSON"),
        (" " * 65_537, "longer than 65,536 bytes"),
        ('{"sample_every": 0}', "sample_every"),
        ('{"sample_every": true}', "sample_every"),
        ('{"level": "loud"}', "level must be one of steps, comm, compute, all"),
        ('{"recording": "yes"}', "recording must be true or false"),
        ('{"recording": false, "from_step": -2}', "from_step"),
    ],
)
def test_an_invalid_file_is_counted_and_reported_and_changes_nothing(
    tmp_path: Path, text: str, reason: str
) -> None:
    recorder = recorder_in(tmp_path)
    (tmp_path / "complete").write_text(text)
    # Atomic: the background thread may read it at any time.
    (tmp_path / "complete").rename(tmp_path / CONTROL_FILE)
    recorder.sampling_control.control.poll()
    recorder.sampling_control.control.poll()
    recorder.begin_steps()
    take_step(recorder)
    recorder.shutdown()

    assert dropped(tmp_path) == {DropReason.BAD_ARGUMENT: 1}
    (event,) = events(tmp_path)
    assert reason in event["text"]
    assert steps_with(tmp_path, "mine") == [0]


def test_a_handler_that_raises_does_not_prevent_the_other_handlers(tmp_path: Path) -> None:
    recorder = recorder_in(tmp_path)
    received: list[Mapping[str, object]] = []

    def fails(document: Mapping[str, object]) -> None:
        raise OSError("mine")

    recorder.on_control(fails)
    recorder.on_control(received.append)
    write_and_poll(recorder, {"x": 1})
    recorder.shutdown()

    assert received == [{"x": 1}]
    assert "OSError" in (tmp_path / "events.jsonl").read_text()


def test_a_file_that_cannot_be_read_is_a_control_error(tmp_path: Path) -> None:
    with pytest.raises(ControlError, match="cannot be read"):
        read_control(tmp_path / "absent.json")


def test_everything_is_recorded_in_the_requested_steps_and_then_what_was_before(
    tmp_path: Path,
) -> None:
    recorder = recorder_in(tmp_path, settings=Settings(level="comm"))
    recorder.begin_steps()
    write_and_poll(recorder, {"full": {"steps": 2, "first_step": 2, "request": "r1"}})
    for _ in range(6):
        take_step(recorder)
    recorder.shutdown()

    assert steps_with(tmp_path, "mine") == [2, 3]
    accepted, done = (event["data"] for event in events(tmp_path))
    assert accepted == {"ranks": None, "request": "r1", "state": "accepted"}
    assert done == {"ranks": None, "request": "r1", "state": "done", "steps": [2, 3]}


def test_a_request_for_another_rank_changes_nothing(tmp_path: Path) -> None:
    recorder = recorder_in(tmp_path, settings=Settings(recording=False))
    recorder.begin_steps()
    write_and_poll(recorder, {"full": {"ranks": [1]}})
    for _ in range(3):
        take_step(recorder)
    recorder.shutdown()

    assert steps_with(tmp_path, "mine") == []
