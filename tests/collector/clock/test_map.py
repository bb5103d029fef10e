from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope.collector.clock.map import ClockMap, Stretch


def test_one_offset_is_added_to_every_time() -> None:
    times = np.array([0, 7, 2**60], dtype=np.int64)

    assert ClockMap.fixed(100).unix_ns(times).tolist() == [100, 107, 2**60 + 100]


def test_a_time_is_mapped_by_the_stretch_that_contains_it() -> None:
    # GIVEN a clock that is 50 ppm slow from 1,000,000 on
    clock = ClockMap([Stretch(begin_ns=0, offset_ns=10)])
    clock.add(Stretch(begin_ns=1_000_000, offset_ns=10, drift_ppb=50_000))

    # THEN times before are unchanged, and later ones drift: 2 ms x 50 ppm = 100 ns
    times = np.array([999_999, 1_000_000, 3_000_000], dtype=np.int64)
    assert clock.unix_ns(times).tolist() == [1_000_009, 1_000_010, 3_000_110]


def test_the_first_stretch_also_holds_before_its_begin() -> None:
    clock = ClockMap([Stretch(begin_ns=1_000_000, offset_ns=5, drift_ppb=1_000_000)])

    assert clock.unix_at(0) == 0 + 5 - 1_000


def test_a_year_of_drift_does_not_overflow() -> None:
    year_ns = 365 * 24 * 3600 * 10**9
    clock = ClockMap([Stretch(begin_ns=0, offset_ns=0, drift_ppb=500_000)])

    assert clock.unix_at(year_ns) == year_ns + year_ns // 2_000


def test_a_stretch_before_the_newest_is_an_error() -> None:
    clock = ClockMap([Stretch(begin_ns=10, offset_ns=0)])

    with pytest.raises(ValueError, match="begins at 9 ns"):
        clock.add(Stretch(begin_ns=9, offset_ns=0))


@given(
    times=st.lists(st.integers(0, 10**15), min_size=1, max_size=30),
    begins=st.lists(st.integers(1, 10**15), max_size=5),
    drift_ppb=st.integers(-500_000, 500_000),
)
def test_a_stretch_added_later_changes_nothing_before_it(
    times: list[int], begins: list[int], drift_ppb: int
) -> None:
    at_ns = np.array(times, dtype=np.int64)
    clock = ClockMap.fixed(17)
    for begin_ns in sorted(begins):
        before = clock.unix_ns(at_ns)
        clock.add(Stretch(begin_ns=begin_ns, offset_ns=19, drift_ppb=drift_ppb))
        is_earlier = at_ns < begin_ns
        assert (clock.unix_ns(at_ns)[is_earlier] == before[is_earlier]).all()
