"""Steps in which all ranks stand still at once: checkpoints, evaluations, missing input."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from analysis.candidate import Candidate
from analysis.evidence import Place
from analysis.phases import DUE_RATIO, row_medians
from analysis.stalls import INPUT_PLACES, WORKING_PLACES
from analysis.words import count_text, duration_text

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from analysis.stalls import Stalls

ALL_RANKS_SHARE = 0.8
"""Share of the ranks that stand still in the same steps for a common dip."""

REGULAR_DIPS = 3
"""Dips with equal spaces between them that make them regular."""


def common_dips(stalls: Stalls) -> tuple[Candidate, ...]:
    """Find steps in which nearly all ranks stand still at once: checkpoints, evaluations, input.

    Regular ones, those in ``checkpoint`` spans, and those after a step's
    compute are no alarm; one before it is missing input.
    """
    inside = stalls.total(Place.CHECKPOINT)
    before, after = stalls.total(*INPUT_PLACES), stalls.total(*WORKING_PLACES)
    unusual = before - row_medians(before)[:, None] + after - row_medians(after)[:, None]
    ratio = (inside + unusual) / stalls.compute_ns[:, None]
    dips = np.flatnonzero((ratio >= DUE_RATIO).mean(axis=0) >= ALL_RANKS_SHARE)
    if not len(dips):
        return ()
    level = float(np.median(ratio[:, dips]))
    spaced = np.unique(np.diff(dips))
    in_spans = np.median(inside[:, dips], axis=0) >= np.median(unusual[:, dips], axis=0)
    late = np.median(after[:, dips], axis=0) > np.median(before[:, dips], axis=0)
    is_checkpoint = bool(
        in_spans.all() or late.all() or (len(dips) >= REGULAR_DIPS and len(spaced) == 1)
    )
    chosen = stalls.among(*Place) & np.isin(stalls.column, dips)
    whole = stalls.total(*Place)
    expected = np.broadcast_to(row_medians(whole)[:, None], whole.shape)
    steps = stalls.profile.steps[dips]
    each = count_text(len(dips), "time")
    if len(spaced) == 1 and spaced[0] > 1:
        each = f"every {int(spaced[0])} steps"
    what = "in checkpoint spans" if in_spans.all() else "outside any compute"
    lost = float(np.median((inside + np.maximum(unusual, 0))[:, dips]))
    return (
        Candidate(
            cause="checkpoint" if is_checkpoint else "data-stall",
            ranks=tuple(stalls.profile.ranks.tolist()),
            steps=(int(steps[0]), int(steps[-1])),
            part=stalls.part(chosen),
            usual_ns=stalls.usual(chosen, expected),
            excess_ratio=level,
            threshold=DUE_RATIO,
            evidence=(
                f"all ranks stand still together for {duration_text(lost)} {what}, {each},"
                f" in steps {int(steps[0])} to {int(steps[-1])}"
            ),
            on_host=True,
            is_alarm=not is_checkpoint,
        ),
    )


def without_dips(stalls: Stalls, dips: tuple[Candidate, ...]) -> NDArray[np.bool_]:
    """Tell which steps (columns) no common dip explains."""
    if not dips:
        return np.ones(len(stalls.profile.steps), dtype=np.bool_)
    before, rest = stalls.total(*INPUT_PLACES), stalls.total(*WORKING_PLACES, Place.CHECKPOINT)
    total = before + rest
    unusual = (total - row_medians(total)[:, None]) / stalls.compute_ns[:, None]
    usual: NDArray[np.bool_] = (unusual >= DUE_RATIO).mean(axis=0) < ALL_RANKS_SHARE
    return usual
