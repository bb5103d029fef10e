"""Prices of candidates: their slowdown, and the share of the lost time that fixing them saves.

See docs/decisions/0028-prices-of-findings.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..arrays.group_stats import group_medians, medians_by_key
from ..arrays.grouping import factorize, sorted_unique
from ..causes.candidate import in_shown_steps
from ..readers.workers import remove_partner_waits
from ..replay.model import COMPUTE_KINDS, has_kind
from ..replay.what_if import ratio, recoverable_ratio
from ..report.report import Finding
from ..statistics.baseline import common_step_ratio

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from ..causes.candidate import Candidate
    from ..replay.model import ReplayModel
    from ..replay.what_if import Replayer

DOUBT_AT_THRESHOLD = 0.1
"""Share of wrong findings among those that barely reach their threshold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Durations and launch gaps of all operations."""

    duration_ns: NDArray[np.float64]
    """Shape (ops,)."""

    gap_ns: NDArray[np.float64]
    """Shape (ops,)."""

    def replace(self, durations: NDArray[np.bool_], gaps: NDArray[np.bool_], other: Times) -> Times:
        """Return these times with some durations and some gaps from ``other``.

        Args:
            durations: Shape (ops,): operations whose duration is replaced.
            gaps: Shape (ops,): operations whose gap is replaced.
            other: The times that replace these.
        """
        return Times(
            duration_ns=np.where(durations, other.duration_ns, self.duration_ns),
            gap_ns=np.where(gaps, other.gap_ns, self.gap_ns),
        )

    def minimum(self, other: Times, where: NDArray[np.bool_]) -> Times:
        """Return the smaller of two times for some operations, and these for the others."""
        return Times(
            duration_ns=np.minimum(
                self.duration_ns, other.duration_ns, where=where, out=self.duration_ns.copy()
            ),
            gap_ns=np.minimum(self.gap_ns, other.gap_ns, where=where, out=self.gap_ns.copy()),
        )

    def add_change(self, before: Times, after: Times) -> Times:
        """Return these times plus the change from one time to another."""
        return Times(
            duration_ns=self.duration_ns + after.duration_ns - before.duration_ns,
            gap_ns=self.gap_ns + after.gap_ns - before.gap_ns,
        )

    def mean_step_ns(self, replayer: Replayer) -> float:
        """Return the mean step of the full replay with these times."""
        return float(replayer.full_with(self.duration_ns, self.gap_ns).mean())


class Fix(NamedTuple):
    """The fix of one candidate."""

    candidate: Candidate
    part: NDArray[np.bool_]
    """Shape (ops,): its operations in the steps that show it."""

    fixed: Times
    """Times of the part without its cause; any values elsewhere."""

    @property
    def host_part(self) -> NDArray[np.bool_]:
        """Return the operations whose launch gaps belong to the candidate.

        Only causes on the host have any. Otherwise a rank begins a step late because it ended the
        previous one late, and a step that is replayed alone must not pay for its predecessor.
        """
        return self.part if self.candidate.on_host else np.zeros_like(self.part)


def price_candidates(
    candidates: Sequence[Candidate], replayer: Replayer, workers: Mapping[int, tuple[int, ...]]
) -> tuple[Finding, ...]:
    """Return candidates as findings with their prices.

    In the full replay, let M be the run with every candidate fixed, M + X the same run with
    candidate X as recorded, T the run with all of them as recorded, and T_without_X the same run
    with X fixed. Of an operation that two candidates share, each adds its own excess::

        slowdown          = (M + X) / M
        recoverable_ratio = (T - T_without_X) / (T - T_ideal)

    Both are None if the replay has no operation of X.

    Args:
        candidates: All candidates.
        replayer: The run.
        workers: Identity of each rank, equal for partners whose compute looks the same.

    Source:
        S of a set: arXiv 2505.05713, where the set is put back into a run whose operations are all
        ideal. Here the others keep what no candidate explains.
    """
    if not candidates:
        return ()
    model = replayer.model
    recorded = Times(duration_ns=model.operations.duration_ns, gap_ns=model.operations.gap_ns)
    unblamed = Times(duration_ns=remove_partner_waits(model, workers), gap_ns=model.ideal_gap_ns)
    ideal = Times(
        duration_ns=ideal_outside(model, candidates, unblamed.duration_ns),
        gap_ns=model.ideal_gap_ns,
    )
    fixes = _fixes(candidates, unblamed, ideal, model)
    fixed = _fix_all(fixes, unblamed)
    num_causes = np.sum([fix.part for fix in fixes], axis=0)
    num_host_causes = np.sum([fix.host_part for fix in fixes], axis=0)
    faulty = Times(
        duration_ns=np.where(num_causes > 0, recorded.duration_ns, fixed.duration_ns),
        gap_ns=np.where(num_host_causes > 0, recorded.gap_ns, fixed.gap_ns),
    )
    # A slow worker's compute includes waits for pauses of its partners, which are not its own.
    compute = Times(duration_ns=unblamed.duration_ns, gap_ns=recorded.gap_ns)

    # Not kept for all candidates: each has the size of the run.
    def put_back(fix: Fix) -> Times:
        return _put_back(fix, fixed, recorded if fix.candidate.on_host else compute)

    total = None
    if (num_causes > 1).any():
        total = fixed
        for fix in fixes:
            total = total.add_change(fixed, put_back(fix))
    fixed_ns, faulty_ns = fixed.mean_step_ns(replayer), faulty.mean_step_ns(replayer)
    ideal_run = _ideal_run(fixes, ideal, model)
    ideal_ns = ideal_run.replace(num_causes > 1, num_host_causes > 1, fixed).mean_step_ns(replayer)
    found = []
    for fix in fixes:
        if not fix.part.any():
            found.append(_finding(fix.candidate, None, None))
            continue
        with_fault = put_back(fix)
        without = faulty.replace(
            fix.part & (num_causes == 1), fix.host_part & (num_host_causes == 1), fixed
        )
        if total is not None:
            rest = total.add_change(with_fault, fixed)
            without = without.minimum(rest, fix.part & (num_causes > 1))
        without_ns = without.mean_step_ns(replayer)
        found.append(
            _finding(
                fix.candidate,
                ratio(with_fault.mean_step_ns(replayer), fixed_ns),
                recoverable_ratio(faulty_ns, without_ns, ideal_ns),
            )
        )
    return tuple(found)


def confidence(excess_ratio: float, threshold: float) -> float:
    """Return the share of right findings among those with this excess over their threshold.

    ``1 - 0.1 * 0.5 ^ (excess / threshold - 1)``: the doubt is `DOUBT_AT_THRESHOLD` at the
    threshold, and half as large with each further one.

    Source:
        The labelled benchmark, seeds 8 and 9; docs/benchmarks.md, "Diagnosis".
    """
    return float(1.0 - DOUBT_AT_THRESHOLD * 0.5 ** (excess_ratio / threshold - 1.0))


def _fixes(
    candidates: Sequence[Candidate], unblamed: Times, ideal: Times, model: ReplayModel
) -> list[Fix]:
    parts = _own_parts([_recorded_part(each, model) for each in candidates], model)
    return [
        Fix(each, part, _fixed_times(each, unblamed, ideal, model))
        for each, part in zip(candidates, parts, strict=True)
    ]


def _recorded_part(candidate: Candidate, model: ReplayModel) -> NDArray[np.bool_]:
    """Return a candidate's operations in the steps that show it."""
    if candidate.part is None:
        return np.zeros(len(model.rank), dtype=np.bool_)
    inside: NDArray[np.bool_] = candidate.part & in_shown_steps(model, candidate)
    return inside


def _own_parts(
    parts: Sequence[NDArray[np.bool_]], model: ReplayModel
) -> tuple[NDArray[np.bool_], ...]:
    """Return the parts, with pauses, input and transfers only in those that have no compute.

    The part of a slow rank is everything that it does. But the checkpoint that it writes, and the
    link over which it sends, cost nothing because the rank computes slowly.
    """
    is_compute = has_kind(model, COMPUTE_KINDS) & model.on_device
    has_compute = [bool((part & is_compute).any()) for part in parts]
    others = np.zeros(len(model.rank), dtype=np.bool_)
    for part, computes in zip(parts, has_compute, strict=True):
        if not computes:
            others |= part
    return tuple(
        part & ~others if computes else part
        for part, computes in zip(parts, has_compute, strict=True)
    )


def _fixed_times(candidate: Candidate, unblamed: Times, ideal: Times, model: ReplayModel) -> Times:
    """Return the times of a candidate's part without its cause; any values elsewhere."""
    duration_ns = ideal.duration_ns
    if not candidate.on_host:
        # Fixing a device makes no gap longer. The ideal of gaps that only checkpoints leave would.
        shorter = np.minimum(duration_ns, model.operations.duration_ns)
        duration_ns = np.where(model.on_device, duration_ns, shorter)
    if candidate.fixed_ns is not None:
        duration_ns = np.where(np.isnan(candidate.fixed_ns), duration_ns, candidate.fixed_ns)
    if candidate.is_everywhere:
        return Times(duration_ns=duration_ns, gap_ns=np.zeros_like(ideal.gap_ns))
    return Times(duration_ns=duration_ns, gap_ns=unblamed.gap_ns)


def _fix_all(fixes: Sequence[Fix], unblamed: Times) -> Times:
    """Return the run with every candidate fixed; the smaller time if two share an operation."""
    fixed = unblamed
    touched = np.zeros(len(unblamed.duration_ns), dtype=np.bool_)
    for fix in fixes:
        times = fix.fixed.minimum(fixed, touched & fix.part)
        fixed = fixed.replace(fix.part, fix.part, times)
        touched |= fix.part
    return fixed


def _put_back(fix: Fix, fixed: Times, recorded: Times) -> Times:
    """Return the fixed run plus the excess of one candidate's operations.

    If no other candidate shares an operation, its time is the recorded one. A shared operation (a
    gap of a host that launches late and then waits for an evaluation) is longer for both causes,
    and each adds its own excess.
    """

    def add_excess(
        fixed_ns: NDArray[np.float64],
        recorded_ns: NDArray[np.float64],
        own_fixed_ns: NDArray[np.float64],
        part: NDArray[np.bool_],
    ) -> NDArray[np.float64]:
        excess_ns = recorded_ns - own_fixed_ns
        return np.where(part, np.maximum(fixed_ns + excess_ns, 0.0), fixed_ns)

    own = fix.fixed
    return Times(
        duration_ns=add_excess(fixed.duration_ns, recorded.duration_ns, own.duration_ns, fix.part),
        gap_ns=add_excess(fixed.gap_ns, recorded.gap_ns, own.gap_ns, fix.host_part),
    )


def _ideal_run(fixes: Sequence[Fix], ideal: Times, model: ReplayModel) -> Times:
    """Return the ideal run, with the candidates' own fixed times if they give any."""
    times = ideal
    for fix in fixes:
        if fix.candidate.fixed_ns is not None or fix.candidate.on_host:
            times = times.replace(fix.part, fix.part, fix.fixed)
            times = _shorten_alike_gaps(times, fix.part, model)
    return times


def _shorten_alike_gaps(ideal: Times, part: NDArray[np.bool_], model: ReplayModel) -> Times:
    """Return an ideal whose host gaps outside a part are no longer than recorded.

    If alike gaps exist only because of a fault, their ideal (their median) is the fault itself.
    """
    on_host = ~model.on_device
    label = model.operations.label
    alike = on_host & ~part & np.isin(label, sorted_unique(label[part & on_host]))
    shorter = np.minimum(ideal.duration_ns, model.operations.duration_ns)
    return Times(duration_ns=np.where(alike, shorter, ideal.duration_ns), gap_ns=ideal.gap_ns)


def _finding(candidate: Candidate, slowdown: float | None, share: float | None) -> Finding:
    return Finding(
        cause=candidate.cause.name,
        ranks=candidate.ranks,
        steps=candidate.steps,
        slowdown=slowdown,
        recoverable_ratio=share,
        confidence=confidence(candidate.excess_ratio, candidate.threshold) * candidate.certainty,
        evidence=candidate.evidence,
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
        model: The operations.
        candidates: All candidates. Operations with a ``fixed_ns`` of their own are left out.
        duration_ns: Shape (ops,): durations without waits for partners.
    """
    inside = np.zeros(len(model.rank), dtype=np.bool_)
    for each in candidates:
        if each.part is not None:
            inside |= each.part if each.fixed_ns is None else each.part & np.isnan(each.fixed_ns)
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
    """Return the ratio of recorded to ideal compute in each step; 1 if no step is unusual.

    Args:
        model: The operations.
        others: Shape (ops,): compute of one kind outside all parts.
        duration_ns: Shape (ops,): recorded durations.
        ideal_ns: Shape (ops,).

    Returns:
        Shape (steps,).
    """
    rows = np.flatnonzero(others & (ideal_ns > 0))
    step = model.operations.step[rows]
    found = np.ones(len(model.operations.steps))
    median = medians_by_key(duration_ns[rows], model.rank[rows], model.operations.label[rows])
    relative = np.divide(duration_ns[rows], median, out=np.ones(len(rows)), where=median > 0)
    is_common = common_step_ratio(relative, step) != 1.0
    if is_common.any():
        took = np.bincount(step, weights=duration_ns[rows], minlength=len(found))
        expected = np.bincount(step, weights=ideal_ns[rows], minlength=len(found))
        # Usual steps change as well: the unusual ones had raised the mean of all steps.
        found = np.divide(took, expected, out=found, where=expected > 0)
    return found


def _medians_outside(
    model: ReplayModel,
    wanted: NDArray[np.bool_],
    inside: NDArray[np.bool_],
    ideal_ns: NDArray[np.float64],
) -> NDArray[np.float64]:
    """Return ideals in which those of wanted operations are medians of alike ones outside.

    Args:
        model: The operations.
        wanted: Shape (ops,).
        inside: Shape (ops,): operations of any part.
        ideal_ns: Shape (ops,): kept if there are no alike ones outside.
    """
    label = model.operations.label
    concerned = np.flatnonzero(np.isin(label, sorted_unique(label[wanted])))
    number, num = factorize(label[concerned])
    outside = ~inside[concerned]
    duration_ns = model.operations.duration_ns[concerned]
    median, _ = group_medians(duration_ns[outside], number[outside], num)
    found = np.where(wanted[concerned], median[number], np.nan)
    ideal_ns[concerned] = np.where(np.isnan(found), ideal_ns[concerned], found)
    return ideal_ns
