from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rankscope.analysis.drawing.raster import step_raster, worst_in_blocks
from rankscope.analysis.drawing.timeline import StepTimeline, step_timeline
from rankscope.analysis.report.report import RankStepExcess
from rankscope.analysis.trace.tables import GroupInfo
from rankscope.tracer.span import KIND_CODES, Span, SpanKind, UnixNs
from tests.support.dashboard.builders import FakeProvider, report, span_table

FORWARD = KIND_CODES[SpanKind.FORWARD]
BACKWARD = KIND_CODES[SpanKind.BACKWARD]
WAIT = KIND_CODES[SpanKind.WAIT]
TP_COMM = KIND_CODES[SpanKind.TP_COMM]


def excess(*rows: list[float]) -> RankStepExcess:
    values = np.array(rows, dtype=np.float64)
    return RankStepExcess(
        ranks=tuple(range(values.shape[0])),
        steps=tuple(10 + column for column in range(values.shape[1])),
        excess_ns=values,
    )


def test_what_fits_keeps_a_cell_for_each_rank_and_step() -> None:
    shown = worst_in_blocks(excess([1.0, 2.0], [3.0, 4.0]), max_rows=2, max_columns=2)

    assert shown.rank_blocks == ((0, 0), (1, 1))
    assert shown.step_blocks == ((10, 10), (11, 11))
    assert shown.excess_ns.tolist() == [[1.0, 2.0], [3.0, 4.0]]


def test_a_block_shows_its_worst_member_and_unknown_only_where_all_are() -> None:
    nan = float("nan")
    shown = worst_in_blocks(
        excess([1.0, nan, 5.0], [9.0, nan, nan], [nan, nan, 2.0]), max_rows=2, max_columns=3
    )

    assert shown.rank_blocks == ((0, 1), (2, 2))
    assert np.array_equal(shown.excess_ns, [[9.0, nan, 5.0], [nan, nan, 2.0]], equal_nan=True)


def test_no_ranks_or_steps_make_no_blocks() -> None:
    nothing = RankStepExcess(ranks=(), steps=(), excess_ns=np.zeros((0, 0)))

    shown = worst_in_blocks(nothing, max_rows=5, max_columns=5)

    assert (shown.rank_blocks, shown.step_blocks, shown.excess_ns.size) == ((), (), 0)


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
    return step_timeline(provider, "r", epoch=0, step=3)


def test_a_cell_has_the_kind_that_fills_most_of_it() -> None:
    # Bins of 10 ns: forward fills the first, backward 7 of the second's 10.
    timeline = drawn(piece(0, 0, 13), piece(0, 13, 40, SpanKind.BACKWARD))

    raster = step_raster(timeline, (0,), max_rows=1, num_bins=4)

    assert raster.edges_ns.tolist() == [0, 10, 20, 30, 40]
    assert raster.compute.kind.tolist() == [[FORWARD, BACKWARD, BACKWARD, BACKWARD]]
    assert raster.compute.filled_ratio.tolist() == [[1.0, 1.0, 1.0, 1.0]]
    assert raster.comm.kind.tolist() == [[-1, -1, -1, -1]]


def test_a_span_shorter_than_a_pixel_still_shows() -> None:
    timeline = drawn(piece(0, 0, 1), piece(1, 0, 100))

    raster = step_raster(timeline, (0, 1), max_rows=2, num_bins=4)

    assert raster.compute.kind.tolist() == [[FORWARD, -1, -1, -1], [FORWARD] * 4]
    assert raster.compute.filled_ratio[0].tolist() == [np.float32(0.04), 0.0, 0.0, 0.0]


def test_a_blocked_thread_takes_its_time_from_the_span_around_it() -> None:
    timeline = drawn(piece(0, 0, 40), piece(0, 12, 30, SpanKind.WAIT), depths=(0, 1))

    raster = step_raster(timeline, (0,), max_rows=1, num_bins=4)

    assert raster.compute.kind.tolist() == [[FORWARD, WAIT, WAIT, FORWARD]]


def test_communication_shows_where_it_waits_and_where_it_moves_bytes() -> None:
    early = piece(0, 0, 40, SpanKind.TP_COMM, seq=0)
    late = piece(1, 20, 40, SpanKind.TP_COMM, seq=0)

    raster = step_raster(drawn(early, late), (0, 1), max_rows=2, num_bins=4)

    assert raster.comm.kind.tolist() == [
        [WAIT, WAIT, TP_COMM, TP_COMM],
        [-1, -1, TP_COMM, TP_COMM],
    ]


def test_rows_follow_the_order_asked_for_and_join_neighbours() -> None:
    timeline = drawn(piece(0, 0, 10), piece(1, 10, 20), piece(2, 30, 40))

    one_each = step_raster(timeline, (2, 0, 1), max_rows=3, num_bins=4)
    joined = step_raster(timeline, (2, 0, 1), max_rows=2, num_bins=4)

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

    raster = step_raster(timeline, (0, 1, 2, 3), max_rows=4, num_bins=16)

    width = np.diff(raster.edges_ns)
    held = (raster.compute.filled_ratio.astype(np.float64) * width).sum(axis=1)
    wanted = [sum(size for rank, _, size in pieces if rank == row) for row in range(4)]
    assert np.allclose(held, wanted, rtol=1e-4, atol=1)
