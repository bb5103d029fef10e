"""A device's clock against the host's: every bound must hold, and be tight enough to use."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rankscope.tracer.device.backend import MarkPool
from rankscope.tracer.device.clock import (
    MAX_DRIFT_RATIO,
    NUM_ANCHORS,
    Bracket,
    DeviceClock,
    Point,
    Probe,
    fit_drift,
    rounding_ns,
)
from tests.support.tracer.torch.fake_cuda import FakeCuda, FakeEvent

MS = 1_000_000
S = 1_000_000_000


def clock_of(cuda: FakeCuda) -> DeviceClock:
    pool = MarkPool(cuda.new_event, 0, 1_000)
    return DeviceClock(pool, cuda.private_stream(0), clock=cuda.clock, sleep=cuda.sleep)


def run_until(cuda: FakeCuda, clock: DeviceClock, until_ns: int) -> None:
    """Make a turn every 20 ms, as the background thread does, until the time is reached."""
    while cuda.now_ns < until_ns:
        clock.renew_if_due()
        cuda.now_ns += 20 * MS


def record_event(cuda: FakeCuda) -> tuple[FakeEvent, int]:
    """Return an event that is done, and when the host recorded it."""
    event, launch_ns = cuda.new_event(), cuda.now_ns
    event.record(cuda.stream(0))
    assert event.done_ns is not None
    cuda.now_ns = max(cuda.now_ns, event.done_ns) + 10_000
    return event, launch_ns


def test_a_bracket_contains_the_event_on_an_idle_device() -> None:
    cuda = FakeCuda()
    event = cuda.new_event()
    probe = Probe(event, cuda.new_stream(), clock=cuda.clock, sleep=cuda.sleep)

    bracket = probe.watch(10 * MS)

    assert bracket is not None
    assert event.done_ns is not None
    assert bracket.lower_ns <= event.done_ns <= bracket.upper_ns
    # Recorded after 1 us, done 4 us later, seen by a query that takes 1 us.
    assert bracket.error_ns < 5_000


def test_a_bracket_behind_a_long_kernel_is_as_wide_as_the_pause_between_queries() -> None:
    cuda = FakeCuda(connections=1)
    first, second = cuda.new_stream(), cuda.new_stream()
    cuda.kernel(7 * MS, first)
    cuda.wait_for(second, first)  # One queue: later work waits behind this.
    event = cuda.new_event()
    probe = Probe(event, cuda.new_stream(), clock=cuda.clock, sleep=cuda.sleep)

    bracket = probe.watch(10 * MS)

    assert bracket is not None
    assert event.done_ns is not None
    assert bracket.lower_ns <= event.done_ns <= bracket.upper_ns
    assert bracket.error_ns < 35_000  # Half of a pause of 50 us, plus the calls around it.


def test_a_probe_that_the_device_does_not_reach_times_out() -> None:
    cuda = FakeCuda()
    stream = cuda.new_stream()
    cuda.kernel(1 << 50, stream)
    probe = Probe(cuda.new_event(), stream, clock=cuda.clock, sleep=cuda.sleep)
    begun_ns = cuda.now_ns

    assert probe.watch(10 * MS) is None
    assert cuda.now_ns - begun_ns < 11 * MS


def test_two_distant_points_bound_the_drift() -> None:
    # 10 s on the device, 10 s + 200 us +- 20 us on the host: 20 ppm +- 2.
    points = [
        Point(0, Bracket(-10_000, 10_000)),
        Point(10 * S, Bracket(10 * S + 190_000, 10 * S + 210_000)),
    ]

    drift = fit_drift(points)

    assert drift.ratio == pytest.approx(20e-6)
    assert drift.error_ratio == pytest.approx(2e-6)


def test_with_one_point_the_drift_is_unknown_within_its_limit() -> None:
    drift = fit_drift([Point(0, Bracket(0, 10))])

    assert (drift.ratio, drift.error_ratio) == (0.0, MAX_DRIFT_RATIO)


def test_points_before_a_change_of_drift_are_left_out() -> None:
    points = [
        Point(0, Bracket(0, 0)),
        Point(1 * S, Bracket(S + 50_000, S + 50_000)),  # 50 ppm until here,
        Point(2 * S, Bracket(2 * S + 50_000, 2 * S + 50_000)),  # then none.
    ]

    assert fit_drift(points).ratio == pytest.approx(0.0)


def test_rounding_is_half_the_distance_between_two_float32_values() -> None:
    assert rounding_ns(16_000.0) == pytest.approx(488.28125)  # 2**-11 ms
    assert rounding_ns(1_800_000.0) == pytest.approx(62_500.0)  # 2**-4 ms: half an hour
    assert rounding_ns(0.0) == 0.0


@pytest.mark.parametrize("connections", [1, 8])
@pytest.mark.parametrize("drift", [0.0, 30e-6, -80e-6])
def test_the_error_of_an_event_is_within_a_small_bound(drift: float, connections: int) -> None:
    cuda = FakeCuda(drift=drift, connections=connections)
    clock = clock_of(cuda)
    run_until(cuda, clock, cuda.now_ns + 60 * S)
    assert abs(clock.drift.ratio - drift) <= clock.drift.error_ratio < 1e-6

    event, launch_ns = record_event(cuda)
    mapped = clock.read_time(event, launch_ns)

    assert event.done_ns is not None
    assert abs(mapped.at_ns - event.done_ns) <= mapped.error_ns < 12_000


@given(
    drift=st.floats(-9e-5, 9e-5),
    slow_ns=st.lists(st.integers(0, 300_000), max_size=60),
    busy_ns=st.integers(0, 40 * MS),
    seconds=st.integers(1, 30),
)
@settings(max_examples=60, deadline=None)
def test_the_bound_holds_if_the_host_is_disturbed(
    drift: float, slow_ns: list[int], busy_ns: int, seconds: int
) -> None:
    cuda = FakeCuda(drift=drift, connections=1, slow_call_ns=slow_ns)
    cuda.kernel(busy_ns)
    clock = clock_of(cuda)
    run_until(cuda, clock, cuda.now_ns + seconds * S)

    event, launch_ns = record_event(cuda)
    mapped = clock.read_time(event, launch_ns)

    assert event.done_ns is not None
    assert abs(mapped.at_ns - event.done_ns) <= mapped.error_ns


def test_an_event_before_the_first_anchor_is_mapped_too() -> None:
    cuda = FakeCuda()
    event, launch_ns = record_event(cuda)
    cuda.now_ns += 300 * MS
    clock = clock_of(cuda)
    assert clock.renew_if_due() is not None

    mapped = clock.read_time(event, launch_ns)

    assert event.done_ns is not None
    # The drift is unknown yet: 300 ms at 100 ppm.
    assert abs(mapped.at_ns - event.done_ns) <= mapped.error_ns < 45_000


def test_anchors_are_renewed_within_ten_seconds_and_events_are_reused() -> None:
    cuda = FakeCuda()
    pool = MarkPool(cuda.new_event, 0, NUM_ANCHORS + 9)
    clock = DeviceClock(pool, cuda.private_stream(0), clock=cuda.clock, sleep=cuda.sleep)
    seen = []
    for _ in range(15_000):  # five minutes
        anchor = clock.renew_if_due()
        if anchor is not None:
            seen.append(anchor.monotonic_ns)
        cuda.now_ns += 20 * MS

    gaps = [after - before for before, after in itertools.pairwise(seen)]
    assert max(gaps) < 10 * S
    assert len(clock.anchors) == NUM_ANCHORS
    # All but those of the anchors are free again.
    assert sum(pool.take() is not None for _ in range(NUM_ANCHORS + 9)) == 9


def test_a_hanging_device_is_queried_once_per_turn() -> None:
    cuda = FakeCuda(connections=1)
    first, second = cuda.new_stream(), cuda.new_stream()
    cuda.kernel(1 << 50, first)
    cuda.wait_for(second, first)
    clock = clock_of(cuda)
    run_until(cuda, clock, cuda.now_ns + 5 * S)
    assert not clock.ready

    before = cuda.num_queries
    clock.renew_if_due()

    assert cuda.num_queries == before + 1
