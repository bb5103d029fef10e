"""Prices of candidates: their slowdown, and the share of the lost time that fixing them saves.

See docs/decisions/0028-prices-of-findings.md.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from rankscope.tracer.span import NS_PER_S

from ..arrays.group_stats import group_medians, medians_by_key
from ..arrays.grouping import factorize, sorted_unique
from ..causes.candidate import shows_in
from ..causes.detector import Subject
from ..readers.workers import remove_partner_waits
from ..replay.model import COMPUTE_KINDS, has_kind
from ..replay.program import Change
from ..replay.replayer import ratio, recoverable_ratio
from ..report.report import Finding
from ..report.text import format_seconds
from ..report.tracked_findings import NO_PROBLEM
from ..statistics.baseline import common_step_ratio
from ..statistics.confidence import confidence
from ..statistics.noise import lower_half_deviation, median_change_deviation

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from ..causes.candidate import Candidate
    from ..replay.model import ReplayModel
    from ..replay.replayer import Replayer


class Times(NamedTuple):
    """Durations and launch gaps of all operations, or of some."""

    duration_ns: NDArray[np.float64]
    gap_ns: NDArray[np.float64]

    def at(self, rows: NDArray[np.int64]) -> Times:
        """Return the times of some operations."""
        return Times(self.duration_ns[rows], self.gap_ns[rows])

    def mean_step_ns(self, replayer: Replayer) -> float:
        """Return the mean step of the full replay with these times."""
        return float(replayer.full_with(*self).mean())


class Fix(NamedTuple):
    """The fix of one candidate."""

    candidate: Candidate
    rows: NDArray[np.int64]
    """Shape (rows,): its operations in the steps that show it, ascending."""

    fixed: Times
    """Shape (rows,): their times without its cause. A slow rank computes as its stage does then."""

    @property
    def host_rows(self) -> NDArray[np.int64]:
        """Return the operations whose launch gaps belong to the candidate.

        Only causes on the host have any. Otherwise a rank begins a step late because it ended the
        previous one late, and a step that is replayed alone must not pay for its predecessor.
        """
        return self.rows if self.candidate.on_host else self.rows[:0]


def price_candidates(
    candidates: Sequence[Candidate],
    replayer: Replayer,
    workers: Mapping[int, tuple[int, ...]],
    tokens_by_step: Mapping[int, int],
) -> tuple[Finding, ...]:
    """Return candidates as findings with their prices.

    In the full replay, let M be the run with every candidate fixed, M + X the same run with
    candidate X as recorded, T the run with all of them as recorded, and T_without_X the same run
    with X fixed. Of an operation that two candidates share, each adds its own excess::

        slowdown          = (M + X) / M
        recoverable_ratio = (T - T_without_X) / (T - T_ideal)
        saved_s           = T - T_without_X

    All are None if the replay has no operation of X. What is planned, such as a checkpoint, has a
    price, and no share that could be recovered.

    Args:
        workers: Identity of each rank, equal for partners whose compute looks the same.

    Source:
        S of a set: arXiv 2505.05713, where the set is put back into a run whose operations are all
        ideal. Here the others keep what no candidate explains.
    """
    if not candidates:
        return ()
    runs = _compose_runs(candidates, replayer.model, workers)
    fixes, model = runs.fixes, replayer.model
    both_ns = _mean_step_with_each(
        replayer, runs.fixed, [*fixes, *fixes], [*runs.healthy, *runs.with_fault]
    )
    fixed_ns, with_fault_ns = both_ns[: len(fixes)], both_ns[len(fixes) :]
    # All that was recorded, but for what was found. Beside chance it may have a level that changed,
    # or single long steps (a checkpoint): each inflates one of the two estimates.
    usual = Times(
        *(
            each.copy() if len(rows) else each
            for each, (rows, _) in zip(runs.recorded, runs.shared, strict=True)
        )
    )
    ideal_run = _ideal_run(fixes, runs.ideal, model)
    for column, other, own, (rows, several) in zip(
        usual, ideal_run, runs.fixed, runs.shared, strict=True
    ):
        column[rows], other[several] = own[rows], own[several]
    usual_ns, ideal_ns = replayer.full_with(*usual), ideal_run.mean_step_ns(replayer)
    faulty = runs.take_faulty()
    faulty_ns = faulty.mean_step_ns(replayer)
    without_ns = _mean_step_with_each(replayer, faulty, fixes, runs.without)
    ideal_ns = min(ideal_ns, *without_ns)  # A fix reaches no step that is shorter than the ideal.
    tokens = [tokens_by_step.get(step, 0) for step in model.operations.steps]
    noise_s = noise_of_steps(usual_ns, np.array(tokens)) / NS_PER_S
    return tuple(
        _finding(fix)
        if not len(fix.rows)
        else replace(
            _finding(fix, saved_s=(faulty_ns - rest_ns) / NS_PER_S),
            slowdown=ratio(with_ns, base_ns),
            recoverable_ratio=recoverable_ratio(faulty_ns, rest_ns, ideal_ns)
            if fix.candidate.cause.is_alarm
            else None,
            noise_s=noise_s,
        )
        for fix, base_ns, with_ns, rest_ns in zip(
            fixes, fixed_ns, with_fault_ns, without_ns, strict=True
        )
    )


def changes_of_fixes(
    candidates: Sequence[Candidate], model: ReplayModel, workers: Mapping[int, tuple[int, ...]]
) -> tuple[Times, tuple[Change, ...]]:
    """Return the run with every candidate as recorded, and what the fix of each changes in it.

    The mean step of the first, less that with one change, is ``saved_s`` of that candidate.
    """
    recorded = Times(model.operations.duration_ns, model.operations.gap_ns)
    if not candidates:
        return recorded, ()
    runs = _compose_runs(candidates, model, workers)
    changes = [
        Change(fix.rows, *times) for fix, times in zip(runs.fixes, runs.without, strict=True)
    ]
    return runs.take_faulty(), tuple(changes)


class _Runs(NamedTuple):
    """The run with candidates fixed and as recorded, in each combination that has a price."""

    recorded: Times
    ideal: Times
    fixed: Times
    """Every candidate fixed."""

    fixes: list[Fix]
    healthy: list[Times]
    """Of each fix, the times of its rows in ``fixed``; of a slow rank in a slow stage, its own."""

    with_fault: list[Times]
    """The same with that candidate's excess."""

    without: list[Times]
    """The same in the run with every candidate's excess but its own."""

    shared: list[tuple[NDArray[np.int64], NDArray[np.int64]]]
    """Of durations and of gaps, the rows that any candidate has, and those that several have."""

    def take_faulty(self) -> Times:
        """Turn ``fixed`` into what no candidate explains and every candidate's excess."""
        for column, recorded, (rows, _) in zip(self.fixed, self.recorded, self.shared, strict=True):
            column[rows] = recorded[rows]
        return self.fixed


def _compose_runs(
    candidates: Sequence[Candidate], model: ReplayModel, workers: Mapping[int, tuple[int, ...]]
) -> _Runs:
    recorded = Times(model.operations.duration_ns, model.operations.gap_ns)
    unblamed = Times(remove_partner_waits(model, workers), model.ideal_gap_ns)
    ideal = Times(ideal_outside(model, candidates, unblamed.duration_ns), model.ideal_gap_ns)
    stage_ratio = _stage_ratio(model, candidates, ideal, unblamed)
    fixes = _fixes(candidates, ideal, stage_ratio, model)
    # Slow ranks may be of a stage that is a candidate itself.
    of_stages = [fix.rows for fix in fixes if fix.candidate.cause.subject is Subject.STAGE]
    stages = sorted_unique(model.stage[np.concatenate(of_stages)]) if of_stages else ()
    in_fixed_stage = [
        np.isin(model.stage[fix.rows], stages) & is_of_device(fix.candidate) for fix in fixes
    ]
    fixed = _fix_all(fixes, unblamed, ideal, in_fixed_stage)
    num_sharing = (
        _count([fix.rows for fix in fixes], len(model.rank)),
        _count([fix.host_rows for fix in fixes], len(model.rank)),
    )
    # A slow worker's compute includes waits for pauses of its partners, which are not its own.
    compute = Times(unblamed.duration_ns, recorded.gap_ns)
    # A slow rank of a slow stage is measured against its stage, which is fixed all around it.
    healthy = [
        Times(np.where(both, fix.fixed.duration_ns, own.duration_ns), own.gap_ns)
        for fix, both in zip(fixes, in_fixed_stage, strict=True)
        for own in (fixed.at(fix.rows),)
    ]
    with_fault = [
        _put_back(fix, own, recorded if fix.candidate.on_host else compute)
        for fix, own in zip(fixes, healthy, strict=True)
    ]
    total = fixed
    if (num_sharing[0] > 1).any():
        total = Times(*(each.copy() for each in fixed))
        for fix, times in zip(fixes, with_fault, strict=True):
            for sums, own, before in zip(total, times, fixed, strict=True):
                sums[fix.rows] = sums[fix.rows] + own - before[fix.rows]
    without = [
        _take_out(fix, times, fixed, total, recorded, num_sharing)
        for fix, times in zip(fixes, with_fault, strict=True)
    ]
    shared = [(np.flatnonzero(num > 0), np.flatnonzero(num > 1)) for num in num_sharing]
    return _Runs(recorded, ideal, fixed, fixes, healthy, with_fault, without, shared)


def noise_of_steps(times_ns: NDArray[np.float64], tokens: NDArray[np.int64]) -> float:
    """Return the standard deviation of the steps' times, or of their times per token if smaller.

    Steps whose tokens vary differ for a known reason, which is no chance. A part of each step does
    not depend on them, so either may vary less.

    Args:
        times_ns: Shape (steps,).
        tokens: Shape (steps,); 0 if unknown, and then they explain nothing.
    """
    series = [times_ns]
    if (tokens > 0).all():
        series.append(times_ns * (tokens.mean() / tokens))
    estimates = (lower_half_deviation, median_change_deviation)
    return min(estimate(values) for values in series for estimate in estimates)


def is_of_device(candidate: Candidate) -> bool:
    """Return whether a candidate is ranks that compute slowly."""
    return candidate.cause.subject is Subject.RANKS and not candidate.on_host


def _count(rows: Sequence[NDArray[np.int64]], num: int) -> NDArray[np.int32]:
    """Return in how many sets of rows each operation is. Shape (num,)."""
    counts = np.zeros(num, dtype=np.int32)
    for numbers in rows:
        counts[numbers] += 1
    return counts


def _mean_step_with_each(
    replayer: Replayer, times: Times, fixes: Sequence[Fix], own: Sequence[Times]
) -> list[float]:
    changes = [Change(fix.rows, *each) for fix, each in zip(fixes, own, strict=True)]
    means: list[float] = replayer.full_with_each(*times, changes).mean(axis=1).tolist()
    return means


def _fixes(
    candidates: Sequence[Candidate],
    ideal: Times,
    stage_ratio: NDArray[np.float64],
    model: ReplayModel,
) -> list[Fix]:
    parts = _own_parts([_recorded_part(each, model) for each in candidates], model)
    fixes = []
    for candidate, rows in zip(candidates, parts, strict=True):
        duration_ns, gap_ns = ideal.at(rows)
        on_device = model.on_device[rows]
        if is_of_device(candidate):
            of_stage = stage_ratio[model.kind[rows], model.stage[rows]]
            duration_ns = duration_ns * np.where(on_device, of_stage, 1)
        if not candidate.on_host:
            # Fixing a device makes no gap longer. The ideal of gaps that only checkpoints leave
            # would.
            shorter = np.minimum(duration_ns, model.operations.duration_ns[rows])
            duration_ns = np.where(on_device, duration_ns, shorter)
        if candidate.fixed_ns is not None:
            fixed_ns = candidate.fixed_ns[rows]
            duration_ns = np.where(np.isnan(fixed_ns), duration_ns, fixed_ns)
        gap_ns = _shared_gaps_ns(rows, model) if candidate.is_everywhere else gap_ns
        fixes.append(Fix(candidate, rows, Times(duration_ns, gap_ns)))
    return fixes


def _shared_gaps_ns(rows: NDArray[np.int64], model: ReplayModel) -> NDArray[np.float64]:
    """Return the part of launch gaps in which the step before still runs elsewhere.

    It stays if what all ranks lose before a step is fixed: a rank that ended the step before late
    begins late.

    Args:
        rows: Shape (rows,): operations.

    Returns:
        Shape (rows,), ns; 0 for operations that begin no step of their rank.
    """
    operations = model.operations
    if model.overlap_ns is None:
        return np.zeros(len(rows))
    is_begin = np.ones(len(model.rank), dtype=np.bool_)
    is_begin[operations.dst] = False
    shared_ns = np.minimum(operations.gap_ns[rows], model.overlap_ns[operations.step[rows]])
    return np.where(is_begin[rows], shared_ns, 0.0)


def _stage_ratio(
    model: ReplayModel, candidates: Sequence[Candidate], ideal: Times, unblamed: Times
) -> NDArray[np.float64]:
    """Return compute of the healthy ranks of a stage over its ideal. Shape (kinds, stages).

    The ideal is a mean over all stages. A slow rank of a stage with more work, once fixed, still
    has that work. The ratio is 1 for all else than compute, and if the stage has no other compute
    of that kind.
    """
    ratios = np.ones((len(model.kinds), int(model.stage.max(initial=0)) + 1))
    slow = [candidate for candidate in candidates if is_of_device(candidate)]
    if not slow:
        return ratios
    compute = np.flatnonzero(has_kind(model, COMPUTE_KINDS) & model.on_device)
    cell = model.kind[compute].astype(np.int64) * ratios.shape[1] + model.stage[compute]
    inside = np.zeros(len(model.rank), dtype=np.bool_)
    for candidate in candidates:
        if candidate.part is not None and candidate.cause.subject is not Subject.STAGE:
            inside[_recorded_part(candidate, model)] = True
    healthy = ~inside[compute]
    took_ns, expected_ns = (
        np.bincount(cell[healthy], weights=times[compute[healthy]], minlength=ratios.size)
        for times in (unblamed.duration_ns, ideal.duration_ns)
    )
    is_known = (took_ns > 0) & (expected_ns > 0)
    np.divide(took_ns, expected_ns, out=ratios.reshape(-1), where=is_known)
    return ratios


def _recorded_part(candidate: Candidate, model: ReplayModel) -> NDArray[np.int64]:
    if candidate.part is None:
        return np.zeros(0, dtype=np.int64)
    shows = shows_in(candidate, model.operations.steps)
    return candidate.part[shows[model.operations.step[candidate.part]]]


def _own_parts(
    parts: Sequence[NDArray[np.int64]], model: ReplayModel
) -> tuple[NDArray[np.int64], ...]:
    """Return the parts, with pauses, input and transfers only in those that have no compute.

    The part of a slow rank is everything that it does. But the checkpoint that it writes, and the
    link over which it sends, cost nothing because the rank computes slowly.
    """
    is_compute = has_kind(model, COMPUTE_KINDS) & model.on_device
    has_compute = [bool(is_compute[part].any()) for part in parts]
    others = np.zeros(len(model.rank), dtype=np.bool_)
    for part, computes in zip(parts, has_compute, strict=True):
        if not computes:
            others[part] = True
    return tuple(
        part[~others[part]] if computes else part
        for part, computes in zip(parts, has_compute, strict=True)
    )


def _fix_all(
    fixes: Sequence[Fix], unblamed: Times, ideal: Times, in_fixed_stage: Sequence[NDArray[np.bool_]]
) -> Times:
    """Return the run with every candidate fixed; the smaller time if two share an operation."""
    fixed = Times(*(column.copy() for column in unblamed))
    touched = np.zeros(len(unblamed.duration_ns), dtype=np.bool_)
    for fix in fixes:
        for times, fixed_times in zip(fixed, fix.fixed, strict=True):
            before = times[fix.rows]
            times[fix.rows] = np.where(
                touched[fix.rows], np.minimum(fixed_times, before), fixed_times
            )
        touched[fix.rows] = True
    for fix, both in zip(fixes, in_fixed_stage, strict=True):
        fixed.duration_ns[fix.rows[both]] = ideal.duration_ns[fix.rows[both]]
    return fixed


def _put_back(fix: Fix, healthy: Times, recorded: Times) -> Times:
    """Return the times of one candidate's operations in the fixed run plus its own excess.

    If no other candidate shares an operation, its time is the recorded one. A shared operation (a
    gap of a host that launches late and then waits for an evaluation) is longer for both causes,
    and each adds its own excess.
    """
    duration_ns, gap_ns = healthy
    recorded = recorded.at(fix.rows)
    excess_ns = recorded.duration_ns - fix.fixed.duration_ns
    duration_ns = np.maximum(duration_ns + excess_ns, 0.0)
    if fix.candidate.on_host:
        gap_ns = np.maximum(gap_ns + (recorded.gap_ns - fix.fixed.gap_ns), 0.0)
    return Times(duration_ns, gap_ns)


def _take_out(
    fix: Fix,
    with_fault: Times,
    fixed: Times,
    total: Times,
    recorded: Times,
    num_sharing: tuple[NDArray[np.int32], NDArray[np.int32]],
) -> Times:
    """Return the times of one candidate's operations in the recorded run without its excess.

    Args:
        with_fault: Result of `_put_back`.
        total: The fixed run plus the excess of every candidate.
        num_sharing: Shape (ops,) each: number of candidates to which the operation's duration
            belongs, and its launch gap.
    """
    rows = fix.rows
    is_shared = num_sharing[0][rows] > 1
    columns = []
    for all_, before, after, put_back, without, num in zip(
        total, fixed, recorded, with_fault, fix.fixed, num_sharing, strict=True
    ):
        faulty = np.where(num[rows] > 0, after[rows], before[rows])
        mine = num[rows] == 1 if num is num_sharing[0] or fix.candidate.on_host else False
        times = np.where(mine, without, faulty)
        rest = all_[rows] + before[rows] - put_back
        columns.append(np.where(is_shared, np.minimum(times, rest), times))
    return Times(*columns)


def _ideal_run(fixes: Sequence[Fix], ideal: Times, model: ReplayModel) -> Times:
    """Make the ideal run that of the candidates' own fixed times, if they give any; return it.

    Host gaps like those of such a candidate become no longer than recorded: if they exist only
    because of a fault, their ideal (their median) is the fault itself.
    """
    times = Times(ideal.duration_ns, ideal.gap_ns.copy())
    on_host, label = np.flatnonzero(~model.on_device), model.operations.label
    for fix in fixes:
        if fix.candidate.fixed_ns is None and not fix.candidate.on_host:
            continue
        for column, fixed in zip(times, fix.fixed, strict=True):
            column[fix.rows] = fixed
        gaps = fix.rows[~model.on_device[fix.rows]]
        alike = on_host[np.isin(label[on_host], sorted_unique(label[gaps]))]
        alike = alike[~np.isin(alike, gaps)]
        shorter = np.minimum(times.duration_ns[alike], model.operations.duration_ns[alike])
        times.duration_ns[alike] = shorter
    return times


def _finding(fix: Fix, *, saved_s: float | None = None) -> Finding:
    """Return a candidate as a finding. One that is planned says what it costs."""
    candidate, evidence = fix.candidate, fix.candidate.evidence
    cause = candidate.cause
    if saved_s is not None and not cause.is_alarm and cause.name not in NO_PROBLEM:
        evidence += f"; it costs {format_seconds(saved_s)} per step"
    return Finding(
        cause=cause.name,
        ranks=candidate.ranks,
        steps=candidate.steps,
        saved_s=saved_s,
        confidence=confidence(candidate.excess_ratio, candidate.threshold) * candidate.certainty,
        evidence=evidence,
    )


def ideal_outside(
    model: ReplayModel, candidates: Sequence[Candidate], duration_ns: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return ideal durations that no candidate influences. Shape (ops,), ns.

    The ideal of compute is a mean over all ranks. It is scaled, kind by kind, to the mean over the
    operations outside all parts; and in steps in which these are all longer, or all shorter, to the
    mean of that step, because a first step that warms up is long without a fault. The ideal of a
    communication is the median of the alike ones outside all parts. Without any, it is unchanged.

    Args:
        candidates: All candidates. Operations with a ``fixed_ns`` of their own are left out.
        duration_ns: Shape (ops,): durations without waits for partners.
    """
    inside = np.zeros(len(model.rank), dtype=np.bool_)
    for candidate in candidates:
        if candidate.part is not None and candidate.fixed_ns is None:
            inside[candidate.part] = True
        elif candidate.part is not None and candidate.fixed_ns is not None:
            inside[candidate.part] |= np.isnan(candidate.fixed_ns[candidate.part])
    ideal = model.ideal_ns.astype(np.float64)
    is_compute = has_kind(model, COMPUTE_KINDS)
    for code in sorted_unique(model.kind[is_compute]).tolist():
        of_kind = model.kind == code
        others = of_kind & model.on_device & ~inside
        expected = float(model.ideal_ns[others].sum())
        if expected > 0:
            ideal[of_kind] *= float(duration_ns[others].sum()) / expected
            ideal[of_kind] *= _ratio_by_step(model, others, duration_ns, ideal)[
                model.operations.step[of_kind]
            ]
    return _medians_outside(model, inside & model.on_device & ~is_compute, inside, ideal)


def _ratio_by_step(
    model: ReplayModel,
    others: NDArray[np.bool_],
    duration_ns: NDArray[np.float64],
    ideal_ns: NDArray[np.float64],
) -> NDArray[np.float64]:
    """Return the ratio of recorded to ideal compute in each step; 1 if no step is unusual."""
    rows = np.flatnonzero(others & (ideal_ns > 0))
    step = model.operations.step[rows]
    ratios = np.ones(len(model.operations.steps))
    median = medians_by_key(duration_ns[rows], model.rank[rows], model.operations.label[rows])
    relative = np.divide(duration_ns[rows], median, out=np.ones(len(rows)), where=median > 0)
    is_common = common_step_ratio(relative, step) != 1.0
    if is_common.any():
        took = np.bincount(step, weights=duration_ns[rows], minlength=len(ratios))
        expected = np.bincount(step, weights=ideal_ns[rows], minlength=len(ratios))
        # Usual steps change as well: the unusual ones had raised the mean of all steps.
        ratios = np.divide(took, expected, out=ratios, where=expected > 0)
    return ratios


def _medians_outside(
    model: ReplayModel,
    wanted: NDArray[np.bool_],
    inside: NDArray[np.bool_],
    ideal_ns: NDArray[np.float64],
) -> NDArray[np.float64]:
    """Return ideals in which those of wanted operations are medians of alike ones outside."""
    label = model.operations.label
    concerned = np.flatnonzero(np.isin(label, sorted_unique(label[wanted])))
    number, num = factorize(label[concerned])
    outside = ~inside[concerned]
    duration_ns = model.operations.duration_ns[concerned]
    median, _ = group_medians(duration_ns[outside], number[outside], num)
    medians = np.where(wanted[concerned], median[number], np.nan)
    ideal_ns[concerned] = np.where(np.isnan(medians), ideal_ns[concerned], medians)
    return ideal_ns
