"""Pauses of garbage collection, against the gaps that a healthy host leaves."""

from __future__ import annotations

import numpy as np

from analysis.evidence import GapItems, Place
from analysis.pauses import gc_pauses
from analysis.profile import Basis, Profile
from analysis.stalls import Stalls, stalls_of

MS = 1_000_000
NUM_RANKS, NUM_STEPS = 4, 8

Gap = tuple[int, int, int]
"""Step, rank, ms."""


def stalls(*gaps: Gap) -> Stalls:
    """Return ranks that compute 100 ms a step, with these gaps before forwards."""
    total = np.full((NUM_RANKS, NUM_STEPS), 100.0 * MS)
    profile = Profile(
        ranks=np.arange(NUM_RANKS, dtype=np.int32),
        steps=np.arange(NUM_STEPS, dtype=np.int32),
        stage=np.zeros(NUM_RANKS, dtype=np.int32),
        total_ns=total,
        expected_ns=total,
        basis=(Basis.PEERS,) * NUM_RANKS,
    )
    step, rank, ms = zip(*gaps, strict=True)
    items = GapItems(
        step=np.array(step, dtype=np.int32),
        rank=np.array(rank, dtype=np.int32),
        place=np.full(len(gaps), Place.FORWARD, dtype=np.int8),
        gap_ns=np.array(ms, dtype=np.int64) * MS,
        operation=np.full(len(gaps), -1),
    )
    return stalls_of(profile, items, np.zeros(1))


def told(*gaps: Gap) -> list[tuple[int, ...]]:
    usual = np.ones(NUM_STEPS, dtype=np.bool_)
    return [each.ranks for each in gc_pauses(stalls(*gaps), usual, frozenset())[0]]


def test_pauses_are_told_where_hosts_leave_no_gap_else() -> None:
    # GIVEN four pauses of some 150 ms in 4 x 8 ranks and steps, and no other gap before a forward
    assert told((1, 0, 150), (3, 2, 160), (4, 1, 140), (6, 3, 150)) == [(0, 1, 2, 3)]


def test_gaps_of_every_rank_and_step_are_no_pauses() -> None:
    # GIVEN 60 ms before a forward everywhere: that is how this host launches
    assert told(*((step, rank, 60) for step in range(8) for rank in range(4))) == []


def test_pauses_stand_out_of_usual_gaps_by_ten_times() -> None:
    # GIVEN 20 ms everywhere, and besides 150 and 250 ms on two ranks each
    usual = [(step, rank, 20) for step in range(8) for rank in range(4)]

    assert told(*usual, (1, 0, 150), (3, 2, 150)) == []
    assert told(*usual, (1, 0, 250), (3, 2, 250)) == [(0, 2)]
