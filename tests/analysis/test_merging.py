"""What a stalled rank explains of the ranks that look slow."""

from __future__ import annotations

from analysis.candidate import Candidate
from analysis.merging import without_partners


def found(cause: str, *ranks: int) -> Candidate:
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

    assert without_partners([found("slow-compute", 0, 1)], [found("data-stall", 1)], workers) == ()


def test_a_rank_without_such_partners_is_slow_and_stalled_at_once() -> None:
    # GIVEN rank 2, alone in its worker, that computes slowly and misses its input as well
    workers = {0: (0, 0), 1: (0, 0), 2: (1, 0)}
    slow = found("slow-compute", 2)

    assert without_partners([slow], [found("data-stall", 2)], workers) == (slow,)
