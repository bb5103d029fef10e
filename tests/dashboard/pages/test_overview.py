from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from rankscope.dashboard.address import View
from rankscope.dashboard.app import create_app
from rankscope.dashboard.pages import overview
from rankscope.dashboard.records.page_results import RunAnnotations, ShownNote
from rankscope.dashboard.records.progress import AnalysisFailed
from rankscope.tracer.topology import Layout
from tests.support.dashboard.builders import FakeProvider, mean_kind_times, report, traces
from tests.support.dashboard.page_text import find_part, rendered, words
from tests.support.dashboard.posts import page_post, post, shown_state
from tests.support.dashboard.training_builder import training_provider

if TYPE_CHECKING:
    from rankscope.analysis.report.report import RunReport


def overview_text(provider: FakeProvider, run: str = "demo-42") -> str:
    return words(rendered(overview.PAGE, provider, View(run=run)))


def test_the_overview_shows_verdict_findings_waits_and_quality() -> None:
    shown = overview_text(training_provider())

    assert "Rank 5 computes 1.80x slower than its peers" in shown
    assert "8 ranks | DP 2 x TP 2 x PP 2 | 30 steps | 9,920 spans | confidence 0.98" in shown
    assert "step time | 556 ms | = | 410 ms |  ideal" in shown
    assert "| + | 137 ms |  slow-compute (rank 5) | + | 5.84 ms |  stage-imbalance" in shown
    assert "slow-compute | n/a | 5 | 10-29 | 137 ms (25 %) | 0.98" in shown
    assert "rank 0 | 34 % | for rank 5 (31 %), rank 0 (2 %)" in shown
    assert "records produced | 3,840 | = stored | 3,840 | + dropped | 0" in shown
    assert "+ still buffered | 0 | clock error | ± 1.80 us | coverage | 100.0 %" in shown
    assert "Paced run" in shown


def test_unknown_quantities_are_n_a_with_a_reason() -> None:
    made = report(mfu=False)
    quality = replace(made.quality, clock_error_ns=None, coverage_ratio=None)
    unknown = replace(made, ideal_s_by_step={}, quality=quality, starved=())

    shown = overview_text(FakeProvider(reports={"demo-42": unknown}))

    assert "recorded mean; no step could be replayed" in shown
    assert "clock error | n/a | coverage | n/a" in shown
    assert "MFU | n/a | peak of A100 at bfloat16 unknown" in shown
    assert "MFU n/a: peak of A100 at bfloat16 unknown: set RANKSCOPE_PEAK_FLOPS." in shown
    assert "No rank waits for another beyond the noise." in shown


def test_an_unknown_cause_of_waiting_and_an_unknown_layout_are_named() -> None:
    made = replace(report(), layout=Layout())
    (first, *_) = report().starved
    unknown = replace(
        made,
        world_size=4,
        slowdown_by_worker={(dp, 0): 1.0 for dp in range(4)},
        starved=(replace(first, waits_on=()),),
    )

    shown = overview_text(FakeProvider(reports={"demo-42": unknown}))

    assert "4 ranks | parallel layout unknown" in shown
    assert "rank 0 | 34 % | cause unknown" in shown


@pytest.mark.parametrize(
    "made",
    [
        report(layout=Layout(), slow_rank=None, num_steps=1),
        report(layout=Layout(dp=3), slow_rank=None, num_steps=0),
        report(layout=Layout(pp=8, dp=192, tp=8), slow_rank=777, num_steps=3),
    ],
    ids=["one rank, one step", "no steps", "12,288 ranks"],
)
def test_the_overview_works_at_every_size(made: RunReport) -> None:
    provider = FakeProvider(reports={made.run: made})

    assert provider.sentence in overview_text(provider, made.run)


def test_a_long_run_says_that_only_its_last_steps_are_analysed() -> None:
    made = replace(report(), num_earlier_steps=970, num_spans=9_920)

    shown = overview_text(FakeProvider(reports={"demo-42": made}))

    assert "step time, mean of the last 30 steps of 1,000" in shown
    assert "Step time covers only the last 30 steps of 1,000." in shown
    assert "last 30 steps of 1,000 analysed | 9,920 of 9,920 spans" in shown
    assert "verdict, ideal and findings cover the last 30 steps of 1,000" in shown


def test_a_run_that_is_analysed_as_a_whole_has_no_note_on_length() -> None:
    shown = overview_text(FakeProvider(reports={"demo-42": report()}))

    assert "30 steps | 9,920 spans | confidence 0.98" in shown
    assert "Part of the run" not in shown


def test_times_by_kind_need_no_report() -> None:
    provider = training_provider()
    provider.times = mean_kind_times()
    view = View(run="demo-42")
    with_report = rendered(overview.PAGE, provider, view)
    (known,) = (run for run in provider.runs() if run.run_id == "demo-42")
    provider.unfinished["demo-42"] = AnalysisFailed(run=known, reason="out of memory", steps=None)
    without = rendered(overview.PAGE, provider, view)

    for page in (with_report, without):
        assert [line.name for line in traces(page["overview-kinds"].figure)] == [
            "forward",
            "dp-comm",
        ]


def test_tags_and_notes_are_shown_and_offered_to_those_who_may_change_them() -> None:
    note = ShownNote(text="drained <b>node-3</b>", author="ada", written="2026-11-28 23:00:00")
    provider = training_provider()
    provider.annotated = {"demo-42": RunAnnotations(tags=("prod",), notes=(note,))}

    page = rendered(overview.PAGE, provider, View(run="demo-42"))

    assert find_part(page, "overview-tags")["value"] == ["prod"]
    assert find_part(page, "overview-tags")["disabled"]
    assert "drained <b>node-3</b>" in words(page)
    assert "2026-11-28 23:00:00 UTC" in words(page)
    client = create_app(provider).server.test_client()
    shown = shown_state("demo-42")
    tags = {
        "overview-tags.value": ["prod", "night"],
        "overview-tags-stored.data": ["prod"],
        "page-shown.data": shown,
    }
    noted = {
        "overview-note.n_submit": 1,
        "overview-note.value": "reseated the cable",
        "page-shown.data": shown,
    }
    assert post(client, page_post(client, tags)) == 200
    assert post(client, page_post(client, noted)) == 200
    assert provider.changed == [
        ("demo-42", "tag", "night", False),
        ("demo-42", "note", "reseated the cable", False),
    ]
