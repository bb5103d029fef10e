from __future__ import annotations

import itertools
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from rankscope.analysis.drawing.raster import (
    NUM_BINS,
    Viewport,
    draw_picture,
    draw_raster,
    redraw_viewport,
)
from rankscope.analysis.drawing.rows import TILED, RowOrder, order_ranks
from rankscope.analysis.drawing.tiles import Level, finest_zooms
from rankscope.analysis.drawing.timeline import StepTimeline, read_timeline, select_ranks
from rankscope.analysis.trace.errors import EmptyRunError
from rankscope.collector.errors import StoreQueryError
from rankscope.collector.read.pictures import (
    PictureLevel,
    StepId,
    StepRevision,
    read_kept_picture,
    read_pixels,
)
from rankscope.collector.retention.deletion import Deletions
from rankscope.collector.retention.retention import Retention
from rankscope.collector.retention.span_days import DAY_NS
from rankscope.dashboard.address import TIMELINE, View
from rankscope.dashboard.figures.timeline_raster import raster_figure, raster_rows
from rankscope.dashboard.pages import timeline as timeline_page
from rankscope.server import step_view
from rankscope.server.pictures import StepPictures, draw_in_portions
from rankscope.server.provider import StoreProvider
from rankscope.server.reports import Reports
from rankscope.server.rollups import Rollups
from rankscope.simulation import store_simulation
from rankscope.sources.store_source import StoreSource
from rankscope.tracer.span import KIND_CODES, SpanKind
from rankscope.trainer.simulator.scenario import Scenario
from rankscope.trainer.simulator.simulation import simulate
from tests.support.dashboard.page_text import rendered, words
from tests.support.receiver import TIMEOUT_S

if TYPE_CHECKING:
    from rankscope.analysis.drawing.raster import StepPicture, StepRaster
    from rankscope.collector.read.pictures import Pixels
    from rankscope.collector.store.store import Store

pytestmark = pytest.mark.slow

FEW, MANY, DEEP = "few", "many", "deep"
SCENARIOS = {
    FEW: Scenario(dp=64, pp=4, num_steps=1, num_microbatches=6),  # a line a rank
    MANY: Scenario(dp=300, pp=2, num_steps=1, num_microbatches=4),  # two ranks a line
    DEEP: Scenario(dp=2, pp=2, num_steps=1, num_microbatches=3_000),  # more spans than pixels
}
_NUMBERS = itertools.count()


@pytest.fixture(scope="module", autouse=True)
def _stored_runs(store: Store) -> None:
    """Store the runs of `SCENARIOS` with the tiles of their steps, each too large for bars."""
    for run_id, scenario in SCENARIOS.items():
        simulation = simulate(scenario, run_id=run_id)
        store_simulation(store, simulation, simulation.tables())
    roll(Rollups(store))


def roll(rollups: Rollups) -> None:
    """Take turns until no step is open; a turn ends after two seconds."""
    while not rollups.turn():
        pass


def step_zero(run_id: str) -> StepId:
    return StepId(run_id=run_id, epoch=0, step=0)


def timeline_in(store: Store, run_id: str) -> StepTimeline:
    return read_timeline(StoreSource(store), run_id, epoch=0, step=0)


def picture_in(
    store: Store, run_id: str, by: RowOrder = RowOrder.PP, viewport: Viewport | None = None
) -> StepPicture | None:
    coords = {
        rank.rank: rank.coords for rank in StoreSource(store).run_info(run_id).epochs[0].ranks
    }
    return StepPictures(store).picture(
        step_zero(run_id), order=by, read_places=lambda _: (coords, {}), viewport=viewport
    )


def assert_tiles_equal_spans(store: Store, run_id: str) -> list[PictureLevel]:
    """Compare each stored cell of a step with one drawn from its spans; return the levels."""
    timeline = timeline_in(store, run_id)
    kept = read_kept_picture(store, step_zero(run_id))
    assert kept is not None
    assert kept.num_spans == len(timeline.spans)
    key = StepRevision(step_id=step_zero(run_id), revision=kept.revision)
    compared = []
    for by in TILED:
        ranks = order_ranks(timeline, by)
        zooms = finest_zooms(num_spans=kept.num_spans, num_ranks=kept.num_ranks)
        for line_ranks, max_zoom in zooms.items():
            num_lines = -(-len(ranks) // line_ranks)
            for zoom in range(max_zoom + 1):
                level = PictureLevel(ordering=kept.orderings[by], line_ranks=line_ranks, zoom=zoom)
                num_tiles = Level(line_ranks, zoom).num_tiles
                pixels = read_pixels(
                    store, key, level, tiles=range(num_tiles), lines=range(num_lines)
                )
                assert pixels is not None, level
                num_bins = NUM_BINS * num_tiles
                fresh = draw_raster(timeline, ranks, max_lines=num_lines, num_bins=num_bins)
                assert_equal_cells(pixels, fresh)
                compared.append(level)
    return compared


def assert_equal_cells(pixels: Pixels, fresh: StepRaster) -> None:
    assert pixels.rank_blocks == fresh.rank_blocks
    for kind, ratio, cells in (
        (pixels.compute_kind, pixels.compute_ratio, fresh.compute),
        (pixels.comm_kind, pixels.comm_ratio, fresh.comm),
    ):
        assert np.array_equal(kind, cells.kind)
        assert np.array_equal(ratio, np.minimum(np.floor(cells.filled_ratio * 8), 255) / 8)


@pytest.mark.parametrize(
    ("run_id", "levels"),
    [(FEW, {(1, 0)}), (MANY, {(2, 0)}), (DEEP, {(1, 0), (1, 1)})],
)
def test_every_stored_cell_equals_one_drawn_from_the_spans(
    store: Store, run_id: str, levels: set[tuple[int, int]]
) -> None:
    compared = assert_tiles_equal_spans(store, run_id)

    assert {(level.line_ranks, level.zoom) for level in compared} == levels


@pytest.mark.parametrize("run_id", [MANY, DEEP, pytest.param(FEW, marks=pytest.mark.nightly)])
def test_tiles_drawn_in_portions_equal_those_drawn_from_all_spans(
    store: Store, run_id: str
) -> None:
    copy = copy_run(store, run_id)
    copy_spans(store, run_id, copy, "1")

    roll(Rollups(store, batch_spans=5_000))

    assert_tiles_equal_spans(store, copy)


@pytest.mark.parametrize("batch_spans", [1_000_000, pytest.param(5_000, marks=pytest.mark.nightly)])
def test_late_and_duplicate_rows_and_retries_leave_a_picture_of_each_row_once(
    store: Store, batch_spans: int
) -> None:
    # GIVEN a step that closed without a third of its ranks, and so with fewer lines
    copy = copy_run(store, MANY)
    copy_spans(store, MANY, copy, "rank % 3 != 0")
    rollups = Rollups(store, batch_spans=batch_spans)
    roll(rollups)
    before = read_kept_picture(store, step_zero(copy))
    assert before is not None
    assert (before.line_ranks, before.num_ranks) == (1, 400)
    assert_tiles_equal_spans(store, copy)

    # WHEN the others arrive late, some rows twice, and the first attempt to draw them fails
    copy_spans(store, MANY, copy, "rank % 3 = 0")
    copy_spans(store, MANY, copy, "rank % 5 = 0")
    with suppress(StoreQueryError):  # raised only if it is the same for several runs
        Rollups(_BreaksAtRollups(store), batch_spans=batch_spans).turn()  # type: ignore[arg-type]
    assert read_kept_picture(store, step_zero(copy)) == before
    assert_old_or_absent(picture_in(store, copy), before.num_spans)
    roll(rollups)

    # THEN every cell equals one drawn from all rows, each once
    kept = read_kept_picture(store, step_zero(copy))
    assert kept is not None
    assert (kept.line_ranks, kept.num_ranks) == (2, 600)
    assert_tiles_equal_spans(store, copy)
    store.command("OPTIMIZE TABLE pictures FINAL")
    assert_tiles_equal_spans(store, copy)


def assert_old_or_absent(picture: StepPicture | None, num_spans: int) -> None:
    assert picture is None or picture.num_spans == num_spans


@pytest.mark.parametrize(
    ("run_id", "by"),
    [
        pytest.param(
            run_id, by, marks=() if run_id == MANY or by == RowOrder.PP else pytest.mark.nightly
        )
        for run_id in SCENARIOS
        for by in TILED
    ],
)
def test_the_figure_of_tiles_equals_the_figure_of_spans(
    store: Store, run_id: str, by: RowOrder
) -> None:
    timeline = timeline_in(store, run_id)

    kept = picture_in(store, run_id, by)

    assert kept is not None
    fresh = draw_picture(timeline, order_ranks(timeline, by))
    assert kept.raster.edges_ns.tolist() == fresh.raster.edges_ns.tolist()
    assert (kept.num_spans, kept.num_ranks) == (fresh.num_spans, fresh.num_ranks)
    rows = raster_rows(fresh, by)
    assert raster_rows(kept, by) == rows
    assert raster_figure(kept, rows) == raster_figure(fresh, rows)


def test_a_viewport_is_cut_out_of_a_finer_level(store: Store) -> None:
    whole = picture_in(store, DEEP)
    assert whole is not None
    length = whole.end_ns - whole.begin_ns

    viewport = Viewport(begin_ns=length // 4, end_ns=length // 2, first_row=1, end_row=3)
    part = picture_in(store, DEEP, viewport=viewport)

    assert part is not None
    assert part.viewport == viewport
    assert part.ranks == whole.ranks[1:3]
    num_bins = part.raster.compute.kind.shape[1]
    assert NUM_BINS <= num_bins <= NUM_BINS + 2  # the step's picture has 225 there
    timeline = timeline_in(store, DEEP)
    fresh = draw_raster(timeline, part.ranks, max_lines=2, num_bins=4 * NUM_BINS)
    first = fresh.edges_ns.tolist().index(part.raster.edges_ns[0])
    assert np.array_equal(part.raster.compute.kind, fresh.compute.kind[:, first : first + num_bins])


def test_the_page_shows_a_stored_picture_without_reading_spans(store: Store) -> None:
    source = StoreSource(store)
    reports = Reports(source)
    reports.get(FEW)
    source.spans = None  # type: ignore[assignment,method-assign]  # reading spans fails
    provider = StoreProvider(source, reports, store=store, timeout_s=TIMEOUT_S)

    page = rendered(timeline_page.PAGE, provider, View(page=TIMELINE, run=FEW, step=0))

    assert "spans of 256 ranks, epoch 0" in words(page)
    assert "spans as a density picture" in words(page)


def test_a_viewport_of_few_spans_shows_each_span_and_its_wait(store: Store) -> None:
    source = StoreSource(store)
    provider = StoreProvider(source, Reports(source), store=store, timeout_s=TIMEOUT_S)
    viewport = Viewport(begin_ns=0, end_ns=10**15, first_row=0, end_row=8)
    view = View(page=TIMELINE, run=FEW, step=0, viewport=viewport)

    page = rendered(timeline_page.PAGE, provider, view)

    assert "Part of the step" in words(page)
    assert "8 ranks" in words(page)
    assert "density picture" not in words(page)
    whole = timeline_in(store, FEW)
    part = picture_in(store, FEW, viewport=viewport)
    assert part is not None
    rows = np.isin(whole.spans.rank, part.ranks)
    assert f"{rows.sum():,} spans" in words(page)
    assert (whole.wait_ns[rows] > 0).any()


def test_a_viewport_without_fine_pixels_is_drawn_from_its_spans(store: Store) -> None:
    source = StoreSource(store)
    provider = StoreProvider(source, Reports(source), store=store, timeout_s=TIMEOUT_S)
    timeline = timeline_in(store, MANY)
    length = timeline.end_ns - timeline.begin_ns
    viewport = Viewport(begin_ns=length // 8, end_ns=length, first_row=100, end_row=590)

    tiles = provider.picture(MANY, epoch=0, step=0, order=RowOrder.PP, viewport=viewport)

    assert tiles is not None
    assert {len(block) for block in tiles.raster.rank_blocks} == {2}
    found = provider.viewport_spans(tiles).found
    assert found is not None
    part = redraw_viewport(tiles, found)
    assert [len(block) for block in part.raster.rank_blocks] == [1] * 490
    assert part.raster.edges_ns[[0, -1]].tolist() == [length // 8, length]
    inside = np.isin(timeline.spans.rank, part.ranks)
    begins = timeline.spans.start_ns - timeline.begin_ns
    ends = np.clip(begins + timeline.spans.duration_ns, length // 8, None)
    spent = np.maximum(ends - np.clip(begins, length // 8, None), 0)
    # A rank that waits in a communication is drawn on both lines, as waiting and as communicating.
    waits = (timeline.spans.kind == KIND_CODES[SpanKind.WAIT]) & (timeline.spans.depth > 0)
    spent = spent[inside & ((timeline.spans.depth == 0) | waits)]
    width = np.diff(part.raster.edges_ns)
    shown = sum(
        float((cells.filled_ratio.astype(np.float64) * width).sum())
        for cells in (part.raster.compute, part.raster.comm)
    )
    assert shown == pytest.approx(float(spent.sum()), rel=1e-5)


def test_a_viewport_shows_its_tiles_until_its_spans_are_read(store: Store) -> None:
    source = StoreSource(store)
    provider = StoreProvider(source, Reports(source), store=store, timeout_s=0)
    viewport = Viewport(begin_ns=0, end_ns=10**15, first_row=0, end_row=8)
    tiles = provider.picture(FEW, epoch=0, step=0, order=RowOrder.PP, viewport=viewport)
    assert tiles is not None

    first = provider.viewport_spans(tiles)

    assert (first.found, first.is_pending) == (None, True)
    until = time.monotonic() + TIMEOUT_S
    while provider.viewport_spans(tiles).is_pending and time.monotonic() < until:
        threading.Event().wait(0.01)
    found = provider.viewport_spans(tiles).found
    assert found is not None
    assert set(found.spans.rank.tolist()) == set(tiles.ranks)


def test_a_step_that_bars_can_show_has_no_picture(store: Store) -> None:
    simulation = simulate(Scenario(dp=2, pp=1, num_steps=1), run_id="small")
    store_simulation(store, simulation, simulation.tables())
    roll(Rollups(store))

    assert picture_in(store, "small") is None
    unknown = StepId(run_id="unknown", epoch=0, step=0)
    pictures = StepPictures(store)
    assert pictures.picture(unknown, order=RowOrder.PP, read_places=lambda _: ({}, {})) is None


def test_deleting_a_run_deletes_its_pictures(store: Store) -> None:
    copy = copy_run(store, FEW)
    copy_spans(store, FEW, copy, "1")
    roll(Rollups(store))

    removed = Deletions(store).delete(copy)

    assert removed.num_rows["pictures"] > 0
    assert read_kept_picture(store, step_zero(copy)) is None


@pytest.fixture(scope="module")
def wide(store: Store) -> str:
    """Store a run of 1,025 ranks, without tiles: lines of three ranks, the last of two."""
    simulation = simulate(Scenario(dp=205, pp=5, num_steps=1, num_microbatches=1), run_id="wide")
    store_simulation(store, simulation, simulation.tables())
    return "wide"


@pytest.mark.parametrize(
    ("by", "portion_spans"), [(RowOrder.PP, 1_700), (RowOrder.DP, 2_400), (RowOrder.PP, 10**9)]
)
def test_a_picture_drawn_in_portions_equals_one_drawn_from_all_spans(
    store: Store, wide: str, by: RowOrder, portion_spans: int
) -> None:
    source = StoreSource(store)
    timeline = read_timeline(source, wide, epoch=0, step=0)
    whole = draw_picture(timeline, order_ranks(timeline, by))

    drawn = draw_in_portions(
        store, source.run_info(wide), step_zero(wide), order=by, portion_spans=portion_spans
    )

    assert [len(block) for block in drawn.raster.rank_blocks] == [3] * 341 + [2]
    assert drawn.raster.rank_blocks == whole.raster.rank_blocks
    assert np.array_equal(drawn.raster.edges_ns, whole.raster.edges_ns)
    for drawn_cells, whole_cells in (
        (drawn.raster.compute, whole.raster.compute),
        (drawn.raster.comm, whole.raster.comm),
    ):
        assert np.array_equal(drawn_cells.kind, whole_cells.kind)
        assert np.array_equal(drawn_cells.filled_ratio, whole_cells.filled_ratio)
    assert (drawn.num_spans, drawn.num_ranks) == (whole.num_spans, whole.num_ranks)
    assert (drawn.begin_ns, drawn.end_ns) == (whole.begin_ns, whole.end_ns)
    assert drawn.coords == whole.coords


def test_the_page_of_a_large_step_is_drawn_in_the_background_in_portions(
    store: Store, wide: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # GIVEN a step too large to be held, without tiles
    run_id = copy_run(store, wide)
    copy_spans(store, wide, run_id, "1")
    monkeypatch.setattr(step_view, "LARGE_STEP_SPANS", 0)
    source = StoreSource(store)
    reports = Reports(source)
    reports.get(run_id)
    source.spans = None  # type: ignore[assignment,method-assign]  # reading spans fails
    provider = StoreProvider(source, reports, store=store, timeout_s=0)
    view = View(page=TIMELINE, run=run_id, step=0)

    # WHEN a page requests it, THEN it first says that it is being drawn, and later shows it
    assert f"Drawing step 0 of run {run_id!r}" in words(
        rendered(timeline_page.PAGE, provider, view)
    )
    give_up_s = time.monotonic() + TIMEOUT_S
    while "density picture" not in (shown := words(rendered(timeline_page.PAGE, provider, view))):
        assert time.monotonic() < give_up_s, "not drawn before the timeout"
    assert "spans of 1,025 ranks, epoch 0" in shown


@pytest.mark.parametrize("is_closed", [False, True])
def test_some_ranks_of_a_step_are_those_of_the_whole_step(
    store: Store, wide: str, *, is_closed: bool
) -> None:
    run_id = FEW if is_closed else wide
    source, ranks = StoreSource(store), (1, 40, 41)
    provider = StoreProvider(source, Reports(source), store=store, timeout_s=TIMEOUT_S)
    whole = timeline_in(store, run_id)
    expected = select_ranks(whole, ranks)

    part = provider.ranks_of_step(run_id, epoch=0, step=0, ranks=ranks).found

    assert (provider.picture_revision(run_id, epoch=0, step=0) != 0) == is_closed
    assert part is not None
    assert (part.begin_ns, part.end_ns) == (whole.begin_ns, whole.end_ns)
    for column in ("wait_ns", "transfer_ns", "last_rank", "blocked_ns"):
        assert getattr(part, column).tolist() == getattr(expected, column).tolist()
    assert provider.ranks_of_step(run_id, epoch=0, step=9, ranks=ranks).found is None


def test_a_large_step_without_spans_is_an_error(store: Store, wide: str) -> None:
    info, nowhere = StoreSource(store).run_info(wide), StepId(run_id=wide, epoch=0, step=7)

    with pytest.raises(EmptyRunError, match="no spans of step 7 in epoch 0"):
        draw_in_portions(store, info, nowhere, order=RowOrder.PP)


def test_finer_levels_expire_with_the_spans_and_the_top_level_stays(store: Store) -> None:
    # The last test of the module: the spans of its runs expire.
    whole = picture_in(store, DEEP)
    assert whole is not None
    length = whole.end_ns - whole.begin_ns
    viewport = Viewport(begin_ns=length // 4, end_ns=length // 2, first_row=0, end_row=4)
    fine = picture_in(store, DEEP, viewport=viewport)
    assert fine is not None
    in_three_days = time.time_ns() + 3 * DAY_NS

    Retention(store, Deletions(store), unix_ns=lambda: in_three_days).expire()

    assert not len(StoreSource(store).spans(DEEP))
    top = picture_in(store, DEEP)
    assert top is not None
    assert np.array_equal(top.raster.compute.kind, whole.raster.compute.kind)
    coarse = picture_in(store, DEEP, viewport=viewport)
    assert coarse is not None
    assert coarse.raster.compute.kind.shape[1] == NUM_BINS // 4
    assert fine.raster.compute.kind.shape[1] == NUM_BINS


def copy_run(store: Store, run_id: str) -> str:
    """Store the description of a run once more under another name, without spans."""
    copy = f"{run_id}-{next(_NUMBERS)}"
    for table in ("runs", "ranks", "groups"):
        copy_rows(store, table, run_id, copy, "1")
    return copy


def copy_spans(store: Store, run_id: str, copy: str, which: str) -> None:
    """Store some spans of a run for its copy, as a cut that may be a repeated one."""
    copy_rows(store, "spans", run_id, copy, which)
    cut = {"run_id": copy, "segment": next(_NUMBERS), "num_spans": 1, "revision": 2}
    store.insert_rows("ledger", [{**cut, "state": "repeated"}])


def copy_rows(store: Store, table: str, run_id: str, copy: str, which: str) -> None:
    found = f"SELECT * FROM {table} FINAL WHERE run_id = '{run_id}' AND {which}"
    store.command(f"INSERT INTO {table} SELECT * REPLACE ('{copy}' AS run_id) FROM ({found})")


class _BreaksAtRollups:
    """A store that fails when rollups are written, after the pictures were."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.rows, self.arrow = store.rows, store.arrow
        self.insert_rows = store.insert_rows

    def insert_arrow(self, table: str, rows: Any) -> None:  # noqa: ANN401  # an Arrow table
        if table == "rollups":
            raise StoreQueryError("the disk is full")
        self._store.insert_arrow(table, rows)
