"""What each candidate cost: its slowdown, and the share of the lost time that mending it wins.

See docs/decisions/0028-a-finding-is-put-back-into-the-mended-run.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from analysis.cells import group_medians
from analysis.distinct import number_rows
from analysis.occupancy import of_kinds
from analysis.partners import COMPUTE_KINDS, least_of_partners
from analysis.report import Finding
from analysis.whatif import ratio, recoverable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from analysis.candidate import Candidate
    from analysis.model import ReplayModel
    from analysis.whatif import Replayer


DOUBT_AT_THRESHOLD = 0.1
"""Share of the findings that barely reach their threshold which are wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """What operations take, one way or another; both of shape (ops,), in ns."""

    duration_ns: NDArray[np.float64]
    gap_ns: NDArray[np.float64]

    def where(self, part: NDArray[np.bool_], other: Times) -> Times:
        """Return these times with a part's taken from ``other``."""
        return Times(
            duration_ns=np.where(part, other.duration_ns, self.duration_ns),
            gap_ns=np.where(part, other.gap_ns, self.gap_ns),
        )

    def least(self, other: Times, where: NDArray[np.bool_]) -> Times:
        """Return the smaller of two, where told, else these."""
        return Times(
            duration_ns=np.minimum(
                self.duration_ns, other.duration_ns, where=where, out=self.duration_ns.copy()
            ),
            gap_ns=np.minimum(self.gap_ns, other.gap_ns, where=where, out=self.gap_ns.copy()),
        )

    def mean_step(self, replayer: Replayer) -> float:
        """Return the mean step of the full replay, in ns."""
        return float(replayer.full_with(self.duration_ns, self.gap_ns).mean())


class Change(NamedTuple):
    """What mending a candidate changes."""

    part: NDArray[np.bool_]
    mended: Times


def priced(
    candidates: Sequence[Candidate], replayer: Replayer, workers: Mapping[int, tuple[int, ...]]
) -> tuple[Finding, ...]:
    """Return candidates as findings, each with what it cost.

    With M the run in which every candidate is mended, M + X the same with
    candidate X as recorded, and T all of them, in the full replay::

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
    unblamed = Times(duration_ns=least_of_partners(model, workers), gap_ns=model.ideal_gap_ns)
    ideal = Times(
        duration_ns=ideal_of_others(model, candidates, unblamed.duration_ns),
        gap_ns=model.ideal_gap_ns,
    )
    changes = [
        Change(_recorded_part(each, model), _mended(each, unblamed, ideal)) for each in candidates
    ]
    mended, least, whole = unblamed, ideal, unblamed
    touched = np.zeros(len(model.rank), dtype=np.bool_)
    for each, change in zip(candidates, changes, strict=True):
        again = touched & change.part
        mended = mended.where(change.part, change.mended.least(mended, again))
        whole = _put_back(whole, change, recorded, each)
        touched |= change.part
        if each.usual_ns is not None or each.on_host:
            least = _without_alike(least.where(change.part, change.mended), change.part, model)
    mended_ns, whole_ns, least_ns = (times.mean_step(replayer) for times in (mended, whole, least))
    found = []
    for number, (each, change) in enumerate(zip(candidates, changes, strict=True)):
        if not change.part.any():
            found.append(_finding(each, None, None))
            continue
        put_back_ns = _put_back(mended, change, recorded, each).mean_step(replayer)
        without = mended
        for other, (one, kept) in enumerate(zip(candidates, changes, strict=True)):
            if other != number:
                without = _put_back(without, kept, recorded, one)
        share = recoverable(whole_ns, without.mean_step(replayer), least_ns)
        found.append(_finding(each, ratio(put_back_ns, mended_ns), share))
    return tuple(found)


def confidence(excess_ratio: float, threshold: float) -> float:
    """Return how often a finding that stands so clear is right.

    ``1 - 0.1 * 0.5 ^ (excess / threshold - 1)``: `DOUBT_AT_THRESHOLD` at its
    threshold, halved with each further one.

    Source:
        The labelled benchmark, seeds 8 and 9; docs/benchmarks.md, "Diagnosis".
    """
    return float(1.0 - DOUBT_AT_THRESHOLD * 0.5 ** (excess_ratio / threshold - 1.0))


def ideal_of_others(
    model: ReplayModel, candidates: Sequence[Candidate], duration_ns: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return ideal durations in which no candidate has a share.

    Compute's ideal is a mean over all ranks. Here it is scaled, kind by kind,
    so that it is the mean over the operations outside of every candidate's
    part; a communication's is the median of the alike ones outside. What has
    none outside keeps its ideal.

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
            inside |= each.part if each.usual_ns is None else each.part & np.isnan(each.usual_ns)
    ideal = model.ideal_ns.astype(np.float64)
    is_compute = of_kinds(model, COMPUTE_KINDS)
    for code in np.unique(model.kind[is_compute]).tolist():
        of_kind = model.kind == code
        others = of_kind & model.on_device & ~inside
        expected = float(model.ideal_ns[others].sum())
        if expected > 0:
            ideal[of_kind] *= float(duration_ns[others].sum()) / expected
    return _alike_outside(model, inside & model.on_device & ~is_compute, inside, ideal)


def _alike_outside(
    model: ReplayModel,
    wanted: NDArray[np.bool_],
    inside: NDArray[np.bool_],
    ideal: NDArray[np.float64],
) -> NDArray[np.float64]:
    """Return ideals with those wanted as the median of what is alike and not inside."""
    label = model.operations.label
    concerned = np.flatnonzero(np.isin(label, np.unique(label[wanted])))
    number, num = number_rows(label[concerned])
    outside = ~inside[concerned]
    duration_ns = model.operations.duration_ns[concerned]
    median, _ = group_medians(duration_ns[outside], number[outside], num)
    found = np.where(wanted[concerned], median[number], np.nan)
    ideal[concerned] = np.where(np.isnan(found), ideal[concerned], found)
    return ideal


def _mended(candidate: Candidate, unblamed: Times, ideal: Times) -> Times:
    """Return what a candidate's part takes without it; elsewhere anything."""
    duration_ns = ideal.duration_ns
    if candidate.usual_ns is not None:
        duration_ns = np.where(np.isnan(candidate.usual_ns), duration_ns, candidate.usual_ns)
    if candidate.is_everywhere:
        return Times(duration_ns=duration_ns, gap_ns=np.zeros_like(ideal.gap_ns))
    return Times(duration_ns=duration_ns, gap_ns=unblamed.gap_ns)


def _without_alike(ideal: Times, part: NDArray[np.bool_], model: ReplayModel) -> Times:
    """Return an ideal whose host gaps elsewhere are not those of a part.

    Gaps that stand alike only where a host was at fault are their own median.
    """
    on_host = ~model.on_device
    label = model.operations.label
    alike = on_host & ~part & np.isin(label, np.unique(label[part & on_host]))
    shorter = np.minimum(ideal.duration_ns, model.operations.duration_ns)
    return Times(duration_ns=np.where(alike, shorter, ideal.duration_ns), gap_ns=ideal.gap_ns)


def _put_back(times: Times, change: Change, recorded: Times, candidate: Candidate) -> Times:
    """Return a run with a candidate as recorded.

    Late starts come back only with causes on the host: else a rank begins a
    step late because it ended the one before late, and a step that is replayed
    alone must not be charged with what its predecessor lost.
    """
    gap_ns = recorded.gap_ns if candidate.on_host else times.gap_ns
    back = Times(duration_ns=recorded.duration_ns, gap_ns=gap_ns)
    return times.where(change.part, back)


def _recorded_part(candidate: Candidate, model: ReplayModel) -> NDArray[np.bool_]:
    """Return a candidate's operations in the steps that show it."""
    if candidate.part is None:
        return np.zeros(len(model.rank), dtype=np.bool_)
    steps = np.array(model.operations.steps)
    shows = (steps >= candidate.steps[0]) & (steps <= candidate.steps[1])
    inside: NDArray[np.bool_] = candidate.part & shows[model.operations.step]
    return inside


def _finding(candidate: Candidate, slowdown: float | None, share: float | None) -> Finding:
    return Finding(
        cause=candidate.cause,
        ranks=candidate.ranks,
        steps=candidate.steps,
        slowdown=slowdown,
        recoverable_ratio=share,
        confidence=confidence(candidate.excess_ratio, candidate.threshold),
        evidence=candidate.evidence,
    )
