"""Micro-batches of unequal length: compute that varies together in forward and backward."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from rankscope.tracer.span import KIND_CODES, SpanKind

from ..arrays.grouping import factorize
from ..arrays.sorting import argsort_rows
from ..replay.model import BACKWARD_KINDS, FORWARD_KINDS, ReplayModel, has_kind
from ..report.text import format_percent
from ..statistics.baseline import common_step_ratio, medians_by_key
from ..statistics.peers import compare_with_peers
from ..statistics.phases import MIN_EXCESS_RATIO
from . import stage_imbalance
from .candidate import Candidate, in_shown_steps, is_brief, named_ranks
from .detector import Cause, Subject
from .equal_lengths import (
    equalize_durations,
    equalize_experts,
    equalize_inferred_lengths,
    speeds_at_equal_lengths,
    squared_lengths,
)
from .slow_compute import SLOW_DEVICE, find_slow_compute
from .thresholds import MIN_CORRELATION, MIN_ITEMS

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from numpy.typing import NDArray

    from ..replay.model import ComputeItems
    from ..replay.what_if import Replayer
    from ..trace.context import MicrobatchTable
    from .detector import Case

MIN_ITEMS_PER_RANK = 8
"""Micro-batches of a rank whose median says what is usual for it; of one alone it says nothing."""

NUM_ROUNDS = 4
"""Of finding what lengths explain and what whole steps are longer by, in turn."""

OF_COMPUTE = SLOW_DEVICE | {stage_imbalance.CAUSE}

FORWARD, BACKWARD = KIND_CODES[SpanKind.FORWARD], KIND_CODES[SpanKind.BACKWARD]


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceEffect:
    """How far micro-batches' compute varies together."""

    correlation: float
    """Between forward and backward of one micro-batch, or between compute and lengths."""

    by_lengths: bool
    """Whether known sums of squared lengths explain it."""

    spread_ratio: float
    """Standard deviation of a micro-batch's compute over its mean."""


CAUSE = Cause(
    name="sequence-imbalance",
    subject=Subject.JOB,
    sentence="Micro-batches of unequal length make ranks wait for each other",
)


def detect(case: Case, found: tuple[Candidate, ...]) -> tuple[Candidate, ...]:
    """Add unequal lengths if they cost much; they explain compute that is long for a step or two.

    If no length is known but whole columns show them, ranks that are slow beside them are searched
    for once more.
    """
    compute = [each for each in found if each.cause in OF_COMPUTE]
    sequences = _find_sequences(case, compute, case.equalized)
    if sequences is None or case.profile.is_equalized:
        return found if sequences is None else (*found, sequences)
    equalized = equalize_inferred_lengths(case.reading.items, case.coords)
    if equalized is not None:
        profile = compare_with_peers(equalized, case.coords, is_equalized=True)
        beside = [
            each for each in find_slow_compute(case, profile, found) if not _is_brief_compute(each)
        ]
        named = {rank for each in beside for rank in each.ranks}
        compute = [*beside, *(each for each in compute if named.isdisjoint(each.ranks))]
        sequences = _find_sequences(case, compute, equalized) or sequences
    others = (each for each in found if each.cause not in OF_COMPUTE)
    compute = [
        replace(each, explained_by=CAUSE) if _is_brief_compute(each) else each for each in compute
    ]
    return (*others, *compute, sequences)


def _is_brief_compute(candidate: Candidate) -> bool:
    return is_brief(candidate) and candidate.cause in SLOW_DEVICE


def _find_sequences(
    case: Case, compute: Sequence[Candidate], equalized: ComputeItems | None
) -> Candidate | None:
    blamed = named_ranks(compute, SLOW_DEVICE)
    effect = measure_sequence_effect(
        case.reading.items,
        case.context.microbatches,
        blamed,
        is_routed=case.reading.experts is None
        and any(link.kind == SpanKind.EP_COMM for link in case.reading.transfers.links),
    )
    if effect is None:
        return None
    model = case.reading.model
    slow = np.zeros(len(model.rank), dtype=np.bool_)
    for each in compute:
        if each.cause in SLOW_DEVICE:
            slow |= np.isin(model.rank, each.ranks) & in_shown_steps(model, each)
    return sequence_candidate(
        effect, case.replayer, blamed, slow=slow, experts=case.reading.experts, equalized=equalized
    )


def measure_sequence_effect(
    items: ComputeItems, lengths: MicrobatchTable, blamed: Collection[int], *, is_routed: bool
) -> SequenceEffect | None:
    """Measure how far compute varies from micro-batch to micro-batch, and why.

    Each item is held against the median of its rank, kind and chunk, so that
    neither slow ranks nor long stages count.

    Args:
        items: Compute by micro-batch.
        lengths: Lengths of the micro-batches, where the loader told them.
        blamed: Ranks whose compute varies for another reason.
        is_routed: Whether the items hold compute of experts: what the router sends them varies
            together in forward and backward as well, so only known lengths tell.

    Returns:
        None where there are too few micro-batches, or nothing varies together.
    """
    ratio = _against_own_median(items)
    ratio = ratio / common_step_ratio(ratio, items.step)
    forward, backward = _pair_rows(items)
    free = ~np.isin(items.rank[forward], list(blamed))
    forward, backward = forward[free], backward[free]
    if len(forward) < MIN_ITEMS:
        return None
    spread = float(np.std(ratio[forward]))
    together = _correlation(ratio[forward], ratio[backward])
    by_length = _length_correlation(items, ratio, forward, lengths)
    if by_length is not None:
        # Known lengths that do not explain it are not the cause.
        if by_length < MIN_CORRELATION:
            return None
        return SequenceEffect(correlation=by_length, by_lengths=True, spread_ratio=spread)
    if is_routed:
        return None
    if together is not None and together >= MIN_CORRELATION:
        return SequenceEffect(correlation=together, by_lengths=False, spread_ratio=spread)
    return None


def _against_own_median(items: ComputeItems) -> NDArray[np.float64]:
    """Return each item over the median of its rank, kind and chunk."""
    median = medians_by_key(items.self_ns, items.rank, items.kind, items.chunk)
    ratio: NDArray[np.float64] = items.self_ns / np.maximum(median, 1.0)
    return ratio


def _pair_rows(items: ComputeItems) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the rows of each micro-batch's forward and of its backward."""
    found = []
    for kind in (FORWARD, BACKWARD):
        rows = np.flatnonzero(items.kind == kind)
        order = argsort_rows(
            items.step[rows], items.rank[rows], items.chunk[rows], items.microbatch[rows]
        )
        found.append(rows[order])
    forward, backward = found
    if len(forward) != len(backward):
        return forward[:0], backward[:0]
    same = np.ones(len(forward), dtype=np.bool_)
    for column in (items.step, items.rank, items.chunk, items.microbatch):
        same &= column[forward] == column[backward]
    return forward[same], backward[same]


def _correlation(x: NDArray[np.float64], y: NDArray[np.float64]) -> float | None:
    """Return Pearson's correlation once the outermost 1 % (pauses) are left out."""
    low, high = np.quantile(x, (0.005, 0.995)), np.quantile(y, (0.005, 0.995))
    keep = (x >= low[0]) & (x <= low[1]) & (y >= high[0]) & (y <= high[1])
    x, y = x[keep], y[keep]
    if len(x) < MIN_ITEMS or x.std() == 0 or y.std() == 0:
        return None
    return float(np.corrcoef(x, y)[0, 1])


def _length_correlation(
    items: ComputeItems,
    ratio: NDArray[np.float64],
    forward: NDArray[np.int64],
    lengths: MicrobatchTable,
) -> float | None:
    """Return how compute follows the sum of squared lengths; None where these are unknown."""
    squares = squared_lengths(items, lengths)[forward]
    known = ~np.isnan(squares)
    if known.sum() < MIN_ITEMS:
        return None
    x, y = squares[known], ratio[forward][known]
    if x.std() == 0:
        return None
    step, rank, chunk = (column[forward][known] for column in (items.step, items.rank, items.chunk))
    often = len(x) >= MIN_ITEMS_PER_RANK * len(np.unique(rank)) * len(np.unique(chunk))
    # What the lengths leave unexplained tells by how much a step was longer as a whole, and what
    # is usual for a rank: its median item has the length that it happens to have.
    for _ in range(NUM_ROUNDS):
        slope, level = np.polyfit(x, y, 1)
        y = y / medians_by_key(y / (level + slope * x), step)
        if often:
            y = y / medians_by_key(y / (level + slope * x), rank, chunk)
    return _correlation(y, x)


def sequence_candidate(
    effect: SequenceEffect,
    replayer: Replayer,
    blamed: Collection[int],
    *,
    slow: NDArray[np.bool_],
    experts: NDArray[np.bool_] | None = None,
    equalized: ComputeItems | None = None,
) -> Candidate | None:
    """Find out whether micro-batches of unequal length cost the job much.

    Args:
        effect: How far they vary, by `analysis.causes.sequence_imbalance`.
        replayer: Prices it, by `analysis.causes.equal_lengths`.
        blamed: Ranks that are slow for a while: their speed is not told by what they compute.
        slow: Shape (ops,): what they do in these steps, which varies with that.
        experts: Shape (ops,): their compute, which goes with what the router sends.
        equalized: Compute by micro-batch as if lengths were equal, where that is known.

    Returns:
        None where the spread costs less than `MIN_EXCESS_RATIO` of a usual step.
    """
    model = replayer.model
    chosen = has_kind(model, FORWARD_KINDS | BACKWARD_KINDS) & model.on_device
    chosen &= ~slow
    if experts is not None:
        chosen &= ~experts
    speed = None if equalized is None else speeds_at_equal_lengths(equalized, model, blamed)
    evened_ns = _equalized_ns(model, chosen, speed)
    if experts is not None:
        others = experts & ~slow
        chosen, evened_ns = equalize_experts(model, others, chosen, evened_ns)
    without = replayer.full_with(evened_ns)
    # Of a usual step: the pauses of some, a checkpoint's, do not make lengths more equal.
    median_step_ns = float(np.median(without))
    won_ns = float((replayer.full_recorded() - without).mean())
    lost = won_ns / median_step_ns if median_step_ns > 0 else 0.0
    if lost < MIN_EXCESS_RATIO:
        return None
    steps = model.operations.steps
    what = (
        f"compute follows the sum of squared lengths (correlation {effect.correlation:.2f})"
        if effect.by_lengths
        else f"forward and backward vary together (correlation {effect.correlation:.2f})"
    )
    return Candidate(
        cause=CAUSE,
        ranks=(),
        steps=(steps[0], steps[-1]),
        part=chosen,
        fixed_ns=evened_ns,
        excess_ratio=lost,
        threshold=MIN_EXCESS_RATIO,
        evidence=(
            f"micro-batches differ by {format_percent(effect.spread_ratio)} in compute on all ranks"
            f" alike, and {what}: with equal ones a step would be"
            f" {format_percent(1 - 1 / (1 + lost))} shorter"
        ),
    )


def _equalized_ns(
    model: ReplayModel, chosen: NDArray[np.bool_], speed: NDArray[np.float64] | None
) -> NDArray[np.float64]:
    """Return the durations with every chosen piece as it would be with equal lengths."""
    operations = model.operations
    rows = np.flatnonzero(chosen)
    label = operations.label if model.work is None else model.work
    duration = operations.duration_ns.copy()
    duration[rows] = equalize_durations(
        duration[rows],
        rank=model.rank[rows],
        step=operations.step[rows],
        label=factorize(model.stage[rows], label[rows])[0],
        span=None if model.span is None else model.span[rows],
        speed=None if speed is None else speed[rows],
    )
    return duration
