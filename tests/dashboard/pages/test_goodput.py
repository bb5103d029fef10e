"""The card of a run's goodput, on a page and on a terminal."""

from __future__ import annotations

from rankscope.analysis.goodput import Diagnosis, EpochRecord, GoodputStep, measure_goodput
from rankscope.dashboard.pages.goodput import goodput_card
from rankscope.terminal.goodput_text import goodput_lines
from tests.support.dashboard.page_text import words

H = 3_600 * 10**9


def epoch(number: int, *steps: int, failed_h: int | None = None) -> EpochRecord:
    """Return an epoch of 1,000 ranks that starts every 10 hours, with steps of an hour."""
    begin_ns = (10 * number + 1) * H
    return EpochRecord(
        epoch=number,
        num_ranks=1000,
        started_ns=begin_ns - H,
        failed_ns=None if failed_h is None else failed_h * H,
        ended_ns=(10 * number + 9) * H,
        last_begin_ns=None,
        steps=tuple(
            GoodputStep(step=step, begin_ns=begin_ns + k * H, end_ns=begin_ns + (k + 1) * H)
            for k, step in enumerate(steps)
        ),
    )


RESTARTED = measure_goodput(
    [epoch(0, 0, 1, 2, 3, failed_h=6), epoch(1, 2, 3, 4, 5)], Diagnosis(lost_s={"slow-link": 3600})
)


def test_the_card_has_each_part_in_gpu_hours_and_the_epochs() -> None:
    text = words(goodput_card(RESTARTED))

    assert "Goodput 26.3 %" in text
    assert "Of 19,000 GPU-hours in 2 epochs" in text
    assert "repeated | 3,000 | 15.8 %" in text
    assert "findings | 1,000 | 5.3 %" in text
    assert "slow-link 5.3 %" in text
    assert "0 | 1,000 | 0-3 | 2 | 10,000" in text
    assert goodput_card(None) == []


def test_the_terminal_lists_the_parts_within_80_columns() -> None:
    lines = goodput_lines(RESTARTED, width=80, is_whole=True, table_width=80)

    assert max(map(len, lines)) <= 80
    assert [line.split()[0] for line in lines if line.endswith(" %")] == [
        *("productive", "repeated", "detection", "restart", "start-up", "findings"),
        *("slow-link", "unknown"),
    ]
    assert goodput_lines(RESTARTED, width=80, is_whole=False) == lines[:2]
