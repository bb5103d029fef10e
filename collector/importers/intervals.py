"""Unions and differences of intervals of time, as ascending lists of (begin, end)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    Interval = tuple[int, int]


def unite(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union of intervals as disjoint ones, in order of time."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((begin, end))
    return merged


def subtract(intervals: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    """Return what of disjoint ascending intervals is in none of the others, which are so too."""
    rest: list[Interval] = []
    at = 0
    for begin, end in intervals:
        while at < len(others) and others[at][1] <= begin:
            at += 1
        place = at
        while place < len(others) and others[place][0] < end:
            if others[place][0] > begin:
                rest.append((begin, others[place][0]))
            begin = max(begin, others[place][1])  # noqa: PLW2901
            place += 1
        if begin < end:
            rest.append((begin, end))
    return rest
