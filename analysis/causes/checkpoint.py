"""Steps in which all ranks stand still at once: checkpoints, evaluations, missing input."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..arrays.group_stats import fast_quartile, row_medians
from ..replay.model import Place
from ..report.text import format_count, format_duration
from ..statistics.phases import MIN_EXCESS_RATIO
from .candidate import Candidate
from .host_gaps import INPUT_PLACES, WORKING_PLACES

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .host_gaps import Stalls

ALL_RANKS_SHARE = 0.8
"""Share of the ranks that stand still in the same steps for a common dip."""

LENGTH_FACTOR = 1.5
"""Dips of one sort, all checkpoints or all evaluations, differ by less than this."""


def common_dips(stalls: Stalls) -> tuple[Candidate, ...]:
    """Find steps in which nearly all ranks stand still at once: checkpoints, evaluations, input.

    Those in ``checkpoint`` spans, those after a step's compute, and those of one
    length that come at equal distances are no alarm. The others are missing
    input.
    """
    inside = stalls.total(Place.CHECKPOINT)
    data = stalls.total(Place.DATA)
    before, after = stalls.total(*INPUT_PLACES), stalls.total(*WORKING_PLACES)
    unusual = before - row_medians(before)[:, None] + after - row_medians(after)[:, None]
    lost = inside + unusual
    dips = np.flatnonzero(
        (lost / stalls.compute_ns[:, None] >= MIN_EXCESS_RATIO).mean(axis=0) >= ALL_RANKS_SHARE
    )
    if not len(dips):
        return ()

    def middle(gap: NDArray[np.float64]) -> NDArray[np.float64]:
        level: NDArray[np.float64] = np.median(gap[:, dips], axis=0)
        return level

    in_spans = middle(inside) >= middle(unusual)
    late = middle(after) > middle(before)
    in_data = middle(data - row_medians(data)[:, None]) > middle(lost) / 2
    harmless = in_spans | late
    for chosen in _of_one_length(middle(lost), ~harmless & ~in_data):
        harmless[chosen] = _is_regular(dips[chosen])
    found = (
        _dip("checkpoint", stalls, dips[harmless], lost, in_spans=bool(in_spans[harmless].all())),
        _dip("data-stall", stalls, dips[~harmless], lost, in_spans=False),
    )
    return tuple(each for each in found if each is not None)


def _of_one_length(
    lost_ns: NDArray[np.float64], chosen: NDArray[np.bool_]
) -> list[NDArray[np.int64]]:
    """Part chosen dips where one is longer than the next shorter one by `LENGTH_FACTOR`."""
    rows = np.flatnonzero(chosen)
    if not len(rows):
        return []
    rows = rows[np.argsort(lost_ns[rows])]
    apart = lost_ns[rows[1:]] > LENGTH_FACTOR * lost_ns[rows[:-1]]
    return [np.sort(part) for part in np.split(rows, np.flatnonzero(apart) + 1)]


def _is_regular(dips: NDArray[np.int64]) -> bool:
    """Tell whether dips come at equal distances, not one after the other.

    One alone, or two, may be part of such a series: nothing speaks against it.
    """
    distances = np.unique(np.diff(dips))
    return len(distances) <= 1 and bool((distances > 1).all())


def _dip(
    cause: str,
    stalls: Stalls,
    dips: NDArray[np.int64],
    lost_ns: NDArray[np.float64],
    *,
    in_spans: bool,
) -> Candidate | None:
    """Turn steps in which all ranks stand still into a candidate; None without any."""
    if not len(dips):
        return None
    chosen = stalls.among(*Place) & np.isin(stalls.column, dips)
    expected = [((place,), _own_usual(stalls.total(place))) for place in Place]
    steps = stalls.profile.steps[dips]
    distances = np.unique(np.diff(dips))
    each = format_count(len(dips), "time")
    if len(distances) == 1 and distances[0] > 1:
        each = f"every {int(distances[0])} steps"
    what = "in checkpoint spans" if in_spans else "outside any compute"
    typical = format_duration(float(np.median(lost_ns[:, dips])))
    return Candidate(
        cause=cause,
        ranks=tuple(stalls.profile.ranks.tolist()),
        steps=(int(steps[0]), int(steps[-1])),
        part=stalls.part(chosen),
        usual_ns=stalls.usual_at(chosen, expected),
        excess_ratio=float(np.median((lost_ns / stalls.compute_ns[:, None])[:, dips])),
        threshold=MIN_EXCESS_RATIO,
        evidence=(
            f"all ranks stand still together for {typical} {what}, {each},"
            f" in steps {int(steps[0])} to {int(steps[-1])}"
        ),
        on_host=True,
        is_alarm=cause != "checkpoint",
    )


def _own_usual(gap_ns: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return each rank's median for all of its steps, shape as given."""
    usual: NDArray[np.float64] = np.broadcast_to(row_medians(gap_ns)[:, None], gap_ns.shape)
    return usual


def places_of_dips(stalls: Stalls, usual: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Tell where in its steps a common dip lies: elsewhere they tell as much as any other.

    Args:
        stalls: The run's gaps.
        usual: Shape (steps,): steps that no common dip explains.

    Returns:
        Shape (places, steps): where the middle rank loses half of what is due or more; everywhere
        in a dip that no one place holds.
    """
    found = np.zeros((len(Place), len(usual)), dtype=np.bool_)
    for place in Place:
        lost = stalls.total(place)
        lost -= fast_quartile(lost)
        found[place] = np.median(lost / stalls.compute_ns[:, None], axis=0) >= MIN_EXCESS_RATIO / 2
    found[:, usual] = False
    found[:, ~usual & ~found.any(axis=0)] = True
    return found


def without_dips(stalls: Stalls, dips: tuple[Candidate, ...]) -> NDArray[np.bool_]:
    """Tell which steps (columns) no common dip explains."""
    if not dips:
        return np.ones(len(stalls.profile.steps), dtype=np.bool_)
    before, rest = stalls.total(*INPUT_PLACES), stalls.total(*WORKING_PLACES, Place.CHECKPOINT)
    total = before + rest
    unusual = (total - row_medians(total)[:, None]) / stalls.compute_ns[:, None]
    usual: NDArray[np.bool_] = (unusual >= MIN_EXCESS_RATIO).mean(axis=0) < ALL_RANKS_SHARE
    return usual
