"""The compiled replay loop against a direct reading of its rules, or the same in Python."""

from __future__ import annotations

import importlib
import subprocess
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rankscope.analysis.arrays.grouping import NO_GROUP
from rankscope.analysis.replay import loop
from rankscope.analysis.replay.program import sort_graph, try_to_sort
from rankscope.analysis.trace.errors import CycleError
from tests.support.analysis import replay_oracle

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

_loop = importlib.import_module("rankscope.analysis.replay._loop")


@dataclass(frozen=True)
class Rows:
    """Rows with their edges and groups; every edge and group leads to a higher number."""

    edges: list[tuple[int, int]]
    group: list[int]
    duration: list[float]
    gap: list[float]


def columns(edges: Sequence[tuple[int, int]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    table = np.array(edges, dtype=np.int64).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def sort(rows: Rows) -> loop.Graph:
    return sort_graph(len(rows.group), *columns(rows.edges), np.array(rows.group, dtype=np.int64))


def expected_times(rows: Rows) -> tuple[list[float], list[float]]:
    """Return arrivals and ends, row by row in an order in which groups come whole."""
    arrivals, ends = [0.0] * len(rows.group), [0.0] * len(rows.group)
    for row, own in enumerate(rows.group):
        item = [row] if own == NO_GROUP else [k for k, g in enumerate(rows.group) if g == own]
        if row != item[0]:
            continue
        for member in item:
            before = [ends[src] for src, dst in rows.edges if dst == member]
            arrivals[member] = max(before, default=0.0) + rows.gap[member]
        for member in item:
            ends[member] = max(arrivals[k] for k in item) + rows.duration[member]
    return arrivals, ends


def test_without_its_compiled_part_only_the_analysis_fails_and_says_what_to_install() -> None:
    script = """
import sys
sys.modules["rankscope.analysis.replay._loop"] = None
import rankscope.tracer
try:
    import rankscope.analysis.analyze
except ImportError as error:
    print(error)
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "apt install gcc python3-dev" in run.stdout


@st.composite
def row_sets(draw: st.DrawFn) -> Rows:
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=12))
    item = [number for number, size in enumerate(sizes) for _ in range(size)]
    row = st.integers(0, len(item) - 1)
    pairs = st.tuples(row, row).filter(lambda pair: item[pair[0]] < item[pair[1]])
    time = st.floats(-5, 100)
    times = st.lists(time, min_size=len(item), max_size=len(item))
    return Rows(
        edges=draw(st.lists(pairs, max_size=60)),
        group=[number if sizes[number] > 1 else NO_GROUP for number in item],
        duration=draw(times),
        gap=draw(times),
    )


@given(row_sets())
@settings(max_examples=100, deadline=None)
def test_the_replay_is_that_of_its_rules(rows: Rows) -> None:
    expected_arrivals, expected_ends = expected_times(rows)
    num = len(rows.group)
    graph = sort(rows)
    arrivals, ends = np.full((2, num), np.nan)

    _loop.replay(graph, 0, num, np.array(rows.duration), np.array(rows.gap), arrivals, ends)

    assert arrivals.tolist() == [expected_arrivals[row] for row in graph.order]
    assert ends.tolist() == [expected_ends[row] for row in graph.order]


@given(
    row_sets(),
    st.lists(st.floats(0, 100), min_size=48, max_size=48),
    st.lists(st.sampled_from([0, 1, 256, 257]), min_size=48, max_size=48),
)
@settings(max_examples=100, deadline=None)
def test_replicas_alone_are_those_of_a_replay_for_each(
    rows: Rows, recorded: list[float], masks: list[int]
) -> None:
    # GIVEN three replicas of equal rows; each group with two rows or more joins all replicas
    num, num_replicas = len(rows.group), 3
    whole = Rows(
        edges=[
            (r * num + src, r * num + dst) for r in range(num_replicas) for src, dst in rows.edges
        ],
        group=rows.group * num_replicas,
        duration=rows.duration * num_replicas,
        gap=[0.0] * num * num_replicas,
    )
    replica = np.repeat(np.arange(num_replicas, dtype=np.int32), num)
    ideal = np.array(whole.duration)
    own_ns = np.resize(np.array(recorded), len(ideal))
    graph = sort(whole)
    size = len(ideal)
    parts = np.array(masks[:num] * num_replicas, dtype=np.uint32)
    closes = np.ones(size, dtype=np.bool_)
    # WHEN two parts of each are put back alone, all at once
    found = np.empty((9, num_replicas))
    _loop.replay_parts(
        graph, 0, size, own_ns, ideal, parts, closes, replica, num_replicas, 9, found
    )

    # THEN the step ends as in a replay of its own
    for part in (0, 8):
        for number in range(num_replicas):
            ends = np.empty(size)
            is_own = (replica == number) & (parts >> part & 1 != 0)
            _loop.replay(graph, 0, size, np.where(is_own, own_ns, ideal), None, None, ends)
            assert found[part, number] == pytest.approx(ends.max(initial=0.0))


@given(row_sets(), st.data())
@settings(max_examples=100, deadline=None)
def test_variants_are_those_of_a_replay_for_each(rows: Rows, data: st.DataObject) -> None:
    # GIVEN several changes, of some rows each
    num = len(rows.group)
    times = st.tuples(st.floats(-5, 100), st.floats(-5, 100))
    changes = [
        data.draw(st.dictionaries(st.integers(0, num - 1), times, max_size=3)) for _ in range(4)
    ]
    closes = np.array(data.draw(st.lists(st.booleans(), min_size=num, max_size=num)))
    listed = sorted((row, number) for number, change in enumerate(changes) for row in change)
    first = np.zeros(num + 1, dtype=np.int32)
    first[1:] = np.cumsum(np.bincount([row for row, _ in listed], minlength=num))
    variant = np.array([number for _, number in listed], dtype=np.int32)
    new = np.array([changes[number][row] for row, number in listed]).reshape(-1, 2).T.copy()
    graph = sort(rows)
    duration, gap, ends = np.array(rows.duration), np.array(rows.gap), np.empty(num)
    _loop.replay(graph, 0, num, duration, gap, None, ends)

    # WHEN all are replayed at once
    latest = np.empty(5)
    _loop.replay_variants(
        graph, 0, num, duration, gap, ends, closes, first, len(listed), variant, *new, 5, latest
    )

    # THEN each ends as in a replay of its own, and the last, without changes, as before
    for change, found in zip([*changes, {}], latest.tolist(), strict=True):
        own = replace(
            rows,
            duration=[change.get(row, (old, 0))[0] for row, old in enumerate(rows.duration)],
            gap=[change.get(row, (0, old))[1] for row, old in enumerate(rows.gap)],
        )
        _, expected = expected_times(own)
        closing = [end for end, is_last in zip(expected, closes, strict=True) if is_last]
        assert found == max([0.0, *closing])


@given(row_sets(), st.data())
@settings(max_examples=50, deadline=None)
def test_parts_are_those_of_a_replay_for_each(rows: Rows, data: st.DataObject) -> None:
    # GIVEN scenarios that each have the recorded times of some rows
    num, width = len(rows.group), data.draw(st.sampled_from([1, 8, 11]))
    ideal = np.arange(num, dtype=np.float64)
    masks = data.draw(st.lists(st.integers(0, 2**width - 1), min_size=num, max_size=num))
    closes = np.array(data.draw(st.lists(st.booleans(), min_size=num, max_size=num)))
    # WHEN all are replayed at once
    latest, parts = np.empty(width), np.array(masks, dtype=np.uint32)
    _loop.replay_parts(
        sort(rows), 0, num, np.array(rows.duration), ideal, parts, closes,
        None, 1, width, latest
    )  # fmt: skip

    # THEN each ends as in a replay of its own
    for scenario, found in enumerate(latest.tolist()):
        is_recorded = parts >> scenario & 1
        duration = np.where(is_recorded, rows.duration, ideal).tolist()
        _, ends = expected_times(replace(rows, duration=duration, gap=[0.0] * num))
        closing = [end for end, is_last in zip(ends, closes, strict=True) if is_last]
        assert found == max([0.0, *closing])


def test_a_part_of_the_positions_is_replayed() -> None:
    rows = Rows(edges=[(0, 1), (2, 3)], group=[-1] * 4, duration=[1, 2, 3, 4], gap=[0] * 4)
    ends = np.empty(2)

    _loop.replay(sort(rows), 2, 4, np.array(rows.duration, dtype=float), None, None, ends)

    assert ends.tolist() == [3, 7]


def test_a_graph_without_rows_is_replayed() -> None:
    graph = sort(Rows(edges=[], group=[], duration=[], gap=[]))

    _loop.replay(graph, 0, 0, np.empty(0), None, None, np.empty(0))


def test_a_cycle_raises_with_the_number_of_its_rows() -> None:
    with pytest.raises(CycleError) as caught:
        sort_graph(4, *columns([(0, 1), (1, 2), (2, 1), (2, 3)]))

    assert caught.value.num_nodes == 3  # the last one waits for the cycle


def test_rows_before_a_cycle_are_sorted() -> None:
    graph, num_sorted = try_to_sort(4, *columns([(0, 1), (2, 3), (3, 2)]))

    assert num_sorted == 2
    assert graph.order[:2].tolist() == [0, 1]


def test_a_member_that_waits_for_its_own_group_is_a_cycle() -> None:
    with pytest.raises(CycleError):
        sort_graph(2, *columns([(0, 1)]), np.array([7, 7]))


def test_arrays_of_another_length_are_refused() -> None:
    graph = sort(Rows(edges=[], group=[-1, -1], duration=[], gap=[]))

    with pytest.raises(ValueError, match="expected 2 items of 8 bytes"):
        _loop.replay(graph, 0, 2, np.empty(3), None, None, np.empty(2))
    with pytest.raises(ValueError, match="not in the graph"):
        _loop.replay(graph, 0, 3, np.empty(2), None, None, np.empty(2))


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_the_last_member_is_that_of_a_search(data: st.DataObject) -> None:
    num = data.draw(st.integers(1, 8))
    numbers = st.lists(st.integers(0, 3), min_size=num, max_size=num)
    start, rank = (np.array(data.draw(numbers)) for _ in range(2))
    group = np.array(data.draw(numbers), dtype=np.int32) - 1

    last = np.empty(num, dtype=np.int32)
    _loop.last_members(num, 3, group, start, rank.astype(np.int32), last)

    for k in range(num):
        members = [m for m in range(num) if group[m] == group[k] != NO_GROUP] or [k]
        assert last[k] == max(members, key=lambda m: (start[m], -rank[m], m))


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_waits_are_attributed_alike_in_c_and_python(data: st.DataObject) -> None:
    # GIVEN operations with any predecessors, also in cycles, and waits of any length
    num, num_waits = data.draw(st.integers(1, 10)), data.draw(st.integers(0, 6))
    time = st.integers(0, 60)

    def draw(of: st.SearchStrategy[int], size: int) -> list[int]:
        return data.draw(st.lists(of, min_size=size, max_size=size))

    before = np.array(draw(st.integers(-1, num - 1), num), dtype=np.int32)
    last = np.array(draw(st.integers(0, num - 1), num), dtype=np.int32)
    rank = np.array(draw(st.integers(0, 3), num), dtype=np.int32)
    owner = np.array(draw(st.integers(0, 6), num), dtype=np.int32)  # links are 4 and above
    start, end = (np.array(draw(time, num)) for _ in range(2))
    times = [np.array(draw(time, num), dtype=np.float64) for _ in range(4)]
    operation = np.array(draw(st.integers(0, num - 1), num_waits), dtype=np.int32)
    begin = np.array(draw(time, num_waits), dtype=np.int64)
    until = begin + np.array(draw(time, num_waits), dtype=np.int64)
    room = data.draw(st.integers(7, 30))
    found = []
    for functions in (_loop, replay_oracle):
        # WHEN all are attributed, in as many parts as the room for their shares needs
        wait, shares = 0, list[tuple[int, ...]]()
        while wait < num_waits:
            out = np.empty(room, np.int32), np.empty(room, np.int32), np.empty(room, np.int64)
            wait, size = functions.attribute(
                num, before, last, rank, owner, start, end, *times, num_waits, wait, operation,
                begin, until, 0.1, 5.0, 4, room, *out
            )  # fmt: skip
            shares += zip(*(column[:size].tolist() for column in out), strict=True)
        found.append(shares)

    # THEN both agree, and the shares of each wait sum to it
    assert found[0] == found[1]
    for number in range(num_waits):
        total = sum(share for wait, _, share in found[0] if wait == number)
        assert total == until[number] - begin[number]


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_steps_are_filled_alike_in_c_and_python(data: st.DataObject) -> None:
    # GIVEN steps, operations and waits of two ranks, all of which may overlap
    def draw_table(size: int) -> list[NDArray[np.int64]]:
        row = st.tuples(st.integers(0, 1), st.integers(0, 40), st.integers(0, 15))
        table = data.draw(st.lists(row, min_size=size, max_size=size))
        rank, start, length = np.array(table, dtype=np.int64).reshape(-1, 3).T.copy()
        order = np.lexsort((start, rank))
        return [order, rank, start, start + length]

    def listed(order: NDArray[np.int64], table: list[NDArray[np.int64]]) -> loop.Intervals:
        rank, start, end = table[1].astype(np.int32), table[2], table[3]
        return loop.Intervals(len(order), len(rank), order.astype(np.int32), rank, start, end)

    num, num_waits, num_steps = (data.draw(st.integers(0, most)) for most in (12, 6, 4))
    operations, waits, steps = map(draw_table, (num, num_waits, num_steps))
    order, by_rank = operations[0], [column[steps[0]] for column in steps[1:]]
    kind = np.array(data.draw(st.lists(st.integers(0, 2), min_size=num, max_size=num)), np.int16)
    step_of = np.array(data.draw(st.lists(st.integers(0, 2), min_size=num, max_size=num)), np.int32)
    is_idle = np.array(data.draw(st.lists(st.booleans(), min_size=num, max_size=num)), np.bool_)
    own, transfers = order[kind[order] < 2], order[kind[order] == 2]
    lists = (
        listed(own[~is_idle[own]], operations), listed(waits[0], waits),
        listed(transfers, operations), listed(own[is_idle[own]], operations),
        listed(order, operations),
    )  # fmt: skip
    found = []
    for functions in (_loop, replay_oracle):
        filled, waiting = np.zeros((2, num_steps, 6), np.int64), np.zeros(num_waits, np.int64)
        of_compute, of_wait = np.full(num, -1, np.int32), np.full(num_waits, -1, np.int32)
        functions.fill(
            num_steps, by_rank[0].astype(np.int32), np.arange(num_steps, dtype=np.int32),
            *by_rank[1:], num, kind, step_of, 3, np.array([1, 0, 0], np.uint8),
            np.array([1, 0, 1], np.uint8), *lists, filled, of_compute, num_waits, waiting, of_wait
        )  # fmt: skip
        found.append([each.tolist() for each in (filled, of_compute, waiting, of_wait)])

    # THEN both agree, and each moment of the steps is counted once
    assert found[0] == found[1]
    spent, _, waited, _ = map(np.array, found[0])
    moments = {
        (rank, moment)
        for rank, start, end in zip(*(column.tolist() for column in by_rank), strict=True)
        for moment in range(start, end)
    }
    assert spent.sum() + waited.sum() == len(moments)
