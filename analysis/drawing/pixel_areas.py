"""How much of each pixel of a step every kind of span covers: whole nanoseconds, so sums are exact.

Areas of neighbouring bins, and of ranks that share a row, add up to those of the larger
cell. A step that is drawn in portions, or at several sizes, therefore meets the same cells
as one that is drawn whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from rankscope.tracer.span import KIND_CODES, NONE, SpanKind

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .timeline import StepTimeline

    ByKind = dict[int, "NDArray[np.int64]"]

_WAIT = KIND_CODES[SpanKind.WAIT]


@dataclass(frozen=True, slots=True, kw_only=True)
class KindCells:
    """One cell per row and bin."""

    kind: NDArray[np.int8]
    """Code of the kind with the largest share of the cell; -1 where nothing was there."""

    filled_ratio: NDArray[np.float32]
    """How much of the cell was covered, above 1 where several ranks or tracks share it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepAreas:
    """By kind code how many ns of each cell are covered, shape (rows, bins) each."""

    edges_ns: NDArray[np.int64]
    """Shape (bins + 1,): where the bins begin and end, relative to the step's begin."""

    outer: ByKind
    """What is no communication and lies in nothing else."""

    inner: ByKind
    """What is no communication and lies in one of these."""

    comm: ByKind
    """Communication: its kind where it moved bytes, `WAIT` where it waited."""

    num_rows: int

    def coarser(self, num_joined: int) -> StepAreas:
        """Join ``num_joined`` neighbouring bins; their number must be a multiple of it."""
        first = np.arange(0, len(self.edges_ns) - 1, num_joined)

        def joined(areas: ByKind) -> ByKind:
            return {code: np.add.reduceat(area, first, axis=1) for code, area in areas.items()}

        return StepAreas(
            edges_ns=self.edges_ns[::num_joined],
            outer=joined(self.outer),
            inner=joined(self.inner),
            comm=joined(self.comm),
            num_rows=self.num_rows,
        )

    def compute_cells(self) -> KindCells:
        """Return per cell the kind with the most time, what is nested taken from what holds it."""
        kind, most, total = self._most(self.outer)
        nested_kind, nested_most, nested_total = self._most(self.inner)
        kind = np.where(nested_most > most - nested_total, nested_kind, kind)
        return KindCells(kind=kind, filled_ratio=self._ratio(total))

    def comm_cells(self) -> KindCells:
        """Return per cell the kind of communication with the most time."""
        kind, _, total = self._most(self.comm)
        return KindCells(kind=kind, filled_ratio=self._ratio(total))

    def _most(self, areas: ByKind) -> tuple[NDArray[np.int8], NDArray[np.int64], NDArray[np.int64]]:
        """Return per cell the kind with the largest area (-1: none), that area, and the sum."""
        shape = (self.num_rows, len(self.edges_ns) - 1)
        kind = np.full(shape, NONE, dtype=np.int8)
        most, total = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        for code in sorted(areas):
            area = areas[code]
            larger = area > most
            kind[larger] = code
            np.maximum(most, area, out=most)
            total += area
        return kind, most, total

    def _ratio(self, total: NDArray[np.int64]) -> NDArray[np.float32]:
        # A bin of a step shorter than its number of bins may have no width, and then nothing in it.
        width = np.maximum(np.diff(self.edges_ns), 1)
        ratio: NDArray[np.float32] = (total / width).astype(np.float32)
        return ratio


def bin_edges(length_ns: int, num_bins: int) -> NDArray[np.int64]:
    """Return ``length_ns * k // num_bins`` for k = 0 to ``num_bins``, shape (bins + 1,).

    Every fourth edge of four times as many bins is one of these.
    """
    whole, rest = divmod(max(length_ns, 1), num_bins)
    at = np.arange(num_bins + 1, dtype=np.int64)
    edges: NDArray[np.int64] = at * whole + at * rest // num_bins
    return edges


def step_areas(
    timeline: StepTimeline, row_of_rank: NDArray[np.int64], *, num_rows: int, num_bins: int
) -> StepAreas:
    """Measure what the spans of a step, or of some of its ranks, cover of each cell.

    Below the second level nested spans count as what they lie in.

    Args:
        timeline: The step; its begin and end are the picture's, and what lies outside is left out.
        row_of_rank: By rank, -1 for ranks that are not drawn, as those beyond its end.
        num_rows: Rows.
        num_bins: Columns.
    """
    spans = timeline.spans
    known = spans.rank < len(row_of_rank)
    row = np.where(known, row_of_rank[np.minimum(spans.rank, len(row_of_rank) - 1)], NONE)
    start = spans.start_ns - timeline.begin_ns
    end = start + spans.duration_ns
    comm = timeline.communication
    waiting = np.where(comm, np.clip(timeline.wait_ns, 0, spans.duration_ns), 0)
    length = timeline.end_ns - timeline.begin_ns
    moves = np.clip(start + waiting, 0, length)
    start, end = np.clip(start, 0, length), np.clip(end, 0, length)
    grid = _Grid(num_rows, bin_edges(timeline.end_ns - timeline.begin_ns, num_bins))
    shown, kind = row >= 0, spans.kind
    held = shown & comm & (waiting > 0)
    blocked = np.full_like(kind, _WAIT)
    return StepAreas(
        edges_ns=grid.edges,
        outer=grid.areas(row, start, end, kind, shown & ~comm & (spans.depth == 0)),
        inner=grid.areas(row, start, end, kind, shown & ~comm & (spans.depth == 1)),
        comm=grid.areas(row, moves, end, kind, shown & comm)
        | grid.areas(row, start, moves, blocked, held),
        num_rows=num_rows,
    )


class _Grid:
    def __init__(self, num_rows: int, edges: NDArray[np.int64]) -> None:
        self._num_rows = num_rows
        self.edges = edges
        self._num_bins = len(edges) - 1
        self._width = np.diff(edges)

    def areas(
        self,
        row: NDArray[np.int64],
        start: NDArray[np.int64],
        end: NDArray[np.int64],
        kind: NDArray[np.int8],
        keep: NDArray[np.bool_],
    ) -> ByKind:
        """Return by kind code how many ns of each cell the kept spans cover."""
        kept = np.flatnonzero(keep)
        row, start, end, kind = row[kept], start[kept], end[kept], kind[kept]
        found = {}
        for code in np.flatnonzero(np.bincount(kind)).tolist():
            own = np.flatnonzero(kind == code)
            found[code] = self._after(row[own], start[own]) - self._after(row[own], end[own])
        return found

    def _after(self, row: NDArray[np.int64], at: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return per cell the time of its bin that lies after ``at``, summed over a row's moments.

        A moment before the bin counts the whole width; one in it, what is left of it.
        """
        column = self._bin(at)
        inside = column < self._num_bins  # the step's end lies in no bin
        if not inside.all():
            row, at, column = row[inside], at[inside], column[inside]
        size, shape = self._num_rows * self._num_bins, (self._num_rows, self._num_bins)
        cell = row * self._num_bins + column
        begun = np.bincount(cell, minlength=size).reshape(shape)
        # Sums below 2^53, as these are, lose nothing as floats.
        passed = np.bincount(cell, weights=at - self.edges[column], minlength=size)
        after: NDArray[np.int64] = np.cumsum(begun, axis=1) * self._width
        after -= passed.astype(np.int64).reshape(shape)
        return after

    def _bin(self, at: NDArray[np.int64]) -> NDArray[np.int64]:
        length = int(self.edges[-1])
        if length < self._num_bins:  # some bins have no width: a guess may be far off
            return np.searchsorted(self.edges, at, side="right") - 1
        guess: NDArray[Any] = (at * (self._num_bins / length)).astype(np.int64)
        np.clip(guess, 0, self._num_bins, out=guess)
        guess -= at < self.edges[guess]
        upper = self.edges[np.minimum(guess + 1, self._num_bins)]
        guess += (at >= upper) & (guess < self._num_bins)
        return guess
