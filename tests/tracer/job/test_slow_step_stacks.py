from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING, Any

import pytest

from rankscope.tracer.job.slow_step_stacks import (
    RequestedStacks,
    SlowStepWatch,
    slow_after_ns,
    stacks,
    watch_slow_steps,
)
from tests.support.tracer.recording import recorder_in, run_script
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from rankscope.tracer.record.recorder import Recorder

S = 1_000_000_000


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[Recorder]:
    recorder = recorder_in(tmp_path)
    yield recorder
    recorder.shutdown()


def dumps(folder: Path) -> list[dict[str, Any]]:
    path = folder / "events.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [event for event in map(json.loads, lines) if event["kind"] == "stack"]


def test_a_step_is_slow_ten_percent_and_four_deviations_above_the_median() -> None:
    assert slow_after_ns([100] * 7) is None
    assert slow_after_ns([100] * 8) == 110
    # deviations from the median 100: 0 0 0 20 20 20 20 20; MAD 20; 4 x 1.4826 x 20 = 118.6
    assert slow_after_ns([100, 100, 100, 80, 120, 80, 120, 120]) == round(100 + 4 * 1.4826 * 20)


def tracer_function(line: str) -> bool:
    return "/tracer/background.py:" in line or "/tracer/late.py:" in line


class Clock:
    def __init__(self, now_ns: int) -> None:
        self.now_ns = now_ns

    def __call__(self) -> int:
        return self.now_ns


def make_watch(recorder: Recorder) -> tuple[SlowStepWatch, Clock, int]:
    """Return a watch that has seen ten steps of a second each, its clock, and the last begin."""
    clock = Clock(0)
    watch = SlowStepWatch(recorder, now_ns=clock)
    recorder.begin_steps()
    start_ns = recorder.step_start_ns
    assert start_ns is not None
    for number in range(11):
        recorder.step_start_ns = start_ns + number * S
        watch.step_begins()
    return watch, clock, start_ns + 10 * S


def test_a_slow_step_is_dumped_at_1_2_4_and_8_times_its_limit(
    recorder: Recorder, tmp_path: Path
) -> None:
    watch, clock, start_ns = make_watch(recorder)
    for tenths in range(200):  # 20 s; the limit is 1.1 s
        clock.now_ns = start_ns + tenths * S // 10
        watch.check()
    recorder.shutdown()

    events = dumps(tmp_path)
    elapsed = [event["data"]["elapsed_ns"] / S for event in events]
    assert elapsed == [1.2, 2.3, 4.5, 8.9]
    assert events[0]["text"] == "step 0 has lasted 1.2 s, usually 1.0 s"


def test_a_first_step_is_dumped_after_30_s(recorder: Recorder, tmp_path: Path) -> None:
    clock = Clock(0)
    watch = SlowStepWatch(recorder, now_ns=clock)
    recorder.begin_steps()
    watch.step_begins()
    start_ns = recorder.step_start_ns
    assert start_ns is not None
    for second in range(50):
        clock.now_ns = start_ns + second * S
        watch.check()
    recorder.shutdown()

    (event,) = dumps(tmp_path)
    assert event["text"] == "step 0 has lasted 31.0 s"


def test_a_hang_is_dumped_soon_after_another_slow_step(recorder: Recorder, tmp_path: Path) -> None:
    watch, clock, start_ns = make_watch(recorder)
    clock.now_ns = start_ns + 14 * S // 10
    watch.check()
    recorder.step_start_ns = watch._start_ns = start_ns + 2 * S
    for second in range(2, 32):
        clock.now_ns = start_ns + second * S
        watch.check()
    recorder.shutdown()

    first, second_event = dumps(tmp_path)[:2]
    assert first["text"] == "step 0 has lasted 1.4 s, usually 1.0 s"
    assert second_event["text"] == "step 0 has lasted 18.0 s, usually 1.0 s"


def test_slow_steps_are_dumped_once_a_minute(recorder: Recorder, tmp_path: Path) -> None:
    watch, clock, start_ns = make_watch(recorder)
    for number in range(100):  # each lasts 1.5 s and is checked after 1.4 s
        recorder.step_start_ns = watch._start_ns = start_ns + number * 1_500_000_000
        clock.now_ns = recorder.step_start_ns + 1_400_000_000
        watch.check()
    recorder.shutdown()

    assert len(dumps(tmp_path)) == 3  # after 1.4, 61.4 and 121.4 s


def test_stacks_name_the_line_and_leave_the_tracer_out(recorder: Recorder) -> None:
    entered, leave = threading.Event(), threading.Event()

    def stuck() -> None:
        with recorder.span("stuck"):
            entered.set()
            leave.wait()

    thread = threading.Thread(target=stuck, name="worker")
    thread.start()
    entered.wait()
    found = {item["name"]: item["frames"] for item in stacks()}
    leave.set()
    thread.join()

    frames = found["worker"]
    assert isinstance(frames, list)
    assert any(line.endswith(f"{stuck.__qualname__}") and __file__ in line for line in frames)
    assert threading.current_thread().name not in found
    assert not [
        line for lines in found.values() for line in str(lines).split("'") if tracer_function(line)
    ]


@pytest.mark.slow
def test_a_thread_that_runs_during_a_garbage_collection_is_dumped_without_a_crash(
    tmp_path: Path,
) -> None:
    # Python 3.11 collects garbage while it creates a frame object. The collected object lets the
    # thread leave the frames that are being read. Each round collects an object later.
    done = run_script(
        """
        import gc, threading
        from rankscope.tracer.job.slow_step_stacks import stacks

        def move(going, gone, over, waits):
            def inner():
                waits.set()
                going.wait()

            def outer():
                inner()

            def elsewhere(*filler):
                gone.set()
                over.wait()

            outer()
            elsewhere(*(set() for _ in range(30)))

        class Cycle:
            def __init__(self, going, gone):
                self.self, self.going, self.gone = self, going, gone

            def __del__(self):
                self.going.set()
                self.gone.wait(10)

        for num_objects in range(1, 120):
            going, gone, over, waits = (threading.Event() for _ in range(4))
            args = (going, gone, over, waits)
            thread = threading.Thread(target=move, args=args, name="moving", daemon=True)
            thread.start()
            waits.wait()
            gc.collect()
            Cycle(going, gone)
            gc.set_threshold(num_objects)
            found = {one["name"]: one["frames"] for one in stacks()}
            gc.set_threshold(700)
            assert gc.isenabled()
            going.set()
            over.set()
            thread.join()
            assert "_bootstrap" in found["moving"][-1], found
        gc.disable()
        stacks()
        print(gc.isenabled())
        """,
        tmp_path,
    )

    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr


def test_a_deep_stack_is_bounded() -> None:
    entered, leave = threading.Event(), threading.Event()

    def dive(depth: int) -> None:
        if depth:
            dive(depth - 1)
        else:
            entered.set()
            leave.wait()

    thread = threading.Thread(target=dive, args=(500,), name="deep")
    thread.start()
    entered.wait()
    found = {item["name"]: item["frames"] for item in stacks()}
    leave.set()
    thread.join()

    assert len(found["deep"]) == 60  # type: ignore[arg-type]


def test_the_background_thread_dumps_a_step_while_it_is_slow(tmp_path: Path) -> None:
    recorder = recorder_in(tmp_path)
    watch_slow_steps(recorder)

    def overrun() -> None:
        # The median is known after eight steps, so no earlier step is slow.
        recorder.begin_steps()
        for _ in range(8):
            recorder.step()
        wait_until(lambda: bool(dumps(tmp_path)))

    overrun()
    (event,) = dumps(tmp_path)[:1]
    recorder.shutdown()

    data = event["data"]
    assert isinstance(data, dict)
    assert data["step"] == 8
    assert data["elapsed_ns"] > data["late_after_ns"] > data["usual_ns"]
    main = data["threads"][0]
    assert main["name"] == "MainThread"
    assert any(line.endswith(overrun.__qualname__) for line in main["frames"])


def test_requested_stacks_are_recorded_once_a_step_and_without_one_that_begins(
    recorder: Recorder, tmp_path: Path
) -> None:
    requested = RequestedStacks(recorder)
    requested.take_control({"stacks": {"steps": 2, "ranks": [0], "request": "why"}})
    requested.check()
    requested.check()
    recorder.begin_steps(7)
    for _ in range(3):
        requested.check()
        recorder.step()
    recorder.shutdown()

    taken = [event["data"] for event in dumps(tmp_path)]
    assert [(data["step"], data["request"]) for data in taken] == [(-1, "why"), (7, "why")]


def test_stacks_requested_of_another_rank_are_not_recorded(
    recorder: Recorder, tmp_path: Path
) -> None:
    requested = RequestedStacks(recorder)
    requested.take_control({"stacks": {"ranks": [1]}})
    requested.check()
    recorder.shutdown()

    assert dumps(tmp_path) == []
