from __future__ import annotations

from dataclasses import replace

from rankscope.analysis.report.report import Severity
from rankscope.analysis.statistics.step_change import StepChange
from rankscope.dashboard.address import View
from rankscope.dashboard.app import create_app
from rankscope.dashboard.pages import compare
from rankscope.dashboard.records.page_results import ComparedNumber, RunComparison
from rankscope.tracer.topology import Layout
from tests.support.dashboard.builders import FakeProvider, report
from tests.support.dashboard.page_text import find_part, rendered, words
from tests.support.dashboard.posts import page_post


def comparison() -> RunComparison:
    healthy, slow = report(run="a", slow_rank=None), report(run="b")
    return RunComparison(
        first=healthy,
        second=slow,
        step_change=StepChange(ratio=1.5, is_significant=True),
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

    shown = words(rendered(compare.PAGE, provider, View(page="compare", run="b")))

    order = [
        "A step is 50 % slower.",
        "env NCCL_ALGO | not set | <b>Ring</b>",
        "step time | 400 ms | 600 ms | 50 % slower",
        "MFU | 50.0 % | n/a | n/a",
        "waiting | 10.0 ms | 200 ms | +190 ms",
        "New | cause",
        "Gone | cause",
        "In both: none.",
    ]
    places = [shown.find(text) for text in order]
    assert places == sorted(places)
    assert places[0] >= 0


def verdict(found: RunComparison) -> tuple[str, str]:
    """Return the classes and the words of the headline."""
    provider = FakeProvider(reports={"b": None, "a": None}, compared=found)
    page = rendered(compare.PAGE, provider, View(page="compare", run="b"))
    headline = find_part(page, "compare-content")["children"][0]
    return headline["props"]["className"], words(headline)


def test_the_step_times_of_two_layouts_are_neither_good_nor_bad() -> None:
    shorter = StepChange(ratio=0.5, is_significant=True)
    same = replace(comparison(), step_change=shorter, appeared=())
    other = replace(same, second=replace(same.second, layout=Layout(dp=2), findings=()))

    assert verdict(same)[0] == "verdict calm"
    style, shown = verdict(other)

    assert style == "verdict busy"
    assert "A step is 50 % faster." in shown
    assert "the layouts differ, so a step is not the same work" in shown


def test_many_settings_have_the_width_of_the_page() -> None:
    def num_parts(num_settings: int) -> int:
        found = replace(comparison(), settings=(("env A", None, "1"),) * num_settings)
        provider = FakeProvider(reports={"b": None, "a": None}, compared=found)
        page = rendered(compare.PAGE, provider, View(page="compare", run="b"))
        return len(find_part(page, "compare-content")["children"])

    assert (num_parts(3), num_parts(4)) == (4, 5)


def test_other_steps_of_another_run_are_named() -> None:
    found = comparison()
    live = replace(found, second=replace(found.second, steps=(39, 40, 41)))

    assert "steps" not in verdict(found)[1]
    assert "steps 39-41 against steps 0-29" in verdict(live)[1]
    one = replace(found, second=replace(found.second, steps=(3,)))
    assert "step 3 against steps 0-29" in verdict(one)[1]


def test_steps_of_one_run_that_are_the_same_are_not_compared() -> None:
    same = replace(comparison(), first=comparison().second)
    provider = FakeProvider(reports={"b": None}, compared=same)
    view = View(page="compare", run="b", with_run="b", steps=(0, 99))

    assert "Both are the same" in words(rendered(compare.PAGE, provider, view))


def test_a_new_critical_finding_is_in_the_headline_although_steps_take_equally_long() -> None:
    equal = StepChange(ratio=1.0, is_significant=False)
    (found,) = comparison().appeared
    hang = replace(found, cause="hang", severity=Severity.CRITICAL)
    new = replace(comparison(), step_change=equal, appeared=(hang,))
    minor = replace(new, appeared=(replace(hang, severity=Severity.MINOR),))

    style, shown = verdict(new)

    assert style.split() == ["verdict"]
    assert "New: hang. A step is equally fast." in shown
    assert "1 setting differs" in shown
    assert verdict(minor)[0] == "verdict busy"
    assert "New: hang" not in verdict(minor)[1]


def test_one_run_alone_is_not_compared_with_itself() -> None:
    provider = FakeProvider(reports={"a": None}, compared=comparison())

    alone = words(rendered(compare.PAGE, provider, View(page="compare")))
    ranges = View(page="compare", run="a", with_run="a", steps=(0, 9))

    assert "Both are the same | Choose another run, or other steps." in alone
    assert "A step is" in words(rendered(compare.PAGE, provider, ranges))


def test_the_page_waits_for_the_analysis_and_the_address_holds_the_choice() -> None:
    provider = FakeProvider(reports={"a": None})
    client = create_app(provider).server.test_client()
    view = View(page="compare", run="a", steps=(10, 19), with_steps=(0, 9))

    assert "Both runs are being analysed" in words(rendered(compare.PAGE, provider, view))
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
