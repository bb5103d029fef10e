"""How many rows lay in segments that somebody removed before they were read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..identity import MAX_SEGMENT, segment_id

if TYPE_CHECKING:
    from collections.abc import Mapping, Set

REMOVED = "segment-removed"
"""Reason under which `ranks.dropped` counts the rows."""


def num_removed_rows(
    process: str,
    *,
    num_stored: int,
    end_rows: Mapping[int, int],
    there: Set[int],
    num_given_up: int,
) -> int:
    """Return the rows of a process that has ended which are neither read nor on the disk.

    Segments are numbered without gaps, so a number that nobody knows was a segment. What it held
    is what the process says that it wrote, less what is known; 0 where that can't be told.

    Args:
        process: The process's uuid in hex.
        num_stored: Rows that it claimed in all segments, by its own account.
        end_rows: Behind the last row that was read, by segment, of any processes.
        there: Numbers of the segments that lie or lay there, with rows or without.
        num_given_up: Rows that were dropped and counted on the way.
    """
    first = segment_id(process, 0)
    own = {
        segment - first: end_row
        for segment, end_row in end_rows.items()
        if 0 <= segment - first <= MAX_SEGMENT
    }
    numbers = own.keys() | there
    if len(numbers) > max(numbers, default=-1):
        return 0
    return max(0, num_stored - sum(own.values()) - num_given_up)
