"""Pixels of a step, held against the spans below them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest

from rankscope.analysis.drawing.rows import RowOrder, lay_out_ranks
from rankscope.analysis.drawing.timeline import find_blocked, read_timeline
from rankscope.dashboard.figures.timeline import timeline_figure
from rankscope.dashboard.figures.timeline_canvas import SOLID
from rankscope.dashboard.theme import KIND_COLORS
from rankscope.server.provider import StoreProvider
from rankscope.server.reports import Reports
from rankscope.tracer.span import KINDS, NS_PER_MS, SpanKind
from tests.browser.conftest import served
from tests.browser.test_pages import DRAWN, opened, point_at, settle, until
from tests.support.rankscope.simulated_source import SimulatedSource
from tests.support.trainer.recorded import preset_scenario

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

    from rankscope.analysis.drawing.timeline import StepTimeline
    from rankscope.collector.store.store import Store

RUN, STEP = "simulated", 2
NUM_RANKS = 128
NUM_BINS = 900

COLORS = """(places) => {
  const canvas = document.querySelector('#timeline-graph-canvas');
  const gd = document.querySelector('#timeline-graph .js-plotly-plot');
  const { l, t, w, h } = gd._fullLayout._size, ratio = window.devicePixelRatio;
  const copy = document.createElement('canvas');
  [copy.width, copy.height] = [canvas.width, canvas.height];
  const context = copy.getContext('2d', { willReadFrequently: true });
  context.drawImage(canvas, 0, 0);
  return places.map(([x, y]) => [...context.getImageData(
    Math.floor((l + x * w) * ratio),
    Math.floor((t + y * h - canvas.offsetTop) * ratio), 1, 1).data]);
}"""
"""Returns the colours of the canvas at shares of the plot's width and height."""

STATE = """() => {
  const gd = document.querySelector('#timeline-graph .js-plotly-plot');
  return gd._fullLayout.xaxis.range.map(Number);
}"""
"""Returns the range that plotly has drawn."""


def long_stretches(step: StepTimeline, lower: int) -> list[tuple[float, float, str]]:
    """Return the middle of the longest stretch of each span that no other span of its rank covers.

    Only of stretches longer than four pixels, on the upper line (0) or the lower one (1) of its
    rank, with the colour that it must have. Communication of unknown wait is left out.
    """
    spans = step.spans
    length = step.end_ns - step.begin_ns
    blocked_ns, _ = find_blocked(spans, step.wait_ns)
    ends = spans.start_ns + spans.duration_ns
    found = []
    for row in range(len(spans)):
        if bool(step.communication[row]) != bool(lower) or (lower and step.wait_ns[row] < 0):
            continue
        begin, end = int(spans.start_ns[row]) + max(int(step.wait_ns[row]), 0), int(ends[row])
        if blocked_ns[row] >= 0:  # what follows in a wait is the transfer
            end = begin + int(blocked_ns[row])
        others = (spans.rank == spans.rank[row]) & (spans.start_ns < end) & (ends > begin)
        # On the upper line a rank waits while communication inside its compute blocks it.
        others &= step.communication if lower else ~step.communication | (spans.depth > 0)
        others[row] = False
        covered = sorted(zip(spans.start_ns[others].tolist(), ends[others].tolist(), strict=True))
        free, at = [], begin
        for first, last in [*covered, (end, end)]:
            free.append((first - at, (first + at) / 2))
            at = max(at, last)
        size, middle = max(free)
        if size > 4 * length / NUM_BINS:
            y = (2 * int(spans.rank[row]) + lower + 0.5) / (2 * NUM_RANKS)
            color = KIND_COLORS[KINDS[int(spans.kind[row])]]
            found.append(((middle - step.begin_ns) / length, y, color))
    return found


def wrong_colors(page: Page, expected: list[tuple[float, float, str]]) -> list[object]:
    """Return the places that have another colour than the expected one."""
    colors = page.evaluate(COLORS, [(x, y) for x, y, _ in expected])
    return [
        (place, color)
        for place, color in zip(expected, colors, strict=True)
        if "#{:02x}{:02x}{:02x}".format(*color[:3]) != place[2] or color[3] != 255
    ]


def test_each_pixel_has_the_colour_of_the_span_below_it(browser: Browser, store: Store) -> None:
    scenario = preset_scenario("slow-compute", num_steps=4, dp=32)
    source = SimulatedSource(scenario, run_id=RUN)
    step = read_timeline(source, RUN, epoch=0, step=STEP)
    assert len(set(step.spans.rank.tolist())) == NUM_RANKS
    upper, lower = (long_stretches(step, line)[::3] for line in (0, 1))
    assert min(len(upper), len(lower)) > 50
    kinds = {SpanKind.FORWARD, SpanKind.BACKWARD, SpanKind.WAIT, SpanKind.DP_COMM}
    assert {KIND_COLORS[kind] for kind in kinds} <= {color for *_, color in upper + lower}

    provider = StoreProvider(source, Reports(source), store=store, timeout_s=60)
    address = f"/timeline?run={RUN}&step={STEP}&order=rank"
    with served(provider) as url, opened(browser, url + address) as seen:
        seen.page.wait_for_selector(DRAWN)

        assert wrong_colors(seen.page, upper + lower) == []


def test_each_bar_has_the_colour_of_its_span(browser: Browser, store: Store) -> None:
    source = SimulatedSource(preset_scenario("slow-compute", num_steps=4), run_id=RUN)
    step = read_timeline(source, RUN, epoch=0, step=STEP)
    _, bars = timeline_figure(step, lay_out_ranks(step, RowOrder.RANK))
    num_rows = len(set(step.spans.rank.tolist()))
    length_ms = (step.end_ns - step.begin_ns) / NS_PER_MS
    kinds = (SpanKind.FORWARD, SpanKind.BACKWARD, SpanKind.OPTIMIZER, SpanKind.DP_COMM)
    expected = [
        ((begin + length / 2) / length_ms, (center + 0.5) / num_rows, KIND_COLORS[one.kind])
        for one in bars
        if one.kind in kinds and one.look == SOLID
        for begin, length, center in zip(one.begin_ms, one.length_ms, one.center, strict=True)
        if length > 4 * length_ms / NUM_BINS
    ]
    assert {color for *_, color in expected} == {KIND_COLORS[kind] for kind in kinds}

    provider = StoreProvider(source, Reports(source), store=store, timeout_s=60)
    address = f"/timeline?run={RUN}&step={STEP}&order=rank"
    with served(provider) as url, opened(browser, url + address) as seen:
        seen.page.wait_for_selector(DRAWN)

        assert wrong_colors(seen.page, expected) == []


def test_turns_of_the_wheel_add_up_and_reach_the_axes(browser: Browser, store: Store) -> None:
    source = SimulatedSource(preset_scenario("slow-compute", num_steps=4, dp=32), run_id=RUN)
    provider = StoreProvider(source, Reports(source), store=store, timeout_s=60)
    address = f"/timeline?run={RUN}&step={STEP}&order=rank"
    with served(provider) as url, opened(browser, url + address) as seen:
        page = seen.page
        page.wait_for_selector(DRAWN)
        settle(page)
        first, last = page.evaluate(STATE)

        # WHEN the wheel turns twice THEN the new picture is of both turns, as plotly's axes are
        point_at(page, "#timeline-graph .nsewdrag", (0.5, 0.2))
        page.keyboard.down("Control")
        for _ in range(2):
            page.mouse.wheel(0, -120)
        page.keyboard.up("Control")
        size = (last - first) / math.e

        def is_drawn() -> bool:
            begin, end = page.evaluate(STATE)
            return bool(end - begin == pytest.approx(size, rel=0.01))

        until(page, is_drawn, lambda: None)
        settle(page)
