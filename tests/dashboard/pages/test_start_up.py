from __future__ import annotations

from rankscope.analysis.report.page_results import RankStartup, Startup, StartupPart, StartupSpan
from rankscope.dashboard.address import View
from rankscope.dashboard.figures.start_up import start_up_figure
from rankscope.dashboard.pages.start_up import start_up_page
from tests.support.dashboard.builders import FakeProvider
from tests.support.dashboard.page_text import words

S = 1_000_000_000


def test_the_slowest_rank_is_named_with_its_host_and_each_part_has_its_slowest() -> None:
    found = Startup(
        epoch=1,
        num_ranks=2,
        median_ns=20 * S,
        parts=(
            StartupPart(
                name="<i>compile</i>", kind="other", num_ranks=2, median_ns=5 * S,
                longest_ns=40 * S, slowest_rank=1,
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

    page = start_up_page(provider, View(page="start-up"), base_path="/")

    shown = words(page)
    assert "Rank 1 on node-7 took longest to start: 62.0 s." in shown
    assert "<i>compile</i> | other | 2 | 5.00 s | 40.0 s | 1" in shown
    assert "&lt;i&gt;compile" in str(page)  # plotly would read tags
    (bars,) = start_up_figure(found).to_plotly_json()["data"]
    assert (bars["y"], bars["base"], bars["x"]) == (["rank 1"], [3.0], [40.0])


def test_a_run_without_such_spans_says_what_they_are() -> None:
    provider = FakeProvider(reports={"a": None})

    assert "imports" in words(start_up_page(provider, View(run="a"), base_path="/"))
    assert "no run" in words(start_up_page(provider, View(run="b"), base_path="/")).lower()
    assert "No data because" in words(start_up_page(FakeProvider(), View(), base_path="/"))
