from __future__ import annotations

import pytest

from rankscope.trainer.errors import SegmentOrderError
from rankscope.trainer.pace import (
    BACKWARD_PACES,
    FORWARD_PACES,
    PacedSegments,
    SegmentTimer,
    StretchedSegments,
)

MS = 1_000_000


class FakeClock:
    """A clock that moves by `work`, by late sleeps and by ``tick_ns`` per reading."""

    def __init__(self, *, late_ns: int = 0, tick_ns: int = 0) -> None:
        self.time_ns = 1_000 * MS
        self.slept_ns: list[int] = []
        self._late_ns = late_ns
        self._tick_ns = tick_ns

    def now_ns(self) -> int:
        self.time_ns += self._tick_ns
        return self.time_ns

    def sleep_ns(self, duration_ns: int) -> None:
        self.slept_ns.append(duration_ns)
        self.time_ns += duration_ns + self._late_ns

    def work(self, duration_ns: int) -> None:
        self.time_ns += duration_ns


def run_segment(timer: SegmentTimer, clock: FakeClock, *, work_ms: int, paces: int) -> int:
    """Return the duration of the segment, ns."""
    begin_ns = clock.time_ns
    timer.begin()
    clock.work(work_ms * MS)
    timer.end(paces)
    return clock.time_ns - begin_ns


def test_a_segment_sleeps_for_the_rest_of_its_pace() -> None:
    clock = FakeClock()
    timer = PacedSegments(pace_ns=20 * MS, clock=clock)

    forward_ns = run_segment(timer, clock, work_ms=3, paces=FORWARD_PACES)
    backward_ns = run_segment(timer, clock, work_ms=5, paces=BACKWARD_PACES)

    assert (forward_ns, backward_ns) == (20 * MS, 40 * MS)
    assert clock.slept_ns == [17 * MS, 35 * MS]
    assert (timer.num_segments, timer.num_overruns) == (2, 0)


def test_a_part_of_a_segment_is_reached_in_time() -> None:
    clock = FakeClock()
    timer = PacedSegments(pace_ns=20 * MS, clock=clock)
    timer.slowdown = 2.0

    timer.begin()
    clock.work(3 * MS)
    timer.reach(0.25)
    timer.reach(0.25)
    clock.work(MS)
    timer.end(1)

    # Until 10 ms and until 40 ms.
    assert clock.slept_ns == [7 * MS, 29 * MS]
    assert timer.num_segments == 1


def test_a_wait_inside_of_a_segment_moves_its_deadline() -> None:
    clock = FakeClock()
    timer = PacedSegments(pace_ns=20 * MS, clock=clock)

    timer.begin()
    timer.exclude(lambda: clock.work(50 * MS))
    timer.end(1)

    assert clock.slept_ns == [20 * MS]
    assert timer.num_overruns == 0


def test_a_fault_moves_the_deadline() -> None:
    clock = FakeClock()
    timer = PacedSegments(pace_ns=20 * MS, clock=clock)
    timer.slowdown = 1.8

    assert run_segment(timer, clock, work_ms=3, paces=FORWARD_PACES) == 36 * MS
    # 38 ms is 1.06 x the stretched target: no overrun, though 1.9 x the healthy one.
    assert run_segment(timer, clock, work_ms=38, paces=FORWARD_PACES) == 38 * MS
    assert timer.num_overruns == 0


@pytest.mark.parametrize(("work_ms", "num_overruns"), [(20, 0), (22, 0), (23, 1)])
def test_more_than_a_tenth_over_the_target_is_an_overrun(work_ms: int, num_overruns: int) -> None:
    clock = FakeClock()
    timer = PacedSegments(pace_ns=20 * MS, clock=clock)

    run_segment(timer, clock, work_ms=work_ms, paces=FORWARD_PACES)

    assert clock.slept_ns == []
    assert timer.num_overruns == num_overruns


def test_a_late_wakeup_is_an_overrun() -> None:
    clock = FakeClock(late_ns=3 * MS)
    timer = PacedSegments(pace_ns=20 * MS, clock=clock)

    run_segment(timer, clock, work_ms=1, paces=FORWARD_PACES)
    run_segment(timer, clock, work_ms=1, paces=BACKWARD_PACES)

    # 23 ms of 20 is over by more than a tenth, 43 ms of 40 is not.
    assert (timer.num_segments, timer.num_overruns) == (2, 1)


def test_the_warm_up_is_not_counted() -> None:
    clock = FakeClock()
    timer = PacedSegments(pace_ns=20 * MS, clock=clock)
    run_segment(timer, clock, work_ms=90, paces=FORWARD_PACES)

    timer.reset_counts()

    assert (timer.num_segments, timer.num_overruns) == (0, 0)


def test_an_end_without_a_begin_is_an_error() -> None:
    timer = PacedSegments(pace_ns=20 * MS, clock=FakeClock())
    timer.begin()
    timer.end(FORWARD_PACES)

    with pytest.raises(SegmentOrderError):
        timer.end(FORWARD_PACES)


def test_without_pace_a_fault_stretches_a_segment_by_busy_waiting() -> None:
    clock = FakeClock(tick_ns=1)
    timer = StretchedSegments(clock)
    timer.slowdown = 1.5

    duration_ns = run_segment(timer, clock, work_ms=10, paces=FORWARD_PACES)

    # 10 ms of work and 5 ms of busy waiting, by a clock that moves 1 ns a reading.
    assert 15 * MS <= duration_ns <= 15 * MS + 10
    assert clock.slept_ns == []
    assert (timer.num_segments, timer.num_overruns) == (1, 0)


def test_without_pace_and_fault_a_segment_is_not_delayed() -> None:
    clock = FakeClock()
    timer = StretchedSegments(clock)

    assert run_segment(timer, clock, work_ms=10, paces=BACKWARD_PACES) == 10 * MS
