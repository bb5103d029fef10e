"""What hosts do to a run: in which order its causes are looked for, and which explain which."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ..replay.model import Place
from .candidate import joined_parts, merged_hosts
from .checkpoint import ALL_RANKS_SHARE, common_dips, places_of_dips, without_dips
from .data_stall import data_stalls
from .gc_pause import gc_pauses, untold_pauses
from .host_gaps import WORKING_PLACES
from .host_stall import host_stalls
from .launch_skew import launch_skews

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from ..trace.tables import RankInfo
    from .candidate import Candidate
    from .host_gaps import Stalls


def host_candidates(
    stalls: Stalls, groups: tuple[tuple[int, ...], ...], ranks: Mapping[int, RankInfo]
) -> tuple[Candidate, ...]:
    """Find common dips, late hosts, missing input, pauses and launch skew.

    Args:
        stalls: The run's gaps.
        groups: Members of each group of collectives that are launched after compute.
        ranks: Their hosts.
    """
    dips = common_dips(stalls)
    usual = without_dips(stalls, dips)
    dipped = places_of_dips(stalls, usual)
    in_dips = dipped[stalls.gaps.place, stalls.column]
    tells = ~(dipped[Place.FORWARD] | dipped[Place.BACKWARD])
    stalled = merged_hosts(host_stalls(stalls, tells, in_dips), ranks)
    blamed = frozenset(rank for each in stalled for rank in each.ranks)
    pauses, paused = gc_pauses(stalls, ~in_dips, blamed)
    late = data_stalls(stalls, usual, paused | _first_of_late_hosts(stalls, stalled))
    dips, late = _told_once(dips, late)
    other = stalls.among(Place.OTHER)
    skews = launch_skews(stalls, groups, ~dipped[Place.LAUNCH], blamed, paused | (in_dips & other))
    untold = untold_pauses(stalls, ~(in_dips | paused), blamed)
    return (*dips, *stalled, *late, *pauses, *skews, *untold)


def _first_of_late_hosts(stalls: Stalls, stalled: Sequence[Candidate]) -> NDArray[np.bool_]:
    """Tell the gaps before the first compute of hosts that launch late throughout.

    Such a host is late for the step's first launch as well. Where it loses more
    there than before all other launches together, in most of its steps, its
    input is late too.

    Returns:
        Shape (gaps,).
    """
    profile = stalls.profile
    first, later = stalls.total(Place.INPUT), stalls.total(*WORKING_PLACES)
    explained = np.zeros(len(stalls.gaps), dtype=np.bool_)
    for each in stalled:
        rows = np.isin(profile.ranks, each.ranks)
        inside = (profile.steps >= each.steps[0]) & (profile.steps <= each.steps[1])
        more = first[rows][:, inside] > later[rows][:, inside]
        if more.mean() <= 1 / 2:
            explained |= stalls.among(Place.INPUT) & np.isin(stalls.gaps.rank, each.ranks)
    return explained


def _told_once(
    dips: Sequence[Candidate], late: Sequence[Candidate]
) -> tuple[tuple[Candidate, ...], tuple[Candidate, ...]]:
    """Add common dips that are part of, or next to, input that all ranks miss throughout to it.

    A step that is later than the others of such a phase stands out as a dip as well, and took no
    part in the search for the phase.

    Returns:
        The dips that are left, and ``late``.
    """
    left, grown = list(dips), []
    for each in late:
        mine = [
            dip
            for dip in left
            if dip.cause == each.cause
            and each.steps[0] <= dip.steps[1] + 1
            and each.steps[1] >= dip.steps[0] - 1
            and len(each.ranks) >= ALL_RANKS_SHARE * len(dip.ranks)
        ]
        left = [dip for dip in left if not any(dip is other for other in mine)]
        grown.append(_grown(each, mine) if mine else each)
    return tuple(left), tuple(grown)


def _grown(late: Candidate, dips: Sequence[Candidate]) -> Candidate:
    whole = (late, *dips)
    part, usual_ns = joined_parts(whole)
    steps = min(each.steps[0] for each in whole), max(each.steps[1] for each in whole)
    also = "" if steps == late.steps else "".join(f"; {each.evidence}" for each in dips)
    return replace(
        late,
        evidence=late.evidence + also,
        steps=steps,
        shown_steps=None,
        part=part,
        usual_ns=usual_ns,
    )
