"""Which compute is that of experts: how long it takes goes with the tokens that the router sends.

A rank whose experts get more tokens than others computes longer there, and is
not slow. So a rank's speed is judged by what it computes outside: up to the
all-to-all that sends the tokens out, and after the one that brings them back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rankscope.tracer.span import KIND_CODES, SpanKind

from ...arrays.grouping import distinct
from ...arrays.intervals import NOWHERE
from .segments import Pieces, own_compute
from .split_backward import is_deferred

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .match_waits import Joined

LEAST_OUTSIDE_RATIO = 0.1
"""Share of the compute that must lie outside the experts for it to speak for the rank."""

MOST_ODD_RATIO = 0.01
"""Share of the compute spans in which what opens may stay open: by borders that coincide."""

EP_COMM = KIND_CODES[SpanKind.EP_COMM]


def expert_pieces(joined: Joined, pieces: Pieces, portion: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Tell which pieces of the ranks' own compute are the experts'.

    Waits for expert-parallel communication inside a compute span open and close
    the experts' part in turn. The later portions of a split backward hold the
    experts' weights without a border, so they count as theirs.

    Args:
        joined: Communications and waits.
        pieces: What the ranks did between their waits.
        portion: Shape (spans,): which portion of its micro-batch a compute span is.

    Returns:
        Shape (pieces,): all False where there are no experts, where what opens is often not
        closed, or where too little is left outside.
    """
    own = own_compute(pieces, len(pieces.start))
    nothing = np.zeros(len(own), dtype=np.bool_)
    ends = _wait_ends(joined)
    if not len(ends) or not own.any():
        return nothing
    spans, line = joined.spans, joined.line
    rows = distinct(pieces.compute[own])
    start = line.place(spans.rank[rows], spans.start_ns[rows])
    # A wait that ends as the span begins is of the one before.
    before = np.searchsorted(ends, start, side="right")
    inside = np.searchsorted(ends, start + spans.duration_ns[rows], side="right") - before
    odd = inside % 2 == 1
    if not inside.any() or odd.mean() > MOST_ODD_RATIO:
        return nothing
    of_piece = np.flatnonzero(own)
    span = np.searchsorted(rows, pieces.compute[of_piece])
    passed = np.searchsorted(ends, pieces.start[of_piece], side="right") - before[span]
    found = nothing.copy()
    found[of_piece] = ((passed % 2 == 1) & ~odd[span]) | is_deferred(portion[rows])[span]
    length = np.where(own, pieces.end - pieces.start, 0)
    outside = float(length[~found].sum())
    return found if outside >= LEAST_OUTSIDE_RATIO * float(length.sum()) else nothing


def _wait_ends(joined: Joined) -> NDArray[np.int64]:
    """Return where on the line ranks ended waiting for expert-parallel communication, sorted."""
    known = joined.wait_comm != NOWHERE
    known[known] = joined.spans.kind[joined.comm[joined.wait_comm[known]]] == EP_COMM
    return np.sort(joined.blocked()[1][known])
