"""The page of a run's links."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rankscope.analysis.breakdown.link_summary import MAX_TOTALS
from rankscope.analysis.report.network import (
    LinkGroup,
    LinkMatrix,
    LinkSummary,
    LinkTotal,
    LinkTransfers,
)
from rankscope.dashboard.address import LINKS, View
from rankscope.dashboard.pages.links import (
    ALL,
    MAX_EVEN_ROWS,
    MAX_ROWS,
    least_width,
    link_matrix_figure,
    show_links,
)
from tests.support.dashboard.analysed import analysed_report
from tests.support.dashboard.builders import FakeProvider, traces
from tests.support.dashboard.page_text import words

MS = 1e6


def slow_pair(number: int) -> LinkTransfers:
    return LinkTransfers(
        members=(number, number + 1),
        num_members=2,
        kind="pp-send",
        is_pair=True,
        hosts=("<b>a</b>", "b"),
        num_transfers=40,
        transfer_ns=4 * MS,
        expected_ns=1 * MS,
        bytes_per_s=8e9,
        lost_ns_per_step=12 * MS,
        slow_steps=(2, 7),
    )


def text_of(links: LinkSummary | None, *, show: str | None = None) -> str:
    report = replace(analysed_report(), links=links)
    view = View(page=LINKS, run="tiny", show=show)
    return words(show_links(FakeProvider(), report, view))


def many(num: int) -> LinkSummary:
    links = analysed_report().links
    assert links is not None
    slow = tuple(slow_pair(number) for number in range(num))
    return replace(links, num_links=num + 33, num_slow=num, links=slow)


def test_a_slow_link_shows_its_bandwidth_against_alike_ones() -> None:
    text = text_of(many(1))

    assert "1 of 34 links is significantly slower than alike ones" in text
    assert "2-7 | 300.0 % | 4.00 ms | 1.00 ms | 12.0 ms | 8.00 of 32.0 GB/s" in text
    assert "<b>a</b>, b" in text  # as text: Dash escapes it


def test_the_hosts_of_a_large_group_are_one_line() -> None:
    links = many(1)
    group = replace(links.links[0], hosts=("<b>a</b>", "b", "c"))

    assert "<b>a</b> and 2 more" in text_of(replace(links, links=(group,)))


def test_the_table_shows_the_slowest_until_all_are_asked_for() -> None:
    few, whole = text_of(many(68)), text_of(many(68), show=ALL)

    assert "68 of 101 links are" in few
    assert few.count("8.00 of") == MAX_ROWS
    assert "Show 68 of 101" in few
    assert whole.count("8.00 of") == 68


def test_of_links_that_are_alike_few_are_shown_and_no_steps_in_which_they_were_slow() -> None:
    alike = replace(many(68), num_slow=0)

    few = text_of(alike)

    assert few.count("8.00 of 32.0 GB/s") == MAX_EVEN_ROWS
    assert "slow in steps" not in few
    assert "slow in steps" in text_of(many(1))


def test_hosts_beyond_the_limit_are_said_to_be_left_out() -> None:
    links = many(1)
    host = LinkTotal(
        group=LinkGroup.HOST,
        name="h",
        num_links=1,
        num_slow=0,
        num_transfers=1,
        excess_ratio=0.0,
        bytes_per_s=None,
    )
    cut, whole = (replace(links, totals=(host,) * num) for num in (MAX_TOTALS, MAX_TOTALS - 1))

    assert "Show the 500 with the largest excess" in text_of(cut)
    assert "Listed: the 500 with the largest excess." in text_of(cut, show=ALL)
    assert "Show all 499" in text_of(whole)


def test_a_run_without_transfers_says_so() -> None:
    assert "no transfer that could be measured" in text_of(None)


def test_the_matrix_is_blank_without_a_transfer() -> None:
    links = analysed_report().links
    assert links is not None
    assert links.matrix is not None

    figure = link_matrix_figure(links.matrix, run="tiny")

    (heat,) = traces(figure)
    ends = links.matrix.ends
    assert heat.y == ends
    row, column = ends.index("0"), ends.index("4")  # from stage 0 to stage 1
    assert "B/s" in heat.customdata[row][column]
    assert heat.customdata[row][row] == ""


def test_long_host_names_leave_room_for_the_matrix() -> None:
    # GIVEN hosts whose names differ at their ends
    hosts = tuple(f"a-very-long-name-of-a-host-{number}" for number in range(8))
    ratio = np.zeros((8, 8))
    matrix = LinkMatrix(
        ends=hosts, of_hosts=True, num_left_out=0, excess_ratio=ratio, bytes_per_s=ratio
    )

    figure = link_matrix_figure(matrix, run="tiny")

    # THEN the labels are cut, and the cells keep their names
    assert figure.layout.xaxis.labelalias[hosts[7]] == "a-very-long-…of-a-host-7"
    assert traces(figure)[0].x == hosts
    assert figure.layout.height == 8 * 22 + 24 * 4 + 74
    assert least_width(matrix) == 8 * 22 + 24 * 7 + 140
