"""Evaluations: forwards without gradients in some of the steps, on all ranks or on one for all."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from ..arrays.group_stats import row_medians, sum_cells
from ..arrays.grouping import factorize, sorted_unique
from ..arrays.sorting import find_positions
from ..breakdown.waterfall import Part
from ..replay.model import EVALUATION_KIND, Place, has_kind
from ..report.text import format_count, format_duration, format_steps
from ..statistics.thresholds import THRESHOLDS
from .candidate import Candidate
from .common_pause import describe_longest, find_longest, format_period, name_ranks
from .detector import Cause, HostTime, ProofForm, Subject

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .detector import Case

CAUSE = Cause(
    name="evaluation",
    subject=Subject.JOB,
    sentence="Evaluations take time",
    shown_in=HostTime("evaluation", (Part.EVALUATION,), is_of_all=True),
    is_alarm=False,
    proof_form=ProofForm.HOST,
)


def detect(case: Case, candidates: tuple[Candidate, ...]) -> tuple[Candidate, ...]:
    """Add the evaluations, with the gaps around them, as one candidate."""
    model, gaps = case.reading.model, case.gaps
    operations = model.operations
    forwards = np.flatnonzero(has_kind(model, frozenset({EVALUATION_KIND})))
    beside = gaps.is_at(Place.EVALUATION)
    held = gaps.gaps.operation[beside]
    part = sorted_unique(np.concatenate((forwards, held[held >= 0])))
    if not len(part):
        return candidates
    fixed_ns = gaps.fixed_ns(beside)
    fixed_ns[forwards] = 0.0
    lost_ns = operations.duration_ns[part] - fixed_ns[part]
    ranks = sorted_unique(model.rank[part])
    steps = np.array(operations.steps)[sorted_unique(operations.step[part])]
    by_rank_ns = np.bincount(model.rank[part], weights=lost_ns)[ranks] / len(steps)
    typical_ns = float(np.median(by_rank_ns))
    num_ranks = len(case.ranks)
    who = name_ranks(ranks, num_ranks, ("evaluates", "evaluate"))
    are_all = len(ranks) == num_ranks
    longest = ""
    if are_all:
        row = find_positions(model.rank[part], ranks)
        of_step, num_steps = factorize(operations.step[part])
        longest = describe_longest(ranks, sum_cells((num_ranks, num_steps), row, of_step, lost_ns))
    how_often = format_period(steps) or f"in {format_count(len(steps), 'step')}"
    shown = int(steps[0]), int(steps[-1])
    compute_ns = float(np.median(gaps.compute_ns))
    evaluation = Candidate(
        cause=CAUSE,
        ranks=tuple(ranks.tolist()),
        steps=shown,
        part=part,
        fixed_ns=fixed_ns,
        excess_ratio=typical_ns / compute_ns if compute_ns > 0 else 0.0,
        threshold=THRESHOLDS.min_excess_ratio,
        evidence=(
            f"{who} for {format_duration(typical_ns)} (forwards without gradients) {how_often},"
            f" in {format_steps(shown)}{longest}"
        ),
        shown_steps=tuple(steps.tolist()),
    )
    return (*candidates, evaluation)


UNEQUAL = "of what all ranks do without gradients"
"""Begin of the evidence of unequal work that is in evaluations, or in rollouts."""

SHOWS_UNEQUAL = replace(CAUSE, shown_in=HostTime("evaluation", (Part.EVALUATION,)))
"""How such a finding is proved: the ranks of a step differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LongestShare:
    """Time that one rank takes longer than the others in the evaluations that all ranks do."""

    rank: int
    part: NDArray[np.int64]
    """Some of its operations, ascending, that take as long together as it takes longer."""

    lost_ns: float
    """Their time in all steps, ns."""

    evidence: str


def find_longest_share(case: Case, evaluation: Candidate) -> LongestShare | None:
    """Return by how much the evaluations of one rank are the longest.

    None if they are alike, or not all ranks take part: that some evaluate for all is planned.

    Args:
        evaluation: Of `detect`.
    """
    model = case.reading.model
    part, fixed_ns = evaluation.part, evaluation.fixed_ns
    if part is None or fixed_ns is None or len(evaluation.ranks) < len(case.ranks):
        return None
    ranks = np.array(evaluation.ranks)
    lost_ns = model.operations.duration_ns[part] - fixed_ns[part]
    row = find_positions(model.rank[part], ranks)
    of_step, num_steps = factorize(model.operations.step[part])
    took_ns = sum_cells((len(ranks), num_steps), row, of_step, lost_ns)
    longest = find_longest(took_ns)
    if longest is None:
        return None
    usual_ns = row_medians(np.delete(took_ns, longest, axis=0).T)
    own = np.flatnonzero(row == longest)
    own = own[np.lexsort((lost_ns[own], of_step[own]))]
    total_ns = np.cumsum(lost_ns[own])
    before_ns = np.bincount(of_step[own], weights=lost_ns[own], minlength=num_steps).cumsum()
    in_step_ns = total_ns - np.concatenate(([0.0], before_ns[:-1]))[of_step[own]]
    beyond = own[in_step_ns <= (took_ns[longest] - usual_ns)[of_step[own]]]
    text = describe_longest(ranks, took_ns).removeprefix("; ")
    return LongestShare(
        rank=int(ranks[longest]),
        part=np.sort(part[beyond]),
        lost_ns=float(lost_ns[beyond].sum()),
        evidence=f"{UNEQUAL}, {text}",
    )
