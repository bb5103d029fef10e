"""From the evidence to findings: every cause searched for, each priced by replay."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from rankscope.tracer.span import NS_PER_S

from .arrays.grouping import NO_GROUP
from .breakdown.mfu import sum_squares
from .causes.detector import INSUFFICIENT_EVIDENCE, insufficient
from .causes.order import FROM_RECORDS, FROM_REPLAY
from .causes.slow_compute import ranks_without_peers
from .price.findings import price_candidates
from .report.report import Finding
from .report.text import (
    format_count,
    format_duration,
    format_percent,
    format_ranks,
    format_slowdown,
)
from .severity import HEALTHY, ends_run, is_alarm
from .statistics.link_profile import find_lone_links
from .statistics.step_change import compare_step_times
from .statistics.thresholds import THRESHOLDS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from .causes.candidate import Candidate
    from .causes.detector import Case, Record
    from .statistics.peers import ComputeProfile


def diagnose(case: Case, parts: tuple[Case, ...] = ()) -> tuple[Finding, ...]:
    """Return what is to be said if nothing is worth an alarm, and then the priced findings.

    Alarms come first of these, the one that is most worth fixing first of all; then what is no
    alarm. `grade_findings` leaves out the first one if there is an alarm.

    Args:
        parts: Its steps between restarts that moved ranks to other hosts, each of which is searched
            by itself; empty if none did.
    """
    candidates = find_candidates(case, parts)
    priced = price_candidates(candidates, case.replayer, case.workers, case.tokens_by_step)
    least_s = -THRESHOLDS.minor_share * float(case.reading.actual_ns.mean()) / NS_PER_S
    findings = sorted(
        # What would make the step longer is no fault, however long it is itself.
        (
            candidate
            for candidate in priced
            if not is_alarm(candidate) or (candidate.saved_s or 0.0) >= least_s
        ),
        key=lambda finding: (
            not is_alarm(finding),
            -(finding.recoverable_ratio or 0.0),
            finding.ranks,
        ),
    )
    return (_no_alarm(case), *findings)


def find_candidates(case: Case, parts: tuple[Case, ...] = ()) -> list[Candidate]:
    """Return what each cause's search finds, less what another one explains."""
    candidates: list[Candidate] = []
    for part in parts or (case,):
        of_part: tuple[Candidate, ...] = ()
        for detector in FROM_REPLAY:
            of_part = detector.detect(part, of_part)
        candidates += [candidate for candidate in of_part if candidate.explained_by is None]
    alarms = [candidate for candidate in candidates if candidate.cause.is_alarm]
    if alarms:
        candidates = [
            candidate for candidate in candidates if candidate.cause is not INSUFFICIENT_EVIDENCE
        ]
    return candidates


def findings_of_record(record: Record) -> tuple[Finding, ...]:
    """Return the findings that need no replay; those that ended the job come first."""
    return tuple(finding for detector in FROM_RECORDS for finding in detector.detect(record))


def combine_findings(
    priced: tuple[Finding, ...], unpriced: tuple[Finding, ...]
) -> tuple[Finding, ...]:
    """Return all findings of a run: what ended the job, what has a price, then the rest.

    A certain finding without a price replaces `healthy`, and so does whatever ended the job: that
    it ended is certain. What is no alarm (the layout), and what is uncertain (a change since the
    previous run), is reported beside it.
    """
    is_sick = any(
        ends_run(finding)
        or (finding.confidence >= THRESHOLDS.undecided_certainty and is_alarm(finding))
        for finding in unpriced
    )
    rest = (finding for finding in priced if not (is_sick and finding.cause == HEALTHY))
    ended = (finding for finding in unpriced if ends_run(finding))
    return (*ended, *rest, *(finding for finding in unpriced if not ends_run(finding)))


def _no_alarm(case: Case) -> Finding:
    """Return `healthy`, or the reason why that is unknown."""
    profile = case.profile
    unclear = ranks_without_peers(profile)
    if unclear:
        verb = "computes" if len(unclear) == 1 else "compute"
        return insufficient(
            f"{format_ranks(unclear)} {verb} more than 10 % longer than the one or two other ranks"
            f" of the stage; with fewer than 3 peers among {len(profile.ranks):,} ranks it is"
            " unknown which is slow"
        )
    lone = find_lone_links(case.links.transfers, case.ranks)
    share = 0.0
    if len(lone):
        duration_ns = case.replayer.model.operations.duration_ns.copy()
        duration_ns[case.links.operations_of(lone.tolist())] = 0.0
        without_ns = float(case.replayer.full_with(duration_ns).mean())
        share = 1.0 - without_ns / float(case.replayer.full_recorded().mean())
    if share > THRESHOLDS.majority_share:
        return insufficient(
            f"transfers between hosts take {format_percent(share)} of the step time, and no alike"
            " link shows whether they are slower than the network allows: compare with an earlier"
            " run on the same hosts, or with the speed of their adapters"
        )
    not_compared = case.reading.not_compared
    if not_compared:
        pronoun = "it is" if len(not_compared) == 1 else "they are"
        return insufficient(
            f"{format_ranks(not_compared)} recorded no compute in most of these steps, so it is"
            f" unknown whether {pronoun} slow; differences between the other ranks are within noise"
        )
    group = case.reading.model.operations.group
    if len(profile.ranks) > 1 and not (np.bincount(group[group != NO_GROUP]) > 1).any():
        return insufficient(
            f"no communication between the {len(profile.ranks):,} ranks was recorded, so it is"
            " unknown who waits for whom"
        )
    healthy = _healthy(profile, case.slowdown)
    return replace(healthy, evidence=healthy.evidence + _growth_text(case))


def _growth_text(case: Case) -> str:
    """Return how much longer the last quarter of the steps is than the first one; "" if it is not.

    What grows on all ranks alike distinguishes none: memory, a cache, a file that is appended to.
    More tokens, longer sequences and more micro-batches explain as much as they grew.
    """
    numbers, step_ns = np.array(case.reading.steps), case.reading.actual_ns
    num = len(numbers) // 4
    change = compare_step_times(step_ns[:num].tolist(), step_ns[len(numbers) - num :].tolist())
    if not change.is_significant:
        return ""
    items = case.reading.items.step
    counts = np.bincount(np.searchsorted(numbers, items), minlength=len(numbers))
    measures: tuple[Mapping[int, int], ...] = (
        dict(zip(numbers.tolist(), counts.tolist(), strict=True)),
        case.tokens_by_step,
        sum_squares(case.context.microbatches),
    )
    known = [
        [float(measure[step]) for step in numbers.tolist()]
        for measure in measures
        if measure.keys() >= set(numbers.tolist())
    ]

    def growth(values: Sequence[float]) -> float:
        first, last = float(np.median(values[:num])), float(np.median(values[-num:]))
        return last / first if first > 0 else 1.0

    explained = max(1.0, *(growth(values) for values in known))
    grown = min(growth(step_ns.tolist()), change.ratio or 1.0)
    if grown < (1.0 + THRESHOLDS.critical_share) * explained:
        return ""
    first_ns, last_ns = float(np.median(step_ns[:num])), float(np.median(step_ns[-num:]))
    return (
        "; but steps became longer on all ranks alike:"
        f" {format_duration(first_ns)} in the first quarter, {format_duration(last_ns)} in the last"
    )


def _healthy(profile: ComputeProfile, slowdown: float | None) -> Finding:
    """Return `healthy`, or `insufficient-evidence` if there was nothing to compare."""
    excess: NDArray[np.float64] = profile.excess_ratio
    compared = ~np.isnan(excess).all(axis=1)
    num_steps = len(profile.steps)
    if not compared.any():
        return insufficient(
            f"{format_count(len(profile.ranks), 'rank')} over {format_count(num_steps, 'step')}:"
            " there are neither peers nor enough steps to compare with"
        )
    if (
        slowdown is not None
        and slowdown >= 1.0 + THRESHOLDS.critical_share
        and num_steps < THRESHOLDS.min_lasting_steps
    ):
        return insufficient(
            f"GPU slowdown {format_slowdown(slowdown)}, and no rank or link is significantly slow"
            f" in {format_count(num_steps, 'step')}; a slow link or host needs"
            f" {THRESHOLDS.min_lasting_steps} steps"
        )
    levels = np.nanmedian(excess[compared], axis=1)
    worst = int(levels.argmax())
    largest = max(float(levels[worst]), 0.0)
    text = (
        f"differences between ranks (up to {format_percent(largest, digits=1)},"
        f" rank {int(profile.ranks[compared][worst])}) are within this run's noise"
        if len(profile.ranks) > 1
        else f"the only rank does not become slower for long, in {format_count(num_steps, 'step')};"
        " without peers, a constant slowness would not show"
    )
    return Finding(
        cause=HEALTHY,
        steps=(int(profile.steps[0]), int(profile.steps[-1])),
        slowdown=slowdown,
        confidence=float(np.clip(1.0 - largest / 0.2, 0.5, 1.0)),
        evidence=text,
    )
