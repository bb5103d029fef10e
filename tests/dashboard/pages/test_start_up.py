from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rankscope.dashboard.address import View
from rankscope.dashboard.pages import start_up
from rankscope.dashboard.pages.start_up import start_up_figure
from rankscope.dashboard.records.page_results import RankStartup, Startup, StartupPart, StartupSpan
from rankscope.dashboard.theme import KIND_COLORS
from rankscope.tracer.span import SpanKind
from tests.support.dashboard.builders import FakeProvider
from tests.support.dashboard.page_text import rendered, words

if TYPE_CHECKING:
    from dash.development.base_component import Component

S = 1_000_000_000


def test_the_slowest_rank_is_named_with_its_host_and_each_part_has_its_slowest() -> None:
    found = Startup(
        epoch=1,
        num_ranks=2,
        median_ns=20 * S,
        parts=(
            StartupPart(
                name="<i>compile</i>", kind="other", num_ranks=2, median_ns=5 * S,
                longest_ns=40 * S, num_calls=3, slowest_rank=1,
            ),
        ),
        slowest=(
            RankStartup(
                rank=1,
                host="node-7",
                total_ns=62 * S,
                spans=(StartupSpan(name="<i>compile</i>", begin_ns=3 * S, duration_ns=40 * S),),
            ),
            RankStartup(rank=0, host="", total_ns=20 * S, spans=()),
        ),
    )  # fmt: skip
    provider = FakeProvider(reports={"a": None}, started=found)

    page = rendered(start_up.PAGE, provider, View(page="start-up"))

    shown = words(page)
    assert "Rank 1 on node-7 took longest to start: 62.0 s." in shown
    assert "<i>compile</i> | other | 2 | 3 | 5.00 s | 40.0 s | 1" in shown
    assert "&lt;i&gt;compile" in str(page)  # plotly would read tags
    bars, *others = start_up_figure(found).to_plotly_json()["data"]
    assert (bars["y"], bars["base"], bars["x"]) == (["rank 1"], [3.0], [40.0])
    assert others == []  # no legend of what is not there


def one_rank(*names: str, kind: str = "forward", num_ns: int = S) -> Startup:
    """Return the start-up of rank 0 with a span of each name, one after the other."""
    part = StartupPart(
        name="",
        kind=kind,
        num_ranks=1,
        median_ns=num_ns,
        longest_ns=num_ns,
        num_calls=1,
        slowest_rank=0,
    )
    spans = tuple(
        StartupSpan(name=name, begin_ns=place * S, duration_ns=num_ns)
        for place, name in enumerate(names)
    )
    return Startup(
        epoch=0,
        num_ranks=1,
        median_ns=len(names) * S,
        parts=tuple(replace(part, name=name) for name in names),
        slowest=(RankStartup(rank=0, host="vm", total_ns=len(names) * S, spans=spans),),
    )


def test_a_part_has_the_colour_of_its_kind_or_one_of_its_own_and_the_others_are_one() -> None:
    names = [f"part {number}" for number in range(10)]

    *named, others = start_up_figure(one_rank(*names)).to_plotly_json()["data"]

    colors = [bars["marker"]["color"] for bars in named]
    assert colors[0] == KIND_COLORS[SpanKind.FORWARD]
    assert len(set(colors)) == len(named) == 8
    assert (others["name"], others["base"]) == ("other parts", [8.0, 9.0])
    # AND no named part has the colour of those
    (bars,) = start_up_figure(one_rank("barrier", kind="other")).to_plotly_json()["data"]
    assert bars["marker"]["color"] != others["marker"]["color"]


def test_a_rank_alone_is_not_compared_and_what_took_no_time_is_not_drawn() -> None:
    def page(found: Startup) -> Component:
        provider = FakeProvider(reports={"a": None}, started=found)
        return rendered(start_up.PAGE, provider, View(page="start-up"))

    assert "Rank 0 on vm took 1.00 s to start." in words(page(one_rank("build")))
    assert "Start-up by rank" in words(page(one_rank("build")))
    assert "Start-up by rank" not in words(page(one_rank("build", num_ns=0)))


def test_a_run_without_such_spans_says_what_they_are() -> None:
    provider = FakeProvider(reports={"a": None})

    assert "imports" in words(rendered(start_up.PAGE, provider, View(run="a")))
    assert "no run" in words(rendered(start_up.PAGE, provider, View(run="b"))).lower()
    assert "No data because" in words(rendered(start_up.PAGE, FakeProvider(), View()))
