"""Pages of runs with little data: they say what there is, and show only measured numbers."""

from __future__ import annotations

import base64
import json
import math
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from plotly.utils import PlotlyJSONEncoder

from rankscope.analysis.drawing.rows import RowOrder
from rankscope.analysis.trace.errors import UnknownRunError
from rankscope.analysis.trace.rows import select_rows
from rankscope.analysis.trace.tables import RunSummary
from rankscope.dashboard.address import TIMELINE, View
from rankscope.dashboard.pages import overview
from rankscope.dashboard.pages import timeline as timeline_page
from rankscope.server.provider import StoreProvider
from rankscope.server.reports import Reports
from rankscope.tracer.topology import Layout
from tests.support.analysis.cluster import Source, gpt_cluster, source_of
from tests.support.dashboard.page_text import rendered, words
from tests.support.receiver import TIMEOUT_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dash.development.base_component import Component

    from rankscope.analysis.trace.tables import RunInfo
    from rankscope.collector.store.store import Store

MS = 1_000_000
RUN = "tiny"
NUM_STEPS = 6
GRID = Layout(dp=2, tp=2)
UNKNOWN_STEP = 10**6
NOT_A_NUMBER = re.compile(r"\b(nan|NaN|inf|Infinity|None|null|undefined)\b")
"""Texts that Python and JavaScript write for a missing number."""


@dataclass(frozen=True)
class OneRun(Source):
    """A store of one run, or of none."""

    state: str = "ended"
    is_there: bool = True

    def runs(self) -> tuple[RunSummary, ...]:
        if not self.is_there:
            return ()
        summary = RunSummary(
            run_id=RUN,
            source_format="rankscope",
            state=self.state,
            world_size=self.info.world_size,
            layout=self.info.layout,
            num_spans=len(self.span_table),
            num_steps=len(set(self.step_table.step.tolist())),
            started_ns=None,
        )
        return (summary,)

    def run_info(self, run_id: str) -> RunInfo:
        if not self.is_there:
            raise UnknownRunError(run_id, ())
        return super().run_info(run_id)


def build_job(
    layout: Layout, *, num_steps: int = NUM_STEPS, slow_rank: int | None = None
) -> Source:
    """Return a job with four micro-batches per step; all ranks but one are equally fast."""
    cluster = gpt_cluster(
        layout,
        num_steps=num_steps,
        forward_ns=lambda rank, _step, _microbatch: 18 * MS if rank == slow_rank else 10 * MS,
    )
    return source_of(cluster)


def whole(source: Source) -> OneRun:
    return OneRun(source.info, source.span_table, source.step_table)


def with_rows(num_rows: int, *, is_there: bool = True) -> OneRun:
    """Return a run with only its first spans, and without the end of any step."""
    source = build_job(GRID)
    keep = np.arange(len(source.span_table)) < num_rows
    return OneRun(
        source.info,
        select_rows(source.span_table, keep),
        select_rows(source.step_table, source.step_table.step < 0),
        is_there=is_there,
    )


def without_rank(rank: int) -> OneRun:
    source = build_job(Layout(dp=2, tp=2, pp=2), slow_rank=5)
    return OneRun(
        source.info,
        select_rows(source.span_table, source.span_table.rank != rank),
        select_rows(source.step_table, source.step_table.rank != rank),
    )


def undescribed(*ranks: int) -> OneRun:
    """Return a run with all its spans, of which some ranks have no description."""
    source = build_job(GRID)
    epochs = tuple(
        replace(epoch, ranks=tuple(info for info in epoch.ranks if info.rank not in ranks))
        for epoch in source.info.epochs
    )
    return OneRun(replace(source.info, epochs=epochs), source.span_table, source.step_table)


def failed() -> OneRun:
    """Return a run all of whose steps have begun and none has ended."""
    source = build_job(GRID)
    ended = select_rows(source.step_table, source.step_table.step < 0)
    return OneRun(source.info, source.span_table, ended, state="failed")


NO_RUNS = "No data because this store holds no runs yet"
NO_RUN = "No data because there is no run 'tiny' in this store"
NO_STEPS = "No data because run 'tiny' ended before a step was recorded completely"
NO_REPLAY = "Insufficient evidence: no step can be replayed"
HEALTHY = "Healthy: differences between ranks"
ALONE = "Healthy: the only rank does not become slower for long, in 6 steps; without peers"

DATASETS: dict[str, tuple[Callable[[], OneRun], str, str]] = {
    # What the overview says of it, and what the timeline. A rank of a grid records 8 computations,
    # 16 + 1 + 1 collectives with a wait each, and its optimizer: 45; 16 more between stages.
    "no run": (lambda: with_rows(0, is_there=False), NO_RUN, NO_RUN),
    "0 rows": (lambda: with_rows(0), NO_STEPS, NO_STEPS),
    "1 row": (lambda: with_rows(1), NO_REPLAY, "1 span of 1 rank,"),
    "1 rank": (lambda: whole(build_job(Layout())), ALONE, "11 spans of 1 rank,"),
    "1 step": (lambda: whole(build_job(GRID, num_steps=1)), HEALTHY, "180 spans of 4 ranks,"),
    "all equal": (lambda: whole(build_job(GRID)), HEALTHY, "180 spans of 4 ranks,"),
    "rank 3 missing": (lambda: without_rank(3), NO_REPLAY, "427 spans of 7 ranks,"),
    "rank 3 undescribed": (lambda: undescribed(3), NO_REPLAY, "180 spans of 4 ranks,"),
    "nothing described": (lambda: undescribed(0, 1, 2, 3), NO_REPLAY, "180 spans of 4 ranks,"),
    "only failed steps": (failed, NO_REPLAY, "180 spans of 4 ranks,"),
}

VIEWS = {
    "the newest run": View(),
    "the run": View(run=RUN),
    "its newest step": View(page=TIMELINE, run=RUN),
    "its first step": View(page=TIMELINE, run=RUN, epoch=0, step=0),
    "a step that is not there": View(page=TIMELINE, run=RUN, epoch=0, step=UNKNOWN_STEP),
    **{f"its newest step by {by}": View(page=TIMELINE, run=RUN, order=by) for by in RowOrder},
}


@pytest.fixture(scope="module", params=DATASETS)
def dataset(request: pytest.FixtureRequest, store: Store) -> tuple[StoreProvider, str, str]:
    make, overview, timeline = DATASETS[request.param]
    source = make()
    provider = StoreProvider(source, Reports(source), store=store, timeout_s=TIMEOUT_S)
    return provider, overview, timeline


def make_page(provider: StoreProvider, view: View) -> Component:
    if view.page == TIMELINE:
        return rendered(timeline_page.PAGE, provider, view)
    return rendered(overview.PAGE, provider, view)


def expected(view: View, overview: str, timeline: str) -> str:
    """Return the expected text of a view, given those of the overview and the timeline."""
    if view.run is None and overview == NO_RUN:
        return NO_RUNS
    if view.page != TIMELINE:
        return overview
    if view.step == UNKNOWN_STEP and not timeline.startswith("No data"):
        return f"No data because step {UNKNOWN_STEP} of epoch 0 has no spans"
    return timeline


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_each_page_says_what_there_is_and_shows_only_measured_numbers(
    dataset: tuple[StoreProvider, str, str], view: View
) -> None:
    provider, overview, timeline = dataset

    page = make_page(provider, view)

    # THEN the page says what there is, or why there is nothing
    shown = words(page)
    assert expected(view, overview, timeline) in shown
    assert not NOT_A_NUMBER.findall(shown)
    # AND every axis, colour scale and label has measured numbers only
    tree = json.loads(json.dumps(page, cls=PlotlyJSONEncoder))
    for figure in figures_of(tree):
        check_layout(figure["layout"])
        for trace in figure["data"]:
            check_trace(trace)


def figures_of(node: Any) -> Iterator[dict[str, Any]]:  # noqa: ANN401  # whatever JSON holds
    if isinstance(node, list):
        for child in node:
            yield from figures_of(child)
    elif isinstance(node, dict):
        if {"data", "layout"} <= set(node):
            yield node
        else:
            for child in node.values():
                yield from figures_of(child)


def check_layout(layout: dict[str, Any]) -> None:
    for name, axis in layout.items():
        if re.fullmatch(r"[xy]axis\d*", name):
            # None: an end that plotly chooses.
            ends = [end for end in axis.get("range") or () if end is not None]
            assert all(isinstance(end, str) or math.isfinite(end) for end in ends)
            labels = axis.get("ticktext") or ()
            assert not any(NOT_A_NUMBER.search(str(label)) for label in labels)


def check_trace(trace: dict[str, Any]) -> None:
    for name in ("x", "y", "base", "width"):
        assert all(is_measured(value) for value in values_of(trace.get(name)))
    for name in ("text", "customdata"):
        assert not any(NOT_A_NUMBER.search(str(value)) for value in values_of(trace.get(name)))
    if "zmin" in trace:
        assert math.isfinite(trace["zmin"])
        assert trace["zmin"] < trace["zmax"] < math.inf


def is_measured(value: object) -> bool:
    """Return whether a value is a number, an axis label, or a gap (None)."""
    if value is None:
        return True
    if isinstance(value, str):
        return not NOT_A_NUMBER.search(value)
    return isinstance(value, int | float) and math.isfinite(value)


def values_of(found: Any) -> list[Any]:  # noqa: ANN401  # whatever plotly makes of a column
    """Return the values of a column, whatever form plotly has given it."""
    if found is None:
        return []
    if isinstance(found, dict):
        values: list[Any] = np.frombuffer(base64.b64decode(found["bdata"]), found["dtype"]).tolist()
        return values
    if isinstance(found, list):
        return (
            [value for part in found for value in values_of(part)] if _is_nested(found) else found
        )
    return [found]


def _is_nested(found: list[Any]) -> bool:
    return any(isinstance(part, list) for part in found)
