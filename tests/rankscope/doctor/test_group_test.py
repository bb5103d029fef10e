"""Group testing: single slow hosts are found, several are found or called not unique."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope.doctor.active.trials import judge_groups
from rankscope.doctor.group_test import MIN_GRID_HOSTS, find_suspects, plan_ring, plan_rounds
from rankscope.doctor.outliers import find_slow
from rankscope.doctor.result import State


def suspects_of(num_hosts: int, bad: set[int]) -> tuple[set[int], set[int]]:
    """Return the hosts found, and those that may be bad."""
    groups = [group for of_round in plan_rounds(num_hosts) for group in of_round]
    found = find_suspects(groups, [group for group in groups if bad & {*group}])
    assert found.contradictory == ()
    return set(found.slow), {*found.hidden, *(host for group in found.unclear for host in group)}


def test_forty_eight_hosts_are_six_rows_and_eight_columns() -> None:
    rows, columns = plan_rounds(48)

    assert [len(group) for group in rows] == [8] * 6
    assert [len(group) for group in columns] == [6] * 8
    assert rows[0] == tuple(range(8))
    assert columns[0] == (0, 8, 16, 24, 32, 40)


@given(st.integers(min_value=2, max_value=300))
def test_each_host_is_in_two_groups_and_with_each_other_host_at_most_once(num_hosts: int) -> None:
    rounds = plan_rounds(num_hosts)

    for groups in rounds:
        members = [host for group in groups for host in group]
        assert len(members) == len(set(members))
        assert all(len(group) > 1 for group in groups)
    every = [group for groups in rounds for group in groups]
    pairs = [pair for group in every for pair in combinations(sorted(group), 2)]
    assert len(pairs) == len(set(pairs))
    num_groups = np.bincount([host for group in every for host in group], minlength=num_hosts)
    assert num_groups.min() >= (2 if num_hosts > 2 else 1)
    if num_hosts >= MIN_GRID_HOSTS:
        assert min(len(groups) for groups in rounds[:2]) >= 4


@given(st.integers(min_value=3, max_value=200), st.data())
def test_each_single_bad_host_is_found(num_hosts: int, data: st.DataObject) -> None:
    bad = data.draw(st.integers(min_value=0, max_value=num_hosts - 1))

    assert suspects_of(num_hosts, {bad}) == ({bad}, set())


@given(st.integers(min_value=4, max_value=200), st.data())
def test_several_bad_hosts_are_found_or_not_unique(num_hosts: int, data: st.DataObject) -> None:
    hosts = st.sets(st.integers(min_value=0, max_value=num_hosts - 1), min_size=2, max_size=4)
    bad = data.draw(hosts)

    slow, unclear = suspects_of(num_hosts, bad)

    assert slow <= bad
    assert bad <= slow | unclear


def test_a_host_behind_two_slow_ones_is_not_judged() -> None:
    # Rows (0-3) (4-7) (8-11) (12-16): 11 is in the row of 8 and in the column of 3.
    groups = [group for of_round in plan_rounds(17) for group in of_round]

    suspects = find_suspects(groups, [group for group in groups if {3, 8, 11} & {*group}])

    assert (suspects.slow, suspects.unclear, suspects.hidden) == ((3, 8), (), (11,))


@pytest.mark.parametrize(
    ("bad", "slow", "unclear"),
    [
        (set(), set(), set()),
        ({0, 3}, {0, 3}, set()),  # the same row
        ({0, 8}, {0, 8}, set()),  # the same column
        ({0, 9}, set(), {0, 1, 8, 9}),
    ],
)
def test_two_bad_hosts_of_forty_eight(bad: set[int], slow: set[int], unclear: set[int]) -> None:
    assert suspects_of(48, bad) == (slow, unclear)


def test_two_bad_hosts_of_eight_are_always_found() -> None:
    for bad in combinations(range(8), 2):
        assert suspects_of(8, {*bad}) == ({*bad}, set())


def test_a_slow_group_of_hosts_that_are_fast_elsewhere_contradicts() -> None:
    found = find_suspects([(0, 1), (0, 2), (1, 2)], [(0, 1)])

    assert (found.slow, found.unclear, found.contradictory) == ((), (), ((0, 1),))


def test_the_times_of_groups_name_the_slow_host() -> None:
    hosts = [f"n{number:02}" for number in range(48)]
    groups = [group for of_round in plan_rounds(48) for group in of_round]
    noise = np.random.default_rng(1).normal(1.0, 0.01, len(groups)).tolist()
    times = [
        value * (1.5 if 17 in group else 1.0) for value, group in zip(noise, groups, strict=True)
    ]

    passed = {"all-reduce": times, "all-to-all": noise}
    members = [(host, "") for host in hosts]

    found = [*judge_groups("groups", members, groups, [passed])]

    assert [(host, out.reason) for host, _, out in found if out.is_deviation] == [
        ("n17", found[0][2].reason)
    ]
    assert found[0][2].reason.startswith("all 2 groups with this host are slow: all-reduce 1.5")
    assert len(found) == 48


def test_noise_alone_accuses_no_one() -> None:
    random = np.random.default_rng(7)
    accused = 0
    for _ in range(300):
        slow = find_slow(random.normal(1.0, 0.02, 14).tolist())
        accused += 0 if slow is None else int(slow.sum())

    assert accused <= 1


@pytest.mark.parametrize("num_slow", [1, 2, 3])
def test_outliers_are_found_among_eight(num_slow: int) -> None:
    times = np.random.default_rng(3).normal(1.0, 0.01, 8)
    times[:num_slow] *= 1.2

    slow = find_slow(times.tolist())

    assert slow is not None
    assert slow.tolist() == [True] * num_slow + [False] * (8 - num_slow)


@given(st.integers(min_value=2, max_value=60))
def test_each_host_has_two_neighbours_on_a_ring(num_hosts: int) -> None:
    rounds = plan_ring(num_hosts)

    pairs = [pair for of_round in rounds for pair in of_round]
    for of_round in rounds:
        assert len({host for pair in of_round for host in pair}) == 2 * len(of_round)
    assert len(pairs) == len(set(pairs)) == (1 if num_hosts == 2 else num_hosts)
    assert all(abs(one - other) in {1, num_hosts - 1} for one, other in pairs)


@pytest.mark.parametrize("bad", [(0, 0), (3, 1)])
def test_a_slow_adapter_is_named_by_both_of_its_pairs(bad: tuple[int, int]) -> None:
    num_hosts, num_adapters = 4, 2
    members = [(f"n{host}", f"mlx5_{lane}") for lane in range(num_adapters) for host in range(4)]
    number = bad[1] * num_hosts + bad[0]
    groups = [
        tuple(lane * num_hosts + host for host in pair)
        for lane in range(num_adapters)
        for of_round in plan_ring(num_hosts)
        for pair in of_round
    ]
    noise = np.random.default_rng(5).normal(1.0, 0.02, len(groups)).tolist()
    times = [v * (4.0 if number in g else 1.0) for v, g in zip(noise, groups, strict=True)]

    found = [*judge_groups("nic-pairs", members, groups, [{"all-reduce": times}])]

    (accused,) = ((host, outcome.part) for host, _, outcome in found if outcome.is_deviation)
    assert accused == members[number]


def test_of_two_hosts_the_slow_adapter_is_not_unique() -> None:
    members = [(f"n{host}", f"mlx5_{lane}") for lane in range(4) for host in range(2)]
    groups = [(2 * lane, 2 * lane + 1) for lane in range(4)]

    found = [*judge_groups("nic-pairs", members, groups, [{"all-reduce": [1.0, 1.01, 4.0, 0.99]}])]

    texts = [(host, out.reason) for host, _, out in found if out.is_deviation]
    text = "not unique: at least one of n0 mlx5_2, n1 mlx5_2 is slow"
    assert texts == [("n0", text), ("n1", text)]


@pytest.mark.parametrize("num_hosts", [6, 8, 12, 16, 48])
def test_two_slow_hosts_are_found_from_noisy_times(num_hosts: int) -> None:
    random = np.random.default_rng(num_hosts)
    groups = [group for of_round in plan_rounds(num_hosts) for group in of_round]
    hosts = [f"n{number}" for number in range(num_hosts)]
    for bad in combinations(range(num_hosts), 2):
        noise = random.normal(1.0, 0.02, len(groups))
        times = [v * (1.4 if {*bad} & {*g} else 1.0) for v, g in zip(noise, groups, strict=True)]
        members = [(host, "") for host in hosts]
        found = [*judge_groups("groups", members, groups, [{"all-reduce": times}])]
        named = {host for host, _, outcome in found if outcome.is_deviation}
        certain = {host for host, _, outcome in found if outcome.state is State.ERROR}
        assert certain <= {f"n{number}" for number in bad} <= named


def test_three_things_have_too_few_peers() -> None:
    assert find_slow([1.0, 1.0, 9.0]) is None
    assert find_slow([1.0, 1.01, 0.99, 9.0]) is not None
