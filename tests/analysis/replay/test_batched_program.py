from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rankscope.analysis.replay.batched_program import Shape, compile_shapes
from rankscope.analysis.replay.batched_replay import ShapeColumns, StepRange
from rankscope.analysis.trace.errors import CycleError

if TYPE_CHECKING:
    from rankscope.analysis.replay.batched_program import CollectiveKey, ShapeProgram

Pairs = list[tuple[int, int]]
Table = list[list[float]]


def shape(
    num: int,
    edges: Pairs,
    *,
    gates: dict[int, int] | None = None,
    shared: dict[int, CollectiveKey] | None = None,
) -> Shape:
    """Return a shape in which operation k has label k and the last one closes the step."""
    table = np.array(edges, dtype=np.int64).reshape(-1, 2)
    gate = np.full(num, -1)
    for operation, number in (gates or {}).items():
        gate[operation] = number
    return Shape(
        label=np.arange(num),
        src=table[:, 0],
        dst=table[:, 1],
        gate=gate,
        shared=shared or {},
        closing=(num - 1,),
    )


def columns(
    program: ShapeProgram, recorded: Table, ideal: list[float], steps: list[int]
) -> ShapeColumns:
    """Return columns of a shape; ``recorded`` is by operation, then by column."""
    step = np.array(steps)
    return ShapeColumns(
        program=program,
        recorded=[np.array(row) for row in recorded],
        ideal=[np.array([value]) for value in ideal],
        step=step,
        replica=np.arange(len(steps)),
        begins=np.flatnonzero(np.diff(step, prepend=-1)),
    )


def test_operation_begins_at_the_last_end_of_its_predecessors() -> None:
    # Durations: 5, 9, 1, 2.
    (program,) = compile_shapes([shape(4, [(0, 2), (1, 2), (2, 3)])])
    steps = StepRange(shapes=[columns(program, [[5], [9], [1], [2]], [0] * 4, [0])], num_steps=1)

    (ends,) = steps.replay([steps.shapes[0].recorded])

    assert [float(end[0]) for end in ends[:4]] == [5, 9, 10, 12]


def test_members_of_a_group_wait_for_the_last_arrival() -> None:
    # Durations: 5, 9, 1, 2; operations 2 and 3 are a send and its receive.
    (program,) = compile_shapes([shape(4, [(0, 2), (1, 3)], gates={2: 0, 3: 0})])
    steps = StepRange(shapes=[columns(program, [[5], [9], [1], [2]], [0] * 4, [0])], num_steps=1)

    (ends,) = steps.replay([steps.shapes[0].recorded])

    assert [float(end[0]) for end in ends[2:4]] == [10, 11]


def reduction(num_computes: int) -> Shape:
    """Return a chain of computes and then a collective over all replicas."""
    num = num_computes + 1
    return shape(
        num,
        [(k, k + 1) for k in range(num_computes)],
        gates={num_computes: 0},
        shared={0: (7, 0, 0)},
    )


def test_member_without_predecessors_arrives_at_the_start_of_the_step() -> None:
    # Operation 0 ends 5 before the step's start, as a clock error may have it. Operation 1 follows
    # it and is in a group with 2.
    (program,) = compile_shapes([shape(4, [(0, 1), (1, 3)], gates={1: 0, 2: 0})])
    steps = StepRange(shapes=[columns(program, [[-5], [2], [2], [1]], [0] * 4, [0])], num_steps=1)

    ends = steps.replay([[np.array([value]) for value in (-5.0, 2.0, 2.0, 1.0)]])

    assert [float(row[0]) for row in ends[0][:4]] == [-5, 2, 2, 3]


def test_replicas_of_different_shapes_join_the_collective_of_their_step() -> None:
    long, short = compile_shapes([reduction(2), reduction(1)])
    # Step 0: one of each shape arrives, at 3 + 4 and at 5. Step 1: two long ones, at 2 and 9.
    shapes = [
        columns(long, [[3, 1, 4], [4, 1, 5], [1, 1, 1]], [0] * 3, [0, 1, 1]),
        columns(short, [[5], [2]], [0] * 2, [0]),
    ]
    steps = StepRange(shapes=shapes, num_steps=2)

    ends = steps.replay([each.recorded for each in shapes])

    assert ends[0][2].tolist() == [8, 10, 10]
    assert ends[1][1].tolist() == [9]
    assert steps.step_times(ends).tolist() == [9, 10]


def test_replica_alone_waits_for_ideal_ones() -> None:
    (program,) = compile_shapes([reduction(1)])
    # Ideal: all arrive at 4 and reduce for 2.
    only = columns(program, [[3, 9, 4], [1, 1, 7]], [4, 2], [0, 0, 0])
    steps = StepRange(shapes=[only], num_steps=1)
    ideal = steps.ideal()
    everything = 0b11

    alone = steps.alone(0, everything, steps.put_back(everything, ideal)[0], ideal)

    # The first is faster and waits for the others, the second makes them wait, the third reduces
    # longer. If a replica reduces faster than the others, they end last.
    assert alone.tolist() == [6, 11, 11]


def test_only_nodes_that_a_label_moves_are_computed_again() -> None:
    (program,) = compile_shapes([shape(4, [(0, 2), (1, 2), (2, 3)])])

    (only_round,) = program.rounds_moved_by(0b0010, through_shared=False)

    assert list(only_round.nodes) == [1, 2, 3]


def test_cycle_of_operations_raises_with_their_number() -> None:
    with pytest.raises(CycleError) as caught:
        compile_shapes([shape(3, [(0, 1), (1, 2), (2, 1)])])

    assert caught.value.num_nodes == 2


def test_shapes_with_collectives_in_opposite_order_are_rejected() -> None:
    first, second = (7, 0, 0), (7, 0, 1)
    gates = {0: 0, 1: 1}

    with pytest.raises(CycleError):
        compile_shapes(
            [
                shape(2, [(0, 1)], gates=gates, shared={0: first, 1: second}),
                shape(2, [(0, 1)], gates=gates, shared={0: second, 1: first}),
            ]
        )


@st.composite
def graphs(draw: st.DrawFn) -> tuple[int, Pairs, Table, list[float]]:
    num, num_columns = draw(st.integers(1, 20)), draw(st.integers(1, 3))
    nodes = st.integers(0, num - 1)
    pairs = draw(
        st.lists(st.tuples(nodes, nodes).filter(lambda pair: pair[0] < pair[1]), max_size=60)
    )
    times = st.floats(0, 100)
    row = st.lists(times, min_size=num_columns, max_size=num_columns)
    recorded = draw(st.lists(row, min_size=num, max_size=num))
    return num, pairs, recorded, draw(st.lists(times, min_size=num, max_size=num))


@pytest.mark.slow
@given(graphs(), st.integers(0, 2**20 - 1))
@settings(max_examples=60, deadline=None)
def test_replay_equals_the_longest_path(
    graph: tuple[int, Pairs, Table, list[float]], labels: int
) -> None:
    num, pairs, recorded, ideal = graph
    (program,) = compile_shapes([shape(num, pairs)])
    num_columns = len(recorded[0])
    steps = StepRange(shapes=[columns(program, recorded, ideal, [0] * num_columns)], num_steps=1)

    (ends,) = steps.put_back(labels, steps.ideal())

    for column in range(num_columns):
        expected = [0.0] * num
        for node in range(num):
            begin = max((expected[src] for src, dst in pairs if dst == node), default=0.0)
            taken = recorded[node][column] if labels >> node & 1 else ideal[node]
            expected[node] = begin + taken
        found = [float(np.broadcast_to(end, num_columns)[column]) for end in ends]
        assert found == pytest.approx(expected)
