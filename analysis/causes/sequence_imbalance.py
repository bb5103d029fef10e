"""Micro-batches of unequal length, if they cost much."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from rankscope.tracer.span import KIND_CODES, SpanKind

from ..arrays.group_stats import medians_by_key
from ..arrays.grouping import factorize
from ..arrays.sorting import argsort_rows
from ..replay.model import BACKWARD_KINDS, FORWARD_KINDS, has_kind
from ..report.text import format_percent
from ..statistics.baseline import common_step_ratio
from ..statistics.peers import compare_with_peers
from ..statistics.thresholds import THRESHOLDS
from . import stage_imbalance
from .candidate import Candidate, in_shown_steps, named_ranks
from .detector import Cause, Subject
from .equal_lengths import (
    correlation,
    equalize_durations,
    equalize_experts,
    equalize_inferred_lengths,
    squared_lengths,
)
from .slow_compute import SLOW_DEVICE, find_slow_compute

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from numpy.typing import NDArray

    from ..replay.model import ComputeItems
    from ..replay.what_if import Replayer
    from ..trace.context import MicrobatchTable
    from .detector import Case


OF_COMPUTE = SLOW_DEVICE | {stage_imbalance.CAUSE}
FORWARD, BACKWARD = KIND_CODES[SpanKind.FORWARD], KIND_CODES[SpanKind.BACKWARD]

CAUSE = Cause(
    name="sequence-imbalance",
    subject=Subject.JOB,
    has_onset=False,
    sentence="Micro-batches of unequal length make ranks wait for each other",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceEffect:
    """Variation of compute between micro-batches, and what it is correlated with."""

    correlation: float
    """Between compute and lengths, or between forward and backward of one micro-batch."""

    is_by_length: bool
    """Whether the correlation is with declared lengths."""

    spread_ratio: float
    """Standard deviation of a micro-batch's compute over its mean."""


def detect(case: Case, found: tuple[Candidate, ...]) -> tuple[Candidate, ...]:
    """Add unequal lengths if they cost much.

    If the lengths can only be inferred, the search for slow compute is repeated with equalized
    compute, because a slow rank shows better beside equal lengths.
    """
    compute = [each for each in found if each.cause in OF_COMPUTE]
    sequences = _find_sequences(case, compute)
    if sequences is None or case.profile.is_equalized:
        return found if sequences is None else (*found, sequences)
    equalized = equalize_inferred_lengths(case.reading.items, case.coords)
    if equalized is not None:
        profile = compare_with_peers(equalized, case.coords, is_equalized=True)
        again = find_slow_compute(case, profile)
        named = {rank for each in again for rank in each.ranks}
        compute = [*again, *(each for each in compute if named.isdisjoint(each.ranks))]
        sequences = _find_sequences(case, compute) or sequences
    others = (each for each in found if each.cause not in OF_COMPUTE)
    return (*others, *compute, sequences)


def _find_sequences(case: Case, compute: Sequence[Candidate]) -> Candidate | None:
    """Return unequal lengths as a candidate; None if there is no effect, or if it costs little.

    Args:
        case: The run.
        compute: What computes slowly: that varies for another reason.
    """
    blamed = named_ranks(compute, SLOW_DEVICE)
    effect = measure_sequence_effect(
        case.reading.items,
        case.context.microbatches,
        blamed,
        is_routed=case.reading.experts is None
        and any(link.kind == SpanKind.EP_COMM for link in case.reading.transfers.links),
        equalized=case.equalized,
    )
    if effect is None:
        return None
    model = case.reading.model
    slow = np.zeros(len(model.rank), dtype=np.bool_)
    for each in compute:
        if each.cause in SLOW_DEVICE:
            slow |= np.isin(model.rank, each.ranks) & in_shown_steps(model, each)
    return sequence_candidate(effect, case.replayer, slow, case.reading.experts)


def measure_sequence_effect(
    items: ComputeItems,
    lengths: MicrobatchTable,
    blamed: Collection[int],
    *,
    is_routed: bool,
    equalized: ComputeItems | None = None,
) -> SequenceEffect | None:
    """Measure how much compute varies between micro-batches, and whether lengths explain it.

    Each item is compared with the median of its rank, kind and chunk, so that neither slow ranks
    nor stages with more work count.

    Args:
        items: Compute by micro-batch.
        lengths: Declared lengths, if any.
        blamed: Ranks whose compute varies for another reason.
        is_routed: Whether the items include compute of experts. What the router sends them varies
            together in forward and backward as well, so only declared lengths are evidence.
        equalized: The items as if all micro-batches had the same declared length; None if the
            lengths are unknown, or do not explain compute.

    Returns:
        None if there are too few micro-batches, or if no correlation reaches `min_correlation`.
    """
    median = medians_by_key(items.self_ns, items.rank, items.kind, items.chunk)
    ratio = items.self_ns / np.maximum(median, 1.0)
    ratio /= common_step_ratio(ratio, items.step)
    forward, backward = _pair_rows(items)
    free = ~np.isin(items.rank[forward], list(blamed))
    forward, backward = forward[free], backward[free]
    if len(forward) < THRESHOLDS.min_items:
        return None
    spread = float(np.std(ratio[forward]))
    squares = squared_lengths(items, lengths)[forward]
    if not np.isnan(squares).any() and squares.std() > 0:
        # Declared lengths that do not explain the variation are not its cause.
        if equalized is None:
            return None
        usual = medians_by_key(equalized.self_ns, items.rank, items.kind, items.chunk)
        usual *= common_step_ratio(equalized.self_ns / usual, items.step)
        of_length = correlation((items.self_ns / usual)[forward], squares)
        return SequenceEffect(correlation=of_length or 0.0, is_by_length=True, spread_ratio=spread)
    together = None if is_routed else correlation(ratio[forward], ratio[backward])
    if together is None or together < THRESHOLDS.min_correlation:
        return None
    return SequenceEffect(correlation=together, is_by_length=False, spread_ratio=spread)


def _pair_rows(items: ComputeItems) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the rows of each micro-batch's forward, and of its backward."""
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


def sequence_candidate(
    effect: SequenceEffect,
    replayer: Replayer,
    slow: NDArray[np.bool_],
    experts: NDArray[np.bool_] | None,
) -> Candidate | None:
    """Price unequal lengths by replaying the run with equal ones.

    Args:
        effect: How much compute varies between micro-batches.
        replayer: The run.
        slow: Shape (ops,): operations of slow ranks in their slow steps, left as recorded.
        experts: Shape (ops,): compute of experts, which also depends on the router.

    Returns:
        None if unequal lengths cost less than `min_excess_ratio` of a median step.
    """
    model, operations = replayer.model, replayer.model.operations
    chosen = has_kind(model, FORWARD_KINDS | BACKWARD_KINDS) & model.on_device & ~slow
    if experts is not None:
        chosen &= ~experts
    rows = np.flatnonzero(chosen)
    label = operations.label if model.work is None else model.work
    fixed_ns = operations.duration_ns.copy()
    fixed_ns[rows] = equalize_durations(
        fixed_ns[rows],
        rank=model.rank[rows],
        step=operations.step[rows],
        label=factorize(model.stage[rows], label[rows])[0],
        span=None if model.span is None else model.span[rows],
    )
    if experts is not None:
        chosen, fixed_ns = equalize_experts(model, experts & ~slow, chosen, fixed_ns)
    without = replayer.full_with(fixed_ns)
    # The mean step includes the pauses of some steps, a checkpoint's, which stay.
    median_step_ns = float(np.median(without))
    lost_ns = float((replayer.full_recorded() - without).mean())
    lost = lost_ns / median_step_ns if median_step_ns > 0 else 0.0
    if lost < THRESHOLDS.min_excess_ratio:
        return None
    steps = operations.steps
    why = (
        " and follows the sum of squared lengths"
        if effect.is_by_length
        else ", in forward and backward together"
    )
    return Candidate(
        cause=CAUSE,
        ranks=(),
        steps=(steps[0], steps[-1]),
        part=np.flatnonzero(chosen),
        fixed_ns=fixed_ns,
        excess_ratio=lost,
        threshold=THRESHOLDS.min_excess_ratio,
        evidence=(
            f"compute per micro-batch varies by {format_percent(effect.spread_ratio)} on all ranks"
            f" alike{why} (correlation {effect.correlation:.2f}); with equal lengths a step would"
            f" be {format_percent(1 - 1 / (1 + lost))} shorter"
        ),
    )
