from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rankscope.analysis.replay.schedule import NUM_SLOTS, order_by_level, replay
from rankscope.analysis.trace.errors import CycleError

if TYPE_CHECKING:
    from random import Random


def edges(*pairs: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    table = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def test_node_begins_at_the_last_end_of_its_predecessors() -> None:
    # Durations: 5, 9, 1, 2.
    schedule = order_by_level(4, *edges((0, 2), (1, 2), (2, 3)), across=np.zeros(4, np.bool_))
    durations = np.array([5.0, 9.0, 1.0, 2.0])[np.argsort(schedule.position)].reshape(4, 1, 1)

    ends = replay(schedule, durations)[schedule.position, 0, 0]

    assert ends.tolist() == [5.0, 9.0, 10.0, 12.0]


def test_node_across_replicas_waits_for_the_slowest_replica() -> None:
    # Node 0 takes 3 on one replica and 8 on the other; node 1 is shared.
    schedule = order_by_level(2, *edges((0, 1)), across=np.array([False, True]))
    durations = np.array([[[3.0], [8.0]], [[0.0], [0.0]]])

    ends = replay(schedule, durations)

    assert ends[1, :, 0].tolist() == [8.0, 8.0]


def test_cycle_raises_with_the_number_of_its_nodes() -> None:
    with pytest.raises(CycleError) as caught:
        order_by_level(3, *edges((0, 1), (1, 2), (2, 1)), across=np.zeros(3, np.bool_))

    assert caught.value.num_nodes == 2


@st.composite
def graphs(draw: st.DrawFn) -> tuple[int, list[tuple[int, int]], list[float]]:
    num = draw(st.integers(1, 40))
    pairs = draw(
        st.lists(
            st.tuples(st.integers(0, num - 1), st.integers(0, num - 1)).filter(
                lambda pair: pair[0] < pair[1]
            ),
            max_size=150,
            unique=True,
        )
    )
    return num, pairs, draw(st.lists(st.floats(0, 100), min_size=num, max_size=num))


@given(graphs(), st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_replay_equals_the_longest_path(
    graph: tuple[int, list[tuple[int, int]], list[float]], random: Random
) -> None:
    num, pairs, durations = graph
    names = list(range(num))
    random.shuffle(names)
    expected = [0.0] * num
    for node in range(num):
        begin = max((expected[src] for src, dst in pairs if dst == node), default=0.0)
        expected[node] = begin + durations[node]

    shuffled = [(names[src], names[dst]) for src, dst in pairs]
    schedule = order_by_level(num, *edges(*shuffled), across=np.zeros(num, np.bool_))
    values = np.empty(num)
    values[schedule.position[names]] = durations
    ends = replay(schedule, values.reshape(num, 1, 1))[schedule.position[names], 0, 0]

    assert ends == pytest.approx(expected)


def test_node_with_more_predecessors_than_slots_waits_for_all() -> None:
    num = NUM_SLOTS + 5
    schedule = order_by_level(
        num + 1, *edges(*((n, num) for n in range(num))), across=np.zeros(num + 1, np.bool_)
    )
    durations = np.zeros(num + 1)
    durations[schedule.position] = [*range(num), 0.5]

    ends = replay(schedule, durations.reshape(-1, 1, 1))

    assert ends[schedule.position[num], 0, 0] == num - 1 + 0.5
