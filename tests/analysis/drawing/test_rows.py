from __future__ import annotations

from dataclasses import replace

import pytest

from rankscope.analysis.drawing.rows import (
    RowOrder,
    arrange_rows,
    fold_groups,
    group_lines,
    row_order,
)
from rankscope.tracer.span import SpanKind
from tests.support.dashboard.step_builder import comm, compute, step_of


@pytest.mark.parametrize(
    ("order", "ranks"),
    [
        (RowOrder.PP, (0, 1, 2, 3, 4, 5, 6, 7)),
        (RowOrder.DP, (0, 1, 4, 5, 2, 3, 6, 7)),
        (RowOrder.TP, (0, 2, 4, 6, 1, 3, 5, 7)),
        (RowOrder.RANK, (0, 1, 2, 3, 4, 5, 6, 7)),
    ],
)
def test_ranks_of_one_position_are_neighbours(order: RowOrder, ranks: tuple[int, ...]) -> None:
    timeline = step_of(*(compute(rank, 0, 9) for rank in range(8)))

    assert row_order(timeline, order) == ranks


def test_ranks_of_unknown_position_come_last() -> None:
    rows = arrange_rows(step_of(compute(99, 0, 9), compute(5, 0, 9)), RowOrder.PP)

    assert rows.blocks == ((5,), (99,))
    assert rows.groups == ((0, 1, "PP 1"), (1, -1, "position unknown"))


def test_without_any_known_position_ranks_are_sorted_and_not_grouped() -> None:
    timeline = replace(step_of(compute(2, 0, 9), compute(1, 0, 9)), coords={})

    rows = arrange_rows(timeline, RowOrder.PP)

    assert (rows.blocks, rows.groups) == (((1,), (2,)), ())


def test_communication_is_below_compute_in_the_row_of_its_rank() -> None:
    timeline = step_of(compute(0, 0, 9), comm(0, 9, 12), compute(1, 0, 9), comm(1, 9, 12))

    centers = arrange_rows(timeline, RowOrder.PP).center.tolist()

    assert -0.5 < centers[0] < centers[1] < 0.5 < centers[2] < centers[3] < 1.5


def test_communication_on_the_track_of_compute_has_a_lane_for_each_kind() -> None:
    timeline = step_of(
        replace(compute(0, 0, 9), track=""),
        replace(comm(0, 5, 12), track=""),
        replace(comm(0, 6, 12, seq=1), track="", kind=SpanKind.DP_COMM),
    )

    centers = arrange_rows(timeline, RowOrder.PP).center

    assert len(set(centers.tolist())) == 3
    assert centers[0] == centers.min()


def test_a_single_track_fills_the_row() -> None:
    rows = arrange_rows(step_of(compute(0, 0, 9)), RowOrder.PP)

    assert rows.center.tolist() == pytest.approx([0.0], abs=0.03)


def test_a_folded_group_has_one_row_at_its_place() -> None:
    timeline = step_of(*(compute(rank, 0, 9) for rank in range(8)))
    blocks = tuple((rank,) for rank in row_order(timeline, RowOrder.DP))
    groups = group_lines(blocks, timeline.coords, RowOrder.DP, {})

    folded, starts = fold_groups(blocks, groups, (0,))

    assert groups == ((0, 0, "DP 0"), (4, 1, "DP 1"))
    assert folded == ((0, 1, 4, 5), (2,), (3,), (6,), (7,))
    assert starts == (0, 4, 5, 6, 7)
    rows = arrange_rows(timeline, RowOrder.DP, folded)
    assert rows.groups == ((0, 0, "DP 0"), (1, 1, "DP 1"))
    assert [round(float(one)) for one in rows.center] == [0, 0, 1, 2, 0, 0, 3, 4]


def test_a_host_has_the_same_number_in_every_part_of_the_step() -> None:
    hosts = {0: "b", 1: "b", 2: "a", 3: "a"}

    assert group_lines(((2,), (3,)), {}, RowOrder.HOST, hosts) == ((0, 1, "a"),)
    assert [group.number for group in group_lines(((0,), (2,)), {}, RowOrder.HOST, hosts)] == [0, 1]
