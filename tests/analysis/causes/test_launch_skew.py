"""Groups whose members enter a collective late in turn."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from rankscope.analysis.analyze import analyze_run
from rankscope.analysis.causes.launch_skew import find_launch_skews
from rankscope.analysis.replay.model import Place
from rankscope.tracer.span import SpanKind
from rankscope.tracer.topology import Layout
from tests.support.analysis.cluster import (
    MS,
    WORLD,
    Action,
    Begin,
    Cluster,
    Collective,
    Compute,
    End,
    source_of,
)
from tests.support.analysis.gap_builders import gaps_with

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankscope.analysis.causes.candidate import Candidate

NUM_RANKS, NUM_STEPS = 15, 14
GROUPS = tuple((rank, rank + 1, rank + 2) for rank in range(0, NUM_RANKS, 3))
ALL_STEPS = np.ones(NUM_STEPS, dtype=np.bool_)

LATE_MS = (40, 0, 20, 0, 30, 0, 10, 40, 0, 30)
"""Lateness of a group's last member, step by step: 17 ms on average."""

LateMs = dict[tuple[int, int], int]
"""By (step, rank): gap before the rank launches its reduction."""


def in_turn(
    first: int, last: int = 13, *, share: float = 1.0, num_groups: int = len(GROUPS)
) -> LateMs:
    """Return groups whose members are late in turn, in some of the steps."""
    return {
        (step, group[(step + 2 * place) % 3]): round(
            share * LATE_MS[(step + 3 * place) % len(LATE_MS)]
        )
        for place, group in enumerate(GROUPS[:num_groups])
        for step in range(first, last + 1)
    }


def skews(late_ms: LateMs, num_groups: int = len(GROUPS)) -> tuple[Candidate, ...]:
    gaps = [(step, rank, Place.LAUNCH, ms) for (step, rank), ms in late_ms.items()]
    table = gaps_with(gaps, stage=[0] * NUM_RANKS, num_steps=NUM_STEPS)
    return find_launch_skews(
        table, GROUPS[:num_groups], ALL_STEPS, np.zeros(len(table.gaps), dtype=np.bool_)
    )


def test_a_lateness_of_a_few_percent_is_no_skew() -> None:
    # GIVEN 17 ms on average, reduced by a factor of 4: 4 % of the compute
    assert skews(in_turn(4, share=0.25)) == ()


def test_one_group_that_is_late_once_is_no_skew() -> None:
    assert skews({(6, 2): 300}) == ()
    assert skews({(6, 2): 300, (9, 5): 300}) == ()


def test_members_late_in_turn_in_one_stage_are_no_stalled_host() -> None:
    # GIVEN ranks 4 to 7 that launch their reduction 60 ms late in turn, and pairs across the
    # stages (tied embeddings) whose member in stage 1 is then always the later one
    gaps = [(step, 4 + step % 4, Place.LAUNCH, 60) for step in range(2, 12)]
    table = gaps_with(gaps, stage=np.repeat((0, 1), 4).tolist(), num_steps=12)
    groups = ((0, 4), (1, 5), (2, 6), (3, 7), (0, 1, 2, 3), (4, 5, 6, 7))

    (found,) = find_launch_skews(
        table, groups, np.ones(12, dtype=np.bool_), np.zeros(len(table.gaps), dtype=np.bool_)
    )

    assert (found.cause.name, found.ranks) == ("launch-skew", (4, 5, 6, 7))


def skews_of_two_groups(late_ms: LateMs, place: Place) -> tuple[Candidate, ...]:
    """Return the skews of two groups of six ranks."""
    gaps = [(step, rank, place, ms) for (step, rank), ms in late_ms.items()]
    table = gaps_with(gaps, stage=[0] * 12, num_steps=NUM_STEPS)
    groups = tuple(range(6)), tuple(range(6, 12))
    return find_launch_skews(table, groups, ALL_STEPS, np.zeros(len(late_ms), dtype=np.bool_))


RISES_AND_FALLS = {4: (1, 15), 5: (1, 40), 6: (3, 15), 7: (3, 40), 8: (1, 15), 9: (3, 40)}
"""By step, (rank, ms): 15 % or 40 % of the compute, on two ranks in turn."""


@pytest.mark.parametrize("place", [Place.LAUNCH, Place.OTHER])
def test_members_that_stop_after_their_compute_in_turn_are_a_skew(place: Place) -> None:
    # GIVEN reductions that DDP launches inside the backward, so that hosts stop before the
    # optimizer; the lateness changes by 25 ms between steps, more than its mean
    late_ms = {(step, rank): ms for step, (rank, ms) in RISES_AND_FALLS.items()}

    (found,) = skews_of_two_groups(late_ms, place)

    assert (found.cause.name, found.ranks) == ("launch-skew", (1, 3))
    # THEN the excess is the median of 40, 15, 40, 15 and 40
    assert found.steps == (5, 9)
    assert found.excess_ratio == pytest.approx(0.4)
    verb = "launching" if place is Place.LAUNCH else "stopping after compute and entering"
    assert found.evidence == (
        f"2 ranks take turns in {verb} a collective of 6 members 40.0 ms after its median member"
        " (40 % of the compute) in steps 5 to 9; compute is as usual"
    )


@pytest.mark.parametrize("place", [Place.LAUNCH, Place.OTHER])
def test_members_that_are_late_in_two_steps_only_are_no_skew(place: Place) -> None:
    # GIVEN that the others are always in time, so that there is no noise
    assert skews_of_two_groups({(3, 1): 40, (8, 3): 40}, place) == ()
    assert skews_of_two_groups({(3, 1): 40, (4, 3): 40}, place) == ()


def test_members_late_by_a_few_percent_in_turn_are_no_skew() -> None:
    late_ms = {(step, step % 6): 4 for step in range(NUM_STEPS)}

    assert skews_of_two_groups(late_ms, Place.OTHER) == ()


def test_the_price_is_that_of_all_late_members_not_of_the_last_one() -> None:
    # GIVEN eight ranks that compute for 100 ms and reduce for 0.5 ms; in each step three others of
    # them are late by 40, 36 and 32 ms
    def script(rank: int, step: int) -> Iterator[Action]:
        yield Begin(SpanKind.FORWARD, 0)
        yield Compute(30 * MS)
        yield End()
        yield Begin(SpanKind.BACKWARD, 0)
        yield Compute(70 * MS)
        yield End()
        yield Compute({0: 40, 3: 36, 5: 32}.get((rank + 3 * step) % 8, 0) * MS)
        yield Collective(WORLD, SpanKind.DP_COMM)
        yield Begin(SpanKind.OPTIMIZER)
        yield Compute(5 * MS)
        yield End()

    cluster = Cluster(Layout(dp=8), {WORLD: (SpanKind.DP_COMM, tuple(range(8)))})
    cluster.run(12, script)

    (finding,) = analyze_run(source_of(cluster), "run").findings

    assert (finding.cause, finding.ranks) == ("launch-skew", tuple(range(8)))
    # THEN fixing it saves 40 of 145.5 ms in each step
    assert finding.slowdown == pytest.approx(145.5 / 105.5, rel=0.001)
    assert finding.recoverable_ratio == pytest.approx(1.0)
