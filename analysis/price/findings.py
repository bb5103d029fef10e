"""What each candidate cost: its slowdown, and the share of the lost time that mending it wins.

See docs/decisions/0028-a-finding-is-put-back-into-the-mended-run.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..arrays.group_stats import group_medians
from ..arrays.grouping import factorize, sorted_unique
from ..causes.candidate import in_shown_steps
from ..readers.workers import remove_partner_waits
from ..replay.model import COMPUTE_KINDS, has_kind
from ..replay.what_if import ratio, recoverable_ratio
from ..report.report import Finding
from ..statistics.baseline import common_step_ratio, medians_by_key

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from ..causes.candidate import Candidate
    from ..replay.model import ReplayModel
    from ..replay.what_if import Replayer

DOUBT_AT_THRESHOLD = 0.1
"""Share of the findings that barely reach their threshold which are wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """What operations take, one way or another; both of shape (ops,), in ns."""

    duration_ns: NDArray[np.float64]
    gap_ns: NDArray[np.float64]

    def exchanged(
        self, durations: NDArray[np.bool_], gaps: NDArray[np.bool_], other: Times
    ) -> Times:
        """Return these times with the durations and gaps of some operations from ``other``."""
        return Times(
            duration_ns=np.where(durations, other.duration_ns, self.duration_ns),
            gap_ns=np.where(gaps, other.gap_ns, self.gap_ns),
        )

    def least(self, other: Times, where: NDArray[np.bool_]) -> Times:
        """Return the smaller of two, where told, else these."""
        return Times(
            duration_ns=np.minimum(
                self.duration_ns, other.duration_ns, where=where, out=self.duration_ns.copy()
            ),
            gap_ns=np.minimum(self.gap_ns, other.gap_ns, where=where, out=self.gap_ns.copy()),
        )

    def changed(self, before: Times, after: Times) -> Times:
        """Return these times with what changes from one to another."""
        return Times(
            duration_ns=self.duration_ns + after.duration_ns - before.duration_ns,
            gap_ns=self.gap_ns + after.gap_ns - before.gap_ns,
        )

    def mean_step(self, replayer: Replayer) -> float:
        """Return the mean step of the full replay, in ns."""
        return float(replayer.full_with(self.duration_ns, self.gap_ns).mean())


class Change(NamedTuple):
    """What mending a candidate changes."""

    candidate: Candidate
    part: NDArray[np.bool_]
    """Shape (ops,): its operations in the steps that show it."""

    mended: Times
    """What the part takes without it; elsewhere anything."""

    @property
    def host_part(self) -> NDArray[np.bool_]:
        """Return the operations whose launch gaps come back with it.

        Late starts come back only with causes on the host: else a rank begins a
        step late because it ended the one before late, and a step that is
        replayed alone must not be charged with what its predecessor lost.
        """
        return self.part if self.candidate.on_host else np.zeros_like(self.part)


def price_candidates(
    candidates: Sequence[Candidate], replayer: Replayer, workers: Mapping[int, tuple[int, ...]]
) -> tuple[Finding, ...]:
    """Return candidates as findings, each with what it cost.

    With M the run in which every candidate is mended, M + X the same with
    candidate X as recorded (in what two share, with its own excess), and T all
    of them, in the full replay (without X, what two share keeps what the others bring)::

        slowdown          = (M + X) / M
        recoverable_ratio = (T - T_without_X) / (T - T_ideal)

    Both are None where the replay holds no operation of X.

    Args:
        candidates: All that was found.
        replayer: The run.
        workers: What each rank shares with the partners that look just like it.

    Source:
        S of a set: arXiv 2505.05713, where the run that a set is put back into is ideal in every
        operation. Here it keeps what nobody is to blame for.
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
    alone = Times(duration_ns=unblamed.duration_ns, gap_ns=recorded.gap_ns)
    parts = _own_parts([_recorded_part(each, model) for each in candidates], model)
    changes = [
        Change(each, part, _fixed_times(each, unblamed, ideal, model))
        for each, part in zip(candidates, parts, strict=True)
    ]
    mended = _fix_all(changes, unblamed)
    blamed = np.sum([change.part for change in changes], axis=0)
    late = np.sum([change.host_part for change in changes], axis=0)
    whole = Times(
        duration_ns=np.where(blamed > 0, recorded.duration_ns, mended.duration_ns),
        gap_ns=np.where(late > 0, recorded.gap_ns, mended.gap_ns),
    )
    mended_ns, whole_ns = mended.mean_step(replayer), whole.mean_step(replayer)
    least = _least(changes, ideal, model).exchanged(blamed > 1, late > 1, mended)
    least_ns = least.mean_step(replayer)
    brought = None
    if (blamed > 1).any():
        brought = mended
        for change in changes:
            took = recorded if change.candidate.on_host else alone
            brought = brought.changed(mended, _put_back(change, mended, took))
    found = []
    for change in changes:
        if not change.part.any():
            found.append(_finding(change.candidate, None, None))
            continue
        # A slow worker's compute holds what its partners waited for pauses of each other: no part
        # of its slowness.
        took = recorded if change.candidate.on_host else alone
        put_back = _put_back(change, mended, took)
        without = whole.exchanged(
            change.part & (blamed == 1), change.host_part & (late == 1), mended
        )
        if brought is not None:
            left = brought.changed(put_back, mended)
            without = without.least(left, change.part & (blamed > 1))
        without_ns = without.mean_step(replayer)
        found.append(
            _finding(
                change.candidate,
                ratio(put_back.mean_step(replayer), mended_ns),
                recoverable_ratio(whole_ns, without_ns, least_ns),
            )
        )
    return tuple(found)


def confidence(excess_ratio: float, threshold: float) -> float:
    """Return how often a finding that stands so clear is right.

    ``1 - 0.1 * 0.5 ^ (excess / threshold - 1)``: `DOUBT_AT_THRESHOLD` at its
    threshold, halved with each further one.

    Source:
        The labelled benchmark, seeds 8 and 9; docs/benchmarks.md, "Diagnosis".
    """
    return float(1.0 - DOUBT_AT_THRESHOLD * 0.5 ** (excess_ratio / threshold - 1.0))


def _fix_all(changes: Sequence[Change], unblamed: Times) -> Times:
    """Return the run in which every candidate is mended: what two share takes the less of both."""
    mended = unblamed
    touched = np.zeros(len(unblamed.duration_ns), dtype=np.bool_)
    for change in changes:
        taken = change.mended.least(mended, touched & change.part)
        mended = mended.exchanged(change.part, change.part, taken)
        touched |= change.part
    return mended


def _put_back(change: Change, mended: Times, recorded: Times) -> Times:
    """Return the mended run with what one candidate's operations took beyond their usual.

    Alone that is what was recorded. An operation that two share, a gap of a host that launches
    late in which it also waits for an evaluation, took longer for both: each brings its own.
    """

    def with_share(
        mended_ns: NDArray[np.float64],
        recorded_ns: NDArray[np.float64],
        fixed_ns: NDArray[np.float64],
        where: NDArray[np.bool_],
    ) -> NDArray[np.float64]:
        share = recorded_ns - fixed_ns
        return np.where(where, np.maximum(mended_ns + share, 0.0), mended_ns)

    usual = change.mended
    return Times(
        duration_ns=with_share(
            mended.duration_ns, recorded.duration_ns, usual.duration_ns, change.part
        ),
        gap_ns=with_share(mended.gap_ns, recorded.gap_ns, usual.gap_ns, change.host_part),
    )


def _least(changes: Sequence[Change], ideal: Times, model: ReplayModel) -> Times:
    """Return the ideal run, as far as candidates do not know better what is usual."""
    least = ideal
    for change in changes:
        if change.candidate.fixed_ns is not None or change.candidate.on_host:
            least = least.exchanged(change.part, change.part, change.mended)
            least = _without_alike_gaps(least, change.part, model)
    return least


def _fixed_times(candidate: Candidate, unblamed: Times, ideal: Times, model: ReplayModel) -> Times:
    """Return what a candidate's part takes without it; elsewhere anything."""
    duration_ns = ideal.duration_ns
    if not candidate.on_host:
        # A device that is mended makes no gap longer: gaps that only checkpoints leave would be.
        shorter = np.minimum(duration_ns, model.operations.duration_ns)
        duration_ns = np.where(model.on_device, duration_ns, shorter)
    if candidate.fixed_ns is not None:
        duration_ns = np.where(np.isnan(candidate.fixed_ns), duration_ns, candidate.fixed_ns)
    if candidate.is_everywhere:
        return Times(duration_ns=duration_ns, gap_ns=np.zeros_like(ideal.gap_ns))
    return Times(duration_ns=duration_ns, gap_ns=unblamed.gap_ns)


def _without_alike_gaps(ideal: Times, part: NDArray[np.bool_], model: ReplayModel) -> Times:
    """Return an ideal whose host gaps elsewhere are not those of a part.

    Gaps that stand alike only where a host was at fault are their own median.
    """
    on_host = ~model.on_device
    label = model.operations.label
    alike = on_host & ~part & np.isin(label, sorted_unique(label[part & on_host]))
    shorter = np.minimum(ideal.duration_ns, model.operations.duration_ns)
    return Times(duration_ns=np.where(alike, shorter, ideal.duration_ns), gap_ns=ideal.gap_ns)


def _recorded_part(candidate: Candidate, model: ReplayModel) -> NDArray[np.bool_]:
    """Return a candidate's operations in the steps that show it."""
    if candidate.part is None:
        return np.zeros(len(model.rank), dtype=np.bool_)
    inside: NDArray[np.bool_] = candidate.part & in_shown_steps(model, candidate)
    return inside


def _own_parts(
    parts: Sequence[NDArray[np.bool_]], model: ReplayModel
) -> tuple[NDArray[np.bool_], ...]:
    """Leave pauses, input and transfers to the candidates that are made of nothing else.

    A slow rank's part is all that it does. The checkpoint that it writes, or the link that it
    sends over, costs the job nothing because the rank computes slowly.
    """
    is_compute = has_kind(model, COMPUTE_KINDS) & model.on_device
    computes = [bool((part & is_compute).any()) for part in parts]
    others = np.zeros(len(model.rank), dtype=np.bool_)
    for part, does in zip(parts, computes, strict=True):
        if not does:
            others |= part
    return tuple(
        part & ~others if does else part for part, does in zip(parts, computes, strict=True)
    )


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
    """Return ideal durations in which no candidate has a share.

    Compute's ideal is a mean over all ranks. Here it is scaled, kind by kind,
    so that it is the mean over the operations outside of every candidate's
    part, and in steps in which these are all longer, or shorter, over those of
    that step: a first step that warms up would have been long without any
    fault. A communication's ideal is the median of the alike ones outside.
    What has none outside keeps its ideal.

    Args:
        model: The operations.
        candidates: What they say themselves of the usual does not count.
        duration_ns: Shape (ops,): what operations took.

    Returns:
        Shape (ops,), ns.
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
            ideal[of_kind] *= _by_step(model, others, duration_ns, ideal)[
                model.operations.step[of_kind]
            ]
    return _medians_outside(model, inside & model.on_device & ~is_compute, inside, ideal)


def _by_step(
    model: ReplayModel,
    others: NDArray[np.bool_],
    duration_ns: NDArray[np.float64],
    ideal_ns: NDArray[np.float64],
) -> NDArray[np.float64]:
    """Return by how much compute outside was longer in each step, 1 where not nearly all was.

    Shape (steps,).
    """
    rows = np.flatnonzero(others & (ideal_ns > 0))
    step = model.operations.step[rows]
    found = np.ones(len(model.operations.steps))
    usual = medians_by_key(duration_ns[rows], model.rank[rows], model.operations.label[rows])
    ratio = np.divide(duration_ns[rows], usual, out=np.ones(len(rows)), where=usual > 0)
    is_common = common_step_ratio(ratio, step) != 1.0
    if is_common.any():
        took = np.bincount(step, weights=duration_ns[rows], minlength=len(found))
        expected = np.bincount(step, weights=ideal_ns[rows], minlength=len(found))
        # The steps that are as usual make up for what the others had in the mean of all.
        found = np.divide(took, expected, out=found, where=expected > 0)
    return found


def _medians_outside(
    model: ReplayModel,
    wanted: NDArray[np.bool_],
    inside: NDArray[np.bool_],
    ideal: NDArray[np.float64],
) -> NDArray[np.float64]:
    """Return ideals with those wanted as the median of what is alike and not inside."""
    label = model.operations.label
    concerned = np.flatnonzero(np.isin(label, sorted_unique(label[wanted])))
    number, num = factorize(label[concerned])
    outside = ~inside[concerned]
    duration_ns = model.operations.duration_ns[concerned]
    median, _ = group_medians(duration_ns[outside], number[outside], num)
    found = np.where(wanted[concerned], median[number], np.nan)
    ideal[concerned] = np.where(np.isnan(found), ideal[concerned], found)
    return ideal
