"""Compilation again: the compiler works on a graph that it had compiled before, for new inputs."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ..breakdown.waterfall import Part
from ..replay.model import Place
from ..statistics.phases import Phase
from ..statistics.thresholds import THRESHOLDS
from .candidate import Candidate, merge_alike
from .detector import Cause, HostTime, ProofForm
from .host_gaps import Loss, late_candidates

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..trace.context import EventRecord
    from .detector import Case
    from .host_gaps import HostGaps

NAME = "recompile"
"""Name of the tracer's spans of it, and first word of its events."""

MAX_IDS = 4
"""Compile ids that the evidence names."""

CAUSE = Cause(
    name="recompile",
    one="recompiles",
    several="recompile",
    sentence="All ranks recompile",
    shown_in=HostTime("input and gaps of the host", (Part.INPUT, Part.HOST_GAP)),
    proof_form=ProofForm.RECOMPILES,
)


def detect(case: Case, candidates: tuple[Candidate, ...]) -> tuple[Candidate, ...]:
    """Add the ranks that recompile after their first steps; if most do, no rank is at fault."""
    return (*candidates, *find_recompiles(case.gaps, case.context.events))


def find_recompiles(gaps: HostGaps, events: Sequence[EventRecord]) -> tuple[Candidate, ...]:
    """Find ranks that spend `min_excess_ratio` of their compute on recompiling in some step.

    In the first `min_lasting_steps` steps of a job that is usual.

    Args:
        events: Events of the run; those of kind ``compilation`` have the compile ids.
    """
    items, steps = gaps.gaps, gaps.profile.steps
    if items.name is None or NAME not in items.names:
        return ()
    chosen = gaps.is_at(Place.COMPILATION) & (items.name == items.names.index(NAME))
    chosen &= items.step >= THRESHOLDS.min_lasting_steps
    lost_ns = gaps.total_ns(Place.COMPILATION, excluding=~chosen)
    ratio = lost_ns / gaps.compute_ns[:, None]
    phases, activities = [], {}
    for row in np.flatnonzero((ratio >= THRESHOLDS.min_excess_ratio).any(axis=1)).tolist():
        columns = np.flatnonzero(ratio[row] >= THRESHOLDS.min_excess_ratio)
        phase = Phase(
            row=row,
            first=int(columns[0]),
            last=int(columns[-1]),
            excess_ratio=float(np.median(ratio[row, columns])),
            deviation=0.0,
            threshold=THRESHOLDS.min_excess_ratio,
            columns=tuple(columns.tolist()),
            recurs=True,
        )
        phases.append(phase)
        (first, last), rank = phase.steps(steps), int(gaps.profile.ranks[row])
        ids = dict.fromkeys(
            str(event.data.get("compile_id"))
            for event in events
            if (event.kind, event.rank) == ("compilation", rank)
            and event.text.startswith(NAME)
            and first <= int(event.data.get("step", -1)) <= last
        )
        more = f" and {len(ids) - MAX_IDS} more" if len(ids) > MAX_IDS else ""
        if ids:
            activities[row] = f"recompiling (compile ids {', '.join([*ids][:MAX_IDS])}{more})"
    loss = Loss(
        cause=CAUSE,
        activity="recompiling",
        lost_ns=lost_ns,
        chosen=chosen,
        expected=(),
        steps=np.zeros(len(steps), dtype=np.bool_),
        is_zero_usual=True,
    )
    candidates = late_candidates(gaps, loss, phases, activities)
    if len(candidates) > max(1, THRESHOLDS.majority_share * len(ratio)):
        candidates = (replace(merge_alike(candidates, " recompile"), ranks=(), is_everywhere=True),)
    return candidates
