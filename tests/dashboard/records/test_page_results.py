"""Numbers of a comparison as text."""

from __future__ import annotations

import pytest

from rankscope.dashboard.records.page_results import ComparedNumber


@pytest.mark.parametrize(
    ("number", "cells"),
    [
        (
            ComparedNumber(name="step time, s", first=0.4, second=0.6, ratio=1.5),
            ("400 ms", "600 ms", "50 % slower"),
        ),
        (
            ComparedNumber(name="step time, s", first=0.6, second=0.27, ratio=0.45),
            ("600 ms", "270 ms", "55 % faster"),
        ),
        # 20 x of next to nothing: the difference is what the step became longer by.
        (
            ComparedNumber(name="time.waiting, s", first=0.01, second=0.2, ratio=20.0),
            ("10.0 ms", "200 ms", "+190 ms"),
        ),
        (
            ComparedNumber(name="time.waiting, s", first=None, second=0.2, ratio=None),
            ("n/a", "200 ms", "n/a"),
        ),
        (
            ComparedNumber(name="MFU", first=0.5, second=None, ratio=None),
            ("50.0 %", "n/a", "n/a"),
        ),
    ],
)
def test_a_part_of_the_step_changes_by_a_difference_and_others_by_a_ratio(
    number: ComparedNumber, cells: tuple[str, str, str]
) -> None:
    assert number.cells == cells
