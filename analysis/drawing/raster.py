"""A step as pixels: for each line of ranks and each bin of time, the kind that fills most of it.

Areas are counted in whole nanoseconds, so sums are exact: the areas of neighbouring bins, and of
the ranks of one line, add up to those of the larger cell. A step that is drawn in portions, or at
several resolutions, has the same cells as one that is drawn whole.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from rankscope.tracer.span import COMM_KINDS, KIND_CODES, KINDS, NONE, SpanFlag, SpanKind

from ..arrays.grouping import cumcount, factorize
from ..arrays.intervals import Line
from ..arrays.sorting import stable_argsort
from .rows import split_ranks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from rankscope.tracer.topology import Coords

    from .rows import RankBlocks, RowLayout
    from .timeline import StepTimeline

    AreasByKind = dict[int, "NDArray[np.int64]"]

MAX_BARS = 10_000
"""Spans that are drawn one by one; a step with more is drawn as pixels: a screen has no room for
them, and their texts would be megabytes."""

MAX_LINES = 512
"""Lines of a picture: a screen has hardly more than one pixel for each."""

NUM_BINS = 900
"""Bins of a picture of a whole step: about one for each pixel of a browser's width."""

MAX_LEVELS = 64
"""Levels of nesting that a picture distinguishes. Each costs a pass over the spans, and a user's
own spans may be nested without limit; deeper ones count as this level."""

NOTABLE = 1.25
"""Length from which a stretch is notable, over the median of alike ones: ranks of a line do equal
work, and differ by a few percent."""

LEAST_ALIKE = 4
"""Ranks of a line from which their average hides one of them."""

ALL_ROWS = 10**9
"""End row of a viewport of all ranks, however many there are."""

_WAIT = KIND_CODES[SpanKind.WAIT]
_COMM_CODES = tuple(KIND_CODES[kind] for kind in COMM_KINDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class KindCells:
    """The kind of each cell, shape (lines, bins) each."""

    kind: NDArray[np.int8]
    """Code of the kind with the largest share of the cell; -1 if nothing was there."""

    filled_ratio: NDArray[np.float32]
    """Covered share of the cell, the mean of its ranks; above 1 if several tracks share it."""

    def at(self, lines: slice, bins: slice) -> KindCells:
        """Return some lines and bins."""
        return KindCells(kind=self.kind[lines, bins], filled_ratio=self.filled_ratio[lines, bins])


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRaster:
    """A step as a grid of pixels."""

    rank_blocks: RankBlocks
    """The ranks of each line, from the top."""

    edges_ns: NDArray[np.int64]
    """Shape (bins + 1,): begin and end of the bins, from the step's begin."""

    compute: KindCells
    """Everything but communication; while a communication blocked the rank, `WAIT` until its last
    member arrived, and its kind from then on."""

    comm: KindCells
    """Communication: its kind while it moved bytes, `WAIT` while it waited."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Viewport:
    """A part of a step's picture: a stretch of time and neighbouring rows of ranks."""

    begin_ns: int
    """From the step's begin, as ``end_ns``."""

    end_ns: int
    first_row: int
    """Place of the uppermost rank in the picture's order, from 0."""

    end_row: int

    def clip(self, length_ns: int, num_ranks: int) -> Viewport:
        """Return the part inside a step of this length and number of ranks, never empty."""
        begin = min(max(self.begin_ns, 0), max(length_ns - 1, 0))
        first = min(max(self.first_row, 0), max(num_ranks - 1, 0))
        return Viewport(
            begin_ns=begin,
            end_ns=max(min(self.end_ns, length_ns), begin + 1),
            first_row=first,
            end_row=max(min(self.end_row, num_ranks), first + 1),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPicture:
    """The raster of a step or of a viewport of it, with what the page says beside it."""

    run: str
    epoch: int
    step: int
    begin_ns: int
    """Start of the step's first span, Unix time; end of its last one."""

    end_ns: int
    num_spans: int
    """Of the whole step, as ``num_ranks``."""

    num_ranks: int
    raster: StepRaster
    coords: dict[int, Coords]
    hosts: dict[int, str] = field(default_factory=dict)
    viewport: Viewport | None = None
    """The part that is shown; None: the whole step."""

    first_row: int = 0
    """Place of the uppermost rank in the order of the whole step."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that are shown, from the top."""
        return tuple(rank for block in self.raster.rank_blocks for rank in block)

    def likely_spans(self) -> float:
        """Return how many spans are shown, if ranks and time are filled evenly."""
        if self.viewport is None:
            return float(self.num_spans)
        share = (self.viewport.end_ns - self.viewport.begin_ns) / (self.end_ns - self.begin_ns)
        num_shown = sum(map(len, self.raster.rank_blocks))
        return self.num_spans * share * num_shown / self.num_ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class StepAreas:
    """Covered nanoseconds of each cell by kind code, shape (lines, bins) each."""

    rank_blocks: RankBlocks
    edges_ns: NDArray[np.int64]
    """Shape (bins + 1,): begin and end of the bins, from the step's begin."""

    compute: AreasByKind
    """What each rank did: its innermost span of every moment, and what blocked it."""

    comm: AreasByKind
    """Communication: its kind while it moved bytes, `WAIT` while it waited."""

    notable: AreasByKind = field(default_factory=dict)
    """The part of ``compute`` in stretches that `find_notable` finds."""

    def join_bins(self, num_joined: int) -> StepAreas:
        """Join ``num_joined`` neighbouring bins; the number of bins is a multiple of it."""
        first = np.arange(0, len(self.edges_ns) - 1, num_joined)

        def join(areas: AreasByKind) -> AreasByKind:
            return {code: np.add.reduceat(area, first, axis=1) for code, area in areas.items()}

        return replace(
            self,
            edges_ns=self.edges_ns[::num_joined],
            compute=join(self.compute),
            comm=join(self.comm),
            notable=join(self.notable),
        )

    def raster(self) -> StepRaster:
        """Return the kind with the most time of each cell, or of what is notable in it."""
        compute, notable = self._cells(self.compute), self._cells(self.notable)
        is_notable = notable.kind != NONE
        return StepRaster(
            rank_blocks=self.rank_blocks,
            edges_ns=self.edges_ns,
            compute=KindCells(
                kind=np.where(is_notable, notable.kind, compute.kind),
                filled_ratio=np.where(
                    is_notable,
                    np.maximum(compute.filled_ratio, np.float32(1)),
                    compute.filled_ratio,
                ),
            ),
            comm=self._cells(self.comm),
        )

    def _cells(self, areas: AreasByKind) -> KindCells:
        """Return for each cell the kind with the largest area (-1: none), and the filled share."""
        shape = (len(self.rank_blocks), len(self.edges_ns) - 1)
        kind = np.full(shape, NONE, dtype=np.int8)
        most, total = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        for code in sorted(areas):
            area = areas[code]
            larger = area > most
            kind[larger] = code
            np.maximum(most, area, out=most)
            total += area
        # A step with fewer nanoseconds than bins has bins of no width, which hold nothing.
        width = np.maximum(np.diff(self.edges_ns), 1)
        num_ranks = np.array([[len(block)] for block in self.rank_blocks])
        ratio: NDArray[np.float32] = (total / (width * num_ranks)).astype(np.float32)
        return KindCells(kind=kind, filled_ratio=ratio)


def draw_picture(
    timeline: StepTimeline, ranks: Sequence[int], viewport: Viewport | None = None
) -> StepPicture:
    """Draw a step or a viewport of it.

    Args:
        ranks: All its ranks from the top.
        viewport: The part to draw; None: the whole step.
    """
    length_ns = timeline.end_ns - timeline.begin_ns
    whole = Viewport(begin_ns=0, end_ns=length_ns, first_row=0, end_row=len(ranks))
    shown = whole if viewport is None else viewport.clip(length_ns, len(ranks))
    return StepPicture(
        run=timeline.run,
        epoch=timeline.epoch,
        step=timeline.step,
        begin_ns=timeline.begin_ns,
        end_ns=timeline.end_ns,
        num_spans=len(timeline.spans),
        num_ranks=len(ranks),
        raster=_draw_part(timeline, ranks[shown.first_row : shown.end_row], shown),
        coords=timeline.coords,
        hosts=timeline.hosts,
        viewport=None if shown == whole else shown,
        first_row=shown.first_row,
    )


def redraw_viewport(picture: StepPicture, part: StepTimeline) -> StepPicture:
    """Draw the viewport of a picture anew, from the spans in it.

    Args:
        part: The spans of its ranks in its time; begin and end are the whole step's.
    """
    if picture.viewport is None:
        return picture
    return replace(picture, raster=_draw_part(part, picture.ranks, picture.viewport))


def _draw_part(timeline: StepTimeline, ranks: Sequence[int], viewport: Viewport) -> StepRaster:
    inside = replace(
        timeline,
        begin_ns=timeline.begin_ns + viewport.begin_ns,
        end_ns=timeline.begin_ns + viewport.end_ns,
    )
    raster = draw_raster(inside, ranks, max_lines=MAX_LINES, num_bins=NUM_BINS)
    return replace(raster, edges_ns=raster.edges_ns + viewport.begin_ns)


def fold_raster(raster: StepRaster, rows: RowLayout) -> StepRaster:
    """Join the lines of each row, which then shows what most of them do."""
    if len(rows.blocks) == len(raster.rank_blocks):
        return raster
    line_by_rank = {block[0]: line for line, block in enumerate(raster.rank_blocks)}
    starts = [line_by_rank[block[0]] for block in rows.blocks]
    sizes = np.diff([*starts, len(raster.rank_blocks)])
    return replace(
        raster,
        rank_blocks=rows.blocks,
        compute=_join_lines(raster.compute, starts, sizes),
        comm=_join_lines(raster.comm, starts, sizes),
    )


def _join_lines(cells: KindCells, starts: Sequence[int], sizes: NDArray[np.int64]) -> KindCells:
    most = np.zeros((len(starts), cells.kind.shape[1]), np.float32)
    kind = np.full(most.shape, NONE, dtype=np.int8)
    for code in np.unique(cells.kind[cells.kind >= 0]).tolist():
        filled = np.where(cells.kind == code, cells.filled_ratio, np.float32(0))
        area = np.add.reduceat(filled, starts, axis=0)
        larger = area > most
        kind[larger] = code
        np.maximum(most, area, out=most)
    total = np.add.reduceat(cells.filled_ratio, starts, axis=0)
    return KindCells(kind=kind, filled_ratio=(total / sizes[:, None]).astype(np.float32))


def draw_raster(
    timeline: StepTimeline, ranks: Sequence[int], *, max_lines: int, num_bins: int
) -> StepRaster:
    """Draw a step as pixels.

    Args:
        ranks: From the top; ranks that are left out are not drawn.
        max_lines: Neighbouring ranks are joined until no more lines are needed.
    """
    blocks = split_ranks(ranks, ranks_per_line(len(ranks), max_lines=max_lines))
    return measure_areas(timeline, blocks, num_bins=num_bins).raster()


def stack_rasters(rasters: Sequence[StepRaster]) -> StepRaster:
    """Return the lines of several rasters with the same bins, one below the other."""

    def stack(cells: list[KindCells]) -> KindCells:
        kind, ratio = ([one.kind for one in cells], [one.filled_ratio for one in cells])
        return KindCells(kind=np.concatenate(kind), filled_ratio=np.concatenate(ratio))

    return StepRaster(
        rank_blocks=tuple(block for one in rasters for block in one.rank_blocks),
        edges_ns=rasters[0].edges_ns,
        compute=stack([one.compute for one in rasters]),
        comm=stack([one.comm for one in rasters]),
    )


def shrink_raster(raster: StepRaster, *, max_lines: int, max_bins: int) -> StepRaster:
    """Return evenly spaced lines and bins of a raster, for a small picture of it."""
    lines = slice(None, None, -(-len(raster.rank_blocks) // max_lines))
    bins = slice(None, None, -(-(len(raster.edges_ns) - 1) // max_bins))
    return StepRaster(
        rank_blocks=raster.rank_blocks[lines],
        edges_ns=np.append(raster.edges_ns[:-1][bins], raster.edges_ns[-1]),
        compute=raster.compute.at(lines, bins),
        comm=raster.comm.at(lines, bins),
    )


def ranks_per_line(num_ranks: int, *, max_lines: int = MAX_LINES) -> int:
    """Return how many neighbouring ranks share a line of a picture of all ranks."""
    return max(1, -(-num_ranks // max_lines))


def bin_edges(length_ns: int, num_bins: int) -> NDArray[np.int64]:
    """Return ``length_ns * k // num_bins`` for k = 0 to ``num_bins``, shape (bins + 1,).

    Every fourth edge of four times as many bins is one of these.
    """
    whole, rest = divmod(max(length_ns, 1), num_bins)
    at = np.arange(num_bins + 1, dtype=np.int64)
    edges: NDArray[np.int64] = at * whole + at * rest // num_bins
    return edges


def measure_areas(
    timeline: StepTimeline, rank_blocks: Sequence[tuple[int, ...]], *, num_bins: int
) -> StepAreas:
    """Measure how much of each cell the spans of a step cover.

    Args:
        timeline: The step; its begin and end are the picture's. Time outside is left out.
        rank_blocks: The ranks of each line; spans of other ranks are left out.
    """
    spans = timeline.spans
    ranks = np.array([rank for block in rank_blocks for rank in block], dtype=np.int64)
    line_by_rank = np.full(int(ranks.max(initial=0)) + 1, NONE, dtype=np.int64)
    sizes = [len(block) for block in rank_blocks]
    line_by_rank[ranks] = np.repeat(np.arange(len(sizes)), sizes)
    known = spans.rank < len(line_by_rank)
    line = np.where(known, line_by_rank[np.minimum(spans.rank, len(line_by_rank) - 1)], NONE)
    start = spans.start_ns - timeline.begin_ns
    end = start + spans.duration_ns
    comm = timeline.communication
    waiting = np.where(comm, np.clip(timeline.wait_ns, 0, spans.duration_ns), 0)
    waiting = np.where(find_unfinished(timeline), spans.duration_ns, waiting)
    length = timeline.end_ns - timeline.begin_ns
    moves = np.clip(start + waiting, 0, length)
    start, end = np.clip(start, 0, length), np.clip(end, 0, length)
    grid = _Grid(len(rank_blocks), bin_edges(length, num_bins))
    shown, kind = line >= 0, spans.kind
    own = np.flatnonzero(shown & comm)
    waits = own[waiting[own] > 0]
    done = find_innermost(timeline, shown)
    at = line_by_rank[done.rank]
    begin = np.clip(done.start_ns - timeline.begin_ns, 0, length)
    until = np.clip(done.end_ns - timeline.begin_ns, 0, length)
    ranks_of_line = np.array([len(block) for block in rank_blocks], np.int64)
    notable = find_notable(done, at, ranks_of_line, least_ns=length // NUM_BINS)
    return StepAreas(
        rank_blocks=tuple(rank_blocks),
        edges_ns=grid.edges,
        compute=grid.areas(at, begin, until, done.kind),
        notable=grid.areas(at[notable], begin[notable], until[notable], done.kind[notable]),
        comm=grid.areas(line[own], moves[own], end[own], kind[own])
        | grid.areas(line[waits], start[waits], moves[waits], np.full(len(waits), _WAIT)),
    )


def find_unfinished(timeline: StepTimeline) -> NDArray[np.bool_]:
    """Return which spans are communication that never moved all its bytes, shape (spans,).

    It was still open when last seen; or it ended by an exception, and a member never arrived.
    """
    spans = timeline.spans
    is_open = (spans.flags & SpanFlag.OPEN) != 0
    is_failed = ((spans.flags & SpanFlag.ERROR) != 0) & (timeline.wait_ns < 0)
    found: NDArray[np.bool_] = timeline.communication & (is_open | is_failed)
    return found


def find_notable(
    done: Stretches, line: NDArray[np.int64], ranks_of_line: NDArray[np.int64], *, least_ns: int
) -> NDArray[np.intp]:
    """Return the stretches that the average of their line would hide, though they are long.

    Alike are the stretches of one kind and number on each rank of a line, such as the third
    forward. One is notable if it takes `NOTABLE` times as long as their median, and ``least_ns``
    longer; a rank that has none counts as 0, so that a lone pause is notable. Waits and transfers
    are not, and neither is anything in a line of fewer than `LEAST_ALIKE` ranks.

    Args:
        done: Stretches, ordered by rank and begin.
        line: Shape (stretches,): the line of each.
        ranks_of_line: Shape (lines,): its ranks.
        least_ns: Shorter differences would not show.
    """
    is_work = ~np.isin(done.kind, (_WAIT, *_COMM_CODES))
    rows = np.flatnonzero(is_work & (ranks_of_line[line] >= LEAST_ALIKE))
    if not len(rows):
        return rows
    length_ns = done.end_ns[rows] - done.start_ns[rows]
    of_rank, _ = factorize(done.rank[rows], done.kind[rows])
    alike, num_groups = factorize(line[rows], done.kind[rows], cumcount(of_rank))
    order = np.lexsort((length_ns, alike))
    first = np.searchsorted(alike[order], np.arange(num_groups))
    num = np.bincount(alike, minlength=num_groups)
    group_line = line[rows[order[first]]]
    num_missing = ranks_of_line[group_line] - num
    middle = ranks_of_line[group_line] // 2 - num_missing
    median_ns = np.where(middle >= 0, length_ns[order[first + np.maximum(middle, 0)]], 0)[alike]
    is_long = (length_ns > NOTABLE * median_ns) & (length_ns - median_ns > least_ns)
    return rows[is_long]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretches:
    """Stretches of time of one kind; those of a rank do not overlap."""

    rank: NDArray[np.int32]
    start_ns: NDArray[np.int64]
    end_ns: NDArray[np.int64]
    kind: NDArray[np.int8]


def find_innermost(timeline: StepTimeline, keep: NDArray[np.bool_]) -> Stretches:
    """Return what each rank did at each moment: the innermost span, communication left out.

    A rank that a communication blocks does nothing else, whichever of its threads waits and
    however deep: then the kind is `WAIT` until the last member arrives, and from then on that of
    the communication. As in the analysis, that is the time of a ``wait``, and of a synchronous
    communication inside another span, which may have no ``wait`` of its own.

    Args:
        keep: Shape (spans,): the spans that count.
    """
    spans = timeline.spans
    comm = timeline.communication
    in_call = comm & (spans.depth > 0) & ((spans.flags & SpanFlag.ASYNC) == 0)
    blocked = keep & (in_call | (spans.kind == _WAIT))
    work, waits = np.flatnonzero(keep & ~comm & ~blocked), np.flatnonzero(blocked)
    # A wait whose last arrival is unknown waits all the time.
    until_ns = np.where(in_call, timeline.wait_ns, timeline.blocked_ns)[waits]
    is_known = (until_ns >= 0) & ~find_unfinished(timeline)[waits]
    until_ns = np.where(is_known, until_ns, spans.duration_ns[waits])
    until_ns = np.clip(until_ns, 0, spans.duration_ns[waits])
    rows = np.concatenate((work, waits, waits))
    transfers = np.where(in_call, spans.kind, timeline.transfer_kind)[waits]
    kind = np.concatenate((spans.kind[work], np.full_like(transfers, _WAIT), transfers))
    level = np.full(len(rows), MAX_LEVELS)
    level[: len(work)] = np.clip(spans.depth[work], 0, MAX_LEVELS - 1)
    start_ns, end_ns = spans.start_ns[rows], (spans.start_ns + spans.duration_ns)[rows]
    arrival_ns = spans.start_ns[waits] + until_ns
    first = len(work) + len(waits)
    end_ns[len(work) : first], start_ns[first:] = arrival_ns, arrival_ns
    lasts = end_ns > start_ns
    rows, kind, level = rows[lasts], kind[lasts], level[lasts]
    start_ns, end_ns, rank = start_ns[lasts], end_ns[lasts], spans.rank[rows]
    axis = Line.over(rank, start_ns, end_ns)
    borders = np.concatenate((axis.place(rank, start_ns), axis.place(rank, end_ns)))
    order = stable_argsort(borders)
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    # Of spans of one level, which only different threads have at once, the first kind is shown.
    layer = level * len(KINDS) - kind
    owner = np.full(len(order), NONE, dtype=np.int8)
    for one in np.unique(layer).tolist():
        own = np.flatnonzero(layer == one)
        change = np.zeros(len(order), dtype=np.int32)
        change[place[own]], change[place[own + len(rows)]] = 1, -1
        owner[np.cumsum(change) > 0] = kind[own[0]]
    begins = np.flatnonzero(np.diff(owner, prepend=np.int8(NONE)))
    at = borders[order[begins]]
    filled = np.flatnonzero(owner[begins] != NONE)
    return Stretches(
        rank=axis.ranks[at[filled] // axis.stride_ns],
        start_ns=axis.time_at(at[filled]),
        end_ns=axis.time_at(at[filled + 1]),  # after the last border nothing is open
        kind=owner[begins[filled]],
    )


class _Grid:
    def __init__(self, num_lines: int, edges: NDArray[np.int64]) -> None:
        self._num_lines = num_lines
        self.edges = edges
        self._num_bins = len(edges) - 1
        self._width = np.diff(edges)

    def areas(
        self,
        line: NDArray[np.int64],
        start: NDArray[np.int64],
        end: NDArray[np.int64],
        kind: NDArray[np.int8],
    ) -> AreasByKind:
        """Return by kind code how many ns of each cell the spans cover."""
        found = {}
        for code in np.flatnonzero(np.bincount(kind)).tolist():
            own = np.flatnonzero(kind == code)
            found[code] = self._after(line[own], start[own]) - self._after(line[own], end[own])
        return found

    def _after(self, line: NDArray[np.int64], at: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return for each cell the time of its bin after ``at``, summed over a line's moments.

        A moment before the bin counts the whole width; one inside it, the rest of it.
        """
        column = self._bin(at)
        inside = column < self._num_bins  # the step's end is in no bin
        if not inside.all():
            line, at, column = line[inside], at[inside], column[inside]
        size, shape = self._num_lines * self._num_bins, (self._num_lines, self._num_bins)
        cell = line * self._num_bins + column
        begun = np.bincount(cell, minlength=size).reshape(shape)
        # bincount sums floats: exact below 2^53 ns, 104 days.
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
