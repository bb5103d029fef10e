"""Work on long columns a piece at a time, on a few threads; numpy lets go of the lock meanwhile."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

Result = TypeVar("Result")

ROWS_AT_ONCE = 1 << 19
"""Rows of one piece: what it makes in between is small enough to be used again, not mapped anew."""

NUM_THREADS = 2


def in_pieces(
    work: Callable[[slice], Result], num_rows: int, *, rows_at_once: int = ROWS_AT_ONCE
) -> list[Result]:
    """Return what ``work`` says of each piece of the rows, in order."""
    pieces = [
        slice(first, min(first + rows_at_once, num_rows))
        for first in range(0, num_rows, rows_at_once)
    ]
    if len(pieces) <= 1:
        return [work(piece) for piece in pieces]
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        return list(pool.map(work, pieces))
