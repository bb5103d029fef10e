"""From the evidence to findings: every cause looked for, each priced by replay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from rankscope.tracer.span import SpanKind

from .causes.candidate import is_brief, merged_hosts, merged_workers, while_shown, without_partners
from .causes.clock_throttle import Devices, told_by_samples
from .causes.equal_lengths import even_columns
from .causes.expert_imbalance import experts_candidate, without_their_stages
from .causes.host_causes import host_candidates
from .causes.host_gaps import stalls_of
from .causes.link_profile import profile_links
from .causes.network_degradation import slow_network
from .causes.sequence_imbalance import sequence_candidate, sequence_effect
from .causes.slow_compute import compute_candidates, unexplained
from .price.findings import priced
from .readers.tp_partners import find_workers
from .report.report import Finding
from .report.text import format_count, format_ranks
from .statistics.peers import compare_with_peers

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from rankscope.tracer.topology import Coords

    from .causes.candidate import Candidate
    from .replay.model import ComputeItems, Reading
    from .replay.what_if import Replayer
    from .statistics.peers import ComputeProfile
    from .trace.context import RunContext
    from .trace.tables import RankInfo


OF_COMPUTE = frozenset({"slow-compute", "clock-throttle"})
HOLDS_PARTNERS_UP = frozenset({"host-stall", "data-stall", "gc-pause"})
NO_ALARM = frozenset({"checkpoint"})
UNTOLD = "insufficient-evidence"
"""What stands out but cannot be named is told where nothing else is."""

LAUNCHED_AFTER_COMPUTE = frozenset({SpanKind.DP_COMM.value, SpanKind.OTHER.value})
"""Span kinds of collectives outside the layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """All that a diagnosis goes by."""

    reading: Reading
    profile: ComputeProfile
    replayer: Replayer
    ranks: Mapping[int, RankInfo]
    context: RunContext
    step_ns: Mapping[int, tuple[int, int]]
    """(begin, end) of each step, Unix time."""

    slowdown: float | None
    """S of the run."""

    evened: ComputeItems | None = None
    """Compute as if micro-batches were of equal length, where their lengths are known."""


def diagnose(case: Case) -> tuple[Finding, ...]:
    """Return the findings of a run, the most recoverable first; never none.

    What raises no alarm (a checkpoint) comes after what does.
    """
    links = case.reading.transfers.links
    workers = find_workers(case.ranks, (link.kind for link in links))
    host = _host_candidates(case)
    compute, sequences = _of_unequal_compute(case, host, workers)
    candidates = (*compute, *_network_candidates(case, compute), *host)
    if sequences is not None:
        if not case.profile.is_evened:
            # One rank's longer step or two are what unequal lengths make.
            candidates = tuple(each for each in candidates if not _is_brief_compute(each))
        candidates = (*candidates, sequences)
    experts = _of_experts(case, candidates)
    if experts is not None:
        candidates = without_their_stages(candidates, experts, case.reading.model)
        candidates = (*candidates, experts)
    is_alarm = any(each.is_alarm for each in candidates)
    if is_alarm:
        candidates = tuple(each for each in candidates if each.cause != UNTOLD)
    findings = sorted(
        priced(candidates, case.replayer, workers),
        key=lambda finding: (
            finding.cause in NO_ALARM,
            -(finding.recoverable_ratio or 0.0),
            finding.ranks,
        ),
    )
    if is_alarm:
        return tuple(findings)
    if any(each.cause == UNTOLD for each in findings):
        return tuple(findings)
    unclear = set(unexplained(case.profile))
    if unclear:
        return (_too_few_peers(tuple(sorted(unclear)), case.profile), *findings)
    if case.reading.not_compared:
        return (_not_judged(case.reading.not_compared), *findings)
    return (_no_slow_rank(case.profile, case.slowdown), *findings)


def _is_brief_compute(candidate: Candidate) -> bool:
    return is_brief(candidate) and candidate.cause in OF_COMPUTE


def _of_unequal_compute(
    case: Case, host: Sequence[Candidate], workers: Mapping[int, tuple[int, ...]]
) -> tuple[tuple[Candidate, ...], Candidate | None]:
    """Return what computes slowly, and unequal lengths where they cost much.

    Where nobody told the lengths but whole columns show them, ranks that are slow beside them are
    looked for once more.

    Args:
        case: The run.
        host: What hosts do.
        workers: What each rank shares with the partners that look just like it.
    """
    compute = _of_compute(case, case.profile, host, workers)
    sequences = _of_sequences(case, compute, case.evened)
    if sequences is None or case.profile.is_evened:
        return compute, sequences
    evened = even_columns(case.reading.items, _coords(case))
    if evened is None:
        return compute, sequences
    profile = compare_with_peers(evened, _coords(case), is_evened=True)
    beside = tuple(
        each for each in _of_compute(case, profile, host, workers) if not _is_brief_compute(each)
    )
    named = {rank for each in beside for rank in each.ranks}
    compute = (*beside, *(each for each in compute if named.isdisjoint(each.ranks)))
    return compute, _of_sequences(case, compute, evened) or sequences


def _of_compute(
    case: Case,
    profile: ComputeProfile,
    host: Sequence[Candidate],
    workers: Mapping[int, tuple[int, ...]],
) -> tuple[Candidate, ...]:
    """Return what computes slowly.

    Args:
        case: The run.
        profile: Its compute: as recorded, or as with micro-batches of equal length.
        host: What hosts do: it explains the compute of partners.
        workers: What each rank shares with the partners that look just like it.
    """
    devices = Devices(ranks=case.ranks, samples=case.context.samples, step_ns=case.step_ns)
    compute = compute_candidates(
        profile,
        case.reading.model,
        case.ranks,
        workers=workers,
        devices=devices,
    )
    stalled = [each for each in host if each.cause in HOLDS_PARTNERS_UP]
    compute = without_partners(compute, stalled, workers)
    merged = merged_workers(compute, workers)
    model = case.reading.model
    explained = told_by_samples(merged, profile, model, workers=workers, devices=devices)
    return merged_hosts(explained, case.ranks)


def _network_candidates(case: Case, compute: Sequence[Candidate]) -> tuple[Candidate, ...]:
    return slow_network(
        profile_links(case.reading.transfers, case.reading.steps, _coords(case)),
        case.ranks,
        blamed=[each for each in compute if each.cause != "stage-imbalance"],
        step_ns=float(np.median(case.reading.actual_ns)),
        step_start_ns={step: begin for step, (begin, _) in case.step_ns.items()},
        samples=case.context.samples,
    )


def _coords(case: Case) -> dict[int, Coords]:
    return {rank: info.coords for rank, info in case.ranks.items()}


def _host_candidates(case: Case) -> tuple[Candidate, ...]:
    reading = case.reading
    stalls = stalls_of(case.profile, reading.gaps, reading.model.operations.duration_ns)
    groups = tuple(
        link.members
        for link in reading.transfers.links
        if not link.is_pair and link.kind in LAUNCHED_AFTER_COMPUTE
    )
    return host_candidates(stalls, groups, case.ranks)


def _of_sequences(
    case: Case, candidates: Sequence[Candidate], evened: ComputeItems | None
) -> Candidate | None:
    of_compute = [each for each in candidates if each.cause in OF_COMPUTE]
    blamed = {rank for each in of_compute for rank in each.ranks}
    effect = sequence_effect(
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
    for each in of_compute:
        slow |= np.isin(model.rank, each.ranks) & while_shown(model, each)
    return sequence_candidate(
        effect, case.replayer, blamed, slow=slow, experts=case.reading.experts, evened=evened
    )


def _of_experts(case: Case, candidates: Sequence[Candidate]) -> Candidate | None:
    blamed = {rank for each in candidates if each.cause in OF_COMPUTE for rank in each.ranks}
    return experts_candidate(case.reading.experts, case.profile, case.replayer, blamed)


def insufficient(evidence: str) -> Finding:
    """Return the finding that says that nothing can be said, and why."""
    return Finding(
        cause="insufficient-evidence",
        ranks=(),
        steps=None,
        slowdown=None,
        recoverable_ratio=None,
        confidence=1.0,
        evidence=evidence,
    )


def _not_judged(ranks: tuple[int, ...]) -> Finding:
    slow = "it is slow" if len(ranks) == 1 else "they are slow"
    return insufficient(
        f"{format_ranks(ranks)} recorded no compute in most of these steps, so nobody can say"
        f" whether {slow}; no other rank's compute stands clear of its peers'"
    )


def _no_slow_rank(profile: ComputeProfile, slowdown: float | None) -> Finding:
    """Return `healthy`, or that nobody could be compared."""
    excess: NDArray[np.float64] = profile.excess_ratio
    compared = ~np.isnan(excess).all(axis=1)
    if not compared.any() or len(profile.ranks) == 1:
        return insufficient(
            f"{format_count(len(profile.ranks), 'rank')} over"
            f" {format_count(len(profile.steps), 'step')}:"
            " there is nobody to compare with, and nothing changed from step to step"
        )
    levels = np.nanmedian(excess[compared], axis=1)
    worst = int(levels.argmax())
    text = (
        f"no rank's own compute stands clear of its peers': the largest median excess is"
        f" {100 * levels[worst]:+.1f} % on rank {int(profile.ranks[compared][worst])}"
    )
    if slowdown is not None:
        text += f"; S = {slowdown:.3f}"
    return Finding(
        cause="healthy",
        ranks=(),
        steps=(int(profile.steps[0]), int(profile.steps[-1])),
        slowdown=slowdown,
        recoverable_ratio=None,
        confidence=float(np.clip(1.0 - max(levels[worst], 0.0) / 0.2, 0.5, 1.0)),
        evidence=text,
    )


def _too_few_peers(ranks: Sequence[int], profile: ComputeProfile) -> Finding:
    verb = "computes" if len(ranks) == 1 else "compute"
    return insufficient(
        f"{format_ranks(tuple(ranks))} {verb} more than 10 % longer than the one or two ranks of"
        f" its stage; with fewer than 3 peers among {len(profile.ranks):,} ranks nobody can say"
        " which is slow"
    )
