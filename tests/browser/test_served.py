"""The pages of `rankscope serve`: signed in with the token, under its content security policy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.browser.test_pages import opened, settle
from tests.integration.programs import rankscope, serving
from tests.support.traces import TRACES, needs_traces

if TYPE_CHECKING:
    from pathlib import Path

    from playwright.sync_api import Browser

pytestmark = [needs_traces, pytest.mark.multiproc]


def test_both_pages_show_a_run_without_errors_or_foreign_requests(
    browser: Browser, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    files = [str(TRACES / "trace-AR.parquet"), "--meta", str(TRACES / "meta-AR.yaml")]
    imported = rankscope("import", *files, "--format", "bytedance", "--run", "AR", store=store)
    assert imported.returncode == 0, imported.stderr

    with serving(store=store) as server, opened(browser, f"{server.url}/run/AR") as seen:
        page = seen.page
        assert page.url.startswith(f"{server.url}/login?next=")
        page.get_by_label("Token").fill(server.token)
        page.get_by_role("button", name="Sign in").click()

        page.get_by_text("computes slowly").first.wait_for()
        assert page.url == f"{server.url}/run/AR"
        page.locator(".js-plotly-plot").first.wait_for()

        settle(page)
        page.goto(f"{server.url}/timeline?run=AR")
        page.locator(".js-plotly-plot").first.wait_for()


def test_the_printed_address_signs_in_by_itself(browser: Browser, tmp_path: Path) -> None:
    with (
        serving(store=tmp_path / "store") as server,
        opened(browser, f"{server.url}/?token={server.token}") as seen,
    ):
        seen.page.get_by_text("rankscope").first.wait_for()
        assert server.token not in seen.page.url
        settle(seen.page)
