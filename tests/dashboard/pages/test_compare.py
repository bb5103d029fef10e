from __future__ import annotations

from rankscope.analysis.report.page_results import ComparedNumber, RunComparison
from rankscope.dashboard.address import View
from rankscope.dashboard.app import create_app
from rankscope.dashboard.pages.compare import compare_page
from tests.support.dashboard.builders import FakeProvider, report
from tests.support.dashboard.page_text import words
from tests.support.dashboard.posts import page_post


def comparison() -> RunComparison:
    healthy, slow = report(run="a", slow_rank=None), report(run="b")
    return RunComparison(
        first=healthy,
        second=slow,
        settings=(("env NCCL_ALGO", None, "<b>Ring</b>"),),
        numbers=(
            ComparedNumber(name="step time, s", first=0.4, second=0.6, ratio=1.5),
            ComparedNumber(name="MFU", first=0.5, second=None, ratio=None),
        ),
        parts_s=(ComparedNumber(name="time.waiting, s", first=0.01, second=0.2, ratio=20.0),),
        appeared=slow.findings[:1],
        disappeared=healthy.findings,
        remained=(),
    )


def test_settings_come_first_then_numbers_then_what_appeared_and_disappeared() -> None:
    provider = FakeProvider(reports={"b": None, "a": None}, compared=comparison())

    shown = words(compare_page(provider, View(page="compare", run="b"), base_path="/"))

    order = [
        "A step takes 1.50x the time.",
        "env NCCL_ALGO | not set | <b>Ring</b>",
        "step time | 400 ms | 600 ms | 1.50x",
        "MFU | 50.0 % | n/a | n/a",
        "waiting | 10.0 ms | 200 ms | 20.00x",
        "New | cause",
        "Gone | cause",
        "In both: none.",
    ]
    places = [shown.find(text) for text in order]
    assert places == sorted(places)
    assert places[0] >= 0


def test_the_page_waits_for_the_analysis_and_the_address_holds_the_choice() -> None:
    provider = FakeProvider(reports={"a": None})
    client = create_app(provider).server.test_client()
    view = View(page="compare", run="a", steps=(10, 19), with_steps=(0, 9))

    assert "Both runs are being analysed" in words(compare_page(provider, view, base_path="/"))
    body = page_post(
        client,
        {
            "compare-go.n_clicks": 1,
            "compare-with.value": "a",
            "compare-with-steps.value": "0-9",
            "compare-run.value": "a",
            "compare-run-steps.value": "10-19",
        },
    )
    answer = client.post("/_dash-update-component", json=body).get_json()
    href = answer["response"]["url"]["href"]
    assert href == "/compare?run=a&with=a&steps=10-19&with-steps=0-9"
