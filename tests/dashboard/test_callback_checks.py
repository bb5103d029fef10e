from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from rankscope.dashboard.app import create_app
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


SCALE = {"first_row": 0, "ranks_per_line": 1.0, "num_lines": 8, "begin_ms": 0, "end_ms": 50.0}
REVISIONS = {"run": 7, "picture": 1}
STEP_SHOWN = {
    "run": "demo-42", "epoch": 0, "step": 3, "revisions": REVISIONS, "scale": SCALE,
}  # fmt: skip
FRAME_SHOWN = {"page": "timeline", "run": "other", "runs": [{"run": "other", "state": "running"}]}

CALLBACKS: dict[str, dict[str, Any]] = {
    "run-chooser.children": {
        "url.pathname": "/",
        "url.search": "",
        "frame-timer.n_intervals": 1,
        "fallback-timer.n_intervals": 1,
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
        "overview-shown.data": {"run": "demo-42", "revision": 7},
    },
    "overview-liveness.children": {
        "liveness-timer.n_intervals": 1,
        "fallback-timer.n_intervals": 1,
        "overview-shown.data": {"run": "demo-42", "revision": 7},
    },
    "overview-excess.clickData": {
        "overview-excess.clickData": {"points": [{"x": "3-4", "y": "5", "z": 0.1}]},
        "overview-shown.data": {"run": "demo-42", "revision": 7},
    },
    "timeline-shown.data": {
        "url.search": "?run=demo-42",
        "timeline-timer.n_intervals": 1,
        "fallback-timer.n_intervals": 1,
        "timeline-shown.data": STEP_SHOWN,
    },
    "timeline-choose-step.value": {
        "timeline-choose-step.value": "4",
        "url.search": "",
        "timeline-shown.data": STEP_SHOWN,
    },
    "timeline-graph.relayoutData": {
        "timeline-graph.relayoutData": {"xaxis.range[0]": 1.5, "xaxis.range[1]": 2},
        "url.search": "",
        "timeline-shown.data": STEP_SHOWN,
    },
}
"""What a page sends, by the callback's first output or, where several lead to the address, its
first input."""

NOT_OF_A_PAGE: dict[str, list[Any]] = {
    "url.pathname": ["no-slash", 7, "/\ud800"],
    "url.search": [7, ["a"], "?run=\ud800"],
    "frame-timer.n_intervals": ["1", {}, 1.5],
    "fallback-timer.n_intervals": ["1", {}, 1.5],
    "overview-timer.n_intervals": ["1", {}, 1.5],
    "liveness-timer.n_intervals": ["1", {}, 1.5],
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
        {**FRAME_SHOWN, "runs": ["other"]},
        {**FRAME_SHOWN, "runs": [{"run": "other"}]},
        {**FRAME_SHOWN, "more": 1},
    ],
    "choose-run.value": [7, ["demo-42"], {}, "\ud800"],
    "overview-shown.data": [
        None,
        [],
        "demo-42",
        {},
        {"run": "demo-42"},
        {"run": 7, "revision": 7},
        {"run": ["demo-42"], "revision": 7},
        {"run": "demo-42", "revision": "7"},
        {"run": "demo-42", "revision": 7, "more": 1},
        {"run": "\ud800", "revision": 7},
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
        {**STEP_SHOWN, "scale": {**SCALE, "end_ms": float("nan")}},
        {**STEP_SHOWN, "scale": {**SCALE, "end_ms": 10**400}},
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
    "timeline-choose-step.value": [7, "", "a", "-1", "1.5", "9" * 16, ["4"]],
}


def update(client: FlaskClient, name: str, **changed: object) -> dict[str, Any]:
    """Return what a page sends for a callback of `CALLBACKS`, with some values changed."""
    values = {**CALLBACKS[name], **changed}
    names = list(values)
    told = client.get("/_dash-dependencies").get_json()
    # Two may take the same: the one that is named goes first.
    for one in sorted(told, key=lambda one: name not in one["output"]):
        given = [f"{part['id']}.{part['property']}" for part in one["inputs"] + one["state"]]
        if given == names:
            outputs = [
                dict(zip(("id", "property"), part.partition("@")[0].split("."), strict=True))
                for part in one["output"].strip(".").split("...")
            ]
            return {
                "output": one["output"],
                "outputs": outputs if one["output"].startswith("..") else outputs[0],
                "inputs": [
                    {**part, "value": values[f"{part['id']}.{part['property']}"]}
                    for part in one["inputs"]
                ],
                "state": [
                    {**part, "value": values[f"{part['id']}.{part['property']}"]}
                    for part in one["state"]
                ],
                "changedPropIds": names[:1],
            }
    raise AssertionError(f"no callback takes {names}")


@pytest.mark.parametrize("name", CALLBACKS)
def test_every_callback_takes_what_its_page_sends(client: FlaskClient, name: str) -> None:
    assert post(client, update(client, name)) in {200, 204}


def test_a_choice_before_any_run_was_shown_leads_nowhere(client: FlaskClient) -> None:
    assert post(client, update(client, "choose-run.value", **{"frame-shown.data": None})) == 204


def test_no_callback_is_left_out_here_or_unchecked(client: FlaskClient) -> None:
    told = client.get("/_dash-dependencies").get_json()
    ours = [one for one in told if one["clientside_function"] is None]
    taken = {
        f"{part['id']}.{part['property']}" for one in ours for part in one["inputs"] + one["state"]
    }

    assert len(ours) == len(CALLBACKS) + 1  # and the page itself
    assert taken == set(NOT_OF_A_PAGE)


@pytest.mark.parametrize(
    ("name", "place", "value"),
    [
        (name, place, value)
        for name, values in CALLBACKS.items()
        for place in values
        for value in NOT_OF_A_PAGE[place]
    ],
)
def test_a_value_that_no_page_sends_is_refused(
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
def test_a_body_that_is_no_json_or_a_bomb_is_refused(client: FlaskClient, body: bytes) -> None:
    answer = client.post("/_dash-update-component", data=body, content_type="application/json")

    assert answer.status_code == 400


def test_another_content_type_is_refused(client: FlaskClient) -> None:
    answer = client.post("/_dash-update-component", data=json.dumps(PAGE))

    assert answer.status_code == 400
