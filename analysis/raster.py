"""Make more ranks, steps or spans than a screen has pixels fit it, without losing the worst."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tracer.span import KIND_CODES, NONE, SpanKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from analysis.report import RankStepExcess
    from analysis.timeline import StepTimeline

_WAIT = KIND_CODES[SpanKind.WAIT]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExcessBlocks:
    """A heat-map of who was slow when, neighbours joined."""

    rank_blocks: tuple[tuple[int, int], ...]
    """First and last rank of each row."""

    step_blocks: tuple[tuple[int, int], ...]
    """First and last step of each column."""

    excess_ns: NDArray[np.float64]
    """Shape (rank blocks, step blocks): the largest excess in the block; NaN where unknown."""


def worst_in_blocks(excess: RankStepExcess, *, max_rows: int, max_columns: int) -> ExcessBlocks:
    """Join neighbouring ranks and steps until they fit, each block showing its largest excess.

    The mean would hide one slow rank among its neighbours; the largest cannot.

    Args:
        excess: Shape (ranks, steps).
        max_rows: Most rows of the result, at least 1.
        max_columns: Most columns of the result, at least 1.
    """
    rows, rank_blocks = _blocks(excess.ranks, max_rows)
    columns, step_blocks = _blocks(excess.steps, max_columns)
    worst = excess.excess_ns
    if worst.size:
        worst = np.fmax.reduceat(np.fmax.reduceat(worst, rows, axis=0), columns, axis=1)
    return ExcessBlocks(rank_blocks=rank_blocks, step_blocks=step_blocks, excess_ns=worst)


@dataclass(frozen=True, slots=True, kw_only=True)
class KindCells:
    """One cell per row and bin."""

    kind: NDArray[np.int8]
    """Code of the kind with the largest share of the cell; -1 where nothing was there."""

    filled_ratio: NDArray[np.float32]
    """How much of the cell was covered, above 1 where several ranks or tracks share it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRaster:
    """A step as a grid of pixels: what filled most of each."""

    rank_blocks: tuple[tuple[int, ...], ...]
    """The ranks of each row pair, in the order asked for."""

    edges_ns: NDArray[np.int64]
    """Shape (bins + 1,): where the bins begin and end, relative to the step's begin."""

    compute: KindCells
    """What is no communication."""

    comm: KindCells
    """Communication: its kind where it moved bytes, `WAIT` where it waited."""


def step_raster(
    timeline: StepTimeline, ranks: Sequence[int], *, max_rows: int, num_bins: int
) -> StepRaster:
    """Average a step over the area of each pixel and keep the kind with the largest share.

    Spans nested in others take their time from these; below the second level
    they count as what they lie in.

    Args:
        timeline: The step.
        ranks: Row order; ranks left out are not drawn.
        max_rows: Most row pairs; neighbours in ``ranks`` are joined beyond it.
        num_bins: Columns.
    """
    first, _ = _blocks(ranks, max_rows)
    ends = np.append(first[1:], len(ranks))
    row_of = _row_by_rank(ranks, first)
    spans = timeline.spans
    inside = spans.rank < len(row_of)
    row = np.where(inside, row_of[np.minimum(spans.rank, len(row_of) - 1)], NONE)
    start = spans.start_ns - timeline.begin_ns
    edges = np.linspace(0, max(timeline.end_ns - timeline.begin_ns, 1), num_bins + 1)
    comm = timeline.communication
    canvas = _Canvas(num_rows=len(first), edges=edges)

    waiting = np.where(comm, np.clip(timeline.wait_ns, 0, spans.duration_ns), 0)
    end = start + spans.duration_ns
    shown = row >= 0
    outer = canvas.areas(row, start, end, spans.kind, shown & ~comm & (spans.depth == 0))
    inner = canvas.areas(row, start, end, spans.kind, shown & ~comm & (spans.depth == 1))
    moving = canvas.areas(row, start + waiting, end, spans.kind, shown & comm)
    held = canvas.areas(
        row, start, start + waiting, np.full_like(spans.kind, _WAIT), shown & comm & (waiting > 0)
    )
    return StepRaster(
        rank_blocks=tuple(
            tuple(ranks[begin:stop])
            for begin, stop in zip(first.tolist(), ends.tolist(), strict=True)
        ),
        edges_ns=edges.astype(np.int64),
        compute=_largest(outer, inner, canvas),
        comm=_largest(moving | held, {}, canvas),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Canvas:
    num_rows: int
    edges: NDArray[np.float64]

    @property
    def bin_ns(self) -> float:
        """Width of one bin."""
        return float(self.edges[1] - self.edges[0])

    def most(
        self, areas: dict[int, NDArray[np.float64]]
    ) -> tuple[NDArray[np.int8], NDArray[np.float64], NDArray[np.float64]]:
        """Return per cell the kind with the largest area (-1: none), that area, and the sum."""
        shape = (self.num_rows, len(self.edges) - 1)
        kind = np.full(shape, NONE, dtype=np.int8)
        most, total = np.zeros(shape), np.zeros(shape)
        for code, area in areas.items():
            larger = area > most
            kind[larger] = code
            most = np.maximum(most, area)
            total += area
        return kind, most, total

    def areas(
        self,
        row: NDArray[np.int64],
        start: NDArray[np.int64],
        end: NDArray[np.int64],
        kind: NDArray[np.int8],
        keep: NDArray[np.bool_],
    ) -> dict[int, NDArray[np.float64]]:
        """Return by kind code how many ns of each cell the kept spans cover."""
        found = {}
        for code in np.unique(kind[keep]).tolist():
            own = keep & (kind == code)
            found[code] = self._area(row[own], start[own], end[own])
        return found

    def _area(
        self, row: NDArray[np.int64], start: NDArray[np.int64], end: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """Sum over spans of their overlap with each bin, by differences of running sums.

        Up to an edge t a span has covered ``max(t - start, 0) - max(t - end, 0)``:
        the sum of a ramp that opens at its start and one that closes at its end.
        """
        covered = self._ramp(row, start) - self._ramp(row, end)
        return np.diff(covered, axis=1)

    def _ramp(self, row: NDArray[np.int64], at: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return ``sum(max(edge - at, 0))`` per row at every edge."""
        num_edges = len(self.edges)
        edge = np.searchsorted(self.edges, at, side="right")
        size = self.num_rows * (num_edges + 1)
        cell = row * (num_edges + 1) + edge
        shape = (self.num_rows, num_edges + 1)
        opened = np.bincount(cell, minlength=size).reshape(shape)
        moments = np.bincount(cell, weights=at, minlength=size).reshape(shape)
        passed = np.cumsum(opened, axis=1)[:, :num_edges]
        sums = np.cumsum(moments, axis=1)[:, :num_edges]
        ramp: NDArray[np.float64] = passed * self.edges - sums
        return ramp


def _largest(
    outer: dict[int, NDArray[np.float64]],
    inner: dict[int, NDArray[np.float64]],
    canvas: _Canvas,
) -> KindCells:
    """Return per cell the kind with the most time, what is nested taken from what holds it."""
    kind, most, total = canvas.most(outer)
    nested_kind, nested_most, nested_total = canvas.most(inner)
    nested_wins = nested_most > most - nested_total
    kind = np.where(nested_wins, nested_kind, kind).astype(np.int8)
    return KindCells(kind=kind, filled_ratio=(total / canvas.bin_ns).astype(np.float32))


def _blocks(
    labels: Sequence[int], most: int
) -> tuple[NDArray[np.intp], tuple[tuple[int, int], ...]]:
    """Cut a row of labels into at most ``most`` blocks of equal size (the last may be smaller)."""
    size = max(1, -(-len(labels) // most))
    first = np.arange(0, len(labels), size)
    last = [min(begin + size, len(labels)) - 1 for begin in first.tolist()]
    blocks = tuple(
        (labels[begin], labels[stop]) for begin, stop in zip(first.tolist(), last, strict=True)
    )
    return first, blocks


def _row_by_rank(ranks: Sequence[int], first: NDArray[np.intp]) -> NDArray[np.int64]:
    """Return the row of each rank by rank; -1 for ranks that are not drawn."""
    row_of = np.full(max(ranks, default=0) + 1, NONE, dtype=np.int64)
    row_of[np.array(ranks, dtype=np.int64)] = (
        np.searchsorted(first, np.arange(len(ranks)), side="right") - 1
    )
    return row_of
