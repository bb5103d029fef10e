"""The replay loop: rows in topological order, with any durations; and other passes over all rows.

``loop.c`` is compiled into ``_loop`` at installation and replays a million rows in 10 ms.
``_loop.pyi`` says what each function computes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

try:
    from . import _loop as functions
except ImportError as error:
    raise ImportError(
        "the compiled part of the analysis is missing: install a C compiler and the headers of"
        " Python (Debian: apt install gcc python3-dev), then rankscope again: pip install"
        " --force-reinstall --no-deps /path/to/rankscope"
    ) from error

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["MAX_WIDTH", "Graph", "Intervals", "functions"]

MAX_WIDTH = 32
"""Most scenarios of `replay_parts`: the bits of a mask."""


class Graph(NamedTuple):
    """Rows in topological order.

    They are held by *position*. An item is a row without a group, or all rows of one group; it
    follows all that its rows wait for.
    """

    num_rows: int
    num_edges: int
    order: NDArray[np.int32]
    """Shape (rows,): the row at each position."""

    last: NDArray[np.uint8]
    """Shape (rows,): whether the position is the last of its item."""

    first: NDArray[np.int32]
    """Shape (rows + 1,): index of each position's first predecessor in ``pred``."""

    pred: NDArray[np.int32]
    """Shape (edges,): positions that are waited for."""


class Intervals(NamedTuple):
    """Intervals of ranks: some rows of a table."""

    num: int
    num_rows: int
    row: NDArray[np.int32]
    """Shape (intervals,): rows, in the order of rank and start."""

    rank: NDArray[np.int32]
    """Shape (rows,)."""

    start: NDArray[np.int64]
    """Shape (rows,)."""

    end: NDArray[np.int64]
    """Shape (rows,)."""
