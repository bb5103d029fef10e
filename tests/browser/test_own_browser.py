"""Use of the reader's own browser: its time zone, and its saved views."""

from __future__ import annotations

from typing import TYPE_CHECKING

from playwright.sync_api import expect

from rankscope.dashboard.records.page_results import RunAnnotations, ShownNote
from tests.browser.conftest import served
from tests.support.dashboard.builders import FakeProvider, report

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

WRITTEN = "2026-07-28 23:30:00"


def press_palette(page: Page, text: str) -> None:
    """Open the palette and type a text."""
    page.keyboard.press("Control+k")
    page.locator("#palette input").fill(text)


def test_times_are_in_the_readers_zone_with_utc_on_the_pointer(browser: Browser) -> None:
    note = ShownNote(text="drained", author="ada", written=WRITTEN)
    provider = FakeProvider(
        reports={"a": report(run="a")}, annotated={"a": RunAnnotations(notes=(note,))}
    )
    context = browser.new_context(timezone_id="Asia/Kolkata")
    page = context.new_page()
    with served(provider) as url:
        page.goto(f"{url}/run/a")
        shown = page.locator("#overview-notes time")
        expect(shown).to_have_text("2026-07-29 05:00:00 GMT+5:30")
        expect(shown).to_have_attribute("title", f"{WRITTEN} UTC")
    context.close()


def test_a_saved_view_is_there_after_a_reload_and_can_be_removed(browser: Browser) -> None:
    provider = FakeProvider(reports={"a": report(run="a"), "b": report(run="b")})
    context = browser.new_context()
    page = context.new_page()
    with served(provider) as url:
        # GIVEN a view saved for any run
        page.goto(f"{url}/mfu?run=a&steps=3-9")
        expect(page.locator("#menu a.here")).to_have_text("MFU")
        press_palette(page, "my steps")
        page.get_by_text("Save it for any run").click()

        # WHEN it is opened beside another run
        page.goto(f"{url}/run/b")
        expect(page.locator("#menu a.here")).to_have_text("Overview")
        press_palette(page, "my st")
        page.keyboard.press("Enter")

        # THEN it shows that run, and can be removed
        page.wait_for_url("**/mfu?steps=3-9&run=b")
        press_palette(page, "my st")
        page.locator("#palette li > button").click()
        expect(page.locator("#palette")).not_to_contain_text("view of any run")
    context.close()
