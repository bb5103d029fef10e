from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rankscope.analysis.report.liveness import StepSilence
from rankscope.dashboard.address import View
from rankscope.dashboard.app import create_app
from rankscope.dashboard.pages import runs
from rankscope.dashboard.pages.configurations import configuration_cards
from rankscope.dashboard.pages.overview_cards import cause_style
from rankscope.dashboard.pages.runs import MAX_RUNS
from rankscope.dashboard.records.page_results import RunAnnotations, RunLine
from rankscope.tracer.topology import Layout
from tests.support.dashboard.builders import FakeProvider, report
from tests.support.dashboard.page_text import find_part, rendered, words
from tests.support.dashboard.posts import page_post, post


def rows_of(provider: FakeProvider) -> list[dict[str, Any]]:
    page = rendered(runs.PAGE, provider, View(page="runs"))
    rows: list[dict[str, Any]] = find_part(page, "runs-grid")["rowData"]
    return rows


def test_each_run_has_its_verdict_and_a_link_and_nothing_is_analysed() -> None:
    provider = FakeProvider(reports={"<b>a</b>": report(), "b": None})

    rows = rows_of(provider)

    assert [row["run"] for row in rows] == ["<b>a</b>", "b"]
    assert rows[0]["href"] == "/run/%3Cb%3Ea%3C%2Fb%3E"
    assert (rows[0]["verdict"], rows[0]["mfu"]) == ("slow-compute on 5", 0.38)
    assert (rows[1]["verdict"], rows[1]["mfu"], rows[1]["style"]) == ("-", None, "pending")
    assert provider.num_reports == 0


def test_on_a_small_laptop_the_numbers_of_a_run_are_within_the_table() -> None:
    page = rendered(runs.PAGE, FakeProvider(reports={"a": report()}), View(page="runs"))
    grid = find_part(page, "runs-grid")
    columns = grid["columnDefs"]
    widths = [column.get("width", column.get("minWidth")) for column in columns]
    boxes = grid["dashGridOptions"]["selectionColumnDef"]["width"]
    num = 1 + [column["field"] for column in columns].index("loss")

    assert {"verdict", "state", "step_s", "mfu"} <= {column["field"] for column in columns[:num]}
    assert boxes + sum(widths[:num]) <= 1280 - 2 * 24


def test_a_running_job_without_a_new_step_is_not_shown_as_live() -> None:
    going = FakeProvider(reports={"a": report()}, state="running")
    silent = replace(going, silent=StepSilence(last_step=7, age_ns=60 * 10**9, step_time_ns=10**9))

    (live,), (stopped,) = rows_of(going), rows_of(silent)

    assert (live["state"], live["live"], live["silent"]) == ("running", True, False)
    assert (stopped["state"], stopped["live"], stopped["silent"]) == ("no new step", False, True)
    assert "1 run; 1 live. All" in words(rendered(runs.PAGE, going, View(page="runs")))
    about = words(rendered(runs.PAGE, silent, View(page="runs")))
    assert "1 run; 0 live, 1 without a new step. All" in about


@pytest.mark.parametrize(
    ("cause", "severity", "style"),
    [
        ("hang", "", "alarm"),
        ("slow-compute", "critical", "alarm"),
        ("slow-compute", "minor", "calm"),
        ("healthy", "none", "calm"),
        ("insufficient-evidence", "none", "unsure"),
        ("", "", "pending"),
    ],
)
def test_only_what_needs_no_action_is_green(cause: str, severity: str, style: str) -> None:
    assert cause_style(cause, severity) == style


def test_a_store_without_runs_says_how_to_make_one_and_a_full_one_lists_the_newest() -> None:
    empty = words(rendered(runs.PAGE, FakeProvider(), View(page="runs")))
    full = FakeProvider(reports=dict.fromkeys(map(str, range(MAX_RUNS + 1))))

    assert "0 runs; 0 live" in empty
    assert "Check two runs" not in empty
    assert "No data because" in empty
    assert len(rows_of(full)) == MAX_RUNS


def test_two_checked_runs_can_be_compared_and_any_deleted_after_a_question() -> None:
    client = create_app(FakeProvider(reports={"a": None, "b": None})).server.test_client()
    chosen = [
        {"run": "a", "verdict": "-", "tags": ["prod"]},
        {"run": "b", "verdict": "-", "tags": ["prod", "baseline"]},
    ]

    body = page_post(client, {"runs-grid.selectedRows": chosen})
    answer = client.post("/_dash-update-component", json=body).get_data(as_text=True)
    assert r"\u002fcompare?run=b&with=a" in answer
    assert '"value":["prod"]' in answer  # of both
    assert "Delete 2" in answer
    ask = page_post(client, {"runs-ask.n_clicks": 1, "runs-grid.selectedRows": chosen})
    assert "a, b" in client.post("/_dash-update-component", json=ask).get_data(as_text=True)
    assert post(client, page_post(client, {"runs-grid.selectedRows": [{"run": 5}]})) == 400


def test_runs_are_filtered_by_tag_and_the_address_has_the_filter() -> None:
    tags = {"a": ("prod",), "b": ("prod", "night"), "c": ()}
    provider = FakeProvider(
        reports=dict.fromkeys(tags),
        annotated={run: RunAnnotations(tags=found) for run, found in tags.items()},
    )

    def shown(find: str | None) -> list[str]:
        page = rendered(runs.PAGE, provider, View(page="runs", find=find))
        return [row["run"] for row in find_part(page, "runs-grid")["rowData"]]

    assert shown(None) == ["a", "b", "c"]
    assert shown("prod") == ["a", "b"]
    assert shown("prod,night") == ["b"]
    assert shown("gone") == []
    client = create_app(provider).server.test_client()
    chosen = {"runs-tags-wanted.value": ["night", "prod"], "url.search": "?show=configurations"}
    answer = client.post("/_dash-update-component", json=page_post(client, chosen)).get_json()
    assert answer["response"]["url"]["search"] == "?show=configurations&find=night,prod"


def test_a_tag_is_added_to_all_checked_runs_and_one_that_went_is_removed() -> None:
    provider = FakeProvider(reports={"a": None, "b": None})
    client = create_app(provider).server.test_client()
    rows = [{"run": "a", "tags": ["old"]}, {"run": "b", "tags": ["old"]}]
    values: dict[str, Any] = {
        "runs-tags.value": ["new"],
        "runs-tags-stored.data": ["old"],
        "runs-grid.selectedRows": rows,
    }

    assert post(client, page_post(client, values)) == 200
    assert provider.changed == [
        ("a", "tag", "new", False),
        ("a", "tag", "old", True),
        ("b", "tag", "new", False),
        ("b", "tag", "old", True),
    ]
    unchanged = page_post(client, values | {"runs-tags.value": ["old"]})
    assert post(client, unchanged) == 204


def test_runs_of_one_configuration_are_side_by_side_with_the_best_marked() -> None:
    lines = [
        RunLine(
            run=replace(run, layout=Layout(dp=2, pp=2)),
            model="gpt",
            num_microbatches=8,
            commit=commit,
            step_s=step_s,
            mfu=mfu,
        )
        for run, commit, step_s, mfu in zip(
            FakeProvider(reports=dict.fromkeys("abcd")).runs(),
            ("c0ffee", "c0ffee", "badcafe", "c0ffee"),
            (0.5, 0.4, 0.3, None),
            (0.3, 0.35, 0.5, None),
            strict=True,
        )
    ]

    first, second = configuration_cards(lines)
    text = words(first)

    assert text.startswith("gpt · 1 rank · dp2 pp2 · 8 micro-batches · commit c0ffee")
    assert "3 runs" in text
    assert "a | - | 500 ms | 25 % slower | 30.0 %" in text
    assert "b | - | 400 ms | fastest | 35.0 %" in text
    assert "d | - | n/a | - | n/a" in text
    assert "commit badcafe" in words(second)
    assert "| fastest |" not in words(second)  # there is no other
