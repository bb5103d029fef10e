from __future__ import annotations

import gc
import json
import multiprocessing
import os
import signal
import sys
from typing import TYPE_CHECKING

import pytest
import torch
from torch.utils.data._utils import signal_handling

from rankscope import tracer
from rankscope.tracer.capture.forward_backward import ComputeCapture
from rankscope.tracer.capture.garbage_collection import capture_garbage
from rankscope.tracer.errors import is_tracer_error
from rankscope.tracer.span import NONE, SpanKind
from rankscope.tracer.spool import DropReason
from tests.support.tracer.reading import dropped, read_rows
from tests.support.tracer.recording import AlarmError, recorder_in
from tests.tracer.programs import run_python

if TYPE_CHECKING:
    from pathlib import Path

ERRORS = DropReason.INTERNAL_ERROR


def fails(*about: object) -> bool:
    raise RuntimeError("ours")


# The file name by which an error is recognized as the tracer's.
fails.__code__ = fails.__code__.replace(co_filename=tracer.__file__)


@pytest.mark.slow
def test_a_job_computes_the_same_if_any_part_of_the_tracer_fails(tmp_path: Path) -> None:
    ran = run_python("-m", "tests.tracer.jobs.harmless_job", tmp_path)

    assert ran.returncode == 0, ran.stderr
    reported = json.loads(ran.stdout.splitlines()[-1])  # torch 2.8's gloo prints lines before it
    untraced, _ = reported.pop("untraced")
    _, without_a_fault = reported.pop("nothing")
    assert without_a_fault == 0
    assert {part: losses for part, (losses, _) in reported.items()} == dict.fromkeys(
        reported, untraced
    )
    assert all(num_errors > 0 for _, num_errors in reported.values()), reported


def test_a_compute_span_without_an_open_slot_restores_its_lane(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = recorder_in(tmp_path)
    compute = ComputeCapture(recorder)
    recorder.lane().segment.open_slots.clear()  # so that the compiled lines ask Python
    with monkeypatch.context() as broken:
        broken.setattr("rankscope.tracer.record.lane.Lane.open_in_first", fails)
        with compute.span("forward", SpanKind.FORWARD, microbatch=0, chunk=0):
            pass
    depth, place = recorder.lane().depth, recorder.lane().microbatch
    recorder.shutdown()

    assert (depth, place) == (0, NONE)
    assert dropped(tmp_path)[ERRORS] == 1


def test_a_handler_that_raises_as_a_compute_span_begins_leaves_the_lane_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*about: object) -> None:
        raise AlarmError

    recorder = recorder_in(tmp_path)
    compute = ComputeCapture(recorder)
    recorder.lane().segment.open_slots.clear()  # so that the compiled lines ask Python
    with monkeypatch.context() as meanwhile:
        meanwhile.setattr("rankscope.tracer.record.lane.Lane.open_in_first", interrupted)
        with pytest.raises(AlarmError):
            compute.span("forward", SpanKind.FORWARD, microbatch=0, chunk=0).__enter__()
    with compute.span("forward", SpanKind.FORWARD, microbatch=1, chunk=0):
        depth = recorder.lane().depth
    recorder.shutdown()

    assert depth == 1
    assert dropped(tmp_path) == {}


def test_a_failing_step_listener_is_removed_and_the_others_go_on(tmp_path: Path) -> None:
    recorder = recorder_in(tmp_path)
    begun: list[int] = []

    def notes() -> bool:
        begun.append(recorder.step_number)
        return False

    recorder.on_step_begin(fails)
    recorder.on_step_begin(notes)
    recorder.begin_steps()
    recorder.step()
    recorder.step()
    recorder.shutdown()

    assert begun == [0, 1, 2]
    assert dropped(tmp_path) == {ERRORS: 1}
    (event,) = map(json.loads, (tmp_path / "events.jsonl").read_text().splitlines())
    assert event["kind"] == "tracer"
    assert event["data"] == {"error": "RuntimeError"}


def test_a_handler_of_the_job_that_raises_as_a_step_begins_reaches_the_job(tmp_path: Path) -> None:
    recorder = recorder_in(tmp_path)
    calls: list[int] = []

    def interrupted() -> bool:
        calls.append(recorder.step_number)
        if len(calls) == 1:
            signal.raise_signal(signal.SIGUSR1)
        return False

    def handle(*about: object) -> None:
        raise alarm

    alarm = AlarmError()
    before = signal.signal(signal.SIGUSR1, handle)
    try:
        recorder.on_step_begin(interrupted)
        with pytest.raises(AlarmError) as caught:
            recorder.begin_steps()
        recorder.step()
    finally:
        signal.signal(signal.SIGUSR1, before)
    recorder.shutdown()

    assert caught.value is alarm
    assert calls == [0, 1]  # not removed, because the error was the job's
    assert dropped(tmp_path) == {}


def test_a_dead_loader_worker_reported_inside_the_tracer_reaches_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = recorder_in(tmp_path)
    recorder.begin_steps()
    recorder.on_step_begin(_report_dead_child)
    worker = multiprocessing.get_context("fork").Process(target=os._exit, args=(3,))
    worker.start()
    os.waitid(os.P_PID, worker.pid or 0, os.WEXITED | os.WNOWAIT)
    torch._C._set_worker_pids(id(worker), (worker.pid,))  # type: ignore[arg-type]
    before = signal.getsignal(signal.SIGCHLD)
    monkeypatch.setattr(signal_handling, "_SIGCHLD_handler_set", False)
    try:
        signal_handling._set_SIGCHLD_handler()  # as a loader with workers does
        with pytest.raises(RuntimeError, match="DataLoader worker"):
            recorder.step()
    finally:
        signal.signal(signal.SIGCHLD, before)
        torch._C._remove_worker_pids(id(worker))
    worker.join()
    recorder.shutdown()

    assert dropped(tmp_path) == {}


def _report_dead_child() -> bool:
    signal.raise_signal(signal.SIGCHLD)
    return False


def test_an_error_in_the_standard_library_belongs_to_its_caller() -> None:
    def raised(text: object) -> BaseException:
        try:
            json.dumps(text)
        except TypeError as problem:
            return problem
        raise AssertionError

    theirs = raised(object())
    raised.__code__ = raised.__code__.replace(co_filename=tracer.__file__)
    ours = raised(object())

    assert not is_tracer_error(theirs)
    assert is_tracer_error(ours)


def test_a_failing_exit_hook_leaves_the_jobs_traceback_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda _type, problem, _trace: shown.append(problem))
    recorder = tracer.install(spool=tmp_path, run="run")
    monkeypatch.setattr(type(recorder), "record_exception", fails)
    mine = KeyError("mine")
    try:
        sys.excepthook(KeyError, mine, None)
    finally:
        tracer.shutdown()

    assert shown == [mine]
    (folder,) = (tmp_path / "run").iterdir()
    assert dropped(folder)[ERRORS] == 1


def test_a_record_that_fails_does_not_disturb_the_collector(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unraisable: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)
    recorder = recorder_in(tmp_path)
    take_off = capture_garbage(recorder, min_pause_ns=0)
    try:
        with monkeypatch.context() as broken:
            broken.setattr("rankscope.tracer.record.recorder.Recorder.head", fails)
            gc.collect()
            take_off()
    finally:
        recorder.shutdown()

    assert unraisable == []
    assert dropped(tmp_path)[ERRORS] >= 1


@pytest.mark.slow
def test_an_exception_of_a_handler_during_a_collection_reaches_the_job(tmp_path: Path) -> None:
    class Deadline(Exception):  # noqa: N818 - the job's own
        pass

    def on_alarm(number: int, frame: object) -> None:
        raise Deadline

    others, gc.callbacks[:] = list(gc.callbacks), []  # they would catch it
    recorder = recorder_in(tmp_path)
    take_off = capture_garbage(recorder, min_pause_ns=0)
    objects = [[number] for number in range(300_000)]  # which take the collector milliseconds
    previous = signal.signal(signal.SIGALRM, on_alarm)
    try:
        for _ in range(5):
            with pytest.raises(Deadline):
                collect_until_the_alarm()
    finally:
        signal.signal(signal.SIGALRM, previous)
        take_off()
        gc.callbacks[:] = others
        recorder.shutdown()

    assert len(objects) == 300_000
    assert {row.kind for row in read_rows(tmp_path)} == {"gc"}


def collect_until_the_alarm() -> None:
    signal.setitimer(signal.ITIMER_REAL, 0.001)
    gc.collect()
    while signal.getitimer(signal.ITIMER_REAL)[0]:
        pass
