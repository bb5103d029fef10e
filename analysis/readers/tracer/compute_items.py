"""Compute of each micro-batch on each rank, without waits, late partners and experts.

With experts, a rank computes as long as it has tokens. A rank whose experts get more tokens than
others is not slow, so its speed is judged by what it computes outside them: up to the all-to-all
that sends the tokens out, and after the one that brings them back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rankscope.tracer.span import KIND_CODES, KINDS, SpanKind

from ...arrays.grouping import cumcount, factorize, is_one_of, sorted_unique
from ...arrays.intervals import NOT_FOUND
from ...arrays.sorting import argsort_rows, find_positions
from ...replay.model import ComputeItems, select_items
from ..workers import number_workers
from .pieces import (
    BACKWARD,
    FORWARD,
    GENERATION,
    NO_GRADIENTS,
    WHOLE,
    Pieces,
    is_deferred_part,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from ...trace.tables import RankInfo, RunInfo, SpanTable
    from .matched_waits import MatchedWaits

MIN_OUTSIDE_RATIO = 0.1
"""Share of the compute that must be outside the experts to represent the rank."""

MAX_ODD_RATIO = 0.01
"""Share of compute spans in which the experts' time may have no end, because borders coincide."""

EP_COMM = KIND_CODES[SpanKind.EP_COMM]


def build_compute_items(
    matched: MatchedWaits,
    pieces: Pieces,
    numbers: NDArray[np.int32],
    run: RunInfo,
) -> tuple[ComputeItems, ComputeItems, NDArray[np.bool_]]:
    """Sum the own pieces of each forward and backward; the parts of a split backward are one item.

    Forwards without gradients are items of their own: what they compute may differ between ranks.
    The others are scaled to all compute of their kind and stage.

    Partners whose communication is not traced cannot work alone, so the time until the last of
    them began the same micro-batch does not count as compute. The time of experts is replaced by
    that outside them, scaled to the whole.

    Args:
        numbers: Numbers of its steps, ascending.

    Returns:
        The items, those of forwards without gradients, and which pieces are those of experts, shape
        (pieces,).
    """
    spans, rank_steps, part = matched.spans, matched.rank_steps, pieces.part
    compute = np.flatnonzero(pieces.is_own)
    compute = compute[is_one_of(spans.kind[pieces.compute[compute]], (FORWARD, BACKWARD))]
    experts = is_expert_piece(matched, pieces, part)
    own = compute[~experts[compute]]
    index, num = factorize(pieces.compute[own])
    first = np.zeros(num, dtype=np.int64)
    first[index] = np.arange(len(index))
    span = pieces.compute[own[first]]
    length = (pieces.end - pieces.start)[own].astype(np.float64)
    self_ns = np.bincount(index, weights=length, minlength=len(span)).astype(np.float64)
    step = rank_steps.step_index[pieces.rank_step[own[first]]]
    rank, kind, chunk = spans.rank[span], spans.kind[span], spans.chunk[span]
    span_part = part[span]
    order = argsort_rows(step, rank, kind, chunk, span_part, spans.start_ns[span])
    step, rank, kind, chunk = step[order], rank[order], kind[order], chunk[order]
    span_part = span_part[order]
    series, _ = factorize(step, rank, kind, chunk, span_part)
    microbatch = cumcount(series).astype(np.int32)
    ranks = run.ranks
    is_generation = pieces.is_call & (part[pieces.compute] == GENERATION)
    for excluded, by_chunk in ((experts, True), (is_generation, False)):
        if excluded.any():
            scale = _scale_to_whole(matched, pieces, ranks, compute, excluded, by_chunk=by_chunk)
            self_ns *= scale[own[first]]
    own_ns = np.rint(self_ns[order]).astype(np.int64)
    traced_kinds = {KINDS[code].value for code in sorted_unique(spans.kind[matched.comm]).tolist()}
    worker = number_workers(ranks, traced_kinds, matched.line.ranks)
    # The time from each item's start to the last start of the same item on a partner.
    start_ns = spans.start_ns[span][order]
    partners = worker[find_positions(rank, matched.line.ranks)]
    same, num_same = factorize(step, partners, kind, chunk, span_part, microbatch)
    latest_ns = np.full(num_same, np.iinfo(np.int64).min)
    np.maximum.at(latest_ns, same, start_ns)
    delay_ns = latest_ns[same] - start_ns
    all_items = ComputeItems(
        step=numbers[step],
        rank=rank,
        kind=kind,
        chunk=chunk,
        microbatch=microbatch,
        self_ns=np.where(delay_ns < own_ns, own_ns - delay_ns, own_ns),
    )
    is_call = np.isin(span_part, NO_GRADIENTS)
    items = _merge_parts(
        select_items(all_items, ~is_call),
        spans,
        span[order][~is_call],
        span_part[~is_call],
        deferred_ratio=_deferred_ratio(matched, pieces, compute),
    )
    return items, select_items(all_items, is_call), experts


def _deferred_ratio(matched: MatchedWaits, pieces: Pieces, compute: NDArray[np.int64]) -> float:
    """Return W / (F + B + W), W being what the split backwards deferred.

    Not all are split: that of a pipeline's first stage has no gradient of its input, and DualPipe
    splits those of the cool-down alone. So W is a share of the split ones, and of all in
    proportion.
    """
    span = pieces.compute[compute]
    part = pieces.part[span]
    length = (pieces.end - pieces.start)[compute].astype(np.float64)
    is_split = (part != WHOLE) & ~np.isin(part, NO_GRADIENTS)
    split_ns = float(length[is_split].sum())
    if not split_ns:
        return 0.0
    deferred_ns = float(length[is_deferred_part(part)].sum())
    backward_ns = float(length[matched.spans.kind[span] == BACKWARD].sum())
    return deferred_ns / split_ns * backward_ns / float(length.sum())


def _scale_to_whole(
    matched: MatchedWaits,
    pieces: Pieces,
    ranks: Mapping[int, RankInfo],
    compute: NDArray[np.int64],
    excluded: NDArray[np.bool_],
    *,
    by_chunk: bool,
) -> NDArray[np.float64]:
    """Return all compute over that outside excluded pieces, by kind, stage and maybe chunk."""
    spans, line = matched.spans, matched.line
    rank_stage = np.array([ranks[rank].coords.pp for rank in line.ranks.tolist()])
    span = pieces.compute[compute]
    stage = rank_stage[find_positions(spans.rank[span], line.ranks)]
    work, num = factorize(spans.kind[span], spans.chunk[span] * by_chunk, stage)
    length = (pieces.end - pieces.start)[compute]
    is_left = ~excluded[compute]
    total = np.bincount(work, weights=length, minlength=num)
    outside = np.bincount(work, weights=length * is_left, minlength=num)
    scale = np.ones(len(excluded))
    ratio = np.divide(total, outside, out=np.ones(num), where=outside > 0)
    scale[compute[is_left]] = ratio[work[is_left]]
    return scale


def _merge_parts(
    items: ComputeItems,
    spans: SpanTable,
    span: NDArray[np.int64],
    part: NDArray[np.int64],
    *,
    deferred_ratio: float,
) -> ComputeItems:
    if not deferred_ratio:
        return items
    deferred = is_deferred_part(part)
    separate = np.where(part == WHOLE, np.arange(len(items)), NOT_FOUND)
    work, num = factorize(
        items.step, items.rank, items.kind, items.chunk, spans.microbatch[span], separate
    )
    self_ns = np.bincount(work, weights=items.self_ns, minlength=num).astype(np.int64)
    # Items are sorted by (step, rank, kind, chunk, part); whole spans and first parts must mix.
    order = argsort_rows(items.step, items.rank, items.kind, items.chunk, spans.start_ns[span])
    first = order[~deferred[order]]
    step, rank = items.step[first], items.rank[first]
    kind, chunk = items.kind[first], items.chunk[first]
    series, _ = factorize(step, rank, kind, chunk)
    return ComputeItems(
        step=step,
        rank=rank,
        kind=kind,
        chunk=chunk,
        microbatch=cumcount(series).astype(np.int32),
        self_ns=self_ns[work[first]],
        deferred_ratio=deferred_ratio,
    )


def is_expert_piece(
    matched: MatchedWaits, pieces: Pieces, part: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Return which pieces of the ranks' own compute are those of experts.

    Waits for expert-parallel communication inside a compute span begin and end the experts' time
    in turn. The deferred parts of a split backward include the experts' weights without a border,
    so they count as experts' time too.

    Args:
        part: Shape (spans,): the part of its micro-batch that a compute span is.

    Returns:
        Shape (pieces,): all False if there are no experts, if too many expert times have no end,
        or if too little compute is outside.
    """
    own = pieces.is_own
    nothing = np.zeros(len(own), dtype=np.bool_)
    is_ep = matched.wait_comm != NOT_FOUND
    is_ep[is_ep] = matched.spans.kind[matched.comm[matched.wait_comm[is_ep]]] == EP_COMM
    ends = np.sort(matched.wait_end[is_ep])
    if not len(ends) or not own.any():
        return nothing
    spans, line = matched.spans, matched.line
    rows = sorted_unique(pieces.compute[own])
    start = line.place(spans.rank[rows], spans.start_ns[rows])
    # A wait that ends as the span begins belongs to the span before.
    before = np.searchsorted(ends, start, side="right")
    inside = np.searchsorted(ends, start + spans.duration_ns[rows], side="right") - before
    odd = inside % 2 == 1
    if not inside.any() or odd.mean() > MAX_ODD_RATIO:
        return nothing
    own_rows = np.flatnonzero(own)
    span = np.searchsorted(rows, pieces.compute[own_rows])
    passed = np.searchsorted(ends, pieces.start[own_rows], side="right") - before[span]
    of_experts = nothing.copy()
    of_experts[own_rows] = ((passed % 2 == 1) & ~odd[span]) | is_deferred_part(part[rows])[span]
    length = np.where(own, pieces.end - pieces.start, 0)
    outside = float(length[~of_experts].sum())
    return of_experts if outside >= MIN_OUTSIDE_RATIO * float(length.sum()) else nothing
