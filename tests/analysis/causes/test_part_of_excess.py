"""M_W and M_S: which part of the time above the ideal goes with a part made ideal."""

from __future__ import annotations

import pytest

from rankscope.analysis.replay.replayer import share_of_excess


def test_it_is_the_time_won_over_the_time_above_the_ideal() -> None:
    # GIVEN T = 140, 110 without the part, 100 ideal; WHEN / THEN 30 of 40 go with it
    assert share_of_excess(140.0, 110.0, 100.0) == pytest.approx(0.75)


def test_it_is_defined_where_the_recorded_run_beats_the_ideal_one() -> None:
    # GIVEN three workers that enter the clip together with transfers of 0, 20, 20 (median 20)
    # and then optimize for 30, 9, 0 (mean 13): T = max(30, 29, 20), T_ideal = 20 + 13
    recorded, ideal = 30.0, 33.0
    # WHEN the first is made ideal: max(33, 29, 20)
    without = 33.0
    # THEN the formula holds with both signs turned
    assert share_of_excess(recorded, without, ideal) == pytest.approx(1.0)


@pytest.mark.parametrize("recorded", [5e9, 5e9 + 1, 5e9 - 1])
def test_it_is_unknown_where_both_take_as_long_but_for_a_nanosecond(recorded: float) -> None:
    assert share_of_excess(recorded, 4e9, 5e9) is None
