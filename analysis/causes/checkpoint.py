"""Checkpoints and evaluations: planned steps in which all ranks pause at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..arrays.group_stats import row_medians
from ..replay.model import Place
from ..report.text import format_count, format_duration
from ..statistics.phases import MIN_EXCESS_RATIO
from .candidate import Candidate
from .detector import Cause, Subject

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .detector import Case
    from .host_gaps import CommonPauses, HostGaps

CAUSE = Cause(
    name="checkpoint",
    subject=Subject.JOB,
    sentence="Checkpoints take time",
    is_alarm=False,
)


def detect(case: Case, found: tuple[Candidate, ...]) -> tuple[Candidate, ...]:
    """Add the planned common pauses."""
    pauses = case.common_pauses
    candidate = pause_candidate(CAUSE, case.gaps, pauses, pauses.is_planned)
    return found if candidate is None else (*found, candidate)


def pause_candidate(
    cause: Cause, stalls: HostGaps, pauses: CommonPauses, chosen: NDArray[np.bool_]
) -> Candidate | None:
    """Return some of the common pauses as a candidate; None if there is none.

    Args:
        cause: What they are.
        stalls: The run's gaps.
        pauses: All common pauses.
        chosen: Shape (pauses,): those that have this cause.
    """
    dips = pauses.columns[chosen]
    if not len(dips):
        return None
    lost_ns = pauses.lost_ns
    mine = stalls.among(*Place) & np.isin(stalls.column, dips)
    expected = [((place,), _own_medians(stalls.total(place))) for place in Place]
    steps = stalls.profile.steps[dips]
    distances = np.unique(np.diff(dips))
    each = format_count(len(dips), "time")
    if len(distances) == 1 and distances[0] > 1:
        each = f"every {int(distances[0])} steps"
    in_spans = cause is CAUSE and pauses.in_spans[chosen].all()
    what = "in checkpoint spans" if in_spans else "outside any compute"
    typical = format_duration(float(np.median(lost_ns[:, dips])))
    return Candidate(
        cause=cause,
        ranks=tuple(stalls.profile.ranks.tolist()),
        steps=(int(steps[0]), int(steps[-1])),
        part=stalls.part(mine),
        fixed_ns=stalls.usual_at(mine, expected),
        excess_ratio=float(np.median((lost_ns / stalls.compute_ns[:, None])[:, dips])),
        threshold=MIN_EXCESS_RATIO,
        evidence=(
            f"all ranks stand still together for {typical} {what}, {each},"
            f" in steps {int(steps[0])} to {int(steps[-1])}"
        ),
        on_host=True,
    )


def _own_medians(gap_ns: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return each rank's median for all of its steps, shape as given."""
    usual: NDArray[np.float64] = np.broadcast_to(row_medians(gap_ns)[:, None], gap_ns.shape)
    return usual
