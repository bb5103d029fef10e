"""Pauses of garbage collection, against the gaps that a healthy host leaves."""

from __future__ import annotations

from itertools import cycle
from typing import TYPE_CHECKING

import numpy as np

from rankscope.analysis.causes.gc_pause import find_gc_pauses
from rankscope.analysis.replay.model import Place
from tests.support.analysis.stall_builders import stalls_with

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankscope.analysis.causes.host_gaps import HostGaps

NUM_RANKS, NUM_STEPS = 4, 8

Gap = tuple[int, int, int]
"""Step, rank, ms."""


def stalls(*gaps: Gap, places: Sequence[Place] = (Place.FORWARD,)) -> HostGaps:
    """Return ranks with these gaps before forwards, or elsewhere in turn."""
    placed = [(step, rank, place, ms) for (step, rank, ms), place in zip(gaps, cycle(places))]
    return stalls_with(placed, stage=[0] * NUM_RANKS, num_steps=NUM_STEPS)


def told(*gaps: Gap, places: Sequence[Place] = (Place.FORWARD,)) -> list[tuple[int, ...]]:
    allowed = np.ones(len(gaps), dtype=np.bool_)
    found = find_gc_pauses(stalls(*gaps, places=places), allowed, frozenset())
    return [each.ranks for each in found]


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


def test_one_pause_inside_a_step_tells_what_those_at_its_begin_are() -> None:
    # GIVEN a host that runs ahead: what it pauses inside a step its lead hides, but for one
    gaps = ((1, 0, 150), (3, 2, 160), (6, 3, 120))

    # THEN all three are pauses; none is where all lie before a step's first compute
    assert told(*gaps, places=(Place.INPUT, Place.INPUT, Place.BACKWARD)) == [(0, 2, 3)]
    assert told(*gaps, places=(Place.INPUT,)) == []


def test_late_reductions_alone_are_no_pauses() -> None:
    assert told((1, 0, 150), (3, 2, 160), (6, 3, 120), places=(Place.LAUNCH,)) == []


def test_what_a_rank_loses_at_three_steps_on_end_is_no_pause() -> None:
    # GIVEN rank 1 without input in steps 2 to 4, and pauses of ranks 0 and 3 inside steps
    gaps = ((2, 1, 90), (3, 1, 90), (4, 1, 90), (1, 0, 150), (6, 3, 150))
    places = (Place.INPUT, Place.INPUT, Place.INPUT, Place.FORWARD, Place.FORWARD)

    assert told(*gaps, places=places) == [(0, 3)]


def test_a_lead_shortens_pauses_once_two_show_in_full() -> None:
    # GIVEN pauses of 60 and 55 ms, and one of which 30 ms are left, in three steps
    assert told((1, 0, 60), (3, 2, 55), (6, 3, 30)) == [(0, 2, 3)]
    # THEN one of 60 ms and one of 30 are too little to tell
    assert told((1, 0, 60), (6, 3, 30)) == []


def test_what_a_common_dip_explains_is_no_pause() -> None:
    gaps = ((1, 0, 150), (3, 2, 150))

    assert find_gc_pauses(stalls(*gaps), np.array([True, False]), frozenset()) == ()
