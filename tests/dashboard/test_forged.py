from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from dashboard.app import create_app
from tests.dashboard.builders import FakeProvider, training_provider

if TYPE_CHECKING:
    from flask.testing import FlaskClient

PAGE = {
    "output": "page.children",
    "outputs": {"id": "page", "property": "children"},
    "inputs": [{"id": "url", "property": "pathname", "value": "/"}],
    "state": [{"id": "url", "property": "search", "value": ""}],
    "changedPropIds": ["url.pathname"],
}


@pytest.fixture
def provider() -> FakeProvider:
    return training_provider()


@pytest.fixture
def client(provider: FakeProvider) -> FlaskClient:
    tester: FlaskClient = create_app(provider).server.test_client()
    return tester


def post(client: FlaskClient, body: object) -> int:
    answer = client.post(
        "/_dash-update-component", data=json.dumps(body), content_type="application/json"
    )
    return answer.status_code


def test_what_a_page_sends_comes_in(client: FlaskClient) -> None:
    assert post(client, PAGE) == 200


FORGED: list[Any] = [
    None,
    7,
    [],
    {},
    {"output": ["page.children"]},
    {"output": "page.children"},
    {**PAGE, "output": "other.children"},
    {**PAGE, "output": "..page.children.."},
    {**PAGE, "outputs": {"id": "other", "property": "children"}},
    {**PAGE, "outputs": []},
    {**PAGE, "outputs": {"id": {"a": 1}, "property": "children"}},
    {**PAGE, "inputs": []},
    {**PAGE, "inputs": None},
    {**PAGE, "inputs": {"id": "url", "property": "pathname", "value": "/"}},
    {**PAGE, "inputs": [PAGE["inputs"]]},
    {**PAGE, "inputs": [{"id": "url", "property": "search", "value": "/"}]},
    {**PAGE, "inputs": [{"id": "url", "property": "pathname", "value": {"a": 1}}]},
    {**PAGE, "inputs": [{"id": "url", "property": "pathname", "value": ["/"]}]},
    {**PAGE, "inputs": [{"id": "url", "property": "pathname", "value": 7}]},
    {**PAGE, "state": []},
    {**PAGE, "state": [{"id": "url", "property": "search", "value": [1]}]},
    {**PAGE, "changedPropIds": "url.pathname"},
    {**PAGE, "changedPropIds": [7]},
    # Of a figure that the browser alone redraws.
    {
        **PAGE,
        "output": "overview-steps.figure",
        "outputs": {"id": "overview-steps", "property": "figure"},
        "inputs": [{"id": "overview-steps-fresh", "property": "data", "value": {}}],
        "state": [{"id": "overview-steps", "property": "figure", "value": {}}],
    },
]


@pytest.mark.parametrize("body", FORGED, ids=lambda body: str(body)[:60])
def test_what_no_page_sends_is_refused_and_runs_nothing(
    client: FlaskClient, provider: FakeProvider, body: object
) -> None:
    assert post(client, body) == 400
    assert provider.num_reports == 0


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[" * 100_000,
        b'{"output":' * 5_000,
        b'{"output": ' + b"9" * 100_000 + b"}",
        b"\xff\xfe",
        b'{"output": NaN}',
    ],
    ids=lambda body: repr(body[:20]),
)
def test_a_body_that_is_no_json_or_a_bomb_is_refused(client: FlaskClient, body: bytes) -> None:
    answer = client.post("/_dash-update-component", data=body, content_type="application/json")

    assert answer.status_code == 400


def test_another_content_type_is_refused(client: FlaskClient) -> None:
    answer = client.post("/_dash-update-component", data=json.dumps(PAGE))

    assert answer.status_code == 400
