"""Work that is distributed unequally: micro-batches and generations of unequal length, experts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from rankscope.tracer.span import KIND_CODES, SpanKind

from ..arrays.group_stats import lower_medians, medians_by_key, row_medians, sum_cells
from ..arrays.grouping import factorize, sorted_unique
from ..arrays.sorting import find_positions
from ..replay.model import (
    BACKWARD_KINDS,
    COMPUTE_KINDS,
    FORWARD_KINDS,
    has_kind,
    select_items,
)
from ..report.text import format_duration, format_percent, format_ranks, format_steps
from ..statistics.baseline import common_step_ratio, equal_share_ratio, equal_work_ratio
from ..statistics.peers import call_ratio, compare_with_peers, median_of_peers
from ..statistics.phases import find_phases
from ..statistics.thresholds import THRESHOLDS
from . import evaluation, stage_imbalance
from .candidate import Candidate, in_shown_steps, join_candidates, named_ranks, shows_in
from .detector import INSUFFICIENT_EVIDENCE, Cause, ProofForm, ShownIn, Subject
from .equal_lengths import (
    correlation,
    declared_sizes,
    equalize_durations,
    equalize_experts,
    equalize_inferred_lengths,
    has_tokens,
)
from .slow_compute import CAUSE as SLOW_COMPUTE
from .slow_compute import SLOW_DEVICE, find_slow_compute, ranks_without_peers

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from numpy.typing import NDArray

    from rankscope.tracer.topology import Coords

    from ..replay.model import ComputeItems, ReplayModel
    from ..replay.replayer import Replayer
    from ..statistics.peers import ComputeProfile
    from ..trace.context import MicrobatchTable
    from .detector import Case


MICROBATCH_KINDS = FORWARD_KINDS | BACKWARD_KINDS
OF_COMPUTE = SLOW_DEVICE | {stage_imbalance.CAUSE}
FORWARD, BACKWARD = KIND_CODES[SpanKind.FORWARD], KIND_CODES[SpanKind.BACKWARD]

CAUSE = Cause(
    name="sequence-imbalance",
    subject=Subject.JOB,
    has_onset=False,
    sentence="Unequal work makes ranks wait for each other",
    shown_in=ShownIn.COMPUTE,
    proof_form=ProofForm.LENGTHS,
)
"""With ranks: their experts get more tokens than others."""


def detect(case: Case, candidates: tuple[Candidate, ...]) -> tuple[Candidate, ...]:
    """Add unequal lengths if they cost much, and ranks whose experts get more tokens."""
    ranks = case.profile.ranks.tolist()
    slow = [candidate for candidate in candidates if candidate.cause is SLOW_COMPUTE]
    is_of_all = len(ranks) > 1 and named_ranks(slow, {SLOW_COMPUTE}).issuperset(ranks)
    # If each is slow for long, one after the other, the rest are its measure.
    steps = sorted(candidate.steps for candidate in slow)
    are_in_turn = all(before[1] < after[0] for before, after in pairwise(steps))
    if is_of_all and not (are_in_turn and all(candidate.shown_steps is None for candidate in slow)):
        candidates = _add_unknown_reason(case, candidates)
    else:
        candidates = _add_sequences(case, candidates)
    candidates = _share_evaluations(case, candidates)
    blamed = named_ranks(candidates, SLOW_DEVICE)
    experts = find_expert_imbalance(case.reading.experts, case.profile, case.replayer, blamed)
    if experts is None:
        return candidates
    return (*mark_explained_stages(candidates, experts, case.reading.model), experts)


def _share_evaluations(case: Case, candidates: tuple[Candidate, ...]) -> tuple[Candidate, ...]:
    """Take the time that one rank needs longer than the others out of the evaluations of all.

    It is of its slow device if it has one, else unequal work; the rest is planned.
    """
    evaluations = [candidate for candidate in candidates if candidate.cause is evaluation.CAUSE]
    planned = evaluations[0] if evaluations else None
    if planned is None or planned.part is None or planned.fixed_ns is None:
        return candidates
    share = evaluation.find_longest_share(case, planned)
    if share is None:
        return candidates
    rest = replace(planned, part=np.setdiff1d(planned.part, share.part))
    others = [rest if candidate is planned else candidate for candidate in candidates]
    for place, candidate in enumerate(others):
        if candidate.cause in SLOW_DEVICE and share.rank in candidate.ranks:
            others[place] = _with_part(candidate, share.part, planned.fixed_ns)
            return tuple(others)
    lost = share.lost_ns / len(case.reading.steps) / float(np.median(case.gaps.compute_ns))
    if lost < THRESHOLDS.min_excess_ratio:
        return candidates
    unequal = replace(
        rest, cause=CAUSE, ranks=(), part=share.part, excess_ratio=lost, evidence=share.evidence
    )
    return (*others, unequal)


def _with_part(
    candidate: Candidate, part: NDArray[np.int64], fixed_ns: NDArray[np.float64]
) -> Candidate:
    """Return a candidate that has more operations, with their times once its cause is fixed."""
    own_ns = np.full(len(fixed_ns), np.nan) if candidate.fixed_ns is None else candidate.fixed_ns
    own_ns = own_ns.copy()
    own_ns[part] = fixed_ns[part]
    own = part if candidate.part is None else np.union1d(candidate.part, part)
    return replace(candidate, part=own, fixed_ns=own_ns)


def _add_unknown_reason(case: Case, candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Add unequal lengths, or that the reason is unknown, where all ranks are slow in turn.

    Not all ranks can be slower than their peers.
    """
    slow = [candidate for candidate in candidates if candidate.cause is SLOW_COMPUTE]
    rest = [candidate for candidate in candidates if candidate.cause is not SLOW_COMPUTE]
    sequences = _find_sequences(
        case, [candidate for candidate in rest if candidate.cause in OF_COMPUTE]
    )
    if sequences is not None:
        return (*rest, sequences)
    unknown = replace(
        join_candidates(slow, max(slow, key=lambda candidate: candidate.excess_ratio)),
        cause=INSUFFICIENT_EVIDENCE,
        evidence=(
            f"each of the {len(case.profile.ranks):,} ranks computes longer than the others in some"
            " steps: their work may be unequal, and no rank shows what is usual"
        ),
    )
    return (*rest, unknown)


def _is_long_microbatch(candidate: Candidate, case: Case) -> bool:
    """Return whether slow ranks are all ranks of a dp position, for too short a time to be slow.

    They compute the same micro-batch, which beside unequal lengths is a long one.
    """
    positions = {case.coords[rank].dp for rank in candidate.ranks}
    column = [rank for rank, at in case.coords.items() if at.dp in positions]
    num_steps = int(shows_in(candidate, case.reading.steps).sum())
    return (
        candidate.cause is SLOW_COMPUTE
        and num_steps < THRESHOLDS.min_lasting_steps
        and len(column) > 1
        and set(column) == set(candidate.ranks)
    )


def _add_sequences(case: Case, candidates: tuple[Candidate, ...]) -> tuple[Candidate, ...]:
    """Add unequal lengths.

    If the lengths can only be inferred, the search for slow compute is repeated with equalized
    compute, because a slow rank shows better beside equal lengths.
    """
    compute = [candidate for candidate in candidates if candidate.cause in OF_COMPUTE]
    sequences = _find_sequences(case, compute)
    if sequences is None or case.profile.is_equalized:
        return candidates if sequences is None else (*candidates, sequences)
    compute = [candidate for candidate in compute if not _is_long_microbatch(candidate, case)]
    equalized = equalize_inferred_lengths(case.reading.items, case.coords)
    if equalized is not None:
        profile = compare_with_peers(
            equalized, case.coords, calls=case.reading.calls, is_equalized=True
        )
        again = find_slow_compute(case, profile)
        named = {rank for candidate in again for rank in candidate.ranks}
        compute = [
            *again,
            *(candidate for candidate in compute if named.isdisjoint(candidate.ranks)),
        ]
        sequences = _find_sequences(case, compute) or sequences
    others = (candidate for candidate in candidates if candidate.cause not in OF_COMPUTE)
    return (*others, *compute, sequences)


def _find_sequences(case: Case, compute: Sequence[Candidate]) -> Candidate | None:
    """Return unequal lengths as a candidate; None if there is no effect, or if it costs little."""
    reading, model = case.reading, case.reading.model
    effect = describe_sequence_effect(
        reading.items,
        case.context.microbatches,
        named_ranks(compute, SLOW_DEVICE),
        is_routed=reading.experts is None
        and any(link.kind == SpanKind.EP_COMM for link in reading.transfers.links),
        is_explained=case.equalized is not None,
        is_work=bool(case.work) or has_tokens(case.context.microbatches),
    )
    shares = _find_shares(case)
    if not effect and shares is None and reading.is_call is None:
        return None
    slow = np.zeros(len(model.rank), dtype=np.bool_)
    for candidate in compute:
        if candidate.cause in SLOW_DEVICE:
            slow |= np.isin(model.rank, candidate.ranks) & in_shown_steps(model, candidate)
    calls = None
    if reading.calls is not None and reading.is_call is not None:
        is_shared = reading.is_call & has_kind(model, FORWARD_KINDS) & ~slow
        unclear = _unclear_ratio(case, reading.calls)
        slow |= np.isin(model.rank, list(unclear))
        calls = Calls(
            rows=np.flatnonzero(is_shared),
            slowness=np.array([unclear.get(rank, 1.0) for rank in model.rank[is_shared].tolist()]),
            evidence=describe_calls(reading.calls, np.array(sorted(case.ranks))),
        )
    return sequence_candidate(
        case,
        effect,
        slow,
        calls=calls,
        shares=shares,
        may_be_slow=calls is None and case.equalized is None,
    )


def _unclear_ratio(case: Case, calls: ComputeItems) -> dict[int, float]:
    """Return how much longer the calls of a rank take that may be slow, by rank.

    It is longer than the one or two others of its stage, in its micro-batches and in each call:
    its device is slow, or it has longer sequences. How many calls it runs is work in either case.
    """
    profile = case.profile
    ratio = call_ratio(calls, profile.ranks, profile.steps, profile.stage)
    level = {
        rank: float(np.median(own[np.isfinite(own)])) if np.isfinite(own).any() else 1.0
        for rank, own in zip(profile.ranks.tolist(), ratio, strict=True)
    }
    longest = 1.0 + THRESHOLDS.min_excess_ratio
    return {rank: level[rank] for rank in ranks_without_peers(profile) if level[rank] > longest}


@dataclass(frozen=True, slots=True, kw_only=True)
class Calls:
    """Forwards without gradients."""

    rows: NDArray[np.int64]
    """Their operations, ascending."""

    slowness: NDArray[np.float64]
    """Shape (rows,): factor by which each may be long because its rank is slow. It stays."""

    evidence: str
    """How much they differ between ranks, in words."""


def describe_calls(calls: ComputeItems, ranks: NDArray[np.int64]) -> str:
    """Return how unequal the forwards without gradients of the ranks are, and whose are longest."""
    steps = sorted_unique(calls.step)
    row, column = find_positions(calls.rank, ranks), find_positions(calls.step, steps)
    total = sum_cells((len(ranks), len(steps)), row, column, calls.self_ns)
    longest, usual = total.argmax(axis=0), row_medians(total.T)
    over = total.max(axis=0) - usual
    by_rank = np.bincount(longest, weights=over, minlength=len(ranks))
    worst = int(by_rank.argmax())
    if by_rank[worst] <= THRESHOLDS.one_rank_share * by_rank.sum():
        return (
            "forwards without gradients take"
            f" {format_duration(float(total.max(axis=0).mean()))} on the longest rank of a"
            f" step, {format_duration(float(usual.mean()))} on the median one"
        )

    def size(chosen: NDArray[np.bool_]) -> str:
        num = np.unique(row[chosen] * len(steps) + column[chosen], return_counts=True)[1]
        if not len(num):
            return "none"
        typical = format_duration(float(np.median(calls.self_ns[chosen])))
        return f"{np.median(num):.0f} of {typical}"

    mine = (row == worst) & (longest == worst)[column]
    return (
        f"forwards without gradients: {size(mine)} in a step on rank {int(ranks[worst])},"
        f" {size(row != worst)} on the others"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Unequal numbers of micro-batches, or of the tokens in them."""

    ratio: NDArray[np.float64]
    """Shape (ops,): work of the rank in the step if all had equal shares, over its own."""

    evidence: str
    """How much work the ranks have, in words."""


def _find_shares(case: Case) -> Shares | None:
    """Return the shares of work in each step; None if all are equal."""
    items, model = case.reading.items, case.reading.model
    of_work = items.kind == FORWARD
    forwards = select_items(items, of_work)
    amount, noun = np.ones(len(forwards)), "micro-batches"
    if case.work and np.ptp(case.work[0][of_work]) > 0:
        amount, noun = case.work[0][of_work], "tokens" if len(case.work) > 1 else "elements"
    evidence = describe_shares(forwards, amount, case.coords, noun=noun)
    if not evidence:
        return None
    step = np.array(model.operations.steps, dtype=np.int32)[model.operations.step]
    ranks = sorted_unique(forwards.rank).tolist()
    ratio = equal_work_ratio(
        amount,
        (forwards.rank, forwards.step),
        (model.rank, step),
        stage_of_rank={rank: case.coords[rank].pp for rank in ranks},
    )
    return Shares(ratio=ratio, evidence=evidence)


def describe_shares(
    items: ComputeItems, amount: NDArray[np.float64], coords: Mapping[int, Coords], *, noun: str
) -> str:
    """Return how much work the ranks of a stage have, and who has most; "" if all have as much.

    Args:
        items: Forwards of micro-batches.
        amount: Shape (items,): work.
        coords: Of each rank.
        noun: What the amount counts.
    """
    ranks, steps = sorted_unique(items.rank), sorted_unique(items.step)
    row, column = find_positions(items.rank, ranks), find_positions(items.step, steps)
    own = sum_cells((len(ranks), len(steps)), row, column, amount)
    stage = np.array([coords[rank].pp for rank in ranks.tolist()])
    usual = np.empty_like(own)
    for each in np.unique(stage).tolist():
        usual[stage == each] = lower_medians(own[stage == each])
    more = np.maximum(own - usual, 0.0)
    if not more.any():
        return ""
    by_rank = more.sum(axis=1)
    worst = int(by_rank.argmax())
    shown = more > 0
    who, others = "the rank with most of them", "the median one"
    if by_rank[worst] > THRESHOLDS.one_rank_share * by_rank.sum():
        shown &= (np.arange(len(ranks)) == worst)[:, None]
        who, others = f"rank {int(ranks[worst])}", "the others"
    most, least = np.median(own[shown]), np.median(usual[shown])
    return f"{noun} of a step: {most:,.0f} on {who}, {least:,.0f} on {others}"


def describe_sequence_effect(
    items: ComputeItems,
    lengths: MicrobatchTable,
    blamed: Collection[int],
    *,
    is_routed: bool,
    is_explained: bool = False,
    is_work: bool = True,
) -> str:
    """Return how much compute varies between micro-batches, if they are unequal; else "".

    Each item is compared with the median of its rank, kind and chunk, so that neither slow ranks
    nor stages with more work count. Micro-batches are unequal if declared lengths explain compute,
    or without these, if forward and backward are correlated (`min_correlation`) on several ranks.

    Args:
        lengths: Declared lengths, if any.
        blamed: Ranks whose compute varies for another reason.
        is_routed: Whether the items include compute of experts. What the router sends them varies
            together in forward and backward as well, so only declared lengths are evidence.
        is_explained: Whether declared lengths explain compute. Those that do not are not its cause.
        is_work: Whether what is declared is the work. Elements need not be: images are cropped.
    """
    median = medians_by_key(items.self_ns, items.rank, items.kind, items.chunk)
    ratio = items.self_ns / np.maximum(median, 1.0)
    ratio /= common_step_ratio(ratio, items.step)
    key, num = factorize(items.step, items.rank, items.chunk, items.microbatch)
    pairs = np.full((2, num), -1, dtype=np.int64)  # rows of each micro-batch's forward and backward
    for rows, kind in zip(pairs, (FORWARD, BACKWARD), strict=True):
        mine = np.flatnonzero(items.kind == kind)
        rows[key[mine]] = mine
    forward, backward = pairs[:, (pairs >= 0).all(axis=0)]
    free = ~np.isin(items.rank[forward], list(blamed))
    forward, backward = forward[free], backward[free]
    if len(forward) < THRESHOLDS.min_items:
        return ""
    varies = f"varies by {format_percent(float(np.std(ratio[forward])))} on all ranks alike"
    sizes, noun = declared_sizes(items, lengths)
    sizes = sizes[forward]
    if (is_explained or is_work) and not np.isnan(sizes).any() and sizes.std() > 0:
        coefficient = correlation(ratio[forward], sizes) or 0.0
        why = f"{varies} and follows the {noun} (correlation {coefficient:.2f})"
        return why if is_explained else ""
    coefficient = correlation(ratio[forward], ratio[backward]) or 0.0
    if is_routed or coefficient < THRESHOLDS.min_correlation:
        return ""
    # Lengths are random: they do not vary on one rank alone.
    varied = np.bincount(items.rank[forward], weights=(ratio[forward] - 1.0) ** 2)
    if varied.max() > THRESHOLDS.one_rank_share * varied.sum():
        return ""
    return f"{varies}, in forward and backward together (correlation {coefficient:.2f})"


def sequence_candidate(
    case: Case,
    effect: str,
    slow: NDArray[np.bool_],
    *,
    calls: Calls | None = None,
    shares: Shares | None = None,
    may_be_slow: bool = True,
) -> Candidate | None:
    """Price unequal lengths and shares of the work by replaying the run with equal ones.

    Args:
        effect: How much compute varies between micro-batches, in words; "" if it does not.
        slow: Shape (ops,): operations of slow ranks in their slow steps, left as recorded.
        calls: Forwards without gradients, of which each rank would take an equal share in each
            step; None: there is none.
        shares: Of micro-batches or tokens; None: they are equal.
        may_be_slow: Whether other ranks that are longer in each step may be slow.

    Returns:
        None if unequal lengths cost less than `min_excess_ratio` of a median step.
    """
    replayer, experts = case.replayer, case.reading.experts
    model, operations = replayer.model, replayer.model.operations
    of_microbatches = has_kind(model, MICROBATCH_KINDS) & model.on_device & ~slow
    if calls is not None:
        of_microbatches[calls.rows] = False
    # If only the shares are unequal, micro-batches are alike.
    chosen = of_microbatches if effect or calls is not None else np.zeros_like(of_microbatches)
    if experts is not None:
        chosen = chosen & ~experts
    rows = np.flatnonzero(chosen)
    label = operations.label if model.work is None else model.work
    fixed_ns = operations.duration_ns.copy()
    fixed_ns[rows] = equalize_durations(
        fixed_ns[rows],
        rank=model.rank[rows],
        step=operations.step[rows],
        label=factorize(model.stage[rows], label[rows])[0],
        span=None if model.span is None else model.span[rows],
        may_be_slow=may_be_slow,
    )
    if experts is not None and len(rows):
        chosen, fixed_ns = equalize_experts(model, experts & ~slow, chosen, fixed_ns)
    evidence = [f"compute per micro-batch {effect}; with equal lengths"] if effect else []
    if calls is not None and len(calls.rows):
        rows = calls.rows
        ranks, first = np.unique(model.rank, return_index=True)
        fixed_ns[rows] *= equal_share_ratio(
            fixed_ns[rows] / calls.slowness,
            rank=model.rank[rows],
            step=operations.step[rows],
            stage_of_rank=dict(zip(ranks.tolist(), model.stage[first].tolist(), strict=True)),
        )
        chosen[rows] = True
        evidence = [f"{calls.evidence}; with equal shares"]
    if shares is not None:
        chosen = chosen | (of_microbatches & (shares.ratio != 1.0))
        fixed_ns = np.where(of_microbatches, fixed_ns * shares.ratio, fixed_ns)
        evidence.append(f"{shares.evidence}; with equal shares")
    lost = _lost_ratio(replayer, fixed_ns)
    if lost < THRESHOLDS.min_excess_ratio:
        return None
    steps = operations.steps
    return Candidate(
        cause=CAUSE,
        ranks=(),
        steps=(steps[0], steps[-1]),
        part=np.flatnonzero(chosen),
        fixed_ns=fixed_ns,
        excess_ratio=lost,
        threshold=THRESHOLDS.min_excess_ratio,
        evidence=(
            f"{' and '.join(evidence)} a step would be {format_percent(1 - 1 / (1 + lost))} shorter"
        ),
    )


def _lost_ratio(replayer: Replayer, fixed_ns: NDArray[np.float64]) -> float:
    """Return how much longer the mean step is than with other durations, over their median step.

    The mean step includes the pauses of some steps, a checkpoint's, which stay.
    """
    without = replayer.full_with(fixed_ns)
    median_step_ns = float(np.median(without))
    lost_ns = float((replayer.full_recorded() - without).mean())
    return lost_ns / median_step_ns if median_step_ns > 0 else 0.0


def find_expert_imbalance(
    experts: NDArray[np.bool_] | None,
    profile: ComputeProfile,
    replayer: Replayer,
    blamed: Collection[int],
) -> Candidate | None:
    """Find ranks whose experts compute longer than those of their stage for some steps.

    A slow device, and a rank with longer sequences, is slow outside its experts as well. What
    remains is the number of tokens that the router sends. Routing that changes from step to step
    favours no rank and is no finding.

    Args:
        experts: Shape (ops,): compute of experts; None: none is known.
        blamed: Ranks whose whole compute is slow.

    Returns:
        None if no rank is significantly longer for `min_lasting_steps` steps, or if fixing all of
        them would save less than `min_excess_ratio` of a step.
    """
    if experts is None or not experts.any():
        return None
    operations = replayer.model.operations
    rows = np.flatnonzero(experts)
    row = np.searchsorted(profile.ranks, replayer.model.rank[rows])
    column = np.searchsorted(profile.steps, np.array(operations.steps)[operations.step[rows]])
    total = sum_cells(profile.total_ns.shape, row, column, operations.duration_ns[rows])
    total = np.where(total > 0, total, np.nan)
    expected = _expected_of_experts(total, profile)
    excess = total / expected - 1.0
    excess[np.isin(profile.ranks, list(blamed))] = np.nan
    phases = [
        phase
        for phase in find_phases(excess, min_steps=THRESHOLDS.min_lasting_steps)
        if phase.excess_ratio >= THRESHOLDS.min_excess_ratio
    ]
    if not phases:
        return None
    equal_share = np.full(total.shape, np.nan)
    for phase in phases:
        cells = phase.row, phase.inside
        equal_share[cells] = expected[cells] / total[cells]
    fixed_ns = np.full(len(experts), np.nan)
    fixed_ns[rows] = operations.duration_ns[rows] * equal_share[row, column]
    part = ~np.isnan(fixed_ns)
    lost = _lost_ratio(replayer, np.where(part, fixed_ns, operations.duration_ns))
    if lost < THRESHOLDS.min_excess_ratio:
        return None
    longest = max(phases, key=lambda phase: phase.excess_ratio)
    worst = stage_imbalance.SlowRanks(
        rows=np.array([longest.row]),
        phase=longest,
        profile=replace(profile, total_ns=total),
        expected_ns=expected[longest.row],
        against="in the rest of the stage",
    )
    ranks = tuple(sorted(int(profile.ranks[phase.row]) for phase in phases))
    firsts, lasts = zip(*(phase.steps(profile.steps) for phase in phases), strict=True)
    steps = min(firsts), max(lasts)
    return Candidate(
        cause=CAUSE,
        ranks=ranks,
        steps=steps,
        part=np.flatnonzero(part),
        fixed_ns=fixed_ns,
        excess_ratio=worst.phase.excess_ratio,
        threshold=max(worst.phase.threshold, THRESHOLDS.min_excess_ratio),
        evidence=(
            f"{format_ranks(ranks)}: experts get more tokens than others; those of rank"
            f" {worst.ranks[0]} take {worst.evidence}, in {format_steps(steps)}; compute outside"
            " experts is as usual; with equal shares a step would be"
            f" {format_percent(1 - 1 / (1 + lost))} shorter"
        ),
    )


def _expected_of_experts(
    total: NDArray[np.float64], profile: ComputeProfile
) -> NDArray[np.float64]:
    """Return what is expected of the experts' compute from the peers. Shape (ranks, steps), ns.

    The factor by which a rank computes longer outside experts is taken out of the comparison: its
    whole device is slow, or its sequences are long. NaN if fewer than `min_peers` peers have
    experts.
    """
    expected = np.full_like(total, np.nan)
    has_experts = ~np.isnan(total).all(axis=1)
    for stage in np.unique(profile.stage).tolist():
        mine = np.flatnonzero((profile.stage == stage) & has_experts)
        if len(mine) > THRESHOLDS.min_peers:
            outside = profile.total_ns[mine]
            relative = outside / row_medians(outside.T)[None]
            expected[mine] = median_of_peers(total[mine] / relative) * relative
    return expected


def mark_explained_stages(
    candidates: Sequence[Candidate], experts: Candidate, model: ReplayModel
) -> tuple[Candidate, ...]:
    """Mark stages that have more work only because of some ranks' experts."""
    duration_ns = model.operations.duration_ns
    fixed_ns = duration_ns if experts.fixed_ns is None else experts.fixed_ns
    fixed_ns = np.where(np.isnan(fixed_ns), duration_ns, fixed_ns)
    compute = has_kind(model, COMPUTE_KINDS) & model.on_device

    def is_explained(candidate: Candidate) -> bool:
        if candidate.cause is not stage_imbalance.CAUSE:
            return False
        mine = compute & np.isin(model.rank, candidate.ranks)
        left = float(fixed_ns[mine].sum() / duration_ns[mine].sum())
        return (1.0 + candidate.excess_ratio) * left - 1.0 < THRESHOLDS.persistent_ratio

    return tuple(
        replace(candidate, explained_by=CAUSE) if is_explained(candidate) else candidate
        for candidate in candidates
    )
