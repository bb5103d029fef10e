from __future__ import annotations

from rankscope.analysis.report.liveness import RankLiveness, SilentRank
from rankscope.dashboard.pages.overview import overview_page
from rankscope.dashboard.pages.overview_cards import age_text, heard_card
from tests.dashboard.pages.test_overview import words
from tests.support.dashboard.builders import FakeProvider, report

SECOND_NS = 1_000_000_000


def heard(*, num_ranks: int, num_recent: int, num_silent: int) -> RankLiveness:
    silent = tuple(
        SilentRank(
            rank=rank,
            host="<b>node-0\u202e</b>",
            state="training",
            step=1234 if rank else None,
            age_ns=(200 - rank) * SECOND_NS,
        )
        for rank in range(min(num_silent, 10))
    )
    return RankLiveness(
        num_ranks=num_ranks, num_recent=num_recent, num_silent=num_silent, silent=silent
    )


def shown(found: RankLiveness | None) -> str:
    return " / ".join(words(part) for part in heard_card(found))


def test_ranks_that_all_go_on_take_one_line() -> None:
    assert (
        shown(heard(num_ranks=12_288, num_recent=12_288, num_silent=0))
        == "12,288 of 12,288 ranks heard within 5 s"
    )


def test_ranks_that_fell_silent_stand_with_host_state_step_and_age() -> None:
    told = shown(heard(num_ranks=16, num_recent=14, num_silent=2))

    assert (
        "Last heard | 2 of 16 ranks silent for more than 15 s, while 14 were heard within 5 s."
        in told
    )
    assert "training | n/a | 3 min 20 s" in told
    assert "training | 1,234 | 3 min 19 s" in told
    assert "\u202e" not in told


def test_of_many_silent_ranks_ten_are_named() -> None:
    told = shown(heard(num_ranks=12_288, num_recent=10_000, num_silent=2_288))

    assert "2,288 of 12,288 ranks silent for more than 15 s" in told
    assert "The 10 longest silences:" in told
    assert told.count(" | 3 min ") == 10


def test_nothing_stands_where_nobody_tells_of_ranks_or_all_are_silent() -> None:
    assert heard_card(None) == []
    assert heard_card(heard(num_ranks=4, num_recent=0, num_silent=4)) == []


def test_an_age_is_told_in_the_two_units_that_count() -> None:
    ages_s = (0, 15, 59, 60, 200, 3599, 3600, 90_061)

    assert [age_text(seconds * SECOND_NS + 999) for seconds in ages_s] == [
        "0 s", "15 s", "59 s", "1 min 0 s", "3 min 20 s", "59 min 59 s", "1 h 0 min", "25 h 1 min",
    ]  # fmt: skip


def test_only_a_run_that_trains_or_was_lost_tells_who_is_heard() -> None:
    found = heard(num_ranks=8, num_recent=8, num_silent=0)
    for state, is_told in (("running", True), ("lost", True), ("ended", False), ("failed", False)):
        provider = FakeProvider(reports={"a": report(), "b": None}, state=state, live=found)

        # A run without a step to analyse too: it may hang in its first.
        for run in ("a", "b"):
            page = words(overview_page(provider, run, base_path="/"))
            assert ("8 of 8 ranks heard within 5 s" in page) == is_told
