"""The frame of pages that show a report: their states, and their refresh."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from rankscope.dashboard.address import LINKS, View
from rankscope.dashboard.app import create_app
from rankscope.dashboard.pages import links
from rankscope.dashboard.records.progress import Activity, AnalysisInProgress, Progress
from tests.support.dashboard.analysed import analysed_report
from tests.support.dashboard.builders import FakeProvider
from tests.support.dashboard.page_text import words
from tests.support.dashboard.posts import UPDATE_PATH, page_post

if TYPE_CHECKING:
    from flask.testing import FlaskClient

SHOWN = {"run": "tiny", "search": "?run=tiny", "revision": 0}


def text_of(provider: FakeProvider, run: str | None = "tiny") -> str:
    view = View(page=LINKS, run=run)
    return words(links.PAGE.build(provider, view, base_path="/"))


def in_progress(provider: FakeProvider) -> AnalysisInProgress:
    (run,) = provider.runs()
    return AnalysisInProgress(
        run=run, progress=Progress(activity=Activity.READING), elapsed_s=1.0, steps=None
    )


def test_each_state_has_its_words() -> None:
    provider = FakeProvider(reports={"tiny": analysed_report()})
    assert "None of" in text_of(provider)
    # the newest run, if the address names none
    assert text_of(provider, None) == text_of(provider)
    assert "there is no run 'gone'" in text_of(provider, "gone")
    provider.unfinished["tiny"] = in_progress(provider)
    assert "analysis in progress" in text_of(provider)
    assert "before a step was recorded" in text_of(FakeProvider(reports={"tiny": None}))
    assert "this store holds no runs yet" in text_of(FakeProvider(), None)


@pytest.fixture
def provider() -> FakeProvider:
    return FakeProvider(reports={"tiny": analysed_report()})


def refreshed(
    client: FlaskClient, *, shown: dict[str, object], path: str = "/links", search: str = ""
) -> dict[str, object]:
    values = {
        "links-timer.n_intervals": 1,
        "fallback-timer.n_intervals": 0,
        "url.search": search or "?run=tiny",
        "url.pathname": path,
        "links-shown.data": shown,
    }
    answer = client.post(UPDATE_PATH, json=page_post(client, values)).get_json()["response"]
    assert answer["links-timer"]["max_intervals"] == 2
    return {} if "links-content" not in answer else answer["links-shown"]["data"]


def test_a_page_is_refreshed_if_its_report_or_its_address_changed(provider: FakeProvider) -> None:
    client = create_app(provider).server.test_client()

    assert refreshed(client, shown=SHOWN) == {}
    # WHEN the address shows more
    more = refreshed(client, shown=SHOWN, search="?run=tiny&show=all")
    assert more == SHOWN | {"search": "?run=tiny&show=all"}
    # WHEN there is a new report
    provider.num_changes = 1
    assert refreshed(client, shown=SHOWN) == SHOWN | {"revision": 1}
    # AND not if another page was opened meanwhile
    assert refreshed(client, shown=SHOWN, path="/timeline") == {}
