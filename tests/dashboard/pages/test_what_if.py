"""The page on which a step is replayed with changes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from rankscope.analysis.analyze import analyze_run
from rankscope.analysis.report.text import format_seconds
from rankscope.analysis.trace.errors import EmptyRunError
from rankscope.analysis.what_if import open_play
from rankscope.dashboard.address import WHAT_IF, View
from rankscope.dashboard.pages.what_if import Change, read_changes, show_what_if
from rankscope.trainer.faults.spec import parse_simulated_faults
from rankscope.trainer.simulator.scenario import Scenario
from tests.support.dashboard.builders import FakeProvider
from tests.support.dashboard.page_text import words
from tests.support.rankscope.simulated_source import SimulatedSource

if TYPE_CHECKING:
    from rankscope.analysis.report.report import RunReport
    from rankscope.analysis.what_if import RunPlay

CLUSTER = Scenario(
    dp=2,
    pp=2,
    num_steps=6,
    num_microbatches=4,
    ranks_per_host=2,
    seed=3,
    faults=parse_simulated_faults(["slow-compute:rank=1,factor=1.8"]),
)


@pytest.fixture(scope="module")
def analysed() -> tuple[RunReport, RunPlay]:
    source = SimulatedSource(CLUSTER)
    return analyze_run(source, "simulated"), open_play(source, "simulated")


def text_of(analysed: tuple[RunReport, RunPlay], show: str | None, *, step: int = 4) -> str:
    report, play = analysed
    view = View(page=WHAT_IF, run=report.run, step=step, show=show)
    return words(show_what_if(FakeProvider(run_play=play), report, view).children)


def test_a_step_without_changes_is_as_recorded(analysed: tuple[RunReport, RunPlay]) -> None:
    text = text_of(analysed, None)
    recorded = format_seconds(analysed[1].step(4).recorded_ns / 1e9)

    assert f"Step 4 takes {recorded}." in text
    assert "slow-compute 1" in text
    assert "with changes" not in text.split("critical path")[0]


def test_changes_of_the_address_are_applied_in_turn(analysed: tuple[RunReport, RunPlay]) -> None:
    report, play = analysed
    changed = play.step(4).fix(report.findings[0]).balance_stages()

    text = text_of(analysed, "fix:0~balance")

    assert f"would take {format_seconds(changed.played_ns / 1e9)}" in text
    assert "slow-compute 1 fixed ✕" in text
    assert "equal stages ✕" in text


@pytest.mark.parametrize(
    ("show", "reason"),
    [
        ("fix:9", "no such finding"),
        ("swap:nowhere:node-0", "no rank of host"),
        ("scale:1:-2", "cannot be multiplied"),
        ("scale:1:none", "such as 33 x 0.7"),
        ("scale:77:0.5", "no operation"),
    ],
)
def test_a_change_that_is_impossible_is_left_out_with_the_reason(
    analysed: tuple[RunReport, RunPlay], show: str, reason: str
) -> None:
    text = text_of(analysed, f"{show}~balance")
    assert reason in text
    assert "equal stages ✕" in text


def test_parts_of_an_address_without_meaning_are_ignored() -> None:
    text = "fix:0~~nothing~fix~scale:0-3:0.5~swap:a~balance"
    assert read_changes(text) == (
        Change("fix", ("0",)),
        Change("scale", ("0-3", "0.5")),
        Change("balance"),
    )
    assert len(read_changes("~".join(["balance"] * 99))) == 16


def test_other_pipelines_are_compared_with_the_recorded_one(
    analysed: tuple[RunReport, RunPlay],
) -> None:
    text = text_of(analysed, None)
    assert "1F1B on 2 stages" in text
    assert "1.00x" in text


def test_the_page_says_why_a_run_cannot_be_replayed(analysed: tuple[RunReport, RunPlay]) -> None:
    class Refusing(FakeProvider):
        def play(self, run_id: str) -> RunPlay | None:
            raise EmptyRunError(f"{run_id} has too many spans")

    report = replace(analysed[0], run="r")
    view = View(page=WHAT_IF, run="r")
    refused = show_what_if(Refusing(), report, view)
    assert "r has too many spans." in words(refused.children)
    unread = show_what_if(FakeProvider(), report, view)
    assert unread.is_unfinished
