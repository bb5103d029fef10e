"""Pages of a run with a slow link, and of others: the same numbers on each, of one source."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

import pytest

from rankscope.analysis.analyze import analyze_run
from rankscope.analysis.causes.detector import ShownIn
from rankscope.analysis.causes.order import CAUSES
from rankscope.analysis.report.network import TRANSFER_CAUSES
from rankscope.analysis.report.text import format_duration, format_percent, format_seconds
from rankscope.analysis.verdict import verdict_sentence
from rankscope.dashboard.address import GRAPH, LINKS, MFU, View
from rankscope.dashboard.exports import report_page
from rankscope.dashboard.figures.proof_card import proof_figure
from rankscope.dashboard.pages.links import show_links
from rankscope.dashboard.pages.mfu import show_mfu
from rankscope.dashboard.pages.wait_graph import show_graph
from rankscope.trainer.faults.spec import parse_simulated_faults
from rankscope.trainer.simulator.scenario import Scenario, TpDetail
from tests.support.dashboard.builders import FakeProvider
from tests.support.dashboard.page_text import words
from tests.support.rankscope.simulated_source import SimulatedSource

if TYPE_CHECKING:
    from rankscope.analysis.report.report import RunReport

SLOW = {
    "group": "slow-link:src=6,dst=8,factor=10,steps=4-11",
    "pair": "slow-link:src=2,dst=18,factor=40,steps=4-11",
    "partners": "slow-link:src=2,dst=3,factor=20,steps=4-11",
    "rank": "slow-link:rank=3,factor=20,steps=4-11",
}
HEALTHY = Scenario(dp=8, pp=2, tp=2, num_steps=12, seed=901, tp_detail=TpDetail.COARSE)


@cache
def analysed(fault: str) -> RunReport:
    faults = parse_simulated_faults([fault]) if fault else ()
    return analyze_run(SimulatedSource(replace(HEALTHY, faults=faults)), "simulated")


@pytest.mark.parametrize("place", SLOW)
def test_each_page_shows_what_the_ranks_wait_for(place: str) -> None:
    # GIVEN a run with a slow link from step 4 on
    report, provider = analysed(SLOW[place]), FakeProvider()
    top = report.top_finding
    assert (top.cause, top.steps) == ("slow-link", (4, 11))
    waiting = [
        one
        for one in report.starved
        if one.rank not in top.ranks and report.share_held_up(one, top) >= 0.01
    ]
    most = max(report.share_held_up(one, top) for one in waiting)

    # THEN verdict, graph and the report to send count the ranks that wait for its transfers
    view = View(page=GRAPH, run=report.run)
    graph = words(show_graph(provider, report, view))
    assert f"{len(waiting)} ranks are held up by it" in verdict_sentence(report)
    assert f"({format_percent(most)} of each step)" in verdict_sentence(report)
    assert f"{len(waiting)} ranks wait for the slow transfers of rank" in graph
    sent = report_page(report, verdict_sentence(report))
    longest = report.longest_waits[:20]
    assert all(one in waiting for one in longest)
    assert all(f"<td>{report.name_waited_for(one.waits_on[0])}" in sent for one in longest)
    assert longest[0].waits_on[0].link is not None

    # AND it costs no more than these waits in sum
    assert report.step_time_s.actual
    lost = (top.saved_s or 0.0) / report.step_time_s.actual
    assert most == pytest.approx(lost, rel=0.25)


@pytest.mark.parametrize("place", SLOW)
def test_the_page_of_links_has_the_times_of_the_finding(place: str) -> None:
    report = analysed(SLOW[place])
    links = report.links
    assert links is not None
    evidence = report.top_finding.evidence
    shown = [
        link
        for link in links.links
        if f"take {format_duration(link.transfer_ns)} against {format_duration(link.expected_ns)}"
        f" for alike ones (+{format_percent(link.excess_ratio)}" in evidence
    ]

    assert shown
    view = View(page=LINKS, run=report.run)
    page = words(show_links(FakeProvider(), report, view))
    assert format_duration(shown[0].transfer_ns) in page
    # AND a picture of pairs is shown only if a pair is slow
    has_pairs = any(link.is_pair and link.slow_steps for link in links.links)
    assert ("Pairs by host" in page) == has_pairs


@pytest.mark.parametrize("place", SLOW)
def test_time_lost_to_a_link_is_no_bubble_of_the_pipeline(place: str) -> None:
    # GIVEN the same job with and without the fault
    found, usual = analysed(SLOW[place]).waterfall, analysed("").waterfall
    assert found is not None
    assert usual is not None

    # THEN the bubble is the same, and what was lost is waiting for the link, and its transfers
    assert found.bubble is not None
    assert usual.bubble is not None
    assert found.bubble.measured_ratio == pytest.approx(usual.bubble.measured_ratio, abs=0.01)
    assert found.waiting_on[0].link is not None
    page = words(show_mfu(FakeProvider(), analysed(SLOW[place]), _MFU_VIEW))
    assert f"{format_percent(found.bubble.measured_ratio, digits=1)} of useful compute" in page


def test_a_stage_is_one_culprit_of_the_graph_as_it_is_of_the_verdict() -> None:
    report = analysed("stage-imbalance:stage=1,factor=1.6")
    top = report.top_finding
    assert (top.cause, len(top.ranks)) == ("stage-imbalance", 16)

    graph = words(show_graph(FakeProvider(), report, View(page=GRAPH)))

    assert "16 ranks are held up by it" in verdict_sentence(report)
    assert "16 ranks wait for ranks 16 to 31" in graph


def test_a_planned_pause_has_one_price() -> None:
    report = analysed("checkpoint:every=5,ms=900")
    (pause,) = (one for one in report.findings if one.cause == "checkpoint")
    price = report.price(pause)
    assert price is not None
    assert price.since is None  # it is planned: nothing began
    share = format_percent(price.share)

    figure = proof_figure(report, pause)

    assert f"checkpoint ({share} of the step time)" in verdict_sentence(report)
    assert f"it costs {format_seconds(price.seconds)} per step" in pause.evidence
    assert figure is not None
    assert f"({share} less)" in str(figure.to_plotly_json()["layout"]["annotations"])


def test_a_misconfiguration_without_a_price_holds_up_no_rank() -> None:
    report = analysed("misconfiguration:rank=3")
    (finding,) = (one for one in report.findings if one.cause == "misconfiguration")
    assert finding.saved_s is None

    assert "held up" not in verdict_sentence(replace(report, findings=(finding,)))


def test_causes_that_are_seen_in_transfers_are_named() -> None:
    seen = {name for name, cause in CAUSES.items() if cause.shown_in is ShownIn.TRANSFERS}
    assert seen == TRANSFER_CAUSES


_MFU_VIEW = View(page=MFU, run="simulated")
