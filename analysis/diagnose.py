"""From the evidence to findings: every cause searched for, each priced by replay."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from rankscope.tracer.span import NS_PER_S

from .arrays.grouping import NO_GROUP
from .breakdown.mfu import sum_squares
from .causes.detector import INSUFFICIENT_EVIDENCE, insufficient
from .causes.order import CAUSES, FROM_RECORDS, FROM_REPLAY
from .causes.slow_compute import ranks_without_peers
from .price.findings import price_candidates
from .replay.replayer import ratio
from .report.report import Finding, Severity
from .report.text import (
    format_count,
    format_duration,
    format_percent,
    format_ranks,
    format_seconds,
    format_slowdown,
)
from .report.tracked_findings import NO_PROBLEM
from .statistics.link_profile import find_lone_links
from .statistics.step_change import compare_step_times
from .statistics.thresholds import THRESHOLDS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from .causes.candidate import Candidate
    from .causes.detector import Case, Record
    from .report.report import RunReport
    from .statistics.peers import ComputeProfile

HEALTHY = "healthy"

MATTERS = (Severity.CRITICAL, Severity.WARNING)

SLACK = 1e-6
"""Relative error of sums of seconds."""


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


def grade_findings(report: RunReport) -> RunReport:
    """Return a report whose findings have severity and price, without `healthy` if one matters."""
    priced = [
        replace(finding, shown_saved_s=finding.saved_s * len(report.steps) / num_shown)
        if finding.saved_s is not None and (num_shown := len(report.shown_steps(finding)))
        else finding
        for finding in report.findings
    ]
    graded = tuple(replace(finding, severity=grade(report, finding)) for finding in priced)
    undecided = tuple(finding for finding in graded[1:] if finding.cause in NO_PROBLEM)
    rest = tuple(finding for finding in graded if finding not in undecided)
    if any(finding.severity in MATTERS for finding in graded):
        graded = tuple(finding for finding in graded if finding.cause not in NO_PROBLEM)
        unexplained = _unexplained_wait(report, "no finding explains half of it")
        if unexplained is not None and not any(map(ends_run, graded)):
            graded += (replace(unexplained, severity=Severity.NONE),)
    elif undecided:
        least_s = THRESHOLDS.minor_share * (report.step_time_s.actual or 0.0)
        matter = tuple(
            finding
            for finding in undecided
            if finding.saved_s is None or finding.saved_s >= least_s
        )
        graded = (*matter, *rest[1:]) if matter else rest
    elif graded[0].cause == HEALTHY:
        unexplained = _unexplained_wait(report, "no cause of it is significant")
        if unexplained is not None:
            graded = (replace(unexplained, severity=Severity.NONE), *graded[1:])
    return replace(report, findings=graded)


def find_contradictions(report: RunReport) -> Iterator[str]:
    """Yield the statements that a graded report breaks; none if it is consistent.

    A saving is at most what was lost, a share at most 1, the bar of the step shows the headline's
    price, nothing is healthy beside an alarm, and no step of the start-up is analysed.
    """
    actual_s, ideal_s = report.step_time_s.actual, report.reachable_step_s
    for finding in report.findings:
        if finding.recoverable_ratio is not None and finding.recoverable_ratio > 1 + SLACK:
            share = format_percent(finding.recoverable_ratio)
            yield f"{finding.cause} recovers {share} of what was lost"
        if actual_s is None or ideal_s is None or finding.saved_s is None:
            continue
        lost_s = actual_s - ideal_s
        if finding.saved_s > lost_s + SLACK * actual_s:
            saved = format_seconds(finding.saved_s)
            yield f"{finding.cause} saves {saved} of {format_seconds(lost_s)} that were lost"
    yield from _contradictions_of_verdict(report)
    for waiting in report.starved:
        if max(waiting.wait_ratio, sum(on.ratio for on in waiting.waits_on)) > 1 + SLACK:
            yield f"rank {waiting.rank} waits for {format_percent(waiting.wait_ratio)} of its time"
    if analysed := set(report.steps) & set(report.warmup_steps):
        yield f"steps {sorted(analysed)} are both start-up and analysed"


def _contradictions_of_verdict(report: RunReport) -> Iterator[str]:
    causes = {finding.cause for finding in report.findings}
    if HEALTHY in causes and any(finding.severity in MATTERS for finding in report.findings):
        yield "healthy beside a finding that matters"
    top, actual_s = report.top_finding, report.step_time_s.actual
    saved_s = top.saved_s or 0.0
    if top.severity in MATTERS and saved_s > 0 and actual_s:
        shown = [part.seconds for part in report.step_parts if part.name == top.cause]
        if min(abs(seconds - saved_s) for seconds in (*shown, 0.0)) > SLACK * actual_s:
            yield f"the bar shows {shown} s for {top.cause}, the headline {saved_s} s"


def _unexplained_wait(report: RunReport, reason: str) -> Finding | None:
    """Return that ranks wait for one culprit, and that no finding says why; None if one does.

    The culprit is a rank, or a link with slow transfers. If most of all waiting is for one, and it
    costs what would be critical, something is slow, whether or not it was found.
    """
    waterfall, actual_s = report.waterfall, report.step_time_s.actual
    if waterfall is None or not waterfall.waiting_on or not actual_s or len(waterfall.ranks) == 1:
        return None
    top = waterfall.waiting_on[0]
    num = len(waterfall.ranks)
    # Members of a link transfer while the others wait; a rank that is waited for does not wait.
    share = top.ratio * (num / (num - 1) if top.link is None else 1.0)
    culprits = {top.rank} if top.link is None else set(report.waited_links[top.link].members)
    total = sum(each.ratio for each in waterfall.waiting_on)
    if share < THRESHOLDS.critical_share or top.ratio <= THRESHOLDS.majority_share * total:
        return None
    for each in report.findings:
        concerns = not each.ranks or not culprits.isdisjoint(each.ranks)
        # Work that is shared equally saves what the others do not take over.
        most_s = share * actual_s * (1.0 if each.ranks else (num - 1) / num)
        if concerns and (each.saved_s or 0.0) >= THRESHOLDS.majority_share * most_s:
            return None
    who = "the other rank waits" if num == 2 else f"the other {num - 1:,} ranks wait"  # noqa: PLR2004
    who = who if top.link is None else "ranks wait"
    return insufficient(
        f"{who} for {report.name_waited_for(top)} for {format_percent(share)} of the time, and"
        f" {reason}"
    )


def grade(report: RunReport, finding: Finding) -> Severity:
    """Return how much a finding matters: by the share of the step time that fixing it saves.

    The share is of all analysed steps; of a finding that one of the newest steps still shows, it is
    of the steps that show it, because that is what it will go on to cost. A share that is no larger
    than the error of the replay, from which it comes, is not known to be above zero. One within two
    standard errors of the mean of these steps (once all findings are fixed) could not be measured:
    they vary as much by chance. A finding that only the ends show is minor: the last analysed step,
    in which a job saves or is cut off, or the first ones of the job, fewer than a phase lasts, in
    which it warms up. Nothing is critical of a job of one rank, which holds no other one up.
    """
    if finding.cause in NO_PROBLEM or not is_alarm(finding):
        return Severity.NONE
    if ends_run(finding):
        return Severity.CRITICAL
    shown = report.shown_steps(finding)
    if shown and len(report.steps) > THRESHOLDS.min_several:
        num_first = 1 if report.num_earlier_steps else THRESHOLDS.min_lasting_steps - 1
        if shown[-1] in report.steps[:num_first] or shown[0] == report.steps[-1]:
            return Severity.MINOR
    counted = shown if shown and report.is_open(finding) else report.steps
    whole_s = sum(report.actual_s_by_step[step] for step in counted)
    saved_s = finding.saved_s
    share = None if saved_s is None else ratio(saved_s * len(report.steps), whole_s)
    if share is None:
        return (
            Severity.WARNING
            if finding.confidence >= THRESHOLDS.undecided_certainty
            else Severity.MINOR
        )
    chance = 2.0 * (finding.noise_s or 0.0) * len(counted) ** 0.5 / whole_s
    if share < max(THRESHOLDS.minor_share, report.replay_error_ratio or 0.0, chance):
        return Severity.MINOR
    is_critical = share >= THRESHOLDS.critical_share and report.world_size > 1
    return Severity.CRITICAL if is_critical else Severity.WARNING


def is_alarm(finding: Finding) -> bool:
    """Return whether a finding, if certain, replaces `healthy`."""
    return finding.cause not in CAUSES or CAUSES[finding.cause].is_alarm


def ends_run(finding: Finding) -> bool:
    """Return whether the job ended with a finding."""
    return finding.cause in CAUSES and CAUSES[finding.cause].ends_run


def is_of_the_work(finding: Finding) -> bool:
    """Return whether a finding is in the work of all steps alike, and of no rank."""
    return not finding.ranks and finding.cause in CAUSES and not CAUSES[finding.cause].has_onset


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
