from __future__ import annotations

import re
import time
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import expect

from rankscope.dashboard.pages import components
from rankscope.dashboard.pages import page as page_module
from rankscope.dashboard.records.progress import Activity, AnalysisInProgress, Progress
from rankscope.dashboard.records.rank_details import RankEvent
from tests.browser.conftest import served
from tests.dashboard.pages.test_rank import DETAILS
from tests.support.dashboard.analysed import analysed_report
from tests.support.dashboard.builders import FakeProvider, report
from tests.support.dashboard.training_builder import training_provider

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from playwright.sync_api import Browser, Page, Route

XSS = '<img src=x onerror=window.__xss=1><script>window.__xss=1</script>" onload="window.__xss=1'
TIMELINE = "/timeline?run=demo-42&step=3"
DRAWN = "#timeline-graph-canvas[data-plotted]"
"""The timeline's canvas once its spans and plotly's axes are painted."""

TIP = ".span-tip"
"""What is under the pointer on it."""

TIMEOUT_S = 120.0
TIMEOUT_MS = 120_000


PARTS = ("frame-changes", "page-content")
"""Outputs of the callbacks that poll."""


@dataclass
class SlowProvider(FakeProvider):
    """A provider that needs ``answer_s`` for each request for a run's revision."""

    answer_s: float = 0.0

    @classmethod
    def of(cls, whole: FakeProvider, *, answer_s: float) -> SlowProvider:
        return cls(**vars(whole), answer_s=answer_s)

    def revision(self, run_id: str) -> int:
        time.sleep(self.answer_s)
        return super().revision(run_id)


@dataclass
class Watched:
    """A page, with its errors and its requests to other hosts."""

    page: Page
    errors: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)


@contextmanager
def opened(browser: Browser, url: str, **options: object) -> Iterator[Watched]:
    size = {"viewport": {"width": 1400, "height": 900}}
    page = browser.new_page(**{**size, **options})  # type: ignore[arg-type]
    page.set_default_timeout(TIMEOUT_MS)
    watched = Watched(page)
    home = url.split("/")[2]

    def on_console(kind: str, text: str) -> None:
        if kind in ("error", "warning"):
            watched.errors.append(text)

    def on_request(address: str) -> None:
        if address.startswith(("http", "ws")) and address.split("/")[2] != home:
            watched.foreign.append(address)

    page.on("console", lambda message: on_console(message.type, message.text))
    page.on("pageerror", lambda error: watched.errors.append(str(error)))
    page.on("dialog", lambda dialog: watched.errors.append(dialog.message))
    page.on("request", lambda request: on_request(request.url))
    page.goto(url)
    try:
        yield watched
    finally:
        page.close()
    assert watched.errors == []
    assert watched.foreign == []


def point_at(page: Page, part: str, at: tuple[float, float]) -> None:
    """Move the pointer to a place, in shares of the part's width and height."""
    found = page.locator(part).first
    found.scroll_into_view_if_needed()
    frame = found.bounding_box()
    assert frame is not None
    page.mouse.move(frame["x"] + at[0] * frame["width"], frame["y"] + at[1] * frame["height"])


def drag(page: Page, part: str, start: tuple[float, float], end: tuple[float, float]) -> None:
    point_at(page, part, start)
    page.mouse.down()
    point_at(page, part, end)
    page.mouse.up()


def until(page: Page, is_so: Callable[[], bool], do: Callable[[], object]) -> None:
    """Repeat an action until it had an effect: a figure reacts to the pointer some time later."""
    give_up_s = time.monotonic() + TIMEOUT_S
    while not is_so():
        assert time.monotonic() < give_up_s, "no effect before the timeout"
        do()
        for _ in range(40):
            if is_so():
                return
            page.wait_for_timeout(50)


def hover(page: Page, at: tuple[float, float]) -> None:
    """Point at a place of the timeline until its hover text appears."""
    box = page.locator(TIP).locator("b")

    def point() -> None:
        point_at(page, "#timeline-graph .nsewdrag", (0.5, 0.5))
        point_at(page, "#timeline-graph .nsewdrag", at)

    point()
    until(page, lambda: box.count() > 0, point)


def settle(page: Page) -> None:
    """Wait until no request is pending: it would fail when the page is left."""
    page.wait_for_load_state("networkidle")


def test_the_overview_shows_the_verdict_and_its_evidence(browser: Browser) -> None:
    provider = training_provider()
    with served(provider) as url, opened(browser, url) as seen:
        seen.page.wait_for_selector("#overview-workers .heatmaplayer image")

        assert seen.page.inner_text("h1") == provider.sentence
        traces = seen.page.locator("#overview-steps .scatterlayer .trace")
        expect(traces).to_have_count(3, timeout=TIMEOUT_MS)
        assert seen.page.locator("#overview-findings tbody tr").count() == 2
        assert "rank 0" in seen.page.inner_text("#overview-starved")
        assert "records produced" in seen.page.inner_text("#overview-quality")


def test_the_timeline_shows_every_span_and_follows_the_address(browser: Browser) -> None:
    with served(training_provider()) as url, opened(browser, url + TIMELINE) as seen:
        seen.page.wait_for_selector(DRAWN)
        assert "336 spans of 8 ranks" in seen.page.inner_text("#timeline-about")

        seen.page.click('summary:has-text("rows:")')
        seen.page.click("text=DP")
        seen.page.wait_for_url("**order=dp")
        seen.page.wait_for_selector("text=DP 1")
        seen.page.click("[title='next step']")
        seen.page.wait_for_url("**step=4**")
        seen.page.wait_for_selector("text=step 4 of epoch 0 has no spans")


def test_the_hover_text_of_a_span_names_the_rank_it_waited_for(browser: Browser) -> None:
    with served(training_provider()) as url, opened(browser, url + TIMELINE) as seen:
        seen.page.wait_for_selector(DRAWN)
        # Rank 7's reduce-scatter is hatched in the last row, from 60 % of the axis on.
        hover(seen.page, (0.8, 0.958))

        said = seen.page.text_content(TIP) or ""
        assert "reduce_scatter" in said
        assert "for rank 5" in said


def test_the_palette_leads_to_a_rank_a_page_and_a_host(browser: Browser) -> None:
    with served(training_provider()) as url, opened(browser, url) as seen:
        page = seen.page
        page.wait_for_selector("#overview-workers .heatmaplayer image")
        expect(page.locator("#open-palette")).to_be_visible()

        page.keyboard.press("Control+k")
        page.keyboard.type("5")
        expect(page.locator("#palette a").first).to_have_text(re.compile("Rank 5"))
        page.keyboard.press("Enter")
        page.wait_for_url("**/rank?**rank=5")

        page.click("#open-palette")
        page.keyboard.type("graph")
        page.keyboard.press("Enter")
        page.wait_for_url("**/graph?**")

        page.keyboard.press("Control+k")
        page.keyboard.type("nothing like it")
        expect(page.locator("#palette li").first).to_have_text(re.compile("Save this view as"))
        page.keyboard.press("Escape")
        expect(page.locator("#palette")).to_be_hidden()
        page.keyboard.press("Control+k")
        page.keyboard.type("timeline")
        expect(page.locator("#palette a").first).to_have_text(re.compile("Timeline"))


def test_the_header_of_a_phone_leaves_the_page_its_room(browser: Browser) -> None:
    size = {"width": 390, "height": 844}
    with served(training_provider()) as url, opened(browser, url, viewport=size) as seen:
        seen.page.wait_for_selector("#overview-workers .heatmaplayer image")
        height = seen.page.evaluate("document.querySelector('.header').offsetHeight")
        assert height <= 0.12 * size["height"]


def test_the_theme_toggles_and_is_remembered_without_a_request(browser: Browser) -> None:
    provider = training_provider()
    with served(provider) as url, opened(browser, url, color_scheme="light") as seen:
        seen.page.wait_for_selector("#overview-workers .heatmaplayer image")
        asked = provider.num_reports
        light = seen.page.evaluate("getComputedStyle(document.body).backgroundColor")

        seen.page.click("#theme-toggle")
        seen.page.wait_for_selector("html[data-mantine-color-scheme=dark]")
        dark = seen.page.evaluate("getComputedStyle(document.body).backgroundColor")

        assert (light, dark) == ("rgb(246, 247, 249)", "rgb(16, 19, 23)")
        assert provider.num_reports == asked
        settle(seen.page)
        seen.page.reload()
        seen.page.wait_for_selector("html[data-mantine-color-scheme=dark]")


@pytest.fixture
def _frequent_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let pages poll five times a second."""
    for module in (components, page_module):
        monkeypatch.setattr(module, "LIVE_MS", 200)


@pytest.mark.usefixtures("_frequent_polls")
def test_a_live_run_refreshes_and_keeps_the_zoom(browser: Browser) -> None:
    provider = training_provider()
    provider.state = "running"
    with served(provider) as url, opened(browser, url) as seen:
        seen.page.wait_for_selector("#overview-steps .scatterlayer .trace")
        graph = "document.querySelector('#overview-steps .js-plotly-plot')"

        def is_zoomed() -> bool:
            return bool(seen.page.evaluate(f"{graph}.layout.xaxis.range[0] > 5"))

        until(
            seen.page,
            is_zoomed,
            lambda: drag(seen.page, "#overview-steps .nsewdrag", (0.3, 0.5), (0.6, 0.5)),
        )
        zoomed = seen.page.evaluate(f"{graph}.layout.xaxis.range")

        provider.reports["demo-42"] = report(num_steps=36)
        provider.sentence = "Rank 5 is still slow."
        provider.num_changes += 1
        seen.page.wait_for_selector("text=Rank 5 is still slow.")
        seen.page.wait_for_function(f"{graph}.data[1].x.length == 36")

        assert seen.page.evaluate(f"{graph}.layout.xaxis.range") == zoomed


@pytest.mark.usefixtures("_frequent_polls")
def test_a_refresh_keeps_what_a_reader_has_typed_opened_and_zoomed(browser: Browser) -> None:
    provider = FakeProvider(reports={"tiny": analysed_report()}, state="running")
    event = RankEvent(at_ns=1, kind="stacks", text="hung", detail="a.py:3")
    details = replace(DETAILS, rank=0, events=(event,), heartbeat=("training", 3, 10**9))
    provider.details = {0: details}
    with served(provider) as url, opened(browser, f"{url}/rank?run=tiny&rank=0") as seen:
        page = seen.page
        page.wait_for_selector("#rank-steps-figure .nsewdrag", state="attached")
        graph = "document.querySelector('#rank-steps-figure .js-plotly-plot')"
        whole = page.evaluate(f"{graph}.layout.xaxis.range")
        until(
            page,
            lambda: page.evaluate(f"{graph}.layout.xaxis.range") != whole,
            lambda: drag(page, "#rank-steps-figure .nsewdrag", (0.3, 0.5), (0.6, 0.5)),
        )
        zoomed = page.evaluate(f"{graph}.layout.xaxis.range")
        values = f"JSON.stringify({graph}.data.map((trace) => trace.y))"
        before = page.evaluate(values)
        page.click("summary")
        page.click("#rank-number")
        page.keyboard.type("4")

        # WHEN its heartbeat is older, and its samples are longer, THEN both show
        (first, *others) = details.kinds
        longer = replace(first, own_s=first.own_s * 2)
        provider.details = {
            0: replace(details, heartbeat=("training", 4, 2 * 10**9), kinds=(longer, *others))
        }
        page.wait_for_selector("text=training, step 4, 2 s ago")
        until(page, lambda: page.evaluate(values) != before, lambda: None)

        # AND all else is as it was
        assert page.evaluate(f"{graph}.layout.xaxis.range") == zoomed
        assert page.evaluate("document.querySelector('details').open")
        assert page.evaluate("document.activeElement.id") == "rank-number"
        assert page.input_value("#rank-number") == "4"


def test_a_zoom_is_in_the_address_and_no_step_of_the_history(browser: Browser) -> None:
    with served(training_provider()) as url, opened(browser, url + TIMELINE) as seen:
        page = seen.page
        page.wait_for_selector(DRAWN)
        length = page.evaluate("history.length")
        axis = "document.querySelector('#timeline-graph .js-plotly-plot')._fullLayout.xaxis.range"
        whole = page.evaluate(axis)

        point_at(page, "#timeline-graph .nsewdrag", (0.5, 0.5))
        page.mouse.wheel(0, 30)
        settle(page)
        assert "from=" not in page.url
        posts: list[str] = []
        page.on("request", lambda request: posts.append(request.post_data or ""))
        page.keyboard.down("Control")
        until(page, lambda: "from=" in page.url, lambda: page.mouse.wheel(0, -200))
        page.keyboard.up("Control")
        settle(page)

        assert not any("timeline-graph" in body for body in posts)  # all spans are loaded
        of_frame = [body for body in posts if '"changedPropIds":["frame-place.data"]' in body]
        assert of_frame == []  # page and run are the same
        assert page.evaluate("history.length") == length
        begin, end = page.evaluate(axis)
        assert whole[0] < begin < end < whole[1]
        page.reload()
        page.wait_for_selector(DRAWN)
        assert page.evaluate(axis) == pytest.approx([begin, end], abs=0.01)

        # WHEN the reader double-clicks THEN the whole step is in view, in the address too
        center = page.locator("#timeline-graph .nsewdrag").first
        until(page, lambda: "from=" not in page.url, lambda: center.dblclick(force=True))
        settle(page)
        until(page, lambda: page.evaluate(axis) == pytest.approx(whole), lambda: None)


def test_what_is_typed_into_a_chooser_replaces_its_text(browser: Browser) -> None:
    with served(training_provider()) as url, opened(browser, url + TIMELINE) as seen:
        seen.page.wait_for_selector(DRAWN)
        seen.page.click("#timeline-choose-step")
        seen.page.keyboard.type("step 2")

        assert seen.page.input_value("#timeline-choose-step") == "step 2"


@pytest.mark.usefixtures("_frequent_polls")
def test_a_live_run_refreshes_if_answers_take_longer_than_the_poll_interval(
    browser: Browser,
) -> None:
    provider = SlowProvider.of(training_provider(), answer_s=0.4)
    provider.state = "running"
    with served(provider) as url, opened(browser, url) as seen:
        seen.page.wait_for_selector("#overview-workers .heatmaplayer image")
        provider.sentence = "Rank 5 is still slow."
        provider.num_changes += 1

        seen.page.wait_for_selector("text=Rank 5 is still slow.")
        provider.is_drawing = True
        seen.page.goto(f"{url}{TIMELINE}")
        seen.page.wait_for_selector("text=Drawing step 3")
        provider.is_drawing = False
        provider.num_changes += 1

        seen.page.wait_for_selector(DRAWN)


@pytest.mark.usefixtures("_frequent_polls")
def test_a_page_polls_again_after_a_request_without_an_answer(
    browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(components, "FALLBACK_MS", 2_000)
    provider = training_provider()
    provider.state = "running"
    with served(provider) as url:
        page = browser.new_page()
        page.set_default_timeout(TIMEOUT_MS)
        page.goto(url)
        page.wait_for_selector("#overview-workers .heatmaplayer image")

        # GIVEN a server that is away until each part of the page has sent a request in vain
        away: set[str] = set()
        page.route(_is_update, lambda route: _refused(route, away))
        until(page, lambda: len(away) >= len(PARTS), lambda: None)
        page.unroute(_is_update)

        # WHEN it is back, with new results, THEN the page shows them
        provider.sentence = "Rank 5 is still slow."
        provider.num_changes += 1
        page.wait_for_selector("text=Rank 5 is still slow.")
        page.close()


def _is_update(address: str) -> bool:
    return "/_dash-update-component" in address


def _refused(route: Route, away: set[str]) -> None:
    asked = route.request.post_data or ""
    away.update(part for part in PARTS if f"{part}." in asked.partition('"inputs"')[0])
    route.abort()


def test_a_page_shows_the_progress_of_the_analysis_and_then_its_result(browser: Browser) -> None:
    provider = training_provider()
    (run,) = provider.runs()
    progress = Progress(activity=Activity.COMPARING, num_spans=4_521_984)
    provider.unfinished = {
        "demo-42": AnalysisInProgress(run=run, progress=progress, elapsed_s=7, steps=None)
    }
    with served(provider) as url, opened(browser, f"{url}/run/demo-42") as seen:
        seen.page.wait_for_selector("text=No verdict yet: replaying 4,521,984 spans")
        provider.unfinished = {}
        provider.num_changes += 1

        seen.page.wait_for_selector("#overview-workers .heatmaplayer image")
        assert seen.page.inner_text("h1") == provider.sentence
        asked = provider.num_reports
        settle(seen.page)
        assert provider.num_reports == asked


@pytest.mark.usefixtures("_frequent_polls")
def test_a_deleted_run_is_reported_on_its_open_page(browser: Browser) -> None:
    provider = training_provider()
    provider.state = "running"
    with served(provider) as url, opened(browser, f"{url}/run/demo-42") as seen:
        seen.page.wait_for_selector("#overview-workers .heatmaplayer image")
        del provider.reports["demo-42"]

        seen.page.wait_for_selector("text=there is no run 'demo-42'")
        assert not seen.page.is_visible("#overview-findings")


@pytest.mark.usefixtures("_frequent_polls")
def test_the_first_run_appears_without_a_reload(browser: Browser) -> None:
    provider = FakeProvider()
    with served(provider) as url, opened(browser, url) as seen:
        seen.page.wait_for_selector("text=this store holds no runs yet")
        filled = training_provider()
        provider.reports, provider.tables = filled.reports, filled.tables

        seen.page.wait_for_selector("#overview-workers .heatmaplayer image")
        drawn = seen.page.locator("#overview-steps .main-svg").first.bounding_box()
        assert drawn is not None
        assert drawn["width"] > 700


def test_a_page_without_data_shows_the_reason(browser: Browser) -> None:
    reasons = {
        "/run/fresh": "No data because run 'fresh' ended before a step was recorded completely",
        "/run/other": "No data because there is no run 'other' in this store",
        "/timeline?run=other": "No data because there is no run 'other' in this store",
        "/nowhere": "There is no page at '/nowhere'",
    }
    provider = FakeProvider(reports={"fresh": None})
    with served(provider) as url, opened(browser, url) as seen:
        for path, reason in reasons.items():
            settle(seen.page)
            seen.page.goto(url + path)
            seen.page.wait_for_selector(f"text={reason}")
