"""Evaluations: forwards without gradients in some of the steps, on all ranks or on one for all."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..arrays.group_stats import sum_cells
from ..arrays.grouping import factorize, sorted_unique
from ..arrays.sorting import find_positions
from ..breakdown.waterfall import Part
from ..replay.model import EVALUATION_KIND, Place, has_kind
from ..report.text import format_count, format_duration, format_steps
from ..statistics.thresholds import THRESHOLDS
from .candidate import Candidate
from .common_pause import describe_longest, format_period, name_ranks
from .detector import Cause, HostTime, ProofForm, Subject

if TYPE_CHECKING:
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
