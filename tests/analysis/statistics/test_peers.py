from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope.analysis.replay.model import ComputeItems
from rankscope.analysis.statistics.peers import (
    Basis,
    ComputeProfile,
    compare_with_peers,
    median_of_peers,
)
from rankscope.tracer.topology import Coords


@given(
    st.integers(2, 7).flatmap(
        lambda num: st.lists(
            st.lists(st.integers(0, 9), min_size=3, max_size=3), min_size=num, max_size=num
        )
    )
)
def test_each_row_is_compared_with_the_median_of_the_others(rows: list[list[int]]) -> None:
    value = np.array(rows, dtype=np.float64)

    found = median_of_peers(value)

    for row in range(len(value)):
        assert found[row].tolist() == np.median(np.delete(value, row, axis=0), axis=0).tolist()


def profile(times: dict[int, list[float]], *, stage_of: dict[int, int]) -> ComputeProfile:
    """Return a profile with one forward micro-batch a step; ``times`` by rank, one a step."""
    rows = [(rank, step, ns) for rank, steps in times.items() for step, ns in enumerate(steps)]
    rank, step, ns = (list(column) for column in zip(*rows, strict=True))
    zero = np.zeros(len(rows))
    items = ComputeItems(
        step=np.array(step, np.int32),
        rank=np.array(rank, np.int32),
        kind=zero.astype(np.int8),
        chunk=zero.astype(np.int32),
        microbatch=zero.astype(np.int32),
        self_ns=np.array(ns, np.int64),
    )
    return compare_with_peers(items, {r: Coords(pp=s) for r, s in stage_of.items()})


def test_a_rank_with_three_peers_in_its_stage_is_compared_with_them() -> None:
    found = profile({0: [10], 1: [10], 2: [18], 3: [12]}, stage_of=dict.fromkeys(range(4), 0))

    assert found.basis == (Basis.PEERS,) * 4
    assert found.excess_ratio[2].tolist() == [pytest.approx(0.8)]


def test_slow_ranks_do_not_shift_the_baseline_of_their_stage() -> None:
    # GIVEN eight ranks, three of which are 10 % slower
    times = dict(enumerate([1000.0, 990.0, 1010.0, 980.0, 1020.0, 1100.0, 1100.0, 1100.0]))

    found = profile({rank: [ns] for rank, ns in times.items()}, stage_of=dict.fromkeys(times, 0))

    # THEN each of them is compared with the median of the other five
    assert found.expected_ns[5:].tolist() == [[1000.0]] * 3
    assert found.expected_ns[:5, 0].tolist() == [1000.0, 1005.0, 995.0, 1005.0, 995.0]


@pytest.mark.parametrize(("slow_steps", "expected"), [((2, 3), 0.15), ((0, 1, 2, 3), None)])
def test_half_of_a_stage_is_slow_if_other_steps_show_equal_work(
    slow_steps: tuple[int, ...], expected: float | None
) -> None:
    # GIVEN eight ranks on two hosts, the second of which is 15 % slower in some steps
    levels = [1000.0, 995.0, 1005.0, 1002.0] * 2
    times = {
        rank: [level * (1.15 if rank > 3 and step in slow_steps else 1.0) for step in range(4)]
        for rank, level in enumerate(levels)
    }

    found = profile(times, stage_of=dict.fromkeys(times, 0)).excess_ratio

    # THEN in these steps the first host is the baseline, and if there are no others, the median
    if expected is not None:
        assert found[:4].max() < 0.01
        assert found[4:, 2] == pytest.approx(expected, abs=0.01)
    else:
        assert found[:4].min() < -0.1


def test_a_single_peer_counts_if_other_stages_agree_with_it() -> None:
    times = {0: [10.0], 1: [18.0], 2: [10.0], 3: [10.0]}

    found = profile(times, stage_of={0: 0, 1: 0, 2: 1, 3: 1})

    assert found.basis[1] is Basis.FEW_PEERS
    assert found.excess_ratio[1].tolist() == [pytest.approx(0.8)]


def test_a_single_peer_alone_proves_nothing() -> None:
    found = profile({0: [10.0], 1: [18.0]}, stage_of={0: 0, 1: 0})

    assert found.basis == (Basis.NOTHING, Basis.NOTHING)
    assert np.isnan(found.excess_ratio).all()


def test_without_peers_a_rank_is_compared_with_its_own_first_steps() -> None:
    found = profile({0: [10] * 6, 1: [10, 10, 10, 15, 15, 15]}, stage_of={0: 0, 1: 0})

    assert found.basis == (Basis.EARLIER, Basis.EARLIER)
    assert found.excess_ratio[1].tolist() == pytest.approx([0, 0, 0, 0.5, 0.5, 0.5])


def test_a_last_stage_is_not_compared_with_the_others() -> None:
    # It may have the output head in addition to its layers.
    found = profile({0: [10], 1: [10], 2: [10], 3: [15]}, stage_of={0: 0, 1: 1, 2: 2, 3: 3})

    assert found.basis[3] is Basis.NOTHING


def test_a_single_pause_in_one_micro_batch_makes_no_slow_rank() -> None:
    num = 5
    items = ComputeItems(
        step=np.zeros(4 * num, np.int32),
        rank=np.repeat(np.arange(4, dtype=np.int32), num),
        kind=np.zeros(4 * num, np.int8),
        chunk=np.zeros(4 * num, np.int32),
        microbatch=np.tile(np.arange(num, dtype=np.int32), 4),
        self_ns=np.array([10, 10, 10, 10, 10] * 3 + [10, 10, 900, 10, 10], np.int64),
    )

    found = compare_with_peers(items, {rank: Coords() for rank in range(4)})

    assert found.excess_ratio[3].tolist() == [0.0]
