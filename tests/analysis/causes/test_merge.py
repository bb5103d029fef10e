"""What a stalled rank explains of the ranks that look slow."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rankscope.analysis.causes import data_stall, gc_pause, slow_compute
from rankscope.analysis.causes.candidate import Candidate, merge_hosts
from rankscope.analysis.causes.slow_compute import drop_waiting_partners
from rankscope.analysis.trace.tables import RankInfo
from rankscope.tracer.topology import Coords

if TYPE_CHECKING:
    from rankscope.analysis.causes.detector import Cause


def found(cause: Cause, *ranks: int) -> Candidate:
    return Candidate(
        cause=cause,
        ranks=ranks,
        steps=(3, 9),
        part=None,
        excess_ratio=0.5,
        threshold=0.1,
        evidence="",
    )


def test_partners_of_a_stalled_rank_that_look_slow_only_wait_for_it() -> None:
    # GIVEN ranks 0 and 1, partners whose communication is not traced, of which 1 has no input
    workers = {0: (0, 0), 1: (0, 0), 2: (1, 0)}

    assert (
        drop_waiting_partners(
            [found(slow_compute.CAUSE, 0, 1)], [found(data_stall.CAUSE, 1)], workers
        )
        == ()
    )


def test_a_rank_without_such_partners_is_slow_and_stalled_at_once() -> None:
    # GIVEN rank 2, alone in its worker, that computes slowly and misses its input as well
    workers = {0: (0, 0), 1: (0, 0), 2: (1, 0)}
    slow = found(slow_compute.CAUSE, 2)

    assert drop_waiting_partners([slow], [found(data_stall.CAUSE, 2)], workers) == (slow,)


def test_a_pause_explains_slow_steps_of_a_partner_now_and_then() -> None:
    # GIVEN a rank slow in three single steps, and one slow throughout
    workers = {0: (0, 0), 1: (0, 0)}
    throughout = found(slow_compute.CAUSE, 0, 1)
    now_and_then = replace(throughout, shown_steps=(3, 6, 9))

    pauses = found(gc_pause.CAUSE, 1)
    stalls = replace(found(data_stall.CAUSE, 1), shown_steps=(3, 6, 9))

    # THEN what its partner does now and then is all there is to the first
    for each in (pauses, stalls):
        assert drop_waiting_partners([now_and_then], [each], workers) == ()
        assert drop_waiting_partners([throughout], [each], workers) == (throughout,)


def test_ranks_of_a_host_that_are_slow_now_and_then_are_one_that_is() -> None:
    ranks = {
        rank: RankInfo(rank=rank, coords=Coords(dp=rank), host=f"node{rank // 2}")
        for rank in range(4)
    }
    one, other = (
        replace(found(slow_compute.CAUSE, rank), steps=steps, shown_steps=steps)
        for rank, steps in ((0, (3, 9)), (1, (5, 9)))
    )

    (joined,) = merge_hosts([one, other], ranks)

    assert (joined.ranks, joined.steps, joined.shown_steps) == ((0, 1), (3, 9), (3, 5, 9))
    # AND one that is slow throughout makes the host so
    (joined,) = merge_hosts([one, replace(other, shown_steps=None)], ranks)
    assert joined.shown_steps is None
