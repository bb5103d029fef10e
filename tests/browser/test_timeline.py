"""The timeline of a simulated job with one slow rank, in a real browser."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import parse_qs, urlsplit

import pytest
from playwright.sync_api import expect

from rankscope.dashboard.theme import KIND_COLORS
from rankscope.server.provider import StoreProvider
from rankscope.server.reports import Reports
from rankscope.tracer.span import SpanKind
from tests.browser.conftest import served
from tests.browser.test_pages import DRAWN, TIMEOUT_MS, opened, point_at, settle, until
from tests.support.rankscope.simulated_source import SimulatedSource
from tests.support.trainer.recorded import preset_scenario

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Browser, Page

    from rankscope.collector.store.store import Store

RUN, SLOW_RANK = "simulated", 9
PLOT = "#timeline-graph .nsewdrag"
GRAPH = "document.querySelector('#timeline-graph .js-plotly-plot')"
AXIS = f"{GRAPH}._fullLayout.xaxis.range.map(Number)"


@pytest.fixture(scope="module")
def url(store: Store) -> Iterator[str]:
    source = SimulatedSource(preset_scenario("slow-compute", num_steps=12), run_id=RUN)
    with served(StoreProvider(source, Reports(source), store=store, timeout_s=60)) as address:
        yield address


def drawn(page: Page) -> None:
    page.wait_for_selector(DRAWN)
    settle(page)


def query_of(page: Page) -> dict[str, str]:
    return {key: values[0] for key, values in parse_qs(urlsplit(page.url).query).items()}


def click_rank(page: Page, rank: int, at_ms: float) -> None:
    """Click a rank's compute at a time, until the facts of a span show."""
    place = f"""() => {{
        const gd = {GRAPH}, layout = gd._fullLayout, box = gd.getBoundingClientRect();
        const row = gd.layout.yaxis.ticktext.findIndex((text) => /^(<b>)?{rank}\\b/.test(text));
        return [
            box.left + layout.xaxis._offset + layout.xaxis.d2p({at_ms}),
            box.top + layout.yaxis._offset + layout.yaxis.d2p(gd.layout.yaxis.tickvals[row] - 0.38),
        ];
    }}"""

    def click() -> None:
        x, y = page.evaluate(place)
        page.mouse.move(x, y - 1)
        page.mouse.move(x, y)
        page.mouse.down()
        page.mouse.up()

    page.locator("#timeline-legend").scroll_into_view_if_needed()  # else the header covers a row
    until(page, lambda: page.locator("#timeline-selection dl").count() > 0, click)


def test_a_finding_leads_to_the_span_that_proves_it_in_three_clicks(
    browser: Browser, url: str
) -> None:
    with opened(browser, url) as seen:
        page = seen.page
        # The first click opened the alert's run; the second is the finding's, the third the span's.
        page.click("#overview-findings td.steps a")
        drawn(page)

        assert query_of(page)["rank"] == str(SLOW_RANK)
        begin, end = page.evaluate(AXIS)
        assert end - begin < 0.3 * 440  # of a step of 440 ms
        click_rank(page, SLOW_RANK, (begin + end) / 2)
        facts = page.inner_text("#timeline-selection")
        assert "none: on the critical path" in facts
        assert facts.startswith(("forward", "backward"))


def test_path_and_ideal_are_turned_on_by_key_and_follow_the_zoom(
    browser: Browser, url: str
) -> None:
    with opened(browser, f"{url}/timeline?run={RUN}&step=10") as seen:
        page = seen.page
        drawn(page)
        page.keyboard.press("c")
        page.wait_for_url("**layers=path**")
        expect(page.locator("#timeline-path")).to_have_attribute("aria-pressed", "true")
        page.keyboard.press("i")
        page.wait_for_selector("text=With usual durations, the step takes 327 ms")
        settle(page)
        path = f"{GRAPH}.data.find((one) => one.name === 'critical path')"
        assert page.evaluate(f"{path}.x.length") > 50

        point_at(page, PLOT, (0.5, 0.2))
        ideal = AXIS.replace("timeline-graph", "timeline-ideal-graph")
        before = page.evaluate(ideal)
        page.keyboard.press("w")
        until(page, lambda: page.evaluate(ideal) != before, lambda: None)
        assert page.evaluate(ideal) == pytest.approx(page.evaluate(AXIS))

        settle(page)
        page.keyboard.press("c")
        expect(page.locator("#timeline-path")).to_have_attribute(
            "aria-pressed", "false", timeout=TIMEOUT_MS
        )
        assert query_of(page)["layers"] == "ideal"
        settle(page)


def test_run_and_minimap_lead_to_a_step_and_to_a_part_of_it(browser: Browser, url: str) -> None:
    with opened(browser, f"{url}/timeline?run={RUN}&step=3") as seen:
        page = seen.page
        drawn(page)
        step_time = page.evaluate(AXIS)[1]
        page.wait_for_selector("#timeline-minimap-canvas[data-drawn]")
        box = page.locator("#timeline-minimap").bounding_box()
        assert box is not None

        # WHEN a quarter of the minimap is dragged over THEN the step shows that quarter
        page.mouse.move(box["x"] + 0.25 * box["width"], box["y"] + 20)
        page.mouse.down()
        page.mouse.move(box["x"] + 0.5 * box["width"], box["y"] + 20)
        page.mouse.up()
        until(page, lambda: "from=" in page.url, lambda: None)
        quarter = [0.25 * step_time, 0.5 * step_time]
        assert page.evaluate(AXIS) == pytest.approx(quarter, rel=0.02)
        window = page.locator("#timeline-window").bounding_box()
        assert window is not None
        assert window["width"] == pytest.approx(0.25 * box["width"], rel=0.03)
        settle(page)

        # WHEN the lane of the finding is clicked THEN the step is that of the proof
        lane = """() => {
            const gd = document.querySelector('#timeline-run-graph .js-plotly-plot');
            const { xaxis: x, yaxis2: y } = gd._fullLayout, box = gd.getBoundingClientRect();
            return [box.left + x._offset + x.d2p(11), box.top + y._offset + y.d2p(0)];
        }"""

        def click() -> None:
            x, y = page.evaluate(lane)
            page.mouse.move(x - 1, y)
            page.mouse.move(x, y)
            page.mouse.down()
            page.mouse.up()

        until(page, lambda: f"rank={SLOW_RANK}" in page.url, click)
        drawn(page)
        assert query_of(page)["order"] == "excess"
        assert int(query_of(page)["step"]) >= 4


def test_a_group_is_folded_by_a_click_on_its_name_and_by_the_keyboard(
    browser: Browser, url: str
) -> None:
    with opened(browser, f"{url}/timeline?run={RUN}&step=3") as seen:
        page = seen.page
        drawn(page)
        labels = f"{GRAPH}.layout.yaxis.ticktext"
        assert len(page.evaluate(labels)) == 16

        # WHEN the name of PP 0 is clicked THEN its 8 ranks share a row, and the address says so
        name = page.get_by_role("button", name="PP 0")
        until(page, lambda: "fold=0" in page.url, name.click)
        folded = ["8 ranks", *map(str, range(8, 16))]
        until(page, lambda: page.evaluate(labels) == folded, lambda: None)
        settle(page)
        assert page.get_by_role("button", name="PP 0").get_attribute("aria-expanded") == "false"

        # WHEN Enter is pressed on PP 1 and G afterwards THEN both are folded, and then unfolded
        page.get_by_role("button", name="PP 1").focus()
        page.keyboard.press("Enter")
        until(page, lambda: query_of(page).get("fold") == "0,1", lambda: None)
        until(page, lambda: page.evaluate(labels) == ["8 ranks", "8 ranks"], lambda: None)
        settle(page)
        page.keyboard.press("g")
        until(page, lambda: len(page.evaluate(labels)) == 16, lambda: None)
        assert "fold" not in page.url
        settle(page)


NUM_PIXELS = """(color) => {
    const canvas = document.querySelector('#timeline-graph-canvas');
    const copy = document.createElement('canvas');
    [copy.width, copy.height] = [canvas.width, canvas.height];
    const context = copy.getContext('2d', { willReadFrequently: true });
    context.drawImage(canvas, 0, 0);
    const pixels = new Uint32Array(
        context.getImageData(0, 0, copy.width, copy.height).data.buffer);
    const sought = [...color.matchAll(/[0-9a-f]{2}/g)].map(([part]) => parseInt(part, 16));
    const word = new Uint32Array(new Uint8Array([...sought, 255]).buffer)[0];
    return pixels.filter((one) => one === word).length;
}"""
"""Returns how many pixels of the step have a colour."""


def test_a_click_in_the_legend_hides_a_kind_and_a_double_click_shows_it_alone(
    browser: Browser, url: str
) -> None:
    with opened(browser, f"{url}/timeline?run={RUN}&step=3") as seen:
        page = seen.page
        drawn(page)

        def shown() -> list[bool]:
            colors = [KIND_COLORS[kind] for kind in (SpanKind.FORWARD, SpanKind.BACKWARD)]
            return [page.evaluate(NUM_PIXELS, color) > 1_000 for color in colors]

        assert shown() == [True, True]
        forward = page.get_by_role("button", name="forward", exact=True)
        forward.click()
        assert shown() == [False, True]
        assert forward.get_attribute("aria-pressed") == "false"
        forward.click()
        assert shown() == [True, True]

        forward.dblclick()
        assert shown() == [True, False]
        assert page.locator("#timeline-legend [aria-pressed=true]").all_inner_texts() == ["forward"]

        # WHEN another step is shown THEN the same kinds are hidden
        page.get_by_title("next step").click()
        page.wait_for_selector("h1:has-text('Step 4')")
        drawn(page)
        assert shown() == [True, False]
        forward.dblclick()
        assert shown() == [True, True]
        settle(page)


def test_a_box_is_measured_after_the_button_or_its_key(browser: Browser, url: str) -> None:
    with opened(browser, f"{url}/timeline?run={RUN}&step=3") as seen:
        page = seen.page
        drawn(page)
        page.keyboard.press("m")
        expect(page.locator("#timeline-measure")).to_have_attribute("aria-pressed", "true")
        box = page.locator(PLOT).first.bounding_box()
        assert box is not None

        def drag() -> None:
            page.mouse.move(box["x"] + 0.2 * box["width"], box["y"] + 20)
            page.mouse.down()
            page.mouse.move(box["x"] + 0.3 * box["width"], box["y"] + 35)
            page.mouse.move(box["x"] + 0.4 * box["width"], box["y"] + 50)
            page.mouse.up()

        shown = page.locator("#timeline-selection h2")
        until(page, lambda: "between the two ends" in "".join(shown.all_inner_texts()), drag)
        settle(page)
        assert "spans of 2 ranks" in page.inner_text("#timeline-selection")


def test_a_search_goes_to_the_row_and_a_shared_address_to_the_selected_span(
    browser: Browser, url: str
) -> None:
    # GIVEN a screen on which only some of the rows have room
    small = {"viewport": {"width": 1400, "height": 620}}
    row = """() => {
        const gd = document.querySelector('#timeline-graph .js-plotly-plot');
        const found = gd.layout.shapes.find((one) => one.name === 'found');
        const { yaxis } = gd._fullLayout, at = yaxis.d2p((found.y0 + found.y1) / 2);
        return gd.getBoundingClientRect().top + yaxis._offset + at;
    }"""
    with opened(browser, f"{url}/timeline?run={RUN}&step=7", **small) as seen:
        page = seen.page
        drawn(page)
        assert page.locator(PLOT).first.bounding_box()["y"] <= 300  # type: ignore[index]

        # WHEN the last rank is searched for THEN its row is framed, and on the screen
        page.keyboard.press("/")
        page.keyboard.type("15")
        page.keyboard.press("Enter")
        page.wait_for_selector("#timeline-selection h2:has-text('Rank 15')")
        until(page, lambda: page.evaluate("scrollY") > 0, lambda: None)
        assert 84 < page.evaluate(row) < 620
        assert query_of(page)["find"] == "15"

        # WHEN a span is selected THEN a colleague who opens the address sees it too
        click_rank(page, SLOW_RANK, 100)
        until(page, lambda: "span" in query_of(page), lambda: None)
        settle(page)
        facts, address = page.inner_text("#timeline-selection dl"), page.url
        page.goto(address)
        drawn(page)
        assert page.inner_text("#timeline-selection dl") == facts
        assert page.url == address

        # WHEN Escape is pressed twice THEN first the span and then the search is no more selected
        page.keyboard.press("Escape")
        until(page, lambda: "span" not in query_of(page), lambda: None)
        settle(page)
        page.keyboard.press("Escape")
        until(page, lambda: "find" not in query_of(page), lambda: None)
        settle(page)


@pytest.mark.parametrize("path", [f"/run/{RUN}", f"/timeline?run={RUN}&step=2"])
def test_p_opens_the_proof(browser: Browser, url: str, path: str) -> None:
    with opened(browser, f"{url}{path}") as seen:
        page = seen.page
        page.wait_for_selector("main h1")
        until(page, lambda: "order=excess" in page.url, lambda: page.keyboard.press("p"))
        drawn(page)
        assert query_of(page)["rank"] == str(SLOW_RANK)


def test_a_chosen_step_is_shown_whole_and_its_run_stays_in_the_address(
    browser: Browser, url: str
) -> None:
    address = f"{url}/timeline?run={RUN}&step=3&rank=5&order=dp&from=1000000&to=9000000&rows=0-3"
    with opened(browser, address) as seen:
        page = seen.page
        drawn(page)

        # WHEN step 7 is chosen THEN all of it is shown; ranks and order stay as they were
        page.click("#timeline-choose-step")
        page.get_by_role("option", name="step 7", exact=True).click()
        page.wait_for_url("**step=7**")
        page.wait_for_selector("h1:has-text('Step 7')")
        drawn(page)
        assert query_of(page) == {"run": RUN, "epoch": "0", "step": "7", "rank": "5", "order": "dp"}

        # WHEN the browser goes back THEN the part of step 3 is shown again, and chooses nothing
        page.go_back()
        page.wait_for_selector("h1:has-text('Step 3')")
        drawn(page)
        assert query_of(page)["rows"] == "0-3"


def test_the_name_of_a_group_stays_in_view_when_its_first_rows_do_not(
    browser: Browser, url: str
) -> None:
    places = f"{GRAPH}._fullLayout.annotations.slice(0, 2).map((one) => one.y)"
    inside = f"{url}/timeline?run={RUN}&step=3&from=0&to=400000000&rows=4-11"
    with opened(browser, inside) as seen:
        page = seen.page
        drawn(page)
        # Rows 4 to 11 are shown, of groups that begin at 0 and 8.
        until(page, lambda: page.evaluate(places) == [4, 8], lambda: None)

        page.keyboard.press("0")
        until(page, lambda: page.evaluate(places) == [0, 8], lambda: None)
        settle(page)


def test_a_finger_scrolls_the_page_and_moves_the_step_sideways(browser: Browser, url: str) -> None:
    phone = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}
    zoomed = f"{url}/timeline?run={RUN}&step=3&from=100000000&to=200000000"
    with opened(browser, zoomed, **phone) as seen:
        page = seen.page
        drawn(page)
        page.locator(PLOT).scroll_into_view_if_needed()
        touch = page.context.new_cdp_session(page)

        def swipe(x_px: int, y_px: int) -> None:
            frame = page.locator(PLOT).bounding_box()
            assert frame is not None
            x = frame["x"] + frame["width"] / 2
            for part in range(11):
                points = [{"x": x + x_px * part / 10, "y": 600 + y_px * part / 10}]
                kind = "touchMove" if part else "touchStart"
                touch.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})
            touch.send("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})

        scrolled, rows = page.evaluate("scrollY"), f"{GRAPH}._fullLayout.yaxis.range"
        before = page.evaluate(rows)
        swipe(0, -200)
        until(page, lambda: page.evaluate("scrollY") > scrolled + 100, lambda: None)
        assert page.evaluate(rows) == before

        swipe(-100, 0)
        until(page, lambda: page.evaluate(AXIS)[0] > 110, lambda: None)
        begin, end = page.evaluate(AXIS)
        assert end - begin == pytest.approx(100)
        settle(page)
