"""From the evidence to findings: every cause searched for, each priced by replay."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .causes.detector import INSUFFICIENT_EVIDENCE
from .causes.order import CAUSES, FROM_RECORDS, FROM_REPLAY
from .causes.slow_compute import ranks_without_peers
from .price.findings import price_candidates
from .report.report import Finding
from .report.text import format_count, format_ranks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from .causes.candidate import Candidate
    from .causes.detector import Case, Record
    from .statistics.peers import ComputeProfile

HEALTHY = "healthy"

LEAST_SURE = 0.5
"""Confidence from which a finding without a price means that the run is not healthy."""


def is_alarm(finding: Finding) -> bool:
    """Return whether a finding replaces `healthy`, if it is sure enough."""
    return finding.cause not in CAUSES or CAUSES[finding.cause].is_alarm


def diagnose(case: Case) -> tuple[Finding, ...]:
    """Return the priced findings of a run, the most recoverable first; at least one.

    What raises no alarm (a checkpoint) comes after what does.
    """
    found: tuple[Candidate, ...] = ()
    for detector in FROM_REPLAY:
        found = detector.detect(case, found)
    candidates = [each for each in found if each.explained_by is None]
    alarms = [each for each in candidates if each.cause.is_alarm]
    if alarms:
        candidates = [each for each in candidates if each.cause is not INSUFFICIENT_EVIDENCE]
    findings = sorted(
        price_candidates(candidates, case.replayer, case.workers),
        key=lambda finding: (
            not is_alarm(finding),
            -(finding.recoverable_ratio or 0.0),
            finding.ranks,
        ),
    )
    if alarms or any(each.cause is INSUFFICIENT_EVIDENCE for each in candidates):
        return tuple(findings)
    return (_no_alarm(case), *findings)


def findings_of_record(record: Record) -> tuple[Finding, ...]:
    """Return what is known without a replay, what ended the job first."""
    return tuple(finding for each in FROM_RECORDS for finding in each.detect(record))


def ends_run(finding: Finding) -> bool:
    """Return whether the job ended with a finding."""
    return finding.cause in CAUSES and CAUSES[finding.cause].ends_run


def combine_findings(
    priced_findings: tuple[Finding, ...], of_record: tuple[Finding, ...]
) -> tuple[Finding, ...]:
    """Return all findings of a run: what ended the job, then what has a price, then the rest.

    A run with a sure finding is not healthy, unless the finding is no alarm (the layout) or a mere
    change since the run before: these are reported beside it.
    """
    is_sick = any(each.confidence >= LEAST_SURE and is_alarm(each) for each in of_record)
    rest = (each for each in priced_findings if not (is_sick and each.cause == HEALTHY))
    ended = (each for each in of_record if ends_run(each))
    return (*ended, *rest, *(each for each in of_record if not ends_run(each)))


def _no_alarm(case: Case) -> Finding:
    """Return `healthy`, or why that cannot be said."""
    unclear = set(ranks_without_peers(case.profile))
    if unclear:
        return _too_few_peers(tuple(sorted(unclear)), case.profile)
    if case.reading.not_compared:
        return _not_judged(case.reading.not_compared)
    return _no_slow_rank(case.profile, case.slowdown)


def insufficient(evidence: str) -> Finding:
    """Return the finding that says that nothing can be said, and why."""
    return Finding(
        cause=INSUFFICIENT_EVIDENCE.name,
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
        cause=HEALTHY,
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
