from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rankscope.analysis.drawing.raster import (
    bin_edges,
    draw_picture,
    draw_raster,
    fold_raster,
    measure_areas,
)
from rankscope.analysis.drawing.rows import RowOrder, lay_out_ranks, order_ranks
from rankscope.analysis.drawing.timeline import StepTimeline, select_ranks
from rankscope.tracer.span import KIND_CODES, SpanFlag, SpanKind
from tests.support.dashboard.step_builder import comm, compute, step_of

if TYPE_CHECKING:
    from rankscope.analysis.drawing.raster import StepAreas
    from rankscope.tracer.span import Span

FORWARD = KIND_CODES[SpanKind.FORWARD]
BACKWARD = KIND_CODES[SpanKind.BACKWARD]
WAIT = KIND_CODES[SpanKind.WAIT]
TP_COMM = KIND_CODES[SpanKind.TP_COMM]

RANDOM_SPANS = st.lists(
    st.tuples(
        st.integers(0, 3),
        st.integers(0, 10**6),
        st.integers(0, 10**5),
        st.sampled_from([SpanKind.FORWARD, SpanKind.BACKWARD, SpanKind.PP_SEND]),
    ),
    min_size=1,
    max_size=12,
)
"""Rank, start, duration and kind of each span."""

LINES = ((0, 1), (2, 3))
"""Ranks 0 and 1 share the first line, 2 and 3 the second."""


def random_step(spans: list[tuple[int, int, int, SpanKind]]) -> StepTimeline:
    return step_of(*(compute(rank, at, at + size, kind) for rank, at, size, kind in spans))


def test_a_cell_has_the_kind_that_fills_most_of_it() -> None:
    # Bins of 10 ns: forward fills the first, backward 7 of the second's 10.
    timeline = step_of(compute(0, 0, 13), compute(0, 13, 40, SpanKind.BACKWARD))

    raster = draw_raster(timeline, (0,), max_lines=1, num_bins=4)

    assert raster.edges_ns.tolist() == [0, 10, 20, 30, 40]
    assert raster.compute.kind.tolist() == [[FORWARD, BACKWARD, BACKWARD, BACKWARD]]
    assert raster.compute.filled_ratio.tolist() == [[1.0, 1.0, 1.0, 1.0]]
    assert raster.comm.kind.tolist() == [[-1, -1, -1, -1]]


def test_a_span_shorter_than_a_pixel_still_shows() -> None:
    timeline = step_of(compute(0, 0, 1), compute(1, 0, 100))

    raster = draw_raster(timeline, (0, 1), max_lines=2, num_bins=4)

    assert raster.compute.kind.tolist() == [[FORWARD, -1, -1, -1], [FORWARD] * 4]
    assert raster.compute.filled_ratio[0].tolist() == [np.float32(0.04), 0.0, 0.0, 0.0]


@pytest.mark.parametrize("depth", [1, 2, 7, 100])
def test_a_rank_that_waits_inside_its_compute_is_not_drawn_as_computing(depth: int) -> None:
    # forward > layers > all_reduce > wait, as the tracer nests a tensor-parallel all-reduce.
    layers = range(1, depth)
    early = (compute(0, 0, 40), *(compute(0, 0, 40) for _ in layers), comm(0, 10, 30))
    late = (compute(1, 0, 20), comm(1, 20, 30))
    timeline = step_of(
        *early, compute(0, 10, 30, SpanKind.WAIT), *late,
        depths=(0, *layers, depth, depth + 1, 0, 1),
    )  # fmt: skip

    raster = draw_raster(timeline, (0, 1), max_lines=2, num_bins=4)

    assert raster.compute.kind.tolist() == [
        [FORWARD, WAIT, TP_COMM, FORWARD],
        [FORWARD, FORWARD, TP_COMM, -1],
    ]
    assert raster.comm.kind.tolist() == [[-1, WAIT, TP_COMM, -1], [-1, -1, TP_COMM, -1]]


# The backward of autograd's thread waits, while the main thread is inside its own span.
ELSEWHERE = replace(compute(0, 10, 30, SpanKind.WAIT), track="autograd")
LAUNCHED = replace(comm(0, 10, 30), flags=SpanFlag.ASYNC)


@pytest.mark.parametrize(
    ("span", "depth", "kinds"),
    [(ELSEWHERE, 0, [FORWARD, WAIT, WAIT, FORWARD]), (LAUNCHED, 1, [FORWARD] * 4)],
    ids=["a wait of another thread", "an asynchronous communication"],
)
def test_only_a_wait_takes_time_from_compute(span: Span, depth: int, kinds: list[int]) -> None:
    timeline = step_of(compute(0, 0, 40), span, depths=(0, depth))

    assert draw_raster(timeline, (0,), max_lines=1, num_bins=4).compute.kind.tolist() == [kinds]


def test_communication_shows_when_it_waits_and_when_it_moves_bytes() -> None:
    early, late = comm(0, 0, 40), comm(1, 20, 40)

    raster = draw_raster(step_of(early, late), (0, 1), max_lines=2, num_bins=4)

    assert raster.comm.kind.tolist() == [
        [WAIT, WAIT, TP_COMM, TP_COMM],
        [-1, -1, TP_COMM, TP_COMM],
    ]


def test_lines_follow_the_order_of_ranks_and_join_neighbours() -> None:
    timeline = step_of(compute(0, 0, 10), compute(1, 10, 20), compute(2, 30, 40))

    one_each = draw_raster(timeline, (2, 0, 1), max_lines=3, num_bins=4)
    joined = draw_raster(timeline, (2, 0, 1), max_lines=2, num_bins=4)

    assert one_each.compute.kind.tolist() == [
        [-1, -1, -1, FORWARD],
        [FORWARD, -1, -1, -1],
        [-1, FORWARD, -1, -1],
    ]
    assert joined.rank_blocks == ((2, 0), (1,))
    assert joined.compute.kind.tolist() == [
        [FORWARD, -1, -1, FORWARD],
        [-1, FORWARD, -1, -1],
    ]


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 10**4), st.integers(0, 10**3)), min_size=1)
)
def test_the_cells_of_a_line_hold_all_time_of_its_spans(
    spans: list[tuple[int, int, int]],
) -> None:
    timeline = step_of(*(compute(rank, start, start + size) for rank, start, size in spans))

    raster = draw_raster(timeline, (0, 1, 2, 3), max_lines=4, num_bins=16)

    width = np.diff(raster.edges_ns)
    drawn = (raster.compute.filled_ratio.astype(np.float64) * width).sum(axis=1)
    covered: list[set[int]] = [set(), set(), set(), set()]
    for rank, start, size in spans:
        covered[rank] |= set(range(start, start + size))
    expected = [len(moments) for moments in covered]
    assert np.allclose(drawn, expected, rtol=1e-4, atol=1)


def test_edges_are_whole_and_every_fourth_of_a_finer_grid() -> None:
    assert bin_edges(10, 4).tolist() == [0, 2, 5, 7, 10]
    assert bin_edges(10, 16)[::4].tolist() == [0, 2, 5, 7, 10]
    assert bin_edges(3 * 10**15, 57_600)[-1] == 3 * 10**15  # 35 days: no overflow on the way


def test_a_span_covers_the_part_of_each_bin_that_it_overlaps() -> None:
    timeline = step_of(compute(0, 0, 25), compute(1, 0, 100))

    areas = measure_areas(timeline, [(0,), (1,)], num_bins=10)

    assert areas.compute[FORWARD].tolist() == [[10, 10, 5, 0, 0, 0, 0, 0, 0, 0], [10] * 10]


def test_nested_time_is_not_part_of_the_span_around_it() -> None:
    timeline = step_of(compute(0, 0, 40), compute(0, 12, 30, SpanKind.WAIT), depths=(0, 1))

    areas = measure_areas(timeline, [(0,)], num_bins=4)

    assert areas.compute[FORWARD].tolist() == [[10, 2, 0, 10]]
    assert areas.compute[WAIT].tolist() == [[0, 8, 10, 0]]


def test_a_step_of_fewer_ns_than_bins_loses_nothing() -> None:
    areas = measure_areas(step_of(compute(0, 0, 3)), [(0,)], num_bins=8)

    assert int(areas.compute[FORWARD].sum()) == 3


@settings(deadline=None)
@given(RANDOM_SPANS)
def test_joined_bins_equal_those_of_a_coarser_grid(
    spans: list[tuple[int, int, int, SpanKind]],
) -> None:
    timeline = random_step(spans)

    fine = measure_areas(timeline, LINES, num_bins=32).join_bins(4)
    coarse = measure_areas(timeline, LINES, num_bins=8)

    assert lists(fine) == lists(coarse)
    assert np.array_equal(fine.raster().compute.kind, coarse.raster().compute.kind)


@pytest.mark.slow
@settings(deadline=None)
@given(RANDOM_SPANS)
def test_the_areas_of_portions_add_up_to_the_step(
    spans: list[tuple[int, int, int, SpanKind]],
) -> None:
    timeline = random_step(spans)
    whole = measure_areas(timeline, LINES, num_bins=8)

    parts = [measure_areas(select_ranks(timeline, line), LINES, num_bins=8) for line in LINES]

    for name in ("compute", "comm"):
        for code, area in getattr(whole, name).items():
            found = [getattr(part, name).get(code, np.zeros((2, 8), np.int64)) for part in parts]
            assert np.array_equal(found[0] + found[1], area)


def lists(areas: StepAreas) -> dict[str, dict[int, list[list[int]]]]:
    """Return the areas as lists."""
    return {
        name: {code: area.tolist() for code, area in getattr(areas, name).items()}
        for name in ("compute", "comm")
    }


def test_one_long_span_among_many_ranks_stays_visible_at_every_zoom() -> None:
    # GIVEN 24 ranks of one line that do the same; one forward of rank 7 is longer, and rank 9
    # collects garbage for 3 % of the step
    spans = [compute(rank, 0, 40_000_000) for rank in range(24)]
    spans += [compute(rank, 45_000_000, 75_000_000) for rank in range(24) if rank != 7]
    spans += [compute(7, 45_000_000, 79_000_000)]
    spans += [compute(9, 80_000_000, 83_000_000, kind=SpanKind.GC)]
    timeline = step_of(*spans)

    fine = measure_areas(timeline, [tuple(range(24))], num_bins=3600)

    # THEN their cells have their kinds, though 23 of 24 ranks do something else or nothing
    for areas in (fine, fine.join_bins(4)):
        cells = areas.raster().compute
        num_bins = cells.kind.shape[1]
        shown = [num_bins * ms // 83 for ms in (60, 77, 81)]
        gc = KIND_CODES[SpanKind.GC]
        assert cells.kind[0, shown].tolist() == [FORWARD, FORWARD, gc]
        # The pause is notable and fills its cell; 4 ms more than 30 are a pale cell of one rank.
        assert cells.filled_ratio[0, shown[1:]].tolist() == [pytest.approx(1 / 24), 1.0]
    # and three ranks, which have no usual length, are drawn as their average
    few = measure_areas(timeline, [(7, 8, 9)], num_bins=900)
    assert few.notable == {}


def test_a_folded_group_of_a_picture_shows_what_most_of_its_ranks_do() -> None:
    # PP 0 has the ranks 0 to 3, of which 3 go backward; PP 1 the ranks 4 to 7.
    kinds = [SpanKind.FORWARD, *[SpanKind.BACKWARD] * 3, *[SpanKind.FORWARD] * 4]
    timeline = step_of(*(compute(rank, 0, 9_000, kind) for rank, kind in enumerate(kinds)))
    unfolded = draw_picture(timeline, order_ranks(timeline, RowOrder.PP)).raster

    raster = fold_raster(unfolded, lay_out_ranks(timeline, RowOrder.PP, folded=(0,)))

    assert raster.rank_blocks == ((0, 1, 2, 3), (4,), (5,), (6,), (7,))
    assert np.unique(raster.compute.kind[0]).tolist() == [BACKWARD]
    assert np.unique(raster.compute.filled_ratio[0]).tolist() == [1.0]
    assert np.unique(raster.compute.kind[1:]).tolist() == [FORWARD]
    assert fold_raster(unfolded, lay_out_ranks(timeline, RowOrder.PP)) is unfolded


def test_a_cell_is_filled_as_much_as_its_ranks_are_on_average() -> None:
    timeline = step_of(compute(0, 0, 10), compute(1, 0, 20), compute(0, 30, 40))

    raster = draw_raster(timeline, (0, 1), max_lines=1, num_bins=4)

    assert raster.compute.filled_ratio.tolist() == [[1.0, 0.5, 0.0, 0.5]]
