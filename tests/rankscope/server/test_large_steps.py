from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
import pytest

from rankscope.analysis.drawing.raster import draw_picture
from rankscope.analysis.drawing.rows import GroupBy
from rankscope.analysis.drawing.timeline import read_timeline
from rankscope.analysis.trace.errors import EmptyRunError
from rankscope.collector.read.pictures import StepId
from rankscope.collector.store.store import Store, open_store
from rankscope.dashboard.address import TIMELINE, View
from rankscope.dashboard.pages.timeline import timeline_page
from rankscope.server import provider as provider_module
from rankscope.server.background_jobs import BackgroundJobs
from rankscope.server.pictures import LargeSteps, draw_in_portions
from rankscope.server.provider import StoreProvider
from rankscope.server.reports import Reports
from rankscope.simulation import store_simulation
from rankscope.sources.store_source import StoreSource
from rankscope.trainer.simulator.scenario import Scenario
from rankscope.trainer.simulator.simulation import simulate
from tests.support.dashboard.page_text import words
from tests.support.receiver import TIMEOUT_S

if TYPE_CHECKING:
    from collections.abc import Iterator

RUN = "wide"
PLACE = StepId(run_id=RUN, epoch=0, step=0)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """Hold a run of 1,025 ranks: lines of three, the last of two; nothing is kept of its step."""
    with open_store(f"chdb://{tmp_path_factory.mktemp('store')}") as opened:
        simulation = simulate(Scenario(dp=205, pp=5, num_steps=1, num_microbatches=5), run_id=RUN)
        store_simulation(opened, simulation, simulation.tables())
        yield opened


@pytest.mark.parametrize(
    ("by", "portion_spans"), [(GroupBy.PP, 5_000), (GroupBy.DP, 7_000), (GroupBy.PP, 10**9)]
)
def test_a_picture_drawn_in_portions_is_the_one_that_all_spans_give(
    store: Store, by: GroupBy, portion_spans: int
) -> None:
    source = StoreSource(store)
    timeline = read_timeline(source, RUN, epoch=0, step=0)
    whole = draw_picture(timeline, by)

    drawn = draw_in_portions(
        store, source.run_info(RUN), PLACE, group_by=by, portion_spans=portion_spans
    )

    assert [len(block) for block in drawn.raster.rank_blocks] == [3] * 341 + [2]
    assert drawn.raster.rank_blocks == whole.raster.rank_blocks
    assert np.array_equal(drawn.raster.edges_ns, whole.raster.edges_ns)
    for mine, theirs in (
        (drawn.raster.compute, whole.raster.compute),
        (drawn.raster.comm, whole.raster.comm),
    ):
        assert np.array_equal(mine.kind, theirs.kind)
        assert np.array_equal(mine.filled_ratio, theirs.filled_ratio)
    assert (drawn.num_spans, drawn.num_ranks) == (whole.num_spans, whole.num_ranks)
    assert (drawn.begin_ns, drawn.end_ns) == (whole.begin_ns, whole.end_ns)
    assert drawn.coords == whole.coords


def test_a_page_of_a_large_step_fills_without_holding_its_spans(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    # GIVEN a step too large to be held, of which no picture is kept yet
    monkeypatch.setattr(provider_module, "LARGE_STEP_SPANS", 10_000)
    source = StoreSource(store)
    reports = Reports(source)
    reports.get(RUN)
    source.spans = None  # type: ignore[assignment,method-assign]  # reading spans fails
    provider = StoreProvider(source, reports, store=store, timeout_s=0)
    view = View(page=TIMELINE, run=RUN, step=0)

    # WHEN a page asks for it, THEN it says what it waits for, and shows it in time
    assert "Drawing step 0 of run 'wide'" in words(timeline_page(provider, view, base_path="/"))
    give_up_s = time.monotonic() + TIMEOUT_S
    while "density picture" not in (shown := words(timeline_page(provider, view, base_path="/"))):
        assert time.monotonic() < give_up_s, "it was never drawn"
    assert "spans of 1,025 ranks, epoch 0" in shown


def test_a_large_step_without_spans_says_so(store: Store) -> None:
    steps = LargeSteps(store, StoreSource(store), BackgroundJobs())
    nowhere = StepId(run_id=RUN, epoch=0, step=7)

    with pytest.raises(EmptyRunError, match="no spans of step 7 in epoch 0"):
        steps.picture(nowhere, group_by=GroupBy.PP, timeout_s=TIMEOUT_S)
