"""Forged posts to the dashboard: each is answered 400, and runs no callback."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from rankscope.dashboard.app import create_app
from tests.support.dashboard.builders import FakeProvider
from tests.support.dashboard.posts import ask_page, page_post, post, refreshed
from tests.support.dashboard.training_builder import training_provider

if TYPE_CHECKING:
    from flask.testing import FlaskClient

PAGE = {
    "output": "url.href",
    "outputs": {"id": "url", "property": "href"},
    "inputs": [{"id": "choose-run", "property": "value", "value": "demo-42"}],
    "state": [
        {"id": "url", "property": "pathname", "value": "/"},
        {"id": "frame-shown", "property": "data", "value": {"run": "a", "digests": {}}},
    ],
    "changedPropIds": ["choose-run.value"],
}


@pytest.fixture
def provider() -> FakeProvider:
    return training_provider()


@pytest.fixture
def client(provider: FakeProvider) -> FlaskClient:
    tester: FlaskClient = create_app(provider).server.test_client()
    return tester


def test_a_post_of_a_page_is_accepted(client: FlaskClient) -> None:
    assert post(client, PAGE) == 200


UNEXPECTED_POSTS: list[Any] = [
    None,
    7,
    [],
    {},
    {"output": ["url.href"]},
    {"output": "url.href"},
    {**PAGE, "output": "other.children"},
    {**PAGE, "output": "..url.href.."},
    {**PAGE, "outputs": {"id": "other", "property": "children"}},
    {**PAGE, "outputs": []},
    {**PAGE, "outputs": {"id": {"a": 1}, "property": "href"}},
    {**PAGE, "inputs": []},
    {**PAGE, "inputs": None},
    {**PAGE, "inputs": PAGE["inputs"][0]},  # type: ignore[index]
    {**PAGE, "inputs": [PAGE["inputs"]]},
    {**PAGE, "inputs": [{"id": "choose-run", "property": "data", "value": "a"}]},
    {**PAGE, "inputs": [{"id": "choose-run", "property": "value", "value": {"a": 1}}]},
    {**PAGE, "inputs": [{"id": "choose-run", "property": "value", "value": 7}]},
    {**PAGE, "state": []},
    {**PAGE, "state": PAGE["state"][:1]},  # type: ignore[index]
    {**PAGE, "changedPropIds": "choose-run.value"},
    {**PAGE, "changedPropIds": [7]},
    # A callback that runs in the browser.
    {
        **PAGE,
        "output": "frame-titled.data",
        "outputs": {"id": "frame-titled", "property": "data"},
        "inputs": [{"id": "frame-title", "property": "data", "value": "x"}],
        "state": [],
    },
]


@pytest.mark.parametrize("body", UNEXPECTED_POSTS, ids=lambda body: str(body)[:60])
def test_an_unexpected_post_is_rejected(client: FlaskClient, body: object) -> None:
    assert post(client, body) == 400


WRONG_VALUES: list[Any] = [
    None, True, -7, 1.5, float("nan"), 10**400, "", "7", "no-slash", "?run=\ud800", [], [1], ["a"],
    {}, {"run": 7}, {"points": 7}, {"points": [7]}, {"points": [{"x": [3], "customdata": "a"}]},
    {"points": [{"x": "9" * 16, "y": 10**400, "customdata": -1}]}, {"asked": 1, "digests": [1]},
]  # fmt: skip
"""What no page sends, or only one of its callbacks."""


def test_a_wrong_value_of_any_callback_is_never_an_error_of_the_server() -> None:
    provider = FakeProvider(reports={"demo-42": None})  # quick to show
    client = create_app(provider).server.test_client()
    callbacks = client.get("/_dash-dependencies").get_json()
    shown = refreshed(client, "/run/demo-42")["page-shown"]["data"]
    on_server = [known for known in callbacks if not known["clientside_function"]]
    statuses = set()

    for callback in on_server:
        names = [
            f"{part['id']}.{part['property']}" for part in callback["inputs"] + callback["state"]
        ]
        right = {name: shown if name == "page-shown.data" else None for name in names}
        body = page_post(client, right, output=callback["output"])
        for sent in (*body["inputs"], *body["state"]):
            for value in WRONG_VALUES:
                kept, sent["value"] = sent["value"], value
                status = post(client, body)
                assert status in {200, 204, 400}, (callback["output"], sent)
                statuses.add(status)
                sent["value"] = kept

    assert len(on_server) >= 10
    assert 400 in statuses


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("page-asked.data", 7),
        ("page-timer.n_intervals", "1"),
        ("page-timer.n_intervals", 10**400),
        ("page-asked.data", "/?run=\ud800"),
        ("page-shown.data", {"asked": "/"}),
        ("page-shown.data", [1]),
    ],
)
def test_a_wrong_value_makes_no_page(
    client: FlaskClient, provider: FakeProvider, name: str, value: object
) -> None:
    body = ask_page("/")
    for sent in (*body["inputs"], *body["state"]):
        if f"{sent['id']}.{sent['property']}" == name:
            sent["value"] = value

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
def test_a_body_that_is_invalid_or_a_json_bomb_is_rejected(
    client: FlaskClient, body: bytes
) -> None:
    answer = client.post("/_dash-update-component", data=body, content_type="application/json")

    assert answer.status_code == 400


def test_another_content_type_is_rejected(client: FlaskClient) -> None:
    answer = client.post("/_dash-update-component", data=json.dumps(PAGE))

    assert answer.status_code == 400
