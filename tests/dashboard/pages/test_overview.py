from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from plotly.utils import PlotlyJSONEncoder

from rankscope.dashboard.address import Page, View
from rankscope.dashboard.pages.overview import overview_page
from rankscope.dashboard.pages.timeline import timeline_page
from rankscope.tracer.topology import Layout
from tests.support.dashboard.builders import FakeProvider, report
from tests.support.dashboard.training_builder import training_provider

if TYPE_CHECKING:
    from rankscope.analysis.report.report import RunReport


def words(part: object) -> str:
    """All text that a page shows, in order."""
    tree = json.loads(json.dumps(part, cls=PlotlyJSONEncoder))
    found: list[str] = []

    def walk(node: object) -> None:
        if isinstance(node, str):
            found.append(node)
        elif isinstance(node, list):
            for child in node:
                walk(child)
        elif isinstance(node, dict) and "props" in node:
            walk(node["props"].get("children"))

    walk(tree)
    return " | ".join(found)


def test_the_overview_says_what_is_known() -> None:
    shown = words(overview_page(training_provider(), "demo-42", base_path="/"))

    assert "Rank 5 computes 1.80x slower than its peers" in shown
    assert "8 ranks | DP 2 x TP 2 x PP 2 | 30 steps | 9,920 spans | confidence 0.98" in shown
    assert "slow-compute | 5 | 10-29 | 1.38x | 94 % | 0.98" in shown
    assert "rank 0 | 34 % | on rank 5 (31 %), rank 0 (2 %)" in shown
    assert "dropped spans | 0 | clock error | ± 1.80 us | coverage | 100.0 %" in shown
    assert "Paced run" in shown


def test_what_is_unknown_reads_so_with_its_reason() -> None:
    made = report(mfu=False, warnings=("MFU unknown: no peak for device 'NVIDIA X9'",))
    quality = replace(made.quality, clock_error_ns=None, coverage_ratio=None)
    unknown = replace(made, slowdown=None, waste_ratio=None, quality=quality, starved=())
    provider = FakeProvider(reports={"demo-42": unknown})

    shown = words(overview_page(provider, "demo-42", base_path="/"))

    assert "slowdown | n/a" in shown
    assert "clock error | n/a | coverage | n/a" in shown
    assert "MFU n/a: MFU unknown: no peak for device 'NVIDIA X9'." in shown
    assert "No rank waits for another beyond the noise." in shown


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

    assert provider.sentence in words(overview_page(provider, made.run, base_path="/"))


def test_the_timeline_opens_at_the_last_step_of_the_top_finding() -> None:
    provider = training_provider(report(num_steps=4, onset=2))

    shown = words(timeline_page(provider, View(page=Page.TIMELINE), base_path="/"))

    assert "Step 3 | 410 ms, ideal" in shown
    assert "336 spans of 8 ranks, epoch 0" in shown


def test_a_step_without_spans_offers_another() -> None:
    view = View(page=Page.TIMELINE, run="demo-42", step=12)

    shown = words(timeline_page(training_provider(), view, base_path="/"))

    assert "No data because step 12 of epoch 0 holds no spans" in shown
    assert "Show a step of this run that has some" in shown


def test_a_long_run_says_that_only_its_last_steps_are_analysed() -> None:
    made = replace(report(), num_earlier_steps=970, num_spans=9_920)
    provider = FakeProvider(reports={"demo-42": made})

    shown = words(overview_page(provider, "demo-42", base_path="/"))

    assert "last 30 steps of 1,000 analysed | 9,920 of 9,920 spans" in shown
    assert "verdict, ideal and findings are of the last 30 steps of 1,000" in shown


def test_a_run_that_is_analysed_as_a_whole_says_how_much_that_is() -> None:
    provider = FakeProvider(reports={"demo-42": report()})

    shown = words(overview_page(provider, "demo-42", base_path="/"))

    assert "30 steps | 9,920 spans | confidence 0.98" in shown
    assert "Long run" not in shown
