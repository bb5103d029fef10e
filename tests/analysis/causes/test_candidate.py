from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rankscope.analysis.causes import slow_compute
from rankscope.analysis.causes.candidate import (
    Candidate,
    explained_gaps,
    merge_equal,
    merge_hosts,
)
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
    # AND it explains the gaps of both
    some = [
        replace(one, gaps=np.array([True, False])),
        replace(other, gaps=np.array([False, True])),
    ]
    assert explained_gaps(merge_hosts(some, ranks), 2).all()
    # AND if one of them is slow throughout, so is the host
    (merged,) = merge_hosts([one, replace(other, shown_steps=None)], ranks)
    assert merged.shown_steps is None


def test_ranks_that_are_equally_slow_at_the_same_time_are_one_finding() -> None:
    # GIVEN ranks that are 10, 12 and 30 % slower in the same steps, and one in another step
    alike = [replace(slow(rank, 3, 9), excess_ratio=0.1 + 0.02 * rank) for rank in (0, 1)]
    worse, other = replace(slow(2, 3, 9), excess_ratio=0.3), replace(slow(3, 3), excess_ratio=0.1)

    found = merge_equal([*alike, worse, other], slow_compute.CAUSE)

    # THEN fixing one of the first two alone wins nothing, and fixing the third wins 18 %
    assert [each.ranks for each in found] == [(2,), (0, 1), (3,)]
    assert found[1].evidence == "ranks 0 and 1, equally slow; the worst: rank 1 is slow"


@pytest.mark.parametrize(
    ("first", "second", "num"),
    [
        ((2, 99), (3, 99), 1),
        ((2, 99), (3, 80), 2),
        ((2, 50), (60, 99), 2),
    ],
)
def test_ranks_that_become_slow_some_steps_later_are_slow_at_the_same_time(
    first: tuple[int, int], second: tuple[int, int], num: int
) -> None:
    lasting = [
        replace(slow(0, *steps), ranks=(rank,), shown_steps=None)
        for rank, steps in enumerate((first, second))
    ]

    assert len(merge_equal(lasting, slow_compute.CAUSE)) == num
    recurring = [replace(each, shown_steps=tuple(range(*each.steps, 3))) for each in lasting]
    assert len(merge_equal(recurring, slow_compute.CAUSE)) == 2
