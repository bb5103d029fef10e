"""Forty payloads of script, each in every text that comes from outside."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING
from urllib.parse import quote

from tests.browser.conftest import served
from tests.browser.test_pages import DRAWN, TIP, hover, opened
from tests.support.dashboard.builders import FakeProvider, report
from tests.support.dashboard.training_builder import training_provider

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

RAN = "window.__xss=1"
KINDS = (
    f"<script>{RAN}</script>",
    f"</script><script>{RAN}</script>",
    f"<ScRiPt>{RAN}</sCrIpT>",
    f"<script/x>{RAN}</script>",
    f"<scr<script>ipt>{RAN}</scr</script>ipt>",
    f"<img src=x onerror={RAN}>",
    f"<img src=x onerror='{RAN}'//",
    f"<IMG SRC=x ONERROR={RAN}>",
    f"<img/src=x/onerror={RAN}>",
    f'<img src="x"onerror="{RAN}">',
    f"<svg onload={RAN}>",
    f"<svg/onload={RAN}>",
    f"<svg><script>{RAN}</script></svg>",
    f"<svg><animate onbegin={RAN} attributeName=x dur=1s>",
    f"<math><mtext><img src=x onerror={RAN}></mtext></math>",
    f"<body onload={RAN}>",
    f"<details open ontoggle={RAN}>",
    f"<input autofocus onfocus={RAN}>",
    f"<video><source onerror={RAN}></video>",
    f"<audio src=x onerror={RAN}>",
    f"<iframe srcdoc='<script>parent.{RAN}</script>'></iframe>",
    f"<iframe src=javascript:parent.{RAN}></iframe>",
    f"<object data=javascript:{RAN}></object>",
    f"<embed src=javascript:{RAN}>",
    f"<a href=javascript:{RAN}>click</a>",
    f"<a href='java&Tab;script:{RAN}'>click</a>",
    f"<form action=javascript:{RAN}><button>go</button></form>",
    f"<meta http-equiv=refresh content='0;url=javascript:{RAN}'>",
    f"<base href=javascript:{RAN}//>",
    f"<link rel=stylesheet href=javascript:{RAN}>",
    f"<style>@import 'javascript:{RAN}';</style>",
    f"<template><script>{RAN}</script></template>",
    f"<noscript><p title='</noscript><img src=x onerror={RAN}>'>",
    f"<!--><img src=x onerror={RAN}>-->",
    f"<![CDATA[<img src=x onerror={RAN}>]]>",
    f"'\"><img src=x onerror={RAN}>",
    f"' onmouseover={RAN} x='",
    f"&lt;img src=x onerror={RAN}&gt;",
    f"\\x3cimg src=x onerror={RAN}\\x3e",
    f"${{{RAN}}}{{{{constructor.constructor('{RAN}')()}}}}",
)
PAYLOADS = [f"{number:02d}|{kind}" for number, kind in enumerate(KINDS)]
"""Each begins with its number, by which it is found again on the page."""

HALVES = ("".join(PAYLOADS[:20]), "".join(PAYLOADS[20:]))


def was_run(page: Page) -> bool:
    """Return whether the page ran any payload."""
    found: bool = page.evaluate("window.__xss !== undefined")
    return found


def test_a_payload_runs_if_a_page_takes_it_as_html(browser: Browser) -> None:
    assert len(set(PAYLOADS)) == 40
    page = browser.new_page()
    page.set_content(PAYLOADS[5])
    page.wait_for_function("window.__xss === 1")
    page.close()


def test_the_overview_shows_each_payload_as_text(browser: Browser) -> None:
    # GIVEN forty runs, findings and warnings with a payload as their text
    # (the page shows twelve warnings, so each has four payloads)
    warnings = tuple("".join(PAYLOADS[place : place + 4]) for place in range(0, 40, 4))
    made = report(name="".join(PAYLOADS), warnings=warnings)
    finding = made.findings[0]
    findings = tuple(replace(finding, evidence=text, cause=text) for text in PAYLOADS)
    first = replace(made, run=PAYLOADS[0], findings=findings)
    provider = FakeProvider(reports={text: replace(first, run=text) for text in PAYLOADS})
    provider.sentence = "".join(PAYLOADS)

    with served(provider) as url, opened(browser, f"{url}/run/{quote(PAYLOADS[0], safe='')}") as it:
        it.page.wait_for_selector("#overview-workers .heatmaplayer image")
        assert it.page.text_content("h1") == provider.sentence
        findings_text = it.page.text_content("#overview-findings") or ""
        quality_text = it.page.text_content("#overview-quality") or ""
        for text in PAYLOADS:
            assert text in findings_text
            assert text in quality_text
        assert not was_run(it.page)


def test_the_timeline_shows_payloads_as_text_under_the_pointer(browser: Browser) -> None:
    # A long name is cut there; tests/dashboard/test_text.py has what plotly shows.
    provider = training_provider(name="".join(PAYLOADS[:5]))
    with served(provider) as url, opened(browser, f"{url}/timeline?run=demo-42&step=3") as it:
        it.page.wait_for_selector(DRAWN)
        hover(it.page, (0.01, 0.03))
        assert PAYLOADS[0] in (it.page.text_content(TIP) or "")
        assert not was_run(it.page)


def test_a_payload_in_an_address_is_shown_as_text(browser: Browser) -> None:
    with served(training_provider()) as url:
        for text in HALVES:
            with opened(browser, f"{url}/run/{quote(text, safe='')}") as it:
                it.page.wait_for_selector(f"text={text[:3]}")
                assert "there is no run" in it.page.inner_text("body")
                assert not was_run(it.page)
