"""The page of one rank, and the heat map of all."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from rankscope.analysis.report.report import Starved, WaitsOn
from rankscope.dashboard.address import RANK, View
from rankscope.dashboard.app import create_app
from rankscope.dashboard.figures.host_boxes import arrange_hosts
from rankscope.dashboard.figures.rank import (
    heat_map_figure,
    place_figure,
    rank_over_steps_figure,
)
from rankscope.dashboard.pages.rank import show_rank
from rankscope.dashboard.records.rank_details import (
    HostFinding,
    KindSeries,
    OpenOperation,
    RankDetails,
    RankEvent,
    RankGroup,
    RankQuantity,
    RankRequest,
    RankValues,
    SampleSeries,
)
from rankscope.tracer.span import SpanKind
from tests.support.dashboard.analysed import SLOW_RANK, analysed_report
from tests.support.dashboard.builders import FakeProvider, traces
from tests.support.dashboard.page_text import words
from tests.support.dashboard.posts import UPDATE_PATH, page_post, shown_state

if TYPE_CHECKING:
    from rankscope.analysis.report.report import RunReport

NAME = "<img src=x>"

DETAILS = RankDetails(
    rank=SLOW_RANK,
    host=NAME,
    local_rank=1,
    switch="leaf0",
    rack="",
    rail="",
    device_name="H100",
    exit_state="failed",
    heartbeat=("training", 7, 3_000_000_000),
    reported=(1_700_000_000_000_000_000, 65_000_000_000),
    steps=(6, 7),
    num_peers=3,
    kinds=(
        KindSeries(
            kind=SpanKind.FORWARD,
            own_s=np.array([0.018, np.nan]),
            peers_s=np.array([0.01, 0.01]),
        ),
    ),
    samples=(
        SampleSeries(
            name="gpu-clock-hz",
            is_rate=False,
            is_device=True,
            at_step=np.array([6.5, 7.5]),
            value=np.array([1.7e9, 1.3e9]),
            peers=np.array([1.7e9, 1.7e9]),
        ),
        SampleSeries(
            name="rdma-ecn-marked-packets",
            is_rate=True,
            is_device=False,
            at_step=np.array([7.5]),
            value=np.array([0.0]),
            peers=np.array([np.nan]),
        ),
    ),
    processes=(("dcgm", 3.25),),
    events=(RankEvent(at_ns=0, kind="exit", text="ValueError: x", detail="Traceback\n  line 1"),),
    requests=(
        RankRequest(
            at_ns=0, level="stacks", num_steps=3, by="ann", state="refused", text="no steps"
        ),
        RankRequest(at_ns=0, level="full", num_steps=3, by="ann", state="", text=""),
    ),
    open_operations=(
        OpenOperation(name="all_reduce", kind="dp-comm", step=7, start_ns=0, group="dp-0"),
    ),
    groups=(RankGroup(name="tp-1", kind="tp-comm", members=(4, 5), num_members=2),),
    host_findings=(
        HostFinding(
            run_id="old", number=2, cause="gc-pause", ranks=(3,), steps=(1, 2), opened_ns=0
        ),
    ),
)


@pytest.fixture
def provider() -> FakeProvider:
    values = RankValues(
        quantity=RankQuantity.WAIT,
        steps=(2, 7),
        seconds={rank: 0.1 * rank for rank in range(8)},
        hosts=dict.fromkeys(range(8), (NAME, "")),
    )
    return FakeProvider(
        reports={"tiny": analysed_report()},
        details={SLOW_RANK: DETAILS},
        values={RankQuantity.WAIT: values},
    )


def text_of(provider: FakeProvider, **parts: object) -> str:
    view = View(page=RANK, run="tiny", **parts)  # type: ignore[arg-type]
    return words(show_rank(provider, analysed_report(), view))


def test_the_page_shows_place_waits_events_and_the_history_of_the_host(
    provider: FakeProvider,
) -> None:
    text = text_of(provider, ranks=(SLOW_RANK,))

    assert "TP 1 (0 to 1), PP 1 (0 to 1), DP 0 (0 to 1). Red: this rank." in text
    assert "7 ranks wait because of it" in text
    assert "training, step 7, 3 s ago" in text
    assert "all_reduce (dp-comm) in step 7, group dp-0" in text
    assert "exit · ValueError: x" in text
    assert "Traceback" in text
    assert "dcgm 3.25" in text
    assert "slow-compute" in text
    assert "old | gc-pause | 3 | 1-2" in text
    assert f"History of host {NAME}" in text  # as text: Dash escapes it


def test_a_process_of_a_lost_run_has_the_time_of_its_last_news(provider: FakeProvider) -> None:
    def text(state: str) -> str:
        provider.details[SLOW_RANK] = replace(DETAILS, exit_state=state, heartbeat=None)
        return text_of(provider, ranks=(SLOW_RANK,))

    assert "process | lost: no news since 2023-11-14 22:13:20 UTC" in text("lost")
    assert "process | running | last record | 1 min 5 s ago" in text("running")
    assert "heartbeat" not in text("running")
    assert "last record" not in text("ended")


def test_events_of_a_kind_that_are_not_listed_are_counted(provider: FakeProvider) -> None:
    pace = RankEvent(at_ns=0, kind="pace", text="1 of 85", detail="", num_alike=1_200)
    provider.details[SLOW_RANK] = replace(DETAILS, events=(pace, pace, *DETAILS.events))

    assert "Earlier ones, not listed: 1,198 of pace." in text_of(provider, ranks=(SLOW_RANK,))


def test_a_wait_that_would_be_shown_as_0_percent_is_not_counted(provider: FakeProvider) -> None:
    def waiting(rank: int, ratio: float) -> Starved:
        on = (WaitsOn(rank=SLOW_RANK, ratio=ratio),)
        return Starved(rank=rank, wait_ratio=0.1, waits_on=on)

    def text(*starved: Starved) -> str:
        made = replace(analysed_report(), starved=starved)
        view = View(page=RANK, run="tiny", ranks=(SLOW_RANK,))
        return words(show_rank(provider, made, view))

    assert "1 rank waits because of it or its links:" in text(waiting(1, 0.1), waiting(2, 0.004))
    assert "No rank waits because of it or its links." in text(waiting(2, 0.004))


def test_a_rank_alone_has_no_place_among_others(provider: FakeProvider) -> None:
    alone = replace(analysed_report(), world_size=1)

    page = show_rank(provider, alone, View(page=RANK, run="tiny", ranks=(SLOW_RANK,)))

    assert "It is the only rank of the run." in words(page)
    assert "rank-place" not in str(page)


def test_an_unknown_rank_says_so(provider: FakeProvider) -> None:
    assert "rank 99 of run 'tiny' is not known" in text_of(provider, ranks=(99,))


def test_without_a_rank_the_page_shows_a_quantity_of_all(provider: FakeProvider) -> None:
    text = text_of(provider, show="wait")
    assert "Waiting in communication, mean of steps 2 to 7" in text
    assert text.index("| 7 |") < text.index("| 6 |")
    assert "By rank, the longest first" in text
    # AND says so if there is none yet
    assert "No closed step is in this range" in text_of(provider)


def test_the_heat_map_opens_on_what_the_top_finding_is_seen_in(provider: FakeProvider) -> None:
    made = analysed_report()
    gaps = replace(made.excess, quantity="gaps of the host")
    seen = replace(provider.values[RankQuantity.WAIT], quantity=RankQuantity.EVIDENCE)
    provider.values[RankQuantity.EVIDENCE] = seen

    def text(report: RunReport) -> str:
        return words(show_rank(provider, report, View(page=RANK, run="tiny")))

    found = text(replace(made, evidence=gaps))
    assert "Gaps of the host above the step's median rank, mean of steps 2 to 7" in found
    links = replace(gaps, quantity="transfers", links=((0, 1),) * 8, baseline="alike links")
    found = text(replace(made, evidence=links))
    assert "Transfers of its slowest link above alike links, mean of steps 2 to 7" in found
    # AND says which ranks have a cell if those of other links have none
    seen = replace(seen, seconds={0: 0.1, 1: 0.1})
    provider.values[RankQuantity.EVIDENCE] = seen
    assert "The 2 of 8 ranks with the 8 slowest links." in text(replace(made, evidence=links))
    assert "slowest links" not in found
    # AND without evidence on compute, of which this provider has nothing
    assert "gaps of the host" not in text(made)


def test_samples_are_on_the_axis_of_the_steps_and_still_counters_are_left_out() -> None:
    figure = rank_over_steps_figure(analysed_report(), DETAILS)
    excess, peers, own, clock_of_peers, clock = traces(figure)

    assert excess.customdata == tuple(range(8))
    assert (own.x, own.y[0]) == ((6.5, 7.5), 18.0)
    assert peers.y == (10.0, 10.0)
    assert (clock.x, clock.y) == ((6.5, 7.5), (1.7, 1.3))
    assert (clock_of_peers.x, clock_of_peers.y) == ((6.5, 7.5), (1.7, 1.7))
    # AND the axis has its name beneath the last panel, and nowhere else
    axes = (figure.layout.xaxis, figure.layout.xaxis2, figure.layout.xaxis3)
    assert [axis.title.text for axis in axes] == [None, None, "step"]


def test_what_differs_most_from_the_peers_is_on_top_times_before_samples() -> None:
    def series(kind: SpanKind, own_s: float) -> KindSeries:
        return KindSeries(kind=kind, own_s=np.full(2, own_s), peers_s=np.full(2, 0.01))

    def sampled(name: str, value: float) -> SampleSeries:
        at = np.array([6.5, 7.5])
        return SampleSeries(
            name=name, is_rate=False, is_device=True, at_step=at,
            value=np.full(2, value), peers=np.full(2, 50.0),
        )  # fmt: skip

    details = replace(
        DETAILS,
        kinds=(series(SpanKind.FORWARD, 0.012), series(SpanKind.BACKWARD, 0.03)),
        samples=(sampled("gpu-power-w", 50.0), sampled("gpu-temperature-c", 80.0)),
    )

    figure = rank_over_steps_figure(analysed_report(), details)

    titles = [str(one.text).partition(" (")[0] for one in figure.layout.annotations]
    assert titles == ["compute above the median rank", "backward", "forward", "gpu temperature",
                      "gpu power"]  # fmt: skip


def test_a_step_between_two_without_a_value_is_a_mark() -> None:
    gc = KindSeries(
        kind=SpanKind.GC,
        own_s=np.array([np.nan, 0.2, np.nan, np.nan]),
        peers_s=np.array([np.nan, np.nan, 0.3, 0.2]),
    )
    details = replace(DETAILS, steps=(4, 5, 6, 7), kinds=(gc,), samples=())

    _, peers, own = traces(rank_over_steps_figure(analysed_report(), details))

    assert (own.mode, peers.mode) == ("lines+markers", "lines")


def test_each_panel_has_the_unit_of_its_own_times_and_a_rank_alone_has_no_median() -> None:
    forward = DETAILS.kinds[0]
    slow = replace(DETAILS, kinds=(replace(forward, own_s=1000 * forward.own_s),), samples=())
    alone = replace(slow, num_peers=0)

    figure = rank_over_steps_figure(analysed_report(), slow)

    titles = [one.text for one in figure.layout.annotations]
    assert titles == ["compute above the median rank (ms)", "forward (s)"]
    _, _, own = traces(figure)
    assert own.y[0] == 18.0
    assert "%{y:.4~g} s," in own.hovertemplate
    # AND each of few steps has its number, under the middle of its step
    axis = figure.layout.xaxis2
    assert (axis.tickvals, axis.ticktext) == ((6.5, 7.5), ("6", "7"))
    provider = FakeProvider(details={SLOW_RANK: alone})
    assert "Dotted" not in text_of(provider, ranks=(SLOW_RANK,))


def test_a_step_that_never_ended_is_a_mark_at_the_end_of_the_axis_of_the_others() -> None:
    made = analysed_report()  # its steps are 0 to 7
    hung = replace(made.top_finding, cause="hang", steps=(8, 8))
    times = {"own_s": np.array([0.3, 0.2, 60.0]), "peers_s": np.array([0.1, 0.2, np.nan])}
    details = replace(
        DETAILS,
        steps=(6, 7, 8),
        kinds=(KindSeries(kind=SpanKind.DP_COMM, **times),),
        samples=(),
    )

    figure = rank_over_steps_figure(replace(made, findings=(hung,)), details)
    _, peers, own, opened = traces(figure)

    assert (peers.y, own.y) == ((100.0, 200.0), (300.0, 200.0))
    assert (opened.x, opened.y, opened.marker.symbol) == ((8.5,), (300.0,), ("triangle-up",))
    assert opened.customdata == ("step 8: 60.0 s",)
    title = figure.layout.annotations[1].text
    assert title == "dp-comm (ms), open: 60.0 s, peers n/a"


def test_the_name_of_a_host_is_cut_to_the_width_of_its_box() -> None:
    values = RankValues(
        quantity=RankQuantity.WAIT,
        steps=(2, 7),
        seconds=dict.fromkeys(range(32), 0.1),
        hosts={rank: (f"{rank // 4}-{'x' * 200}", "") for rank in range(32)},
    )
    boxes = arrange_hosts(values)  # 8 hosts, 4 of them side by side

    _, names = traces(heat_map_figure(boxes, values, run="tiny", step_s=None))

    assert names.text[0] == "0-xx…xxxx"


def test_the_grid_lights_the_rank_and_its_peers() -> None:
    (cells,) = traces(place_figure(analysed_report(), SLOW_RANK))

    # rows: stages, columns: DP positions, of TP position 1
    assert cells.customdata.tolist() == [[1, 3], [5, 7]]
    assert cells.z.tolist() == [[2.0, 0.0], [3.0, 1.0]]


@pytest.mark.parametrize(
    ("values", "href"),
    [
        ({"rank-heat.clickData": {"points": [{"customdata": 3}]}}, "/rank?run=tiny&rank=3"),
        ({"rank-number.value": " 6 "}, "/rank?run=tiny&rank=6"),
        (
            {"rank-steps.value": "3-5", "rank-drawn.data": {"quantity": "wait", "steps": "0-7"}},
            "/rank?run=tiny&steps=3-5&show=wait",
        ),
        (
            {"rank-steps.value": "9 - 3", "rank-drawn.data": {"quantity": "wait", "steps": "0-7"}},
            "/rank?run=tiny&steps=3-9&show=wait",
        ),
        ({"rank-heat.clickData": {"points": [{"customdata": -1}]}}, None),
        ({"rank-number.value": "x"}, None),
        (
            {"rank-steps.value": "0-7", "rank-drawn.data": {"quantity": "wait", "steps": "0-7"}},
            None,
        ),
    ],
)
def test_clicks_and_inputs_open_a_view(
    provider: FakeProvider, values: dict[str, object], href: str | None
) -> None:
    client = create_app(provider).server.test_client()
    body = page_post(client, values | {"page-shown.data": shown_state("tiny")})
    answer = client.post(UPDATE_PATH, json=body)

    found = answer.get_json()["response"]["url"]["href"] if answer.status_code == 200 else None
    assert found == href
    assert answer.status_code in (200, 204)


def test_more_is_requested_of_a_running_rank_only(provider: FakeProvider) -> None:
    ended = text_of(provider, ranks=(SLOW_RANK,))
    provider.details = {SLOW_RANK: replace(DETAILS, exit_state="running")}
    running = text_of(provider, ranks=(SLOW_RANK,))
    client = create_app(provider).server.test_client()
    values = {
        "rank-request-stacks.n_clicks": 1, "rank-request-steps.value": 7, "url.pathname": "/rank",
        "url.search": f"?run=tiny&rank={SLOW_RANK}", "page-shown.data": shown_state("tiny"),
    }  # fmt: skip
    answer = client.post(UPDATE_PATH, json=page_post(client, values))

    assert "Record more of it" not in ended
    assert "refused: no steps" in ended
    assert "none yet" in running
    assert "Python stacks" in running
    (output,) = answer.get_json()["response"].values()
    assert output["children"] == f"7 steps of stacks requested of rank {SLOW_RANK} of tiny"


def test_noise_is_pale_on_the_heat_map() -> None:
    values = RankValues(
        quantity=RankQuantity.COMPUTE,
        steps=(2, 7),
        seconds={0: -0.001, 1: 0.001},
        hosts=dict.fromkeys(range(2), ("a", "")),
    )

    cells, _ = traces(heat_map_figure(arrange_hosts(values), values, run="tiny", step_s=1.0))

    assert (cells.zmin, cells.zmax) == (-1.0, 49.0)
