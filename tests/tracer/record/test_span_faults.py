"""Faults during a span: rows A4, A5 and A13 of the fault matrix, and promise 1."""

from __future__ import annotations

import contextlib
import gc
import signal
import threading
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rankscope import tracer
from rankscope.tracer.record.current import set_current
from rankscope.tracer.record.interface import NOOP_TRACER
from rankscope.tracer.spool import DropReason
from tests.support.tracer.reading import count_dropped, dropped, read_spans
from tests.support.tracer.recording import AlarmError, recorder_in
from tests.support.waiting import LONGEST_S

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


# -- A4, A13: exceptions, and signal handlers during code of the tracer ------------


def test_an_exception_passes_a_span_that_was_used_before_unchanged(installed: Path) -> None:
    def fail(times: int) -> None:
        for number in range(times):
            with tracer.span("x"):
                if number == times - 1:
                    raise raised

    raised = ValueError("mine")
    with pytest.raises(ValueError, match="mine") as caught:
        fail(3)

    assert caught.value is raised
    assert len(caught.traceback) == 2  # this test and `fail`: no frame of the tracer
    assert [int(row.flags) for row in read_spans(installed)] == [16, 16, 16 + 64]


def test_recursive_names_and_concurrent_tasks_keep_their_own_times(installed: Path) -> None:
    def descend(levels: int) -> None:
        with tracer.span("deeper"):
            if levels:
                descend(levels - 1)

    descend(0)  # so that the span is a reused one
    descend(2)
    first = tracer.span("task")
    first.__enter__()
    second = tracer.span("task")
    second.__enter__()
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)

    rows = read_spans(installed)
    assert [row.depth for row in rows if row.name == "deeper"] == [0, 0, 1, 2]
    one, two = (row for row in rows if row.name == "task")
    assert one.start_ns <= two.start_ns <= one.end_ns <= two.end_ns


def test_more_than_255_nested_spans_are_all_recorded(installed: Path) -> None:
    with contextlib.ExitStack() as stack:
        for number in range(300):
            stack.enter_context(tracer.span(f"level {number}"))

    assert [row.depth for row in read_spans(installed)] == list(range(300))


def test_a_span_left_after_its_thread_ended_does_not_change_the_depth_of_the_next_thread(
    installed: Path,
) -> None:
    left_open: list[Any] = []

    def begin() -> None:
        left_open.extend((tracer.span("plain"), tracer.span("placed", microbatch=1)))
        for span in left_open:
            span.__enter__()

    def go_on() -> None:  # uses the lane of the thread that has ended
        with tracer.span("before"):
            pass
        for span in left_open:
            span.__exit__(None, None, None)
        with tracer.span("outer"), tracer.span("inner"):
            pass
        with tracer.span("outer", microbatch=1), tracer.span("inner", microbatch=1):
            pass

    for work in (begin, go_on):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()

    depths = [(row.name, row.depth) for row in read_spans(installed)]
    assert sorted(depths) == [
        *(("before", 0), ("inner", 1), ("inner", 1), ("outer", 0), ("outer", 0)),
        *(("placed", 0), ("plain", 0)),
    ]


def test_the_depth_of_too_many_spans_never_left_is_clipped(installed: Path) -> None:
    for _ in range(70_000):
        tracer.span("left open").__enter__()
    with tracer.span("plain"), tracer.span("placed", microbatch=1):
        pass

    assert {row.name: row.depth for row in read_spans(installed)} == {
        "plain": 65_535,
        "placed": 65_535,
    }


def leave_often(entered: list[str], *, fails: bool) -> None:
    """Enter and leave spans until the alarm, or for some seconds; append each to ``entered``."""
    signal.setitimer(signal.ITIMER_REAL, 0.001)
    for _ in range(5_000_000):
        entered.append("x")
        with contextlib.suppress(ValueError), tracer.span("x"):
            if fails:
                raise ValueError


@pytest.mark.parametrize("fails", [False, True])
def test_a_signal_handlers_exception_reaches_the_job_and_loses_one_span_at_most(
    installed: Path, *, fails: bool
) -> None:
    def on_alarm(number: int, frame: object) -> None:
        raise AlarmError

    entered: list[str] = []
    previous = signal.signal(signal.SIGALRM, on_alarm)
    # Garbage collection runs callbacks (hypothesis has one), and Python ignores an exception that a
    # handler raises in one: the alarm would be lost.
    gc.disable()
    try:
        for _ in range(30):
            with pytest.raises(AlarmError):
                leave_often(entered, fails=fails)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
        gc.enable()

    # Each of the 30 alarms may lose one span, if it comes before the span begins or at the first
    # instruction of `__exit__`.
    assert abs(len(read_spans(installed)) + count_dropped(installed) - len(entered)) <= 30


@pytest.mark.parametrize("raised", [AlarmError, KeyboardInterrupt])
def test_a_handlers_exception_in_python_code_at_the_end_of_a_span_reaches_the_job(
    installed: Path, monkeypatch: pytest.MonkeyPatch, raised: type[BaseException]
) -> None:
    def interrupted(*about: object, **named: object) -> None:
        raise raised

    def fail_within() -> None:
        with tracer.span("x"):
            raise ValueError

    with monkeypatch.context() as meanwhile:
        meanwhile.setattr("rankscope.tracer.record.lane.Lane.leave_slowly", interrupted)
        with pytest.raises(raised):
            fail_within()

    assert dropped(installed) == {}


@pytest.mark.slow
def test_handlers_and_finalizers_that_use_the_interrupted_name_lose_nothing(tmp_path: Path) -> None:
    recorder = recorder_in(tmp_path, segment_bytes=1 << 22, spool_bytes=1 << 24)
    set_current(recorder)
    entered = 0

    def record() -> None:
        nonlocal entered
        entered += 1
        with tracer.span("x"):
            pass

    class Cyclic:
        def __init__(self) -> None:
            self.me = self

        def __del__(self) -> None:
            record()

    record()  # takes the segment: a handler during that drops its record, by design
    threshold = gc.get_threshold()
    gc.set_threshold(1)
    previous = signal.signal(signal.SIGALRM, lambda number, frame: record())
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    try:
        for _ in range(3000):
            entered += 1
            with tracer.span("x"):
                Cyclic()
            record()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
        gc.set_threshold(*threshold)
        gc.collect()
        set_current(NOOP_TRACER)
        recorder.shutdown()

    rows = read_spans(tmp_path)
    assert dropped(tmp_path) == {}
    assert len(rows) == entered > 9000
    assert all(row.duration_ns >= 0 for row in rows)
    assert all(row.duration_ns < 10**10 for row in rows)


def test_more_threads_than_lanes_share_the_last_lane_and_lose_nothing(tmp_path: Path) -> None:
    recorder = recorder_in(tmp_path, segment_bytes=4096 + 64 * 128, spool_bytes=1 << 22)
    everyone = threading.Barrier(70, timeout=LONGEST_S)

    def work() -> None:
        with recorder.span("x"):
            everyone.wait()
        for _ in range(3):
            with recorder.span("x"):
                pass

    threads = [threading.Thread(target=work) for _ in range(70)]
    for thread in threads:
        recorder._pool.prepare_spare()  # spares are made one by one, and each thread may need one
        thread.start()
    for thread in threads:
        thread.join()
    recorder.shutdown()

    rows = read_spans(tmp_path)
    assert dropped(tmp_path) == {}
    assert len(rows) == 70 * 4
    assert len({row.track for row in rows}) == 63  # one of the 64 lanes is that of communication


# -- A5: hostile arguments ---------------------------------------------------------


class Hostile:
    """An object whose methods all raise."""

    def _raise(self, *about: object) -> Any:  # noqa: ANN401
        raise RuntimeError("do not ask")

    __str__ = __repr__ = __hash__ = __eq__ = __bool__ = _raise


class HostileText(str):
    """A string whose every method raises."""

    __slots__ = ()

    def _raise(self, *about: object) -> Any:  # noqa: ANN401
        raise RuntimeError("do not ask")

    __str__ = __repr__ = __hash__ = __eq__ = __len__ = encode = _raise  # type: ignore[assignment]


RECURSIVE: dict[str, object] = {}
RECURSIVE["me"] = RECURSIVE

ANYTHING = st.one_of(
    st.none(),
    st.text(),
    st.binary(),
    st.integers(),
    st.floats(),
    st.lists(st.integers()),
    st.sampled_from(tracer.SpanKind),
    st.builds(Hostile),
    st.builds(lambda: HostileText("x")),
    st.sampled_from([RECURSIVE, "y" * 10_000_000, "\ud800", "a\0b"]),
)


@given(name=ANYTHING, place=ANYTHING, kind=ANYTHING)
@settings(max_examples=60, deadline=None)
def test_no_argument_makes_the_module_functions_raise(
    module_recorder: Path,
    name: Any,  # noqa: ANN401
    place: Any,  # noqa: ANN401
    kind: Any,  # noqa: ANN401
) -> None:
    for _ in range(2):  # the second time it may be a reused span
        with tracer.span(name):
            pass
        with tracer.span(name, kind=kind, microbatch=place, chunk=place):
            pass
    tracer.microbatch(place, kind, kind)
    tracer.step(kind, loss=kind)
    tracer.begin_steps(place)
    tracer.event(name, name, value=kind)


@pytest.fixture(scope="module")
def module_recorder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("hostile")
    recorder = recorder_in(folder)
    set_current(recorder)
    yield folder
    set_current(NOOP_TRACER)
    recorder.shutdown()
    assert DropReason.INTERNAL_ERROR not in dropped(folder)


# -- promise 1: errors of the tracer ----------------------------------------------


def test_an_error_of_the_tracer_is_counted_and_does_not_reach_the_job(
    installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*about: object) -> None:
        raise RuntimeError

    # Compiled under a file name of the tracer, by which its errors are recognized.
    broken.__code__ = broken.__code__.replace(co_filename=tracer.__file__)
    tracer.begin_steps()
    monkeypatch.setattr("rankscope.tracer.record.lane.Lane.write", broken)
    monkeypatch.setattr("rankscope.tracer.record.lane.Lane.append", broken)
    monkeypatch.setattr("rankscope.tracer.record.lane.Lanes.span", broken)
    tracer.step(tokens=3)
    tracer.microbatch(0)
    with tracer.span("new"), tracer.span("x", kind=tracer.SpanKind.DATA, microbatch=2):
        pass

    assert dropped(installed) == {DropReason.INTERNAL_ERROR: 4}
