from __future__ import annotations

from dataclasses import replace

import pytest

from rankscope.analysis.drawing.rows import (
    RowOrder,
    lay_out_ranks,
    lay_out_rows,
    order_ranks,
    place_spans,
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

    assert order_ranks(timeline, order) == ranks


def test_ranks_of_unknown_position_come_last() -> None:
    rows = lay_out_ranks(step_of(compute(99, 0, 9), compute(5, 0, 9)), RowOrder.PP)

    assert rows.blocks == ((5,), (99,))
    assert rows.groups == ((0, 1, "PP 1"), (1, -1, "position unknown"))


def test_without_any_known_position_ranks_are_sorted_and_not_grouped() -> None:
    timeline = replace(step_of(compute(2, 0, 9), compute(1, 0, 9)), coords={})

    rows = lay_out_ranks(timeline, RowOrder.PP, folded=(0,))

    assert (rows.blocks, rows.groups) == (((1,), (2,)), ())


def test_a_group_of_all_ranks_is_not_shown() -> None:
    timeline = step_of(compute(0, 0, 9), compute(4, 0, 9))

    assert lay_out_ranks(timeline, RowOrder.CP, folded=(0,)).blocks == ((0,), (4,))


def test_a_folded_group_has_one_row_at_its_place() -> None:
    timeline = step_of(*(compute(rank, 0, 9) for rank in range(8)))

    rows = lay_out_ranks(timeline, RowOrder.DP, folded=(0,))

    assert rows.groups == ((0, 0, "DP 0"), (1, 1, "DP 1"))
    assert rows.blocks == ((0, 1, 4, 5), (2,), (3,), (6,), (7,))
    assert (rows.folded_rows, rows.single_ranks) == ([0], [2, 3, 6, 7])
    assert rows.rows_with((5, 6)) == [0, 3]
    centers = place_spans(timeline, rows).center
    assert [round(center) for center in centers.tolist()] == [0, 0, 1, 2, 0, 0, 3, 4]


def test_a_host_has_the_same_number_in_every_part_of_the_step() -> None:
    hosts = {0: "b", 1: "b", 2: "a", 3: "a"}
    step = replace(step_of(*(compute(rank, 0, 9) for rank in range(4))), hosts=hosts)

    part = lay_out_rows(step, RowOrder.HOST, ((2,), (3,)), num_ranks=4, first_place=2)

    assert part.groups == ((0, 1, "a"),)
    assert lay_out_ranks(step, RowOrder.HOST).groups == ((0, 0, "b"), (2, 1, "a"))


def test_communication_is_below_compute_in_the_row_of_its_rank() -> None:
    timeline = step_of(compute(0, 0, 9), comm(0, 9, 12), compute(1, 0, 9), comm(1, 9, 12))

    centers = place_spans(timeline, lay_out_ranks(timeline, RowOrder.PP)).center.tolist()

    assert -0.5 < centers[0] < centers[1] < 0.5 < centers[2] < centers[3] < 1.5


def test_communication_on_the_track_of_compute_has_a_lane_for_each_kind() -> None:
    timeline = step_of(
        replace(compute(0, 0, 9), track=""),
        replace(comm(0, 5, 12), track=""),
        replace(comm(0, 6, 12, seq=1), track="", kind=SpanKind.DP_COMM),
    )

    centers = place_spans(timeline, lay_out_ranks(timeline, RowOrder.PP)).center

    assert len(set(centers.tolist())) == 3
    assert centers[0] == centers.min()


def test_a_single_track_fills_the_row() -> None:
    timeline = step_of(compute(0, 0, 9))

    lanes = place_spans(timeline, lay_out_ranks(timeline, RowOrder.PP))

    assert lanes.center.tolist() == pytest.approx([0.0], abs=0.03)
