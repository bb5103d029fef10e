from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from analysis.picture import picture_of
from analysis.timeline import StepTimeline, step_timeline
from collector.pyramid import write_pixels
from collector.rollups import ClosedStep
from collector.store import Store, open_store
from dashboard.address import GroupBy, Page, View
from dashboard.figures.timeline_raster import MAX_ROWS, NUM_BINS, picture_figure, raster_figure
from dashboard.figures.timeline_rows import row_order
from dashboard.pages.timeline import timeline_page
from rankscope.pictures import picture_rows, read_picture
from rankscope.provider import StoreProvider
from rankscope.reports import Reports
from rankscope.rolling import Rolling
from rankscope.simulated_store import store_simulation
from rankscope.source import StoreSource
from tests.dashboard.builders import traces
from tests.dashboard.pages.test_overview import words
from trainer.simulator.scenario import Scenario
from trainer.simulator.simulation import simulate

if TYPE_CHECKING:
    from collections.abc import Iterator

FEW, MANY = "few", "many"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """Hold a run whose steps are too large for bars, one with a line a rank, one without."""
    with open_store(f"chdb://{tmp_path_factory.mktemp('store')}") as opened:
        few = Scenario(dp=64, pp=4, num_steps=1, num_microbatches=6)
        many = Scenario(dp=300, pp=2, num_steps=1, num_microbatches=4)
        for run_id, scenario in ((FEW, few), (MANY, many)):
            simulation = simulate(scenario, run_id=run_id)
            store_simulation(opened, simulation, simulation.tables())
        while not Rolling(opened).turn():
            pass
        yield opened


def timeline_in(store: Store, run_id: str) -> StepTimeline:
    return step_timeline(StoreSource(store), run_id, epoch=0, step=0)


@pytest.mark.parametrize(
    ("run_id", "by"), [*((FEW, by) for by in GroupBy), (MANY, GroupBy.PP), (MANY, GroupBy.DP)]
)
def test_a_kept_picture_shows_what_one_drawn_from_spans_does(
    store: Store, run_id: str, by: GroupBy
) -> None:
    timeline = timeline_in(store, run_id)
    assert len(timeline.spans) > 10_000

    kept = read_picture(store, run_id, epoch=0, step=0, group_by=by, coords=timeline.coords)

    assert kept is not None
    fresh = picture_of(timeline, row_order(timeline, by), max_rows=MAX_ROWS, num_bins=NUM_BINS)
    assert kept.raster.rank_blocks == fresh.raster.rank_blocks
    assert (kept.num_spans, kept.num_ranks) == (fresh.num_spans, fresh.num_ranks)
    assert kept.raster.edges_ns.tolist() == fresh.raster.edges_ns.tolist()
    for mine, theirs in (
        (kept.raster.compute, fresh.raster.compute),
        (kept.raster.comm, fresh.raster.comm),
    ):
        assert np.array_equal(mine.kind, theirs.kind)
        assert np.array_equal(mine.filled_ratio >= 0.5, theirs.filled_ratio >= 0.5)
    drawn, again = (traces(f)[0].z for f in (picture_figure(kept, by), raster_figure(timeline, by)))
    assert np.array_equal(drawn, again, equal_nan=True)


def test_the_page_shows_it_without_reading_a_span(store: Store) -> None:
    source = StoreSource(store)
    reports = Reports(source)
    reports.get(FEW)
    source.spans = None  # type: ignore[assignment,method-assign]  # whoever asks for spans fails
    provider = StoreProvider(source, reports, store=store)

    page = timeline_page(provider, View(page=Page.TIMELINE, run=FEW, step=0), base_path="/")

    assert "spans of 256 ranks, epoch 0" in words(page)
    assert "spans as areas" in words(page)


def test_a_step_that_bars_can_carry_has_none(store: Store) -> None:
    simulation = simulate(Scenario(dp=2, pp=1, num_steps=1), run_id="small")
    store_simulation(store, simulation, simulation.tables())
    assert Rolling(store).turn()

    assert read_picture(store, "small", epoch=0, step=0, group_by=GroupBy.PP, coords={}) is None
    assert read_picture(store, "nobody", epoch=0, step=0, group_by=GroupBy.PP, coords={}) is None


def test_a_picture_of_less_never_replaces_one_of_more(store: Store) -> None:
    whole = timeline_in(store, FEW)
    step = ClosedStep(
        run_id=FEW, epoch=0, step=0, begin_ns=0, end_ns=1, num_spans=1, num_ranks=256,
        num_described=0, at_ns=1,
    )  # fmt: skip
    before = read_picture(store, FEW, epoch=0, step=0, group_by=GroupBy.RANK, coords={})

    write_pixels(store, picture_rows(replace(whole, begin_ns=whole.begin_ns - 10**9), step))

    after = read_picture(store, FEW, epoch=0, step=0, group_by=GroupBy.RANK, coords={})
    assert before is not None
    assert after is not None
    assert np.array_equal(before.raster.compute.kind, after.raster.compute.kind)
