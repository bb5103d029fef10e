"""Pixels of a step's picture, held against the spans below them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest

from rankscope.analysis.drawing.timeline import read_timeline
from rankscope.dashboard.theme import KIND_COLORS
from rankscope.server.provider import StoreProvider
from rankscope.server.reports import Reports
from rankscope.tracer.span import KINDS, SpanKind
from tests.browser.conftest import served
from tests.browser.test_pages import opened, point_at, settle, until
from tests.support.rankscope.simulated_source import SimulatedSource
from tests.support.trainer.recorded import preset_scenario

if TYPE_CHECKING:
    from playwright.sync_api import Browser

    from rankscope.analysis.drawing.timeline import StepTimeline

RUN, STEP = "simulated", 2
NUM_RANKS = 128
NUM_BINS = 900

COLORS = """async (places) => {
  const image = document.querySelector('#timeline-graph .heatmaplayer image');
  const drawn = new Image();
  drawn.src = image.getAttribute('href') || image.getAttribute('xlink:href');
  await drawn.decode();
  const canvas = document.createElement('canvas');
  [canvas.width, canvas.height] = [drawn.width, drawn.height];
  const context = canvas.getContext('2d', { willReadFrequently: true });
  context.drawImage(drawn, 0, 0);
  return places.map(([x, y]) => [...context.getImageData(
    Math.floor(x * drawn.width), Math.floor(y * drawn.height), 1, 1).data]);
}"""
"""Returns the colours of the picture at shares of its width and height."""

STATE = """() => {
  const gd = document.querySelector('#timeline-graph .js-plotly-plot');
  return [
    gd._fullLayout.xaxis.range.map(Number),
    [...gd.querySelectorAll('.overplot > .xy > .mlayer')]
      .map((one) => one.style.transform).join(''),
  ];
}"""
"""Returns the range that plotly has drawn, and how its picture is stretched."""


def long_stretches(step: StepTimeline, lower: int) -> list[tuple[float, float, str]]:
    """Return the middle of the longest stretch of each span that no other span of its rank covers.

    Only of stretches longer than four pixels, on the upper line (0) or the lower one (1) of its
    rank, with the colour that it must have. Communication of unknown wait is left out.
    """
    spans = step.spans
    length = step.end_ns - step.begin_ns
    ends = spans.start_ns + spans.duration_ns
    found = []
    for row in range(len(spans)):
        if bool(step.communication[row]) != bool(lower) or (lower and step.wait_ns[row] < 0):
            continue
        begin, end = int(spans.start_ns[row]) + max(int(step.wait_ns[row]), 0), int(ends[row])
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


def test_each_pixel_has_the_colour_of_the_span_below_it(browser: Browser) -> None:
    scenario = preset_scenario("slow-compute", num_steps=4, dp=32)
    source = SimulatedSource(scenario, run_id=RUN)
    step = read_timeline(source, RUN, epoch=0, step=STEP)
    assert len(set(step.spans.rank.tolist())) == NUM_RANKS
    upper, lower = (long_stretches(step, line)[::3] for line in (0, 1))
    assert min(len(upper), len(lower)) > 50
    kinds = {SpanKind.FORWARD, SpanKind.BACKWARD, SpanKind.WAIT, SpanKind.DP_COMM}
    assert {KIND_COLORS[kind] for kind in kinds} <= {color for *_, color in upper + lower}

    provider = StoreProvider(source, Reports(source), timeout_s=60)
    address = f"/timeline?run={RUN}&step={STEP}&order=rank"
    with served(provider) as url, opened(browser, url + address) as seen:
        seen.page.wait_for_selector("#timeline-graph .heatmaplayer image")
        places = [(x, y) for x, y, _ in upper + lower]
        colors = seen.page.evaluate(COLORS, places)

    wrong = [
        (place, color, expected)
        for place, color, (*_, expected) in zip(places, colors, upper + lower, strict=True)
        if "#{:02x}{:02x}{:02x}".format(*color[:3]) != expected or color[3] != 255
    ]
    assert wrong == []


def test_turns_of_the_wheel_add_up_and_leave_no_stretched_picture(browser: Browser) -> None:
    source = SimulatedSource(preset_scenario("slow-compute", num_steps=4, dp=32), run_id=RUN)
    provider = StoreProvider(source, Reports(source), timeout_s=60)
    address = f"/timeline?run={RUN}&step={STEP}&order=rank"
    with served(provider) as url, opened(browser, url + address) as seen:
        page = seen.page
        page.wait_for_selector("#timeline-graph .heatmaplayer image")
        settle(page)
        (first, last), stretched = page.evaluate(STATE)
        assert stretched == ""

        # WHEN the wheel turns twice THEN the new picture is of both turns, and not stretched
        point_at(page, "#timeline-graph .nsewdrag", (0.5, 0.2))
        page.keyboard.down("Control")
        for _ in range(2):
            page.mouse.wheel(0, -120)
        page.keyboard.up("Control")
        size = (last - first) / math.e

        def is_drawn() -> bool:
            (begin, end), now = page.evaluate(STATE)
            return end - begin == pytest.approx(size, rel=0.01) and not now

        until(page, is_drawn, lambda: None)
        settle(page)
