"""Communications that one call issued together: their common end tells little of each."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ...arrays.grouping import number_rows
from ...replay.operations import latest_by_group

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ...trace.tables import SpanTable
    from ..waits import WaitSplit

HELD_RATIO = 0.05
"""Share of a communication for which another of its call may have waited: half of the least excess
that is a finding."""


def held_by_another(
    spans: SpanTable, split: WaitSplit, comm: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Tell the last members of communications that another one of their call kept from ending.

    What one call issued runs as one: in a ring that sends to the next rank and
    receives from the one before, neither ends before both partners have come.
    The member that entered last waited for nobody, so its duration is the
    transfer; but not where a partner of another operation of its call entered
    later still: then no member's duration is.

    Args:
        spans: The table.
        split: Its split.
        comm: Rows of communications.

    Returns:
        Shape as ``comm``.
    """
    held = np.zeros(len(comm), dtype=np.bool_)
    at = np.flatnonzero(spans.interval_id[comm] != 0)
    if not len(at):
        return held
    rows = comm[at]
    call, _ = number_rows(spans.epoch[rows], spans.rank[rows], spans.interval_id[rows])
    start, wait, length = spans.start_ns[rows], split.wait_ns[rows], spans.duration_ns[rows]
    latest = latest_by_group(call, start + wait)
    held[at] = (wait == 0) & (latest <= start + length)
    held[at] &= latest - start > HELD_RATIO * length
    return held
