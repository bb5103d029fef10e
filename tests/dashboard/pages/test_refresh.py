"""The one refresh of every page: what a browser is sent, and what it keeps."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from dash import dcc, html

from rankscope.dashboard.app import create_app
from rankscope.dashboard.pages.refresh import render_parts
from rankscope.dashboard.records.progress import Activity, AnalysisInProgress, Progress
from tests.support.dashboard.analysed import analysed_report
from tests.support.dashboard.builders import FakeProvider, mean_kind_times, report
from tests.support.dashboard.page_text import words
from tests.support.dashboard.posts import UPDATE_PATH, page_post, refreshed

if TYPE_CHECKING:
    from flask.testing import FlaskClient

PART = [html.P("before"), html.Div([html.Span("a", id="inner"), dcc.Store(id="s")], id="outer")]


def test_a_part_that_is_as_before_is_not_sent() -> None:
    before = render_parts(PART)

    assert render_parts(PART).changes(before.digests) == {}


def test_of_a_part_only_the_changed_properties_are_sent() -> None:
    before = render_parts(PART)
    outer = html.Div([html.Span("b", id="inner"), dcc.Store(id="s", data=1)], id="outer")

    assert render_parts([PART[0], outer]).changes(before.digests) == {
        "inner": {"children": "b"},
        "s": {"data": 1},
    }


def test_a_property_that_is_gone_is_sent_as_none() -> None:
    before = render_parts([html.Div(id="a", className="hidden")])

    assert render_parts([html.Div(id="a")]).changes(before.digests) == {"a": {"className": None}}


def test_a_part_with_other_parts_inside_is_sent_as_a_whole() -> None:
    before = render_parts(PART)
    outer = html.Div([html.Span("b", id="inner"), dcc.Store(id="t", data=1)], id="outer")

    changes = render_parts([outer]).changes(before.digests)

    assert {part: list(names) for part, names in changes.items()} == {"outer": ["children"]}
    assert words(changes["outer"]["children"]) == "b"


@pytest.fixture
def provider() -> FakeProvider:
    return FakeProvider(reports={"tiny": analysed_report()})


@pytest.fixture
def client(provider: FakeProvider) -> FlaskClient:
    tester: FlaskClient = create_app(provider).server.test_client()
    return tester


def test_a_page_is_refreshed_if_its_report_or_its_address_changed(
    client: FlaskClient, provider: FakeProvider
) -> None:
    shown = refreshed(client, "/links?run=tiny")["page-shown"]["data"]

    unchanged = refreshed(client, "/links?run=tiny", shown=shown)
    assert set(unchanged) == {"page-timer"}
    # WHEN the address shows more
    more = refreshed(client, "/links?run=tiny&show=all", shown=shown)
    assert more["page-shown"]["data"]["asked"] == "/links?run=tiny&show=all"
    # WHEN there is a new report, which says the same
    provider.num_changes = 1
    same = refreshed(client, "/links?run=tiny", shown=shown)
    assert same["page-shown"]["data"]["revision"] == "1"
    assert not {"page-content", "page-changes"} & set(same)


def test_another_page_is_sent_as_a_whole(client: FlaskClient) -> None:
    shown = refreshed(client, "/links?run=tiny")["page-shown"]["data"]

    answer = refreshed(client, "/rank?run=tiny&rank=0", shown=shown)

    assert "rank 0 of run 'tiny'" in words(answer["page-content"]["children"])


def test_a_newer_run_does_not_replace_the_one_that_is_looked_at(
    client: FlaskClient, provider: FakeProvider
) -> None:
    shown = refreshed(client, "/")["page-shown"]["data"]
    assert shown["run"] == "tiny"

    provider.reports = {"newer": report(run="newer"), **provider.reports}

    assert (
        refreshed(client, "/", shown=shown | {"revision": None})["page-shown"]["data"]["run"]
        == "tiny"
    )
    # AND the address of another run shows that one
    other = refreshed(client, "/run/newer", shown=shown)
    assert other["page-shown"]["data"]["run"] == "newer"


def test_what_is_being_made_is_asked_for_again_soon(provider: FakeProvider) -> None:
    (run,) = provider.runs()
    progress = Progress(activity=Activity.READING)
    provider.unfinished["tiny"] = AnalysisInProgress(
        run=run, progress=progress, elapsed_s=1.0, steps=None
    )
    client = create_app(provider).server.test_client()

    answer = refreshed(client, "/run/tiny")

    assert answer["page-shown"]["data"]["revision"] is None
    assert (
        answer["page-timer"]["interval"] < refreshed(client, "/run/none")["page-timer"]["interval"]
    )


@pytest.mark.parametrize(("open_step", "is_drawn"), [(5, True), (6, False)])
def test_a_drawn_step_that_never_ends_is_named_without_a_reload(
    open_step: int, *, is_drawn: bool
) -> None:
    made = report(num_steps=open_step)
    hang = replace(made.findings[0], cause="hang", steps=(open_step, open_step))
    provider = FakeProvider(reports={"demo-42": made}, times=mean_kind_times())
    client = create_app(provider).server.test_client()
    shown = refreshed(client, "/run/demo-42")["page-shown"]["data"]

    provider.reports["demo-42"] = replace(made, findings=(hang,))
    provider.num_changes += 1
    changes = refreshed(client, "/run/demo-42", shown=shown)["page-changes"]["data"]

    about = changes.get("overview-kinds-about", {}).get("children", "")
    assert (f"Step {open_step} never ended" in about) is is_drawn


def test_an_address_of_no_page_says_so(client: FlaskClient) -> None:
    answer = refreshed(client, "/nowhere")

    problem = answer["page-changes"]["data"]["page-problem"]["children"]
    assert "There is no page at '/nowhere'" in words(problem)


def test_the_frame_has_the_state_of_the_run_and_the_title_its_verdict() -> None:
    provider = FakeProvider(reports={"demo-42": report()}, state="running")
    client = create_app(provider).server.test_client()
    values = {
        "frame-place.data": "/mfu demo-42",
        "frame-timer.n_intervals": 0,
        "fallback-timer.n_intervals": 0,
        "url.pathname": "/mfu",
        "url.search": "?run=demo-42",
        "frame-shown.data": None,
    }

    answer = client.post(UPDATE_PATH, json=page_post(client, values)).get_json()["response"]
    parts = answer["frame-changes"]["data"]
    strip = words(parts["strip"]["children"])
    again = values | {"frame-shown.data": answer["frame-shown"]["data"]}

    assert strip == "live | step 29 | 0 records lost | clocks within 1.80 us"
    assert parts["frame-title"]["data"] == "demo-42: slow-compute 5 - MFU - rankscope"
    # AND nothing is sent again as long as it is the same
    same = client.post(UPDATE_PATH, json=page_post(client, again)).get_json()["response"]
    assert "frame-changes" not in same
