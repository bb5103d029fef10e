from __future__ import annotations

from dataclasses import replace

from rankscope.analysis.causes import slow_compute
from rankscope.analysis.causes.candidate import Candidate, merge_hosts
from rankscope.analysis.trace.tables import RankInfo
from rankscope.tracer.topology import Coords


def slow(rank: int, *steps: int) -> Candidate:
    """Return a rank that is slow in some steps only."""
    return Candidate(
        cause=slow_compute.CAUSE,
        ranks=(rank,),
        steps=(steps[0], steps[-1]),
        shown_steps=steps,
        part=None,
        excess_ratio=0.1 * (1 + rank),
        threshold=0.1,
        evidence=f"rank {rank} is slow",
    )


def test_slow_ranks_of_one_host_are_merged() -> None:
    ranks = {
        rank: RankInfo(rank=rank, coords=Coords(dp=rank), host=f"node{rank // 2}")
        for rank in range(4)
    }
    one, other = slow(0, 3, 9), slow(1, 5, 9)

    (merged,) = merge_hosts([one, other], ranks)

    assert (merged.ranks, merged.steps, merged.shown_steps) == ((0, 1), (3, 9), (3, 5, 9))
    assert merged.evidence == "ranks 0 and 1, all on host node0; the worst: rank 1 is slow"
    # AND if one of them is slow throughout, so is the host
    (merged,) = merge_hosts([one, replace(other, shown_steps=None)], ranks)
    assert merged.shown_steps is None
