from __future__ import annotations

import logging
import shutil
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import sync_playwright
from werkzeug.serving import make_server

from rankscope.dashboard.app import content_security_policy, create_app
from tests.support.missing_tools import skip_for_missing

if TYPE_CHECKING:
    from collections.abc import Iterator

    from flask import Response
    from playwright.sync_api import Browser

    from rankscope.dashboard.provider import ReportProvider

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/browser" in item.path.as_posix():
            item.add_marker(pytest.mark.browser)


# Scope package: while Playwright runs, other tests cannot run an event loop.
@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    found = next((path for path in map(shutil.which, NAMES) if path), None)
    if found is None:
        skip_for_missing("no Chromium on PATH: run tests/browser/install_chromium.sh")
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(
            executable_path=found,
            args=["--no-sandbox", "--disable-gpu", "--disable-background-networking"],
        )
        yield chromium
        chromium.close()


@contextmanager
def served(provider: ReportProvider) -> Iterator[str]:
    """Serve the dashboard on loopback, with its content security policy."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    app = create_app(provider)
    policy = content_security_policy(app)

    def guard(response: Response) -> Response:
        response.headers["Content-Security-Policy"] = policy
        return response

    app.server.after_request(guard)
    server = make_server("127.0.0.1", 0, app.server, threaded=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
