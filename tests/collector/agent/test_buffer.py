from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from rankscope.collector.agent.buffer import RowBuffer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankscope.collector.identity import Row


def rows(first: int, end: int) -> list[Row]:
    return [{"n": number} for number in range(first, end)]


def numbers_of(found: Sequence[Row]) -> list[int]:
    return [row["n"] for row in found]


def test_rows_are_sent_in_order_in_bounded_batches() -> None:
    sent: list[list[int]] = []
    buffer = RowBuffer()
    buffer.add(rows(0, 5))

    buffer.send(lambda batch: sent.append(numbers_of(batch)), rows_per_call=2)

    assert sent == [[0, 1], [2, 3], [4]]
    assert len(buffer) == 0


def test_the_oldest_rows_are_dropped_and_counted() -> None:
    buffer = RowBuffer(max_rows=3)
    buffer.add(rows(0, 5))
    sent: list[int] = []

    buffer.send(lambda batch: sent.extend(numbers_of(batch)), rows_per_call=10)

    assert (sent, buffer.num_dropped) == ([2, 3, 4], 2)


def test_rows_that_failed_stay_before_rows_added_meanwhile() -> None:
    buffer = RowBuffer(max_rows=5)
    buffer.add(rows(0, 3))

    def fail(_batch: Sequence[Row]) -> None:
        buffer.add(rows(3, 7))
        raise OSError

    with pytest.raises(OSError):  # noqa: PT011  # raised by fail
        buffer.send(fail, rows_per_call=2)

    # THEN of 0 to 6 the newest five stay, and two are counted
    sent: list[int] = []
    buffer.send(lambda batch: sent.extend(numbers_of(batch)), rows_per_call=10)
    assert (sent, buffer.num_dropped) == ([2, 3, 4, 5, 6], 2)
