"""Compute of each (rank, step) by micro-batch: its own time, waits and late partners cut out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from rankscope.tracer.span import KIND_CODES, KINDS, SpanKind

from ...arrays.grouping import cumcount, factorize, is_one_of, sorted_unique
from ...arrays.intervals import NOT_FOUND
from ...arrays.sorting import argsort_rows, find_positions
from ...replay.model import ComputeItems
from ..tp_partners import number_workers
from .pieces import WHOLE, Pieces, is_deferred_part, is_own_compute

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from ...trace.tables import RankInfo, RunInfo, SpanTable
    from .matched_waits import MatchedWaits

MIN_OUTSIDE_RATIO = 0.1
"""Share of the compute that must lie outside the experts for it to speak for the rank."""

MAX_ODD_RATIO = 0.01
"""Share of the compute spans in which what opens may stay open: by borders that coincide."""

EP_COMM = KIND_CODES[SpanKind.EP_COMM]


def build_compute_items(
    joined: MatchedWaits,
    pieces: Pieces,
    numbers: NDArray[np.int32],
    run: RunInfo,
    *,
    portion: NDArray[np.int64],
) -> tuple[ComputeItems, NDArray[np.bool_]]:
    """Sum each forward's and backward's own pieces, those of a split one together.

    Partners whose inner communication is not traced cannot work alone: the time
    until the last of them began the same micro-batch is no compute. The experts'
    parts take as long as they have tokens: what lies outside stands for them.

    Args:
        joined: The run.
        pieces: What its ranks did between their waits.
        numbers: Its steps' numbers, ascending.
        run: Positions of the ranks.
        portion: Shape (spans,): which portion of its micro-batch a compute span is.

    Returns:
        The items, and which pieces are the experts', shape (pieces,).
    """
    spans, windows = joined.spans, joined.windows
    kinds = (KIND_CODES[SpanKind.FORWARD], KIND_CODES[SpanKind.BACKWARD])
    whole = np.flatnonzero(is_own_compute(pieces, len(pieces.start)))
    whole = whole[is_one_of(spans.kind[pieces.compute[whole]], kinds)]
    experts = is_expert_piece(joined, pieces, portion)
    own = whole[~experts[whole]]
    index, num = factorize(pieces.compute[own])
    first = np.zeros(num, dtype=np.int64)
    first[index] = np.arange(len(index))
    span = pieces.compute[own[first]]
    length = (pieces.end - pieces.start)[own].astype(np.float64)
    self_ns = np.bincount(index, weights=length, minlength=len(span)).astype(np.float64)
    window = pieces.window[own[first]]
    step = windows.step_index[window]
    rank, kind, chunk = spans.rank[span], spans.kind[span], spans.chunk[span]
    part = portion[span]
    order = argsort_rows(step, rank, kind, chunk, part, spans.start_ns[span])
    kind_of_rank, _ = factorize(step[order], rank[order], kind[order], chunk[order], part[order])
    microbatch = cumcount(kind_of_rank).astype(np.int32)
    ranks = {info.rank: info for epoch in run.epochs for info in epoch.ranks}
    if experts.any():
        self_ns = self_ns * _expert_scale(joined, pieces, ranks, whole, experts)[own[first]]
    own_ns = np.rint(self_ns[order]).astype(np.int64)
    kinds_traced = {KINDS[code].value for code in sorted_unique(spans.kind[joined.comm]).tolist()}
    worker = number_workers(ranks, kinds_traced, joined.line.ranks)
    late_ns = _partner_delays(
        (step[order], worker[find_positions(rank[order], joined.line.ranks)], kind[order],
         chunk[order], part[order], microbatch),
        spans.start_ns[span][order],
    )  # fmt: skip
    items = _merge_parts(
        ComputeItems(
            step=numbers[step[order]],
            rank=rank[order],
            kind=kind[order],
            chunk=chunk[order],
            microbatch=microbatch,
            self_ns=np.where(late_ns < own_ns, own_ns - late_ns, own_ns),
        ),
        spans,
        span[order],
        part[order],
        deferred_ratio=_deferred_ratio(pieces, whole, portion),
    )
    return items, experts


def _expert_scale(
    joined: MatchedWaits,
    pieces: Pieces,
    ranks: Mapping[int, RankInfo],
    whole: NDArray[np.int64],
    experts: NDArray[np.bool_],
) -> NDArray[np.float64]:
    """Return all compute over that outside the experts, by kind, chunk and stage.

    Args:
        joined: The run.
        pieces: Its pieces.
        ranks: Their stages.
        whole: Pieces of forward and backward compute.
        experts: Shape (pieces,): those of the experts.

    Returns:
        Shape (pieces,), 1 where it is no such compute.
    """
    spans, line = joined.spans, joined.line
    stage_of = np.array([ranks[rank].coords.pp for rank in line.ranks.tolist()])
    span = pieces.compute[whole]
    stage = stage_of[find_positions(spans.rank[span], line.ranks)]
    work, num = factorize(spans.kind[span], spans.chunk[span], stage)
    length = (pieces.end - pieces.start)[whole]
    total = np.bincount(work, weights=length, minlength=num)
    outside = np.bincount(work, weights=np.where(experts[whole], 0, length), minlength=num)
    ratio = np.ones(len(experts))
    ratio[whole] = np.divide(total, outside, out=np.ones(num), where=outside > 0)[work]
    return ratio


def _deferred_ratio(pieces: Pieces, whole: NDArray[np.int64], portion: NDArray[np.int64]) -> float:
    """Return the share of forward and backward compute that lies in later portions."""
    length = (pieces.end - pieces.start)[whole].astype(np.float64)
    total = float(length.sum())
    deferred = is_deferred_part(portion[pieces.compute[whole]])
    return float(length[deferred].sum()) / total if total else 0.0


def _merge_parts(
    items: ComputeItems,
    spans: SpanTable,
    span: NDArray[np.int64],
    portion: NDArray[np.int64],
    *,
    deferred_ratio: float,
) -> ComputeItems:
    """Make one item of the portions of each micro-batch.

    Args:
        items: One a span.
        spans: The table.
        span: Shape (items,): the row of each.
        portion: Shape (items,).
        deferred_ratio: Share of the compute in later portions.
    """
    if not deferred_ratio:
        return items
    later = is_deferred_part(portion)
    alone = np.where(portion == WHOLE, np.arange(len(items)), NOT_FOUND)
    work, num = factorize(
        items.step, items.rank, items.kind, items.chunk, spans.microbatch[span], alone
    )
    self_ns = np.bincount(work, weights=items.self_ns, minlength=num).astype(np.int64)
    # Items are in order of (step, rank, kind, chunk, portion): whole ones and first halves mix.
    order = argsort_rows(items.step, items.rank, items.kind, items.chunk, spans.start_ns[span])
    first = order[~later[order]]
    step, rank = items.step[first], items.rank[first]
    kind, chunk = items.kind[first], items.chunk[first]
    of_rank, _ = factorize(step, rank, kind, chunk)
    return ComputeItems(
        step=step,
        rank=rank,
        kind=kind,
        chunk=chunk,
        microbatch=cumcount(of_rank).astype(np.int32),
        self_ns=self_ns[work[first]],
        deferred_ratio=deferred_ratio,
    )


def _partner_delays(
    key: tuple[NDArray[Any], ...], start_ns: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return how long after each item the last partner began the same one. Shape (items,)."""
    same, num = factorize(*key)
    latest = np.full(num, np.iinfo(np.int64).min)
    np.maximum.at(latest, same, start_ns)
    late: NDArray[np.int64] = latest[same] - start_ns
    return late


def is_expert_piece(
    joined: MatchedWaits, pieces: Pieces, portion: NDArray[np.int64]
) -> NDArray[np.bool_]:
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
    own = is_own_compute(pieces, len(pieces.start))
    nothing = np.zeros(len(own), dtype=np.bool_)
    ends = _find_ep_wait_ends(joined)
    if not len(ends) or not own.any():
        return nothing
    spans, line = joined.spans, joined.line
    rows = sorted_unique(pieces.compute[own])
    start = line.place(spans.rank[rows], spans.start_ns[rows])
    # A wait that ends as the span begins is of the one before.
    before = np.searchsorted(ends, start, side="right")
    inside = np.searchsorted(ends, start + spans.duration_ns[rows], side="right") - before
    odd = inside % 2 == 1
    if not inside.any() or odd.mean() > MAX_ODD_RATIO:
        return nothing
    of_piece = np.flatnonzero(own)
    span = np.searchsorted(rows, pieces.compute[of_piece])
    passed = np.searchsorted(ends, pieces.start[of_piece], side="right") - before[span]
    found = nothing.copy()
    found[of_piece] = ((passed % 2 == 1) & ~odd[span]) | is_deferred_part(portion[rows])[span]
    length = np.where(own, pieces.end - pieces.start, 0)
    outside = float(length[~found].sum())
    return found if outside >= MIN_OUTSIDE_RATIO * float(length.sum()) else nothing


def _find_ep_wait_ends(joined: MatchedWaits) -> NDArray[np.int64]:
    """Return where on the line ranks ended waiting for expert-parallel communication, sorted."""
    known = joined.wait_comm != NOT_FOUND
    known[known] = joined.spans.kind[joined.comm[joined.wait_comm[known]]] == EP_COMM
    return np.sort(joined.blocked()[1][known])
