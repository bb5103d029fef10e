from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rankscope.analysis.drawing.raster import StepAreas, bin_edges, draw_raster, measure_areas
from rankscope.analysis.drawing.timeline import StepTimeline, make_timeline, read_timeline
from rankscope.analysis.trace.rows import select_rows
from rankscope.analysis.trace.tables import GroupInfo
from rankscope.tracer.span import KIND_CODES, Span, SpanKind, UnixNs
from tests.support.dashboard.builders import FakeProvider, report, span_table

FORWARD = KIND_CODES[SpanKind.FORWARD]
BACKWARD = KIND_CODES[SpanKind.BACKWARD]
WAIT = KIND_CODES[SpanKind.WAIT]
TP_COMM = KIND_CODES[SpanKind.TP_COMM]


def piece(
    rank: int, start_ns: int, end_ns: int, kind: SpanKind = SpanKind.FORWARD, seq: int = -1
) -> Span:
    return Span(
        rank=rank,
        step=3,
        kind=kind,
        name="op",
        start_ns=UnixNs(start_ns),
        duration_ns=end_ns - start_ns,
        group_id=0 if seq < 0 else 7,
        seq=seq,
    )


def drawn(*spans: Span, depths: tuple[int, ...] = ()) -> StepTimeline:
    pair = GroupInfo(group_id=7, kind="tp-comm", name="tp", members=(0, 1))
    provider = FakeProvider(
        reports={"r": report(run="r")},
        tables={"r": span_table(spans, depths=depths)},
        groups={"r": (pair,)},
    )
    return read_timeline(provider, "r", epoch=0, step=3)


def test_a_cell_has_the_kind_that_fills_most_of_it() -> None:
    # Bins of 10 ns: forward fills the first, backward 7 of the second's 10.
    timeline = drawn(piece(0, 0, 13), piece(0, 13, 40, SpanKind.BACKWARD))

    raster = draw_raster(timeline, (0,), max_lines=1, num_bins=4)

    assert raster.edges_ns.tolist() == [0, 10, 20, 30, 40]
    assert raster.compute.kind.tolist() == [[FORWARD, BACKWARD, BACKWARD, BACKWARD]]
    assert raster.compute.filled_ratio.tolist() == [[1.0, 1.0, 1.0, 1.0]]
    assert raster.comm.kind.tolist() == [[-1, -1, -1, -1]]


def test_a_span_shorter_than_a_pixel_still_shows() -> None:
    timeline = drawn(piece(0, 0, 1), piece(1, 0, 100))

    raster = draw_raster(timeline, (0, 1), max_lines=2, num_bins=4)

    assert raster.compute.kind.tolist() == [[FORWARD, -1, -1, -1], [FORWARD] * 4]
    assert raster.compute.filled_ratio[0].tolist() == [np.float32(0.04), 0.0, 0.0, 0.0]


def test_a_blocked_thread_takes_its_time_from_the_span_around_it() -> None:
    timeline = drawn(piece(0, 0, 40), piece(0, 12, 30, SpanKind.WAIT), depths=(0, 1))

    raster = draw_raster(timeline, (0,), max_lines=1, num_bins=4)

    assert raster.compute.kind.tolist() == [[FORWARD, WAIT, WAIT, FORWARD]]


def test_communication_shows_where_it_waits_and_where_it_moves_bytes() -> None:
    early = piece(0, 0, 40, SpanKind.TP_COMM, seq=0)
    late = piece(1, 20, 40, SpanKind.TP_COMM, seq=0)

    raster = draw_raster(drawn(early, late), (0, 1), max_lines=2, num_bins=4)

    assert raster.comm.kind.tolist() == [
        [WAIT, WAIT, TP_COMM, TP_COMM],
        [-1, -1, TP_COMM, TP_COMM],
    ]


def test_rows_follow_the_order_asked_for_and_join_neighbours() -> None:
    timeline = drawn(piece(0, 0, 10), piece(1, 10, 20), piece(2, 30, 40))

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
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 10**6), st.integers(0, 10**5)), min_size=1)
)
def test_the_cells_of_a_row_hold_all_time_of_its_spans(
    pieces: list[tuple[int, int, int]],
) -> None:
    timeline = drawn(*(piece(rank, start, start + size) for rank, start, size in pieces))

    raster = draw_raster(timeline, (0, 1, 2, 3), max_lines=4, num_bins=16)

    width = np.diff(raster.edges_ns)
    held = (raster.compute.filled_ratio.astype(np.float64) * width).sum(axis=1)
    wanted = [sum(size for rank, _, size in pieces if rank == row) for row in range(4)]
    assert np.allclose(held, wanted, rtol=1e-4, atol=1)


PIECES = st.lists(
    st.tuples(
        st.integers(0, 3),
        st.integers(0, 10**6),
        st.integers(0, 10**5),
        st.sampled_from([SpanKind.FORWARD, SpanKind.BACKWARD, SpanKind.PP_SEND]),
    ),
    min_size=1,
    max_size=12,
)
LINES = ((0, 1), (2, 3))
"""Ranks 0 and 1 share the first line, 2 and 3 the second."""


def test_edges_are_whole_and_those_of_four_times_as_many_contain_them() -> None:
    assert bin_edges(10, 4).tolist() == [0, 2, 5, 7, 10]
    assert bin_edges(10, 16)[::4].tolist() == [0, 2, 5, 7, 10]
    assert bin_edges(3 * 10**15, 57_600)[-1] == 3 * 10**15  # 35 days: no overflow on the way


def test_a_span_covers_of_each_bin_what_it_overlaps() -> None:
    timeline = drawn(piece(0, 0, 25), piece(1, 0, 100))

    areas = measure_areas(timeline, [(0,), (1,)], num_bins=10)

    assert areas.outer[FORWARD].tolist() == [[10, 10, 5, 0, 0, 0, 0, 0, 0, 0], [10] * 10]


def test_nested_and_waiting_time_is_kept_apart() -> None:
    timeline = drawn(piece(0, 0, 40), piece(0, 12, 30, SpanKind.WAIT), depths=(0, 1))

    areas = measure_areas(timeline, [(0,)], num_bins=4)

    assert areas.outer[FORWARD].tolist() == [[10, 10, 10, 10]]
    assert areas.inner[WAIT].tolist() == [[0, 8, 10, 0]]


def test_a_step_of_fewer_ns_than_bins_loses_nothing() -> None:
    timeline = drawn(piece(0, 0, 3))

    areas = measure_areas(timeline, [(0,)], num_bins=8)

    assert int(areas.outer[FORWARD].sum()) == 3


@settings(deadline=None)
@given(PIECES)
def test_joined_bins_are_those_of_a_coarser_grid(
    pieces: list[tuple[int, int, int, SpanKind]],
) -> None:
    timeline = drawn(*(piece(rank, at, at + size, kind) for rank, at, size, kind in pieces))

    fine = measure_areas(timeline, LINES, num_bins=32).join_bins(4)
    coarse = measure_areas(timeline, LINES, num_bins=8)

    assert told(fine) == told(coarse)
    assert np.array_equal(fine.raster().compute.kind, coarse.raster().compute.kind)


@settings(deadline=None)
@given(PIECES)
def test_portions_add_up_to_the_step(pieces: list[tuple[int, int, int, SpanKind]]) -> None:
    timeline = drawn(*(piece(rank, at, at + size, kind) for rank, at, size, kind in pieces))
    whole = measure_areas(timeline, LINES, num_bins=8)

    parts = [
        measure_areas(portion, LINES, num_bins=8)
        for portion in (of_ranks(timeline, 0, 1), of_ranks(timeline, 2, 3))
    ]

    for name in ("outer", "comm"):
        for code, area in getattr(whole, name).items():
            found = [getattr(part, name).get(code, np.zeros((2, 8), np.int64)) for part in parts]
            assert np.array_equal(found[0] + found[1], area)


def of_ranks(timeline: StepTimeline, *ranks: int) -> StepTimeline:
    """Return the same step with the spans of some ranks alone."""
    keep = np.isin(timeline.spans.rank, ranks)
    info = FakeProvider(reports={"r": report(run="r")}).run_info("r")
    if not keep.any():
        none = select_rows(timeline.spans, keep)
        return replace(
            timeline, spans=none, wait_ns=timeline.wait_ns[keep],
            transfer_ns=timeline.transfer_ns[keep], last_rank=timeline.last_rank[keep],
        )  # fmt: skip
    portion = make_timeline(info, select_rows(timeline.spans, keep), epoch=0, step=3)
    return replace(portion, begin_ns=timeline.begin_ns, end_ns=timeline.end_ns)


def told(areas: StepAreas) -> dict[str, dict[int, list[list[int]]]]:
    """Return the areas as lists."""
    return {
        name: {code: area.tolist() for code, area in getattr(areas, name).items()}
        for name in ("outer", "inner", "comm")
    }
