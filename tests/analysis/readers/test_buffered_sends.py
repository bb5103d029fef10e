"""Sends that only seem to have ended before their receive began, because clocks disagree."""

from __future__ import annotations

import pytest

from rankscope.analysis.readers.waits import split_waits
from rankscope.analysis.trace.tables import GroupInfo
from tests.analysis.readers.test_waits import p2p
from tests.support.dashboard.builders import span_table

PAIR = GroupInfo(group_id=9, kind="pp", name="pp", members=(0, 4))
ERROR_NS = 10


@pytest.mark.parametrize("error_ns", [ERROR_NS, 0])
def test_a_pair_whose_ends_end_together_is_not_buffered_within_the_clock_error(
    error_ns: int,
) -> None:
    # GIVEN transfers of 5 ns after receives that begin 20, 40 and 30 ns after their sends, and a
    # receiver whose clock is 8 ns ahead: sends seem to end 3 ns before the receives begin
    spans = span_table(
        [
            span
            for number, late in enumerate((20, 40, 30))
            for begin in [100 * number]
            for span in (
                p2p(0, begin, begin + late + 5, src=0, dst=4, seq=number),
                p2p(4, begin + late + 8, begin + late + 13, src=0, dst=4, seq=number),
            )
        ]
    )

    split = split_waits(spans, [PAIR], clock_error_ns=error_ns)

    # THEN with clocks known to be off by as much the sends waited, without it they were buffered
    waits = [28, 0, 48, 0, 38, 0] if error_ns else [0] * 6
    assert split.wait_ns.tolist() == waits
    assert split.transfer_ns.tolist() == ([-3, 5] * 3 if error_ns else [25, 5, 45, 5, 35, 5])


def test_a_send_that_lasts_as_long_each_time_is_buffered_within_the_clock_error_too() -> None:
    spans = span_table(
        [
            span
            for number, late in enumerate((8, 14, 10))
            for begin in [100 * number]
            for span in (
                p2p(0, begin, begin + 5, src=0, dst=4, seq=number),
                p2p(4, begin + late, begin + late + 3, src=0, dst=4, seq=number),
            )
        ]
    )

    split = split_waits(spans, [PAIR], clock_error_ns=ERROR_NS)

    assert split.wait_ns.tolist() == [0] * 6
    assert split.transfer_ns.tolist() == [5, 3] * 3
