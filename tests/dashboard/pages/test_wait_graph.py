"""The page of who waits for whom."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rankscope.analysis.breakdown.wait_graph import (
    WaitEdge,
    WaitGraph,
    WaitNode,
    follow_waits,
)
from rankscope.analysis.report.report import Finding, Severity
from rankscope.dashboard.address import GRAPH, View
from rankscope.dashboard.app import create_app
from rankscope.dashboard.figures.wait_graph import least_width, wait_graph_figure
from rankscope.dashboard.pages.wait_graph import BY_GROUP, show_graph
from tests.support.dashboard.analysed import SLOW_RANK, analysed_report
from tests.support.dashboard.builders import FakeProvider, traces
from tests.support.dashboard.page_text import words
from tests.support.dashboard.posts import UPDATE_PATH, page_post, shown_state

if TYPE_CHECKING:
    from rankscope.analysis.report.report import RunReport


def text_of(report: RunReport, *, show: str | None = None, ranks: tuple[int, ...] = ()) -> str:
    view = View(page=GRAPH, run="tiny", show=show, ranks=ranks)
    return words(show_graph(FakeProvider(), report, view))


def test_the_graph_begins_at_the_culprit_of_the_verdict() -> None:
    report = analysed_report()

    assert report.top_finding.ranks == (SLOW_RANK,)
    assert "7 ranks wait for rank 5, directly or not" in text_of(report)
    assert "groups" in text_of(report, show=BY_GROUP)
    # AND the address may name another rank, of which there may be none
    text = text_of(report, ranks=(2,))
    assert "No rank waits for rank 2 for 1 %" in text
    assert "Most waited for:  | rank 5 | ." in text
    assert text_of(report, ranks=(99,)) == text_of(report)


def test_a_finding_of_many_ranks_begins_at_the_one_that_others_wait_for_most() -> None:
    made = analysed_report()
    everywhere = replace(made.top_finding, cause="gc-pause", ranks=tuple(range(8)))

    text = text_of(replace(made, findings=(everywhere,)))

    assert f"7 ranks wait for rank {SLOW_RANK}, directly or not" in text
    assert "gc-pause is on 8 ranks: the graph begins at the one" in text


def test_a_culprit_without_an_arrow_is_explained() -> None:
    assert "No arrow leads from rank 2: of members" in text_of(
        analysed_report(), ranks=(2, SLOW_RANK)
    )
    assert "No arrow" not in text_of(analysed_report())


def test_all_ranks_wait_for_one_that_hangs_though_none_did_before() -> None:
    report = analysed_report()
    hang = Finding(
        cause="hang",
        ranks=(2,),
        steps=(8, 8),
        confidence=0.9,
        evidence="",
        severity=Severity.CRITICAL,
    )

    text = text_of(replace(report, findings=(hang,)))

    assert "In step 8, all other ranks wait for rank 2 (hang). Before, none" in text

    # AND says so above the waits of the steps before, if there were some
    text = text_of(replace(report, findings=(replace(hang, ranks=(SLOW_RANK,)),)))
    assert "wait for rank 5 (hang). The graph shows steps that have ended." in text
    assert "An arrow leads" in text


def test_a_run_that_was_not_replayed_has_no_graph() -> None:
    assert "no step could be replayed" in text_of(replace(analysed_report(), direct_waits=None))


def test_a_run_in_which_no_rank_waits_has_no_graph_and_no_hint_at_the_quality() -> None:
    made = analysed_report()
    assert made.waterfall is not None
    healthy = Finding(
        cause="healthy", ranks=(), steps=None, confidence=1.0, evidence="", severity=Severity.NONE
    )
    calm = replace(made, findings=(healthy,), waterfall=replace(made.waterfall, waiting_on=()))

    text = text_of(calm)

    assert "no rank waits for another" in text
    assert "quality" not in text


def test_each_waiting_rank_has_an_arrow_and_says_for_whom() -> None:
    report = analysed_report()
    assert report.direct_waits is not None
    graph = follow_waits(report.direct_waits, (SLOW_RANK,), report.coords, max_nodes=8)

    *arrows, _labels, nodes = traces(wait_graph_figure(graph, run="tiny"))

    num_arrows = sum(one.x.count(None) for one in arrows)
    assert num_arrows == len(graph.edges) >= 7
    assert nodes.customdata[0] == SLOW_RANK
    assert nodes.x[0] == 0
    hover = dict(zip(nodes.customdata, nodes.hovertext, strict=True))
    assert "waits, of a step: 3" in hover[4]
    assert hover[4].endswith("% for rank 5")


def test_an_arrow_to_a_group_is_as_wide_as_the_mean_wait_of_all_of_its_ranks() -> None:
    culprit = WaitNode(ranks=(0,), stage=0, distance=0)
    groups = [
        WaitNode(ranks=tuple(range(10 * stage, 10 * stage + 10)), stage=stage, distance=1)
        for stage in (1, 2)
    ]
    all_wait = WaitEdge(node=1, on_node=0, ranks=groups[0].ranks, ratio=0.15)
    one_waits = WaitEdge(node=2, on_node=0, ranks=(20,), ratio=0.15)
    graph = WaitGraph(nodes=(culprit, *groups), edges=(all_wait, one_waits), num_ranks=21)

    *arrows, _labels, _nodes = traces(wait_graph_figure(graph, run="tiny"))

    # 1 px, and half or a twentieth of the 6 px that a wait of 30 % adds
    assert [one.line.width for one in arrows] == [1.5, 4.0]


def test_of_shares_that_would_overlap_on_their_arrows_the_largest_is_shown() -> None:
    # GIVEN arrows from 0 to 2 and from 1 to 3 of 30 and 10 %, and one that crosses both
    ends = {(2, 0): 0.3, (3, 1): 0.1, (3, 0): 0.2, (2, 1): 0.25}
    node = {"stage": 0, "distance": 0}
    nodes = (
        WaitNode(ranks=(0,), **node),
        WaitNode(ranks=(1,), **node),
        WaitNode(ranks=(2,), stage=0, distance=1),
        WaitNode(ranks=(3,), stage=0, distance=1),
    )
    edges = tuple(
        WaitEdge(node=one, on_node=on, ranks=(one,), ratio=ratio)
        for (one, on), ratio in ends.items()
    )

    graph = WaitGraph(nodes=nodes, edges=edges, num_ranks=4)
    *_, labels, _ = traces(wait_graph_figure(graph, run="tiny"))

    assert labels.text == ("30 %", "25 %", "20 %", "10 %")
    # AND of two arrows in one place the longer wait
    edges = (replace(edges[0], ratio=0.02), edges[0])
    *_, labels, _ = traces(wait_graph_figure(replace(graph, edges=edges), run="tiny"))
    assert labels.text == ("30 %",)


def test_up_to_three_layers_fit_on_a_phone() -> None:
    report = analysed_report()
    assert report.direct_waits is not None
    graph = follow_waits(report.direct_waits, (SLOW_RANK,), report.coords, max_nodes=8)
    nodes = [replace(graph.nodes[0], distance=distance) for distance in range(4)]

    widths = [least_width(replace(graph, nodes=tuple(nodes[: num + 1]))) for num in (1, 2, 3)]

    assert widths == [216, 324, 600]  # of 328 px inside the margins of 390 px


def test_a_click_opens_the_rank() -> None:
    provider = FakeProvider(reports={"tiny": analysed_report()})
    client = create_app(provider).server.test_client()
    values = {
        "graph-figure.clickData": {"points": [{"customdata": 4}]},
        "page-shown.data": shown_state("tiny"),
    }
    answer = client.post(UPDATE_PATH, json=page_post(client, values))

    assert answer.get_json()["response"]["url"]["href"] == "/rank?run=tiny&rank=4"
