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


def test_rows_go_in_order_and_a_bounded_number_at_a_time() -> None:
    sent: list[list[int]] = []
    buffer = RowBuffer()
    buffer.add(rows(0, 5))

    buffer.ship(lambda some: sent.append(numbers_of(some)), num_at_once=2)

    assert sent == [[0, 1], [2, 3], [4]]
    assert len(buffer) == 0


def test_the_oldest_make_room_and_are_counted() -> None:
    buffer = RowBuffer(max_rows=3)
    buffer.add(rows(0, 5))
    sent: list[int] = []

    buffer.ship(lambda some: sent.extend(numbers_of(some)), num_at_once=10)

    assert (sent, buffer.num_dropped) == ([2, 3, 4], 2)


def test_what_was_not_taken_waits_in_its_place_before_what_came_meanwhile() -> None:
    buffer = RowBuffer(max_rows=5)
    buffer.add(rows(0, 3))

    def refuse(_some: Sequence[Row]) -> None:
        buffer.add(rows(3, 7))
        raise OSError

    with pytest.raises(OSError):  # noqa: PT011  # our own
        buffer.ship(refuse, num_at_once=2)

    # THEN of 0 to 6 the newest five are there, and two are counted
    sent: list[int] = []
    buffer.ship(lambda some: sent.extend(numbers_of(some)), num_at_once=10)
    assert (sent, buffer.num_dropped) == ([2, 3, 4, 5, 6], 2)
