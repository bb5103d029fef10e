from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from dash import Input, Output

from rankscope.dashboard.app import create_app
from tests.support.dashboard.posts import page_post, post
from tests.support.dashboard.training_builder import training_provider

if TYPE_CHECKING:
    from flask.testing import FlaskClient

    from tests.support.dashboard.builders import FakeProvider

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


def test_a_post_of_a_page_is_accepted(client: FlaskClient) -> None:
    assert post(client, PAGE) == 200


UNEXPECTED_POSTS: list[Any] = [
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
    # A callback that runs in the browser.
    {
        **PAGE,
        "output": "overview-steps.figure",
        "outputs": {"id": "overview-steps", "property": "figure"},
        "inputs": [{"id": "overview-steps-fresh", "property": "data", "value": {}}],
        "state": [{"id": "overview-steps", "property": "figure", "value": {}}],
    },
]


@pytest.mark.parametrize("body", UNEXPECTED_POSTS, ids=lambda body: str(body)[:60])
def test_an_unexpected_post_is_rejected_and_runs_no_callback(
    client: FlaskClient, provider: FakeProvider, body: object
) -> None:
    assert post(client, body) == 400
    assert provider.num_reports == 0


SCALE = {
    "lines": [0, 8], "rows": [0, 8], "num_ranks": 8, "length_ms": 50.0, "is_whole": True,
}  # fmt: skip
REVISIONS = {"run": 7, "picture": 1}
STEP_SHOWN = {
    "run": "demo-42", "epoch": 0, "step": 3, "revisions": REVISIONS, "scale": SCALE, "num_views": 0,
    "asked": None, "around": "timeline?run=demo-42&step=3",
}  # fmt: skip
FRAME_SHOWN = {"page": "timeline", "run": "other", "runs": "0f"}

CALLBACKS: dict[str, dict[str, Any]] = {
    "run-chooser.children": {
        "frame-place.data": "/ ",
        "frame-timer.n_intervals": 1,
        "fallback-timer.n_intervals": 1,
        "url.pathname": "/",
        "url.search": "",
        "frame-shown.data": FRAME_SHOWN,
    },
    "choose-run.value": {
        "choose-run.value": "demo-42",
        "url.pathname": "/timeline",
        "frame-shown.data": FRAME_SHOWN,
    },
    "overview-shown.data": {
        "overview-timer.n_intervals": 1,
        "fallback-timer.n_intervals": 1,
        "overview-shown.data": {"run": "demo-42", "revision": 7, "is_silent": False},
    },
    "overview-liveness.children": {
        "liveness-timer.n_intervals": 1,
        "fallback-timer.n_intervals": 1,
        "overview-shown.data": {"run": "demo-42", "revision": 7, "is_silent": False},
        "overview-kinds-shown.data": "7",
    },
    "overview-excess.clickData": {
        "overview-excess.clickData": {"points": [{"x": "3-4", "y": "5", "z": 0.1}]},
        "overview-shown.data": {"run": "demo-42", "revision": 7, "is_silent": False},
    },
    "timeline-shown.data": {
        "timeline-asked.data": "?run=demo-42",
        "timeline-timer.n_intervals": 1,
        "fallback-timer.n_intervals": 1,
        "timeline-shown.data": STEP_SHOWN,
        "url.search": "?run=demo-42",
    },
}
"""Values that a page sends, by the callback's first output, or by its first input if several set
that output."""

UNEXPECTED_VALUES: dict[str, list[Any]] = {
    "url.pathname": ["no-slash", 7, "/\ud800"],
    "url.search": [7, ["a"], "?run=\ud800"],
    "frame-place.data": [7, ["/ "], {}],
    "frame-timer.n_intervals": ["1", {}, 1.5],
    "fallback-timer.n_intervals": ["1", {}, 1.5],
    "overview-timer.n_intervals": ["1", {}, 1.5],
    "liveness-timer.n_intervals": ["1", {}, 1.5],
    "timeline-asked.data": [7, ["a"], "?run=\ud800"],
    "overview-kinds-shown.data": [7, {}, ["7"]],
    "timeline-timer.n_intervals": ["1", {}, 1.5],
    "frame-shown.data": [
        7,
        "x",
        {},
        [],
        ["timeline", "other", []],
        {**FRAME_SHOWN, "page": None},
        {**FRAME_SHOWN, "page": "\ud800"},
        {**FRAME_SHOWN, "run": {}},
        {**FRAME_SHOWN, "runs": 1},
        {**FRAME_SHOWN, "runs": ["0f"]},
        {**FRAME_SHOWN, "runs": None},
        {**FRAME_SHOWN, "more": 1},
    ],
    "choose-run.value": [7, ["demo-42"], {}, "\ud800"],
    "overview-shown.data": [
        None,
        [],
        "demo-42",
        {},
        {"run": "demo-42"},
        {"run": 7, "revision": 7, "is_silent": False},
        {"run": "demo-42", "revision": 7, "is_silent": False, "open_step": "7"},
        {"run": ["demo-42"], "revision": 7, "is_silent": False},
        {"run": "demo-42", "revision": "7"},
        {"run": "demo-42", "revision": 7, "is_silent": False, "more": 1},
        {"run": "\ud800", "revision": 7, "is_silent": False},
    ],
    "overview-excess.clickData": [
        7,
        "x",
        [1],
        {"points": []},
        {"points": {}},
        {"points": [7]},
        {"points": [{}]},
        {"points": [{"x": "a"}]},
        {"points": [{"x": ""}]},
        {"points": [{"x": [3]}]},
        {"points": [{"x": "9" * 16}]},
        {"points": [{"x": "\u0663"}]},
    ],
    "timeline-shown.data": [
        None,
        {"run": "demo-42", "revision": 7},
        {"run": "demo-42", "step": 3, "revision": 7},
        {**STEP_SHOWN, "step": [3]},
        {**STEP_SHOWN, "epoch": "0"},
        {**STEP_SHOWN, "run": {}},
        {**STEP_SHOWN, "revisions": 7},
        {**STEP_SHOWN, "revisions": {"run": 7}},
        {**STEP_SHOWN, "revisions": {"run": 7, "picture": "1"}},
        {**STEP_SHOWN, "scale": 7},
        {**STEP_SHOWN, "scale": {"first_row": 0}},
        {**STEP_SHOWN, "scale": {**SCALE, "length_ms": float("nan")}},
        {**STEP_SHOWN, "scale": {**SCALE, "length_ms": 10**400}},
        {**STEP_SHOWN, "scale": {**SCALE, "num_lines": 8.5}},
        {**STEP_SHOWN, "more": 1},
    ],
    "timeline-graph.relayoutData": [
        7,
        "x",
        [],
        {"xaxis.range[0]": "1"},
        {"yaxis.range[1]": [1]},
        {"xaxis.range[0]": float("inf")},
    ],
}


def update(client: FlaskClient, name: str, **changed: object) -> dict[str, Any]:
    """Return the post of a page for a callback of `CALLBACKS`, with some values changed."""
    values = {**CALLBACKS[name], **changed}
    return page_post(client, values, output="" if name in values else name)


@pytest.mark.parametrize("name", CALLBACKS)
def test_every_callback_accepts_the_post_of_its_page(client: FlaskClient, name: str) -> None:
    assert post(client, update(client, name)) in {200, 204}


def test_a_choice_before_any_run_was_shown_changes_nothing(client: FlaskClient) -> None:
    assert post(client, update(client, "choose-run.value", **{"frame-shown.data": None})) == 204


def test_every_callback_declares_a_post_with_a_field_for_each_value() -> None:
    app = create_app(training_provider())
    app.server.test_client().get("/_dash-dependencies")  # fills the map
    on_server = {
        output: callback
        for output, callback in app.callback_map.items()
        if "callback" in callback  # others run in the browser
    }

    assert len(on_server) >= len(CALLBACKS) + 1  # and the page itself
    for output, callback in on_server.items():
        fields = callback["callback"].post_model.model_fields
        assert len(fields) == len(callback["inputs"]) + len(callback["state"]), output


def test_a_post_to_a_callback_without_a_model_is_rejected() -> None:
    app = create_app(training_provider())

    @app.callback(Output("other", "children"), Input("url", "pathname"))
    def run(path: str) -> str:
        raise AssertionError(path)

    unchecked = {
        **PAGE,
        "output": "other.children",
        "outputs": {"id": "other", "property": "children"},
        "state": [],
    }
    assert post(app.server.test_client(), unchecked) == 400


@pytest.mark.parametrize(
    ("name", "place", "value"),
    [
        (name, place, value)
        for name, values in CALLBACKS.items()
        for place in values
        for value in UNEXPECTED_VALUES[place]
    ],
)
def test_an_unexpected_value_is_rejected_and_runs_no_callback(
    client: FlaskClient, provider: FakeProvider, name: str, place: str, value: object
) -> None:
    assert post(client, update(client, name, **{place: value})) == 400
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
