"""Every page but the timeline: what each state shows, to the eye and to a screen reader."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING
from urllib.parse import quote

import pytest

from rankscope.analysis.report.report import Finding, Severity
from rankscope.analysis.statistics.step_change import StepChange
from rankscope.dashboard.records.page_results import (
    RankStartup,
    RunComparison,
    Startup,
    StartupPart,
    StartupSpan,
)
from rankscope.tracer.topology import Layout
from tests.browser.conftest import served
from tests.browser.test_pages import XSS, opened, settle, until
from tests.dashboard.pages.test_rank import DETAILS
from tests.support.dashboard.analysed import SLOW_RANK, analysed_report
from tests.support.dashboard.builders import FakeProvider, report

if TYPE_CHECKING:
    from playwright.sync_api import Browser

    from rankscope.analysis.report.report import RunReport

OF_A_RUN = ("run", "rank", "mfu", "links", "graph", "what-if", "start-up", "compare")
OF_THE_STORE = ("runs", "alerts", "health")

AUDIT = """() => {
  const seen = e => e.getClientRects().length && getComputedStyle(e).visibility != 'hidden';
  const all = query => [...document.querySelectorAll(query)].filter(seen);
  const label = e => e.getAttribute('aria-label') || e.innerText || e.title || e.placeholder
    || (e.labels && e.labels.length && e.labels[0].innerText) || '';
  const ids = [...document.querySelectorAll('[id]')].map(e => e.id);
  return [
    ...all('button, a[href], input, select').filter(e => !label(e).trim())
      .map(e => 'no name: ' + e.outerHTML.slice(0, 120)),
    ...all('.js-plotly-plot').filter(e => !e.closest('[role][aria-label]'))
      .map(e => 'no label: ' + e.parentElement.id),
    ...ids.filter((id, place) => ids.indexOf(id) != place).map(id => 'twice: ' + id),
    ...['main', 'nav', 'html[lang]'].filter(part => document.querySelectorAll(part).length != 1)
      .map(part => 'not one ' + part),
    ...(all('h1').length > 1 || !all('h1, h2').length ? ['headings'] : []),
    ...(document.documentElement.scrollWidth > innerWidth ? ['wider than the screen'] : []),
  ];
}"""


def ends(made: RunReport, cause: str) -> RunReport:
    """Return a report whose run ended in a hang or a crash of rank 2."""
    evidence = f"rank 2 failed: {XSS}"
    found = Finding(
        cause=cause,
        ranks=(2,),
        steps=(8, 8),
        confidence=0.9,
        evidence=evidence,
        severity=Severity.CRITICAL,
    )
    return replace(made, findings=(found,))


def provider_of(made: RunReport, *, text: str = "name") -> FakeProvider:
    """Return a provider of a run, with a text in all that comes from outside."""
    span = StartupSpan(name=text, begin_ns=0, duration_ns=2 * 10**9)
    return FakeProvider(
        reports={made.run: made},
        sentence=f"Rank 5 is slow ({text}).",
        details={rank: replace(DETAILS, rank=rank, host=text) for rank in made.coords},
        started=Startup(
            epoch=0,
            num_ranks=1,
            median_ns=10**9,
            parts=(
                StartupPart(
                    name=text,
                    kind="other",
                    num_ranks=1,
                    median_ns=1,
                    longest_ns=2 * 10**9,
                    num_calls=1,
                    slowest_rank=0,
                ),
            ),
            slowest=(RankStartup(rank=0, host=text, total_ns=2 * 10**9, spans=(span,)),),
        ),
        compared=RunComparison(
            first=made,
            second=made,
            step_change=StepChange(ratio=None, is_significant=None),
            settings=((text, None, text),),
            numbers=(),
            parts_s=(),
            appeared=made.findings,
            disappeared=(),
            remained=(),
        ),
    )


STATES = {
    "slow rank": provider_of(analysed_report()),
    "hang, hostile names": provider_of(ends(replace(analysed_report(), run=XSS), "hang"), text=XSS),
    "crash of one rank": provider_of(
        ends(report(layout=Layout(), slow_rank=None, num_steps=1), "crash")
    ),
    "no runs": FakeProvider(),
}
QUICK = "hang, hostile names"
"""The state that every run of the tests opens; `make nightly` opens all."""


@pytest.mark.parametrize(
    "state",
    [pytest.param(state, marks=() if state == QUICK else pytest.mark.nightly) for state in STATES],
)
def test_each_page_opens_without_an_error_and_names_its_parts(browser: Browser, state: str) -> None:
    provider = STATES[state]
    run = quote(next(iter(provider.reports), "none"), safe="")
    theme = "dark" if state.startswith("hang") else "light"
    with served(provider) as url, opened(browser, f"{url}/runs", color_scheme=theme) as seen:
        found = {}
        for name in (*OF_A_RUN, *OF_THE_STORE):
            query = f"run={run}&rank=0&with={run}&steps=0-3"
            address = f"/run/{run}" if name == "run" else f"/{name}?{query}"
            settle(seen.page)
            seen.page.goto(url + (f"/{name}" if name in OF_THE_STORE else address))
            seen.page.wait_for_selector("h1, h2")
            settle(seen.page)
            found[name] = seen.page.evaluate(AUDIT)
        assert {name: problems for name, problems in found.items() if problems} == {}
        assert seen.page.evaluate("window.__xss === undefined")


def test_rank_numbers_lead_to_the_rank_and_the_keyboard_to_the_page(browser: Browser) -> None:
    with (
        served(STATES["slow rank"]) as url,
        opened(browser, f"{url}/graph?run=tiny", viewport={"width": 390, "height": 844}) as seen,
    ):
        seen.page.wait_for_selector("table a.rank-link")
        seen.page.keyboard.press("Tab")
        assert seen.page.evaluate("document.activeElement.innerText").startswith("Skip to")
        seen.page.locator(f"table a.rank-link[title='Show rank {SLOW_RANK}']").first.click()

        seen.page.wait_for_url(f"**/rank?run=tiny&rank={SLOW_RANK}")
        seen.page.wait_for_selector(f"h1:has-text('Rank {SLOW_RANK}')")
        settle(seen.page)


def test_a_phone_shows_each_runs_verdict_beneath_its_name(browser: Browser) -> None:
    phone = {"viewport": {"width": 390, "height": 844}}
    with (
        served(STATES["slow rank"]) as url,
        opened(browser, f"{url}/runs", **phone) as seen,
    ):
        cell = seen.page.locator(".run-verdict")
        cell.wait_for()

        assert cell.locator(".cause").inner_text() == f"slow-compute on {SLOW_RANK}"
        assert seen.page.locator(".ag-pinned-left-header").is_hidden()
        frame = cell.locator(".cause").bounding_box()
        assert frame is not None
        assert frame["x"] + frame["width"] <= phone["viewport"]["width"]
        settle(seen.page)


def test_a_finger_that_moves_over_a_figure_scrolls_the_page(browser: Browser) -> None:
    phone = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}
    with (
        served(STATES["slow rank"]) as url,
        opened(browser, f"{url}/run/tiny", **phone) as seen,
    ):
        page = seen.page
        figure = page.locator("#overview-excess .nsewdrag").first
        figure.wait_for(state="attached")
        settle(page)
        figure.scroll_into_view_if_needed()
        frame = figure.bounding_box()
        assert frame is not None
        x, y = frame["x"] + frame["width"] / 2, frame["y"] + frame["height"] / 2
        before = page.evaluate("scrollY")
        touch = page.context.new_cdp_session(page)

        def send(kind: str, *places: dict[str, float]) -> None:
            touch.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": list(places)})

        send("touchStart", {"x": x, "y": y})
        for moved in range(20, 201, 20):
            send("touchMove", {"x": x, "y": y + moved})
        send("touchEnd")

        until(page, lambda: page.evaluate("scrollY") < before - 100, lambda: None)
        settle(page)
