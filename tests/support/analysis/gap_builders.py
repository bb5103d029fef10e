"""Host gaps of ranks that compute for 100 ms in each step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import numpy as np

from rankscope.analysis.causes import (
    checkpoint,
    common_pause,
    data_stall,
    gc_pause,
    host_stall,
    launch_skew,
)
from rankscope.analysis.causes.host_gaps import HostGaps, find_common_pauses, tabulate_gaps
from rankscope.analysis.replay.model import GapItems, Link, Place
from rankscope.analysis.statistics.peers import Basis, ComputeProfile
from rankscope.analysis.trace.tables import RankInfo
from rankscope.tracer.topology import Coords

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rankscope.analysis.causes.candidate import Candidate
    from rankscope.analysis.causes.detector import Case

MS = 1_000_000

Gap = tuple[int, int, Place, int]
"""Step, rank, place, ms."""


def gaps_with(gaps: Iterable[Gap], *, stage: Sequence[int], num_steps: int) -> HostGaps:
    """Return the host gaps of ranks 0, 1, ...

    Args:
        gaps: At least one.
        stage: Shape (ranks,): stage of each rank.
        num_steps: Steps are numbered from 0.
    """
    num_ranks = len(stage)
    total = np.full((num_ranks, num_steps), 100.0 * MS)
    profile = ComputeProfile(
        ranks=np.arange(num_ranks, dtype=np.int32),
        steps=np.arange(num_steps, dtype=np.int32),
        stage=np.array(stage, dtype=np.int32),
        total_ns=total,
        expected_ns=total,
        basis=(Basis.PEERS,) * num_ranks,
    )
    step, rank, place, ms = zip(*gaps, strict=True)
    items = GapItems(
        step=np.array(step, dtype=np.int32),
        rank=np.array(rank, dtype=np.int32),
        place=np.array(place, dtype=np.int8),
        gap_ns=np.array(ms, dtype=np.int64) * MS,
        operation=np.full(len(step), -1),
    )
    return tabulate_gaps(profile, items, np.zeros(1))


def host_candidates(gaps: HostGaps, *groups: tuple[int, ...]) -> tuple[Candidate, ...]:
    """Return the candidates of all host causes, with one rank on each host.

    Args:
        gaps: The gaps.
        groups: Members of each group that reduces gradients.
    """
    ranks = gaps.profile.ranks.tolist()
    links = tuple(Link(members=group, kind="dp-comm", is_pair=False) for group in groups)
    case = SimpleNamespace(
        gaps=gaps,
        common_pauses=find_common_pauses(gaps),
        ranks={
            rank: RankInfo(rank=rank, coords=Coords(dp=rank), host=f"node{rank}") for rank in ranks
        },
        reading=SimpleNamespace(transfers=SimpleNamespace(links=links)),
    )
    found: tuple[Candidate, ...] = ()
    for detector in (checkpoint, common_pause, host_stall, gc_pause, data_stall, launch_skew):
        found = detector.detect(cast("Case", case), found)
    return found
