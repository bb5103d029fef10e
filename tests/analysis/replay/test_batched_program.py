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
    meeting: dict[int, CollectiveKey] | None = None,
) -> Shape:
    """Operation k has label k; the last one closes the step."""
    table = np.array(edges, dtype=np.int64).reshape(-1, 2)
    gate = np.full(num, -1)
    for operation, number in (gates or {}).items():
        gate[operation] = number
    return Shape(
        label=np.arange(num),
        src=table[:, 0],
        dst=table[:, 1],
        gate=gate,
        meeting=meeting or {},
        closing=(num - 1,),
    )


def part(
    program: ShapeProgram, recorded: Table, ideal: list[float], steps: list[int]
) -> ShapeColumns:
    """``recorded`` by operation, by lane."""
    step = np.array(steps)
    return ShapeColumns(
        program=program,
        recorded=[np.array(row) for row in recorded],
        ideal=[np.array([value]) for value in ideal],
        step=step,
        replica=np.arange(len(steps)),
        begins=np.flatnonzero(np.diff(step, prepend=-1)),
    )


def test_an_operation_begins_when_the_last_that_it_waits_for_has_ended() -> None:
    # 0 (5) and 1 (9) before 2 (1), 2 before 3 (2).
    (program,) = compile_shapes([shape(4, [(0, 2), (1, 2), (2, 3)])])
    block = StepRange(parts=[part(program, [[5], [9], [1], [2]], [0] * 4, [0])], num_steps=1)

    (ends,) = block.replay([block.parts[0].recorded])

    assert [float(end[0]) for end in ends[:4]] == [5, 9, 10, 12]


def test_members_of_a_group_wait_for_each_others_arrival() -> None:
    # 0 (5) before 2 (1), 1 (9) before 3 (2); 2 and 3 are a send and its receive.
    (program,) = compile_shapes([shape(4, [(0, 2), (1, 3)], gates={2: 0, 3: 0})])
    block = StepRange(parts=[part(program, [[5], [9], [1], [2]], [0] * 4, [0])], num_steps=1)

    (ends,) = block.replay([block.parts[0].recorded])

    assert [float(end[0]) for end in ends[2:4]] == [10, 11]


def reduction(num_computes: int) -> Shape:
    """Some computes one after the other, then a collective over all replicas."""
    num = num_computes + 1
    return shape(
        num,
        [(k, k + 1) for k in range(num_computes)],
        gates={num_computes: 0},
        meeting={0: (7, 0, 0)},
    )


def test_a_member_that_waits_for_nothing_is_there_when_the_step_begins() -> None:
    # 0 ends 5 before the step begins, as clocks may have it; 1 follows it and meets 2.
    (program,) = compile_shapes([shape(4, [(0, 1), (1, 3)], gates={1: 0, 2: 0})])
    block = StepRange(parts=[part(program, [[-5], [2], [2], [1]], [0] * 4, [0])], num_steps=1)

    ends = block.replay([[np.array([value]) for value in (-5.0, 2.0, 2.0, 1.0)]])

    assert [float(row[0]) for row in ends[0][:4]] == [-5, 2, 2, 3]


def test_replicas_meet_in_their_own_step_whatever_their_shape() -> None:
    long, short = compile_shapes([reduction(2), reduction(1)])
    # Step 0: one of each shape arrives, at 3 + 4 and at 5; step 1: two long ones, at 2 and 9.
    parts = [
        part(long, [[3, 1, 4], [4, 1, 5], [1, 1, 1]], [0] * 3, [0, 1, 1]),
        part(short, [[5], [2]], [0] * 2, [0]),
    ]
    block = StepRange(parts=parts, num_steps=2)

    ends = block.replay([each.recorded for each in parts])

    assert ends[0][2].tolist() == [8, 10, 10]
    assert ends[1][1].tolist() == [9]
    assert block.step_times(ends).tolist() == [9, 10]


def test_a_replica_alone_waits_for_ideal_ones() -> None:
    (program,) = compile_shapes([reduction(1)])
    # Ideally all arrive at 4 and reduce for 2.
    only = part(program, [[3, 9, 4], [1, 1, 7]], [4, 2], [0, 0, 0])
    block = StepRange(parts=[only], num_steps=1)
    ideal = block.ideal()
    everything = 0b11

    alone = block.alone(0, everything, block.put_back(everything, ideal)[0], ideal)

    # The first is faster and waits for the others; the second makes them wait; the third reduces
    # longer. Where a replica reduces faster than the others, these end last.
    assert alone.tolist() == [6, 11, 11]


def test_only_what_a_label_moves_is_computed_again() -> None:
    (program,) = compile_shapes([shape(4, [(0, 2), (1, 2), (2, 3)])])

    (phase,) = program.moved_by(0b0010, behind=False)

    assert list(phase.nodes) == [1, 2, 3]


def test_operations_that_wait_for_each_other_are_named_not_dropped() -> None:
    with pytest.raises(CycleError) as caught:
        compile_shapes([shape(3, [(0, 1), (1, 2), (2, 1)])])

    assert caught.value.num_nodes == 2


def test_shapes_that_meet_in_opposite_order_are_refused() -> None:
    first, second = (7, 0, 0), (7, 0, 1)
    gates = {0: 0, 1: 1}

    with pytest.raises(CycleError):
        compile_shapes(
            [
                shape(2, [(0, 1)], gates=gates, meeting={0: first, 1: second}),
                shape(2, [(0, 1)], gates=gates, meeting={0: second, 1: first}),
            ]
        )


@st.composite
def graphs(draw: st.DrawFn) -> tuple[int, Pairs, Table, list[float]]:
    num, lanes = draw(st.integers(1, 20)), draw(st.integers(1, 3))
    nodes = st.integers(0, num - 1)
    pairs = draw(
        st.lists(st.tuples(nodes, nodes).filter(lambda pair: pair[0] < pair[1]), max_size=60)
    )
    times = st.floats(0, 100)
    row = st.lists(times, min_size=lanes, max_size=lanes)
    recorded = draw(st.lists(row, min_size=num, max_size=num))
    return num, pairs, recorded, draw(st.lists(times, min_size=num, max_size=num))


@given(graphs(), st.integers(0, 2**20 - 1))
@settings(max_examples=60, deadline=None)
def test_the_replay_is_the_longest_path(
    graph: tuple[int, Pairs, Table, list[float]], labels: int
) -> None:
    num, pairs, recorded, ideal = graph
    (program,) = compile_shapes([shape(num, pairs)])
    lanes = len(recorded[0])
    block = StepRange(parts=[part(program, recorded, ideal, [0] * lanes)], num_steps=1)

    (ends,) = block.put_back(labels, block.ideal())

    for lane in range(lanes):
        expected = [0.0] * num
        for node in range(num):
            begin = max((expected[src] for src, dst in pairs if dst == node), default=0.0)
            taken = recorded[node][lane] if labels >> node & 1 else ideal[node]
            expected[node] = begin + taken
        found = [float(np.broadcast_to(end, lanes)[lane]) for end in ends]
        assert found == pytest.approx(expected)
