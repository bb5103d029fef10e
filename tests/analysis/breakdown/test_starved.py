from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rankscope.analysis.arrays.grouping import NO_GROUP
from rankscope.analysis.breakdown.starved import attribute_waits, find_starved_ranks
from rankscope.analysis.replay.model import NO_LINK, ReplayModel, WaitIntervals, remove_overlaps
from rankscope.analysis.replay.operations import Operations

Op = tuple[int, int, int, int]
"""(rank, start, end, group)."""


def model_of(
    ops: list[Op], edges: list[tuple[int, int]], *, ideal_ns: list[int] | None = None
) -> ReplayModel:
    rank, start, end, group = np.array(ops, dtype=np.int64).T.copy()
    table = np.array(edges, dtype=np.int64).reshape(-1, 2)
    zero = np.zeros(len(ops))
    operations = Operations(
        steps=(0,),
        step=zero.astype(np.int32),
        replica=zero.astype(np.int32),
        label=zero.astype(np.int64),
        group=group,
        duration_ns=(end - start).astype(np.float64),
        gap_ns=zero,
        start_ns=start,
        end_ns=end,
        closes_step=zero == 0,
        src=table[:, 0],
        dst=table[:, 1],
    )
    return ReplayModel(
        operations=operations,
        ideal_ns=zero if ideal_ns is None else np.array(ideal_ns, dtype=np.float64),
        ideal_gap_ns=zero,
        kind=zero.astype(np.int16),
        kinds=("forward",),
        rank=rank.astype(np.int32),
        dp=zero.astype(np.int32),
        stage=zero.astype(np.int32),
        on_device=zero == 0,
    )


def waits(*rows: tuple[int, int, int, int]) -> WaitIntervals:
    """Return waits of (rank, operation, start, end)."""
    table = np.array(rows, dtype=np.int64).reshape(-1, 4).T.copy()
    return WaitIntervals(
        rank=table[0].astype(np.int32),
        operation=table[1],
        start_ns=table[2],
        end_ns=table[3],
    )


def pairs(model: ReplayModel, direct: WaitIntervals) -> dict[tuple[int, int], int]:
    found = attribute_waits(model, direct)
    keys = zip(direct.rank[found.wait].tolist(), found.on_rank.tolist(), strict=True)
    sums = Counter[tuple[int, int]]()
    for key, waited_ns in zip(keys, found.waited_ns.tolist(), strict=True):
        sums[key] += waited_ns
    return dict(sums)


# Rank 2 computes until 100, then communicates with rank 1 (group 7) until 110. Rank 1 computes
# until 130, then communicates with rank 0 (group 8), which has waited since 20, until 140.
CHAIN = model_of(
    [
        (0, 0, 20, NO_GROUP),
        (1, 0, 10, NO_GROUP),
        (2, 0, 100, NO_GROUP),
        (1, 10, 110, 7),
        (2, 100, 110, 7),
        (1, 110, 130, NO_GROUP),
        (0, 20, 140, 8),
        (1, 130, 140, 8),
    ],
    [(1, 3), (2, 4), (3, 5), (0, 6), (5, 7)],
)


def test_a_rank_that_only_passes_a_delay_on_is_not_charged_with_it() -> None:
    # Rank 0 waits from 20 to 130. Backwards: rank 1 computed from 110; the transfer from 100
    # belongs to rank 2, which arrived last, and so does all before it.
    assert pairs(CHAIN, waits((0, 6, 20, 130))) == {(0, 1): 20, (0, 2): 90}


def test_a_rank_waits_on_the_one_that_computes_meanwhile() -> None:
    assert pairs(CHAIN, waits((1, 3, 10, 100))) == {(1, 2): 90}


def test_a_wait_is_followed_to_a_cause_before_its_begin() -> None:
    # Rank 2 takes 400 us where 100 are ideal, rank 1 as long as ever after it. Rank 0 has work of
    # its own until rank 1 is half done, then waits 300 us; 250 us less and it would wait 50.
    us = 1_000
    ops = [
        (2, 0, 400 * us, NO_GROUP),
        (2, 400 * us, 410 * us, 7),
        (1, 100 * us, 410 * us, 7),
        (1, 410 * us, 1_000 * us, NO_GROUP),
        (0, 0, 700 * us, NO_GROUP),
        (0, 700 * us, 1_010 * us, 8),
        (1, 1_000 * us, 1_010 * us, 8),
    ]
    ideal_us = [150, 10, 10, 590, 700, 10, 10]
    model = model_of(
        ops, [(0, 1), (1, 3), (2, 3), (4, 5), (3, 6)], ideal_ns=[us * one for one in ideal_us]
    )
    waited = np.array([0, 0, 300, 0, 0, 300, 0]) * us
    model.operations.duration_ns[:] -= waited

    found = pairs(model, waits((0, 5, 700 * us, 1_000 * us)))

    assert found == {(0, 2): 250 * us, (0, 1): 50 * us}


def slow_transfer(*, overlap_us: int) -> ReplayModel:
    """Return two steps: a transfer of ranks 1 and 2 takes 300 us where 50 are ideal, and ends step
    0; in step 1, which begins ``overlap_us`` before, rank 0 waits for rank 1.
    """
    us = 1_000
    ops = [
        (1, 100 * us, 400 * us, 7),
        (2, 100 * us, 400 * us, 7),
        (1, 400 * us, 500 * us, NO_GROUP),
        (0, (400 - overlap_us) * us, 510 * us, 8),
        (1, 500 * us, 510 * us, 8),
    ]
    model = model_of(ops, [(2, 4)], ideal_ns=[50 * us, 50 * us, 100 * us, 10 * us, 10 * us])
    operations = replace(
        model.operations, steps=(0, 1), step=np.array([0, 0, 1, 1, 1], dtype=np.int32)
    )
    operations.duration_ns[3] = 10 * us
    overlaps = np.array([0, overlap_us * us])
    return replace(model, operations=operations, overlap_ns=overlaps)


def test_a_wait_for_a_slow_transfer_is_for_its_link_also_if_the_step_before_had_it() -> None:
    # GIVEN a wait of rank 0 from 200 to 500 us, of which 250 are the transfer's, on link 3
    us, links = 1_000, np.array([3, 3, NO_LINK, NO_LINK, NO_LINK], dtype=np.int32)
    direct = waits((0, 3, 200 * us, 500 * us))

    found = attribute_waits(slow_transfer(overlap_us=200), direct, links)

    columns = (found.on_rank, found.on_link, found.waited_ns)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    assert sorted(rows) == [(NO_LINK, 3, 250 * us), (1, NO_LINK, 50 * us)]
    # AND without the links it is for the member that arrived last
    assert attribute_waits(slow_transfer(overlap_us=200), direct).on_link.tolist() == [NO_LINK] * 1


def test_the_rank_that_waits_most_comes_first_and_a_short_wait_is_not_listed() -> None:
    direct = waits((0, 6, 20, 130), (1, 3, 10, 100), (2, 4, 99, 100))

    found = find_starved_ranks(direct, attribute_waits(CHAIN, direct), dict.fromkeys(range(3), 200))

    assert [(entry.rank, entry.wait_ratio) for entry in found] == [(0, 0.55), (1, 0.45)]
    assert [(part.rank, part.ratio) for part in found[0].waits_on] == [(2, 0.45), (1, 0.1)]


def test_each_moment_of_overlapping_waits_counts_once() -> None:
    found = remove_overlaps(waits((0, 1, 0, 10), (0, 2, 4, 15), (0, 3, 6, 12), (1, 2, 3, 5)))

    columns = (found.rank, found.operation, found.start_ns, found.end_ns)
    assert set(zip(*(column.tolist() for column in columns), strict=True)) == {
        (0, 1, 0, 10),
        (0, 2, 10, 15),
        (1, 2, 3, 5),
    }


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 50)), min_size=1, max_size=20))
@settings(deadline=None)
def test_attributing_waits_neither_adds_nor_loses_time(chain: list[tuple[int, int]]) -> None:
    # Consecutive operations, each waiting for the one before.
    ops: list[Op] = []
    now = 0
    for rank, length in chain:
        ops.append((rank, now, now + length, NO_GROUP))
        now += length
    ops += [(3, 0, now + 5, 1), (0, now, now + 5, 1)]
    last = len(chain)
    model = model_of(ops, [(k, k + 1) for k in range(last - 1)] + [(last - 1, last + 1)])

    found = pairs(model, waits((3, last, 0, now)))

    for rank in range(3):
        assert found.get((3, rank), 0) == sum(length for r, length in chain if r == rank)


def test_a_walk_in_a_cycle_ends_at_the_rank_that_it_has_reached() -> None:
    # Two operations without length, each a predecessor of the other.
    cycle = model_of(
        [(1, 50, 50, NO_GROUP), (2, 50, 50, NO_GROUP), (0, 0, 60, 7), (1, 50, 60, 7)],
        [(0, 1), (1, 0), (0, 3)],
    )

    found = pairs(cycle, waits((0, 2, 10, 50)))

    assert sum(found.values()) == 40
    assert {rank for rank, _ in found} == {0}
