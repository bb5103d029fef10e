from __future__ import annotations

from dataclasses import replace

import pytest

from rankscope.analysis.report.liveness import RankLiveness, SilentRank, StepSilence, find_silence
from rankscope.analysis.report.report import NOT_MEASURED, HostNote, Severity
from rankscope.analysis.report.text import format_age
from rankscope.dashboard.address import View
from rankscope.dashboard.pages import overview
from rankscope.dashboard.pages.overview_cards import findings_table, liveness_card, proof_cards
from tests.support.dashboard.builders import FakeProvider, report
from tests.support.dashboard.page_text import rendered, words

SECOND_NS = 1_000_000_000


def liveness(*, num_ranks: int, num_recent: int, num_silent: int) -> RankLiveness:
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
    return " / ".join(words(part) for part in liveness_card(found, run="AR"))


def test_ranks_that_all_go_on_take_one_line() -> None:
    assert (
        shown(liveness(num_ranks=12_288, num_recent=12_288, num_silent=0))
        == "12,288 of 12,288 ranks sent a heartbeat within 5 s"
    )


def test_silent_ranks_are_listed_with_host_state_step_and_age() -> None:
    text = shown(liveness(num_ranks=16, num_recent=14, num_silent=2))

    assert (
        "Silent ranks | 2 of 16 ranks silent for more than 15 s; 14 sent a heartbeat within 5 s."
        in text
    )
    assert "training | n/a | 3 min 20 s" in text
    assert "training | 1,234 | 3 min 19 s" in text
    assert "\u202e" not in text


def test_ten_of_many_silent_ranks_are_listed() -> None:
    text = shown(liveness(num_ranks=12_288, num_recent=10_000, num_silent=2_288))

    assert "2,288 of 12,288 ranks silent for more than 15 s" in text
    assert "The 10 longest silences:" in text
    assert text.count(" | 3 min ") == 10


def test_there_is_no_card_without_heartbeats_or_if_all_ranks_are_silent() -> None:
    assert liveness_card(None, run="AR") == []
    all_silent = liveness(num_ranks=4, num_recent=0, num_silent=4)
    assert liveness_card(all_silent, run="AR") == []


@pytest.mark.parametrize(
    ("age_s", "text"),
    [
        (0, "0 s"),
        (59, "59 s"),
        (60, "1 min 0 s"),
        (200, "3 min 20 s"),
        (3599, "59 min 59 s"),
        (3600, "1 h 0 min"),
        (90_061, "25 h 1 min"),
        (180_000, "2 days 2 h"),
    ],
)
def test_an_age_has_its_two_largest_units(age_s: int, text: str) -> None:
    assert format_age(age_s * SECOND_NS + 999) == text


@pytest.mark.parametrize(
    ("state", "is_shown"), [("running", True), ("lost", True), ("ended", False), ("failed", False)]
)
@pytest.mark.parametrize("run", ["analysed", "without-a-step"])
def test_liveness_is_shown_of_runs_that_train_or_were_lost(
    state: str, run: str, *, is_shown: bool
) -> None:
    # A run may hang in its first step, before there is anything to analyse.
    provider = FakeProvider(
        reports={"analysed": report(), "without-a-step": None},
        state=state,
        live=liveness(num_ranks=8, num_recent=8, num_silent=0),
    )

    page = words(rendered(overview.PAGE, provider, View(run=run)))

    assert ("8 of 8 ranks sent a heartbeat within 5 s" in page) == is_shown


def test_a_finding_opens_the_longest_of_its_steps_with_its_ranks_marked() -> None:
    made = report(num_steps=12, onset=4)  # rank 5 is slow in steps 4 to 11
    times = dict.fromkeys(made.steps, 1.0) | {2: 9.0, 7: 3.0, 11: 2.0}

    cells = findings_table(replace(made, actual_s_by_step=times))

    assert "'/timeline?run=demo-42&epoch=0&step=7&rank=5&order=excess'" in str(cells)


@pytest.mark.parametrize(
    ("step_s", "age_s", "is_silent"),
    [(10, 20, False), (10, 20.1, True), (1, 5.9, False), (1, 6.1, True), (0.1, 5, False)],
)
def test_a_job_is_silent_from_twice_its_step_time_on(
    step_s: float, age_s: float, *, is_silent: bool
) -> None:
    # A record may take 5 s to the store, so a step of 1 s that is due now ended 6 s ago.
    found = find_silence(
        last_step=7,
        ended_ns=0,
        step_time_ns=round(step_s * SECOND_NS),
        now_ns=round(age_s * SECOND_NS),
    )

    assert (found is not None) == is_silent


SILENCE = StepSilence(last_step=29, age_ns=84 * SECOND_NS, step_time_ns=SECOND_NS)


@pytest.mark.parametrize(
    ("silence", "state", "style", "text"),
    [
        (None, "running", "verdict calm", "healthy | All ranks are alike."),
        (
            SILENCE,
            "running",
            "verdict unsure",
            "silent | No step has ended after step 29. Until then: All ranks are alike.",
        ),
        (
            None,
            "lost",
            "verdict unsure",
            "lost | The run stopped reporting after step 29, without an end. Until then: All",
        ),
    ],
)
def test_a_run_that_ends_no_step_is_never_shown_as_healthy(
    silence: StepSilence | None, state: str, style: str, text: str
) -> None:
    healthy = report(slow_rank=None)
    provider = FakeProvider(
        reports={"demo-42": healthy}, sentence="All ranks are alike.", state=state, silent=silence
    )

    page = rendered(overview.PAGE, provider, View(run="demo-42"))

    (card,) = page["overview-verdict"].children
    assert card.className == style
    assert text in words(page)
    shown = "No step has ended for 1 min 24 s. The last one was step 29; a step takes 1.00 s."
    assert (shown in words(page)) == (silence is not None)


def test_the_proof_and_what_to_do_follow_the_verdict() -> None:
    found = report()
    finding = replace(found.findings[0], hosts=("node-1",), severity=Severity.CRITICAL)
    shown = [words(part) for part in proof_cards(replace(found, findings=(finding,)))]

    assert len(shown) == 1
    assert "Proof" in shown[0]
    assert "Show it in the timeline" in shown[0]
    assert "ssh node-1 nvidia-smi" in shown[0]
    assert "state=drain" in shown[0]

    matters = replace(found, findings=(finding,))
    page = overview.show_overview(FakeProvider(reports={"demo-42": matters}), View(run="demo-42"))
    text = " ".join(words(part) for part in page.children)
    order = [text.index(word) for word in ("Proof", "What to do", "MFU", "Findings")]
    assert order == sorted(order)


def test_a_healthy_run_has_no_proof() -> None:
    assert proof_cards(report(slow_rank=None)) == []


def test_further_findings_can_be_opened() -> None:
    found = report()
    first = replace(found.findings[0], severity=Severity.CRITICAL)
    second = replace(first, cause="data-stall", ranks=(2,))
    minor = replace(first, cause="gc-pause", severity=Severity.MINOR)

    top, more = proof_cards(replace(found, findings=(first, second, minor)))

    assert "data-stall" not in words(top)
    assert "data-stall" in words(more)


def test_what_its_hosts_say_is_below_the_picture_of_a_finding() -> None:
    found = report(slow_rank=5)
    notes = (
        HostNote(source="processes", text="<b>burn</b> (pid 77) took 0.97 CPUs of c"),
        HostNote(source=NOT_MEASURED, text="GPU of c"),
    )
    plain = replace(found.findings[0], severity=Severity.CRITICAL)
    top = replace(plain, host_notes=notes)

    cards = proof_cards(replace(found, findings=(top,)))
    without = proof_cards(replace(found, findings=(plain,)))

    text = " / ".join(map(words, cards))
    assert "processes:" in text
    assert "(pid 77) took 0.97 CPUs of c" in text
    assert "not measured:" in text
    assert "processes:" not in " / ".join(map(words, without))
