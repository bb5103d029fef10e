"""The pages of `rankscope serve`: signed in with the token, under its content security policy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.integration.programs import rankscope, serving
from tests.support.traces import TRACES, needs_traces

if TYPE_CHECKING:
    from pathlib import Path

    from playwright.sync_api import Browser, Page

pytestmark = [needs_traces, pytest.mark.multiproc]

TIMEOUT_MS = 120_000


class Visit:
    """A page, with its console messages and the hosts of its requests."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.console: list[str] = []
        self.hosts: set[str] = set()
        self.errors: list[str] = []
        page.set_default_timeout(TIMEOUT_MS)
        page.on("console", lambda message: self.console.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("request", lambda request: self.hosts.add(request.url.split("/")[2]))

    @property
    def problems(self) -> list[str]:
        kinds = ("error", "warning")
        return self.errors + [line for line in self.console if line.startswith(kinds)]


def test_both_pages_show_a_run_without_errors_or_foreign_requests(
    browser: Browser, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    files = [str(TRACES / "trace-AR.parquet"), "--meta", str(TRACES / "meta-AR.yaml")]
    imported = rankscope("import", *files, "--format", "bytedance", "--run", "AR", store=store)
    assert imported.returncode == 0, imported.stderr

    with serving(store=store) as server:
        visit = Visit(browser.new_page())
        visit.page.goto(f"{server.url}/run/AR")
        assert visit.page.url.startswith(f"{server.url}/login?next=")
        visit.page.get_by_label("Token").fill(server.token)
        visit.page.get_by_role("button", name="Sign in").click()

        visit.page.get_by_text("computes slowly").first.wait_for(timeout=TIMEOUT_MS)
        assert visit.page.url == f"{server.url}/run/AR"
        visit.page.locator(".js-plotly-plot").first.wait_for(timeout=TIMEOUT_MS)

        visit.page.wait_for_load_state("networkidle")  # a pending request would fail
        visit.page.goto(f"{server.url}/timeline?run=AR")
        visit.page.locator(".js-plotly-plot").first.wait_for(timeout=TIMEOUT_MS)
        visit.page.close()

        host = server.url.removeprefix("http://")

    assert visit.problems == []
    assert visit.hosts == {host}


def test_the_printed_address_signs_in_by_itself(browser: Browser, tmp_path: Path) -> None:
    with serving(store=tmp_path / "store") as server:
        visit = Visit(browser.new_page())
        visit.page.goto(f"{server.url}/?token={server.token}")
        visit.page.get_by_text("rankscope").first.wait_for(timeout=TIMEOUT_MS)
        assert server.token not in visit.page.url
        visit.page.wait_for_load_state("networkidle")
        visit.page.close()

    assert visit.problems == []
