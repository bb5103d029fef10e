from __future__ import annotations

import re
from typing import TYPE_CHECKING

from rankscope.dashboard.app import content_security_policy, create_app
from tests.support.dashboard.builders import FakeProvider
from tests.support.dashboard.training_builder import training_provider

if TYPE_CHECKING:
    import pytest


def test_the_page_and_its_files_come_from_this_server() -> None:
    client = create_app(training_provider()).server.test_client()

    page = client.get("/").text
    sources = re.findall(r'(?:src|href)="([^"]+)"', page)

    assert sources
    assert all(source.startswith("/") for source in sources)
    with client.get("/assets/rankscope.css") as style:
        assert style.status_code == 200


def test_the_policy_allows_only_our_scripts() -> None:
    policy = dict(
        part.split(" ", 1)
        for part in content_security_policy(create_app(FakeProvider())).split("; ")
    )

    assert policy["default-src"] == "'none'"
    assert re.fullmatch(r"'self'( 'sha256-[A-Za-z0-9+/=]+')+", policy["script-src"])
    assert policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == "'none'"


def test_an_unknown_script_is_404() -> None:
    client = create_app(FakeProvider()).server.test_client()

    for path in ("unknown/x.js", "dash/x.js", "dash/../x.js"):
        answer = client.get(f"/_dash-component-suites/{path}")
        assert answer.status_code == 404
        assert "registered" not in answer.text


def test_no_debug_console_is_served_even_if_the_environment_asks_for_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FLASK_DEBUG", "1")
    monkeypatch.setenv("DASH_DEBUG", "1")
    app = create_app(FakeProvider())

    # Dash answers any unknown path with the page itself.
    page = app.server.test_client().get("/console").text

    assert "EVALEX" not in page
    assert '"ui":false' in page
