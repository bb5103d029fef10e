"""Ranks, counts and durations as a person reads them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

MOST_RANKS_NAMED = 8
"""Ranges, and ranks that stand alone."""

LEAST_RANGE = 3
"""Ranks in a row that are told by the first and the last."""

NS_PER_S = 1e9
LEAST_IN_MS_NS = 950_000
"""Durations below are written in microseconds: a tenth of a millisecond would say little."""


def name_ranks(ranks: tuple[int, ...]) -> str:
    """Write out ascending ranks: "rank 5", "ranks 4 and 5", "ranks 0 to 7, 9 and 12,279 more".

    Three neighbours or more are a range, and a rank's own number has no separator.
    """
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    parts = neighbours(ranks, least=LEAST_RANGE)
    shown = [
        f"{first}" if first == last else f"{first} to {last}"
        for first, last in parts[:MOST_RANKS_NAMED]
    ]
    num_more = sum(last - first + 1 for first, last in parts[MOST_RANKS_NAMED:])
    if num_more:
        return f"ranks {', '.join(shown)} and {num_more:,} more"
    if len(shown) == 1:
        return f"ranks {shown[0]}"
    return f"ranks {', '.join(shown[:-1])} and {shown[-1]}"


def neighbours(numbers: Sequence[int], *, least: int) -> list[tuple[int, int]]:
    """Return ascending numbers as (first, last) of each run of neighbours.

    Args:
        numbers: Ascending.
        least: Runs of fewer are left as the numbers alone, (4, 4) and (5, 5).
    """
    runs: list[tuple[int, int]] = []
    begin = 0
    for end in range(1, len(numbers) + 1):
        if end < len(numbers) and numbers[end] == numbers[end - 1] + 1:
            continue
        own = numbers[begin:end]
        runs += [(own[0], own[-1])] if len(own) >= least else [(one, one) for one in own]
        begin = end
    return runs


def count_text(num: int, word: str) -> str:
    """Write out a count: "1 step", "3 steps", "2 micro-batches", "12,288 ranks"."""
    plural = "es" if word.endswith("ch") else "s"
    return f"{num} {word}" if num == 1 else f"{num:,} {word}{plural}"


def percent_text(ratio: float, *, digits: int = 0) -> str:
    """Write out a share in percent, as the pages do: "26 %"."""
    return f"{100 * ratio:z.{digits}f} %"


def duration_text(value_ns: float) -> str:
    """Write out a duration in ns: "45.3 s", "137.0 ms", "62 us"."""
    if value_ns >= NS_PER_S:
        return f"{value_ns / NS_PER_S:.1f} s"
    if abs(value_ns) >= LEAST_IN_MS_NS:
        return f"{value_ns / 1e6:.1f} ms"
    return f"{value_ns / 1e3:.0f} us"
