from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rankscope.analysis.drawing.pixel_areas import bin_edges, step_areas
from rankscope.analysis.drawing.timeline import StepTimeline, timeline_of
from rankscope.analysis.trace.rows import select_rows
from rankscope.tracer.span import SpanKind
from tests.analysis.drawing.test_raster import FORWARD, WAIT, drawn, piece
from tests.support.dashboard.builders import FakeProvider, report

if TYPE_CHECKING:
    from rankscope.analysis.drawing.pixel_areas import StepAreas

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
ROWS = np.array([0, 0, 1, 1])
"""Ranks 0 and 1 share the first row, 2 and 3 the second."""


def test_edges_are_whole_and_those_of_four_times_as_many_contain_them() -> None:
    assert bin_edges(10, 4).tolist() == [0, 2, 5, 7, 10]
    assert bin_edges(10, 16)[::4].tolist() == [0, 2, 5, 7, 10]
    assert bin_edges(3 * 10**15, 57_600)[-1] == 3 * 10**15  # 35 days: no overflow on the way


def test_a_span_covers_of_each_bin_what_it_overlaps() -> None:
    timeline = drawn(piece(0, 0, 25), piece(1, 0, 100))

    areas = step_areas(timeline, np.array([0, 1]), num_rows=2, num_bins=10)

    assert areas.outer[FORWARD].tolist() == [[10, 10, 5, 0, 0, 0, 0, 0, 0, 0], [10] * 10]


def test_nested_and_waiting_time_is_kept_apart() -> None:
    timeline = drawn(piece(0, 0, 40), piece(0, 12, 30, SpanKind.WAIT), depths=(0, 1))

    areas = step_areas(timeline, np.array([0]), num_rows=1, num_bins=4)

    assert areas.outer[FORWARD].tolist() == [[10, 10, 10, 10]]
    assert areas.inner[WAIT].tolist() == [[0, 8, 10, 0]]


def test_a_step_of_fewer_ns_than_bins_loses_nothing() -> None:
    timeline = drawn(piece(0, 0, 3))

    areas = step_areas(timeline, np.array([0]), num_rows=1, num_bins=8)

    assert int(areas.outer[FORWARD].sum()) == 3


@settings(deadline=None)
@given(PIECES)
def test_joined_bins_are_those_of_a_coarser_grid(
    pieces: list[tuple[int, int, int, SpanKind]],
) -> None:
    timeline = drawn(*(piece(rank, at, at + size, kind) for rank, at, size, kind in pieces))

    fine = step_areas(timeline, ROWS, num_rows=2, num_bins=32).coarser(4)
    coarse = step_areas(timeline, ROWS, num_rows=2, num_bins=8)

    assert told(fine) == told(coarse)
    assert np.array_equal(fine.compute_cells().kind, coarse.compute_cells().kind)


@settings(deadline=None)
@given(PIECES)
def test_portions_add_up_to_the_step(pieces: list[tuple[int, int, int, SpanKind]]) -> None:
    timeline = drawn(*(piece(rank, at, at + size, kind) for rank, at, size, kind in pieces))
    whole = step_areas(timeline, ROWS, num_rows=2, num_bins=8)

    parts = [
        step_areas(portion, ROWS, num_rows=2, num_bins=8)
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
    portion = timeline_of(info, select_rows(timeline.spans, keep), epoch=0, step=3)
    return replace(portion, begin_ns=timeline.begin_ns, end_ns=timeline.end_ns)


def told(areas: StepAreas) -> dict[str, dict[int, list[list[int]]]]:
    """Return the areas as lists."""
    return {
        name: {code: area.tolist() for code, area in getattr(areas, name).items()}
        for name in ("outer", "inner", "comm")
    }
