"""From a real alert of `rankscope serve` to the span, in a real browser."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.browser.test_pages import opened, settle
from tests.browser.test_timeline import AXIS, click_rank, drawn, query_of
from tests.integration.programs import TIMEOUT_S, serving
from tests.integration.test_serve import Job
from tests.support.receiver import Receiver

if TYPE_CHECKING:
    from pathlib import Path

    from playwright.sync_api import Browser

pytestmark = [pytest.mark.multiproc, pytest.mark.nightly]

ONSET, SLOW_RANK = 8, 1


def test_the_link_of_an_alert_opens_its_first_step_and_a_click_its_span(
    browser: Browser, tmp_path: Path
) -> None:
    spool, config, bot = tmp_path / "spool", tmp_path / "alerts.toml", Receiver()
    config.write_text(f'[[receivers]]\nname = "bot"\nurl = "{bot.url}"\n')
    job = Job(spool)
    job.record_steps(ONSET)
    job.record_steps(4, slow_ms=180)
    with serving(
        "--spool", str(spool), "--config", str(config), store=tmp_path / "store"
    ) as server:
        message = json.loads(bot.bodies.get(timeout=TIMEOUT_S))
        size = {"width": 1280, "height": 900}
        with opened(browser, f"{server.url}/?token={server.token}", viewport=size) as seen:
            page = seen.page
            settle(page)

            page.goto(message["url"])
            drawn(page)
            query, marked = query_of(page), page.inner_text("main")
            begin, end = page.evaluate(AXIS)
            click_rank(page, SLOW_RANK, (begin + end) / 2)
            settle(page)
            facts = page.inner_text("#timeline-selection")
    bot.close()

    assert message["steps"][0] == ONSET
    assert message["ranks"] == [SLOW_RANK]
    assert (query["run"], query["step"], query["rank"]) == ("job", str(ONSET), str(SLOW_RANK))
    assert f"step {ONSET}" in marked.lower()
    assert facts.startswith("forward")
    assert f"rank {SLOW_RANK}" in facts
    assert "180" in facts
