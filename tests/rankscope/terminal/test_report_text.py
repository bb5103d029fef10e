from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rankscope.analysis.report.report import (
    CulpritComparison,
    Finding,
    HostNote,
    PipelineBubble,
    Severity,
    StepTimes,
    WaitsOn,
    WaterfallSummary,
)
from rankscope.analysis.report.text import format_seconds
from rankscope.terminal.report_text import View, report_text
from tests.support.dashboard.builders import report

VERDICT = "Rank 5 is slow; 7 ranks wait for it."


def test_the_verdict_comes_first_and_the_numbers_follow() -> None:
    text = report_text(report(num_steps=30, slow_rank=5), verdict=VERDICT, width=100)
    blocks = text.split("\n\n")

    assert blocks[0] == VERDICT
    assert blocks[1].startswith("cause ")
    assert blocks[2].startswith("run demo-42: 8 ranks (dp 2 x tp 2 x pp 2), 30 steps (0 to 29)")
    assert blocks[3].startswith("step time    ")
    assert "M_W" not in text
    assert "paper" not in text
    assert blocks[4].startswith("waiting rank  share of step  waits for")
    assert blocks[5].startswith(
        "data quality: coverage 100.0 %, clock error 1.8 us; 3,840 records ="
    )


def test_no_cause_is_broken_at_its_hyphen() -> None:
    text = report_text(report(), verdict="Rank 5 is slow (slow-compute).", width=24)

    assert text.splitlines()[:2] == ["Rank 5 is slow", "(slow-compute)."]


@pytest.mark.parametrize("width", [80, 120])
def test_paragraphs_fit_the_width_of_the_terminal(width: int) -> None:
    warned = report(warnings=("a rank dropped spans while its spool was full " * 4,))

    lines = report_text(warned, verdict=VERDICT * 4, width=width).splitlines()

    assert max(len(line) for line in lines) <= width
    assert any(line.startswith("  ! a rank dropped") for line in lines)


def test_a_finding_shows_ranks_steps_numbers_and_evidence() -> None:
    finding = Finding(
        cause="slow-compute",
        ranks=(4, 5, 6, 7),
        steps=(10, 29),
        slowdown=1.382,
        recoverable_ratio=0.943,
        saved_s=0.125,
        confidence=0.98,
        evidence="rank 5 takes 43.2 ms where its peers take 24.0 ms",
        severity=Severity.CRITICAL,
    )
    made = report()
    half_s = replace(made, findings=(finding,), step_time_s=replace(made.step_time_s, actual=0.5))

    lines = report_text(half_s, verdict=VERDICT, width=100).splitlines()

    row = lines.index("slow-compute  critical  4-7    10-29   125 ms (25 %)        0.98")
    assert lines[row + 1] == "  rank 5 takes 43.2 ms where its peers take 24.0 ms"


def test_the_reachable_step_time_is_that_of_the_overview() -> None:
    made = report()
    # No step can have an ideal of 9 s: alike ones took half a second.
    made = replace(made, ideal_s_by_step={**made.ideal_s_by_step, 0: 9.0})
    (ideal,) = (format_seconds(part.seconds) for part in made.step_parts if part.name == "ideal")

    text = report_text(made, verdict=VERDICT, width=100)

    assert f"; {ideal} if every rank ran like the median" in text
    assert ideal != "9.00 s"


def test_an_unknown_quantity_is_shown_as_na() -> None:
    unknown = replace(
        report(slow_rank=None, mfu=False),
        step_time_s=StepTimes(actual=None, replayed=None, ideal=None),
        ideal_s_by_step={},
        quality=replace(report().quality, clock_error_ns=None, coverage_ratio=None),
    )

    text = report_text(unknown, verdict=VERDICT, width=100)

    assert "step time    n/a; n/a if every rank" in text
    assert "slowdown     n/a\n" in text
    assert "MFU          n/a" in text
    assert "coverage n/a, clock error n/a; 3,840 records =" in text
    assert "waiting rank" not in text


def test_waiting_ranks_beyond_the_first_are_counted() -> None:
    starved = report().starved[:1] * 25

    text = report_text(
        replace(report(), starved=starved), verdict=VERDICT, width=100, view=View(top=10)
    )

    assert "and 15 more (--top 25)" in text


def test_a_healthy_run_has_neither_a_table_of_findings_nor_of_waiting_ranks() -> None:
    healthy = Finding(cause="healthy", confidence=0.9, evidence="noise", severity=Severity.NONE)

    text = report_text(replace(report(), findings=(healthy,)), verdict="Healthy: noise.", width=80)

    assert "severity" not in text
    assert "waiting rank" not in text
    assert text.startswith("Healthy: noise.\n\nrun demo-42")


def test_the_figures_of_the_replay_come_with_their_meaning() -> None:
    text = report_text(report(), verdict=VERDICT, width=100, view=View(has_details=True))

    assert "GPU slowdown" in text
    assert "M_W, M_S, the paper's estimate: arXiv 2505.05713" in text


def test_one_rank_is_shown_with_its_place_its_findings_and_its_waiting() -> None:
    text = report_text(report(slow_rank=5), verdict=VERDICT, width=200, view=View(rank=5))
    waiting = report_text(report(slow_rank=5), verdict=VERDICT, width=200, view=View(rank=0))

    assert "rank 5 (dp 0, stage 1, tp 1)\n  findings     slow-compute, stage-imbalance\n" in text
    assert "  holds up     rank " in text
    assert "  waits        for no other rank" in text
    assert "  waits        for no other rank" not in waiting
    assert "  findings     none names it" in waiting


def test_tables_fit_the_terminal_and_are_whole_in_a_pipe() -> None:
    ranks = tuple(range(0, 1024, 2))
    finding = replace(report().findings[0], ranks=ranks)
    wide = replace(report(), findings=(finding,))

    terminal = report_text(wide, verdict=VERDICT, width=80, view=View(table_width=80))
    pipe = report_text(wide, verdict=VERDICT, width=80)

    assert max(map(len, terminal.splitlines())) <= 80
    assert "0, 2, 4, 6, 8, 10, 12, 14 and 504 more" in pipe


def test_the_waterfall_is_a_table_without_its_zero_parts() -> None:
    waterfall = WaterfallSummary(
        parts=("useful_compute", "waiting", "bubble_warm_up", "gc"),
        mean_ratio={"useful_compute": 0.61, "waiting": 0.3, "bubble_warm_up": 0.09, "gc": 0.0},
        waiting_on=(WaitsOn(rank=5, ratio=0.28), WaitsOn(rank=1, ratio=0.02)),
        bubble=PipelineBubble(
            num_stages=2,
            num_chunks=1,
            num_microbatches=4,
            formula_ratio=0.25,
            measured_ratio=0.1475,
        ),
        ranks=(0,),
        by_rank_ns=np.array([[61, 30, 9, 0]]),
        steps=(0,),
        by_step_ns=np.array([[61, 30, 9, 0]]),
    )

    lines = report_text(
        replace(report(), waterfall=waterfall),
        verdict=VERDICT,
        width=120,
        view=View(has_details=True),
    ).splitlines()

    first = lines.index("part of the step time   share")
    assert lines[first + 1 : first + 6] == [
        "useful compute         61.0 %",
        "waiting                30.0 %  for rank 5 28.0 %, for rank 1 2.0 %",
        "bubble, warm-up         9.0 %",
        (
            "  bubble: 14.8 % of the useful compute; expected 25.0 % = (p - 1) / (v m)"
            " with p = 2 stages, v = 1 chunks, m = 4"
        ),
        "  micro-batches",
    ]


def test_the_worst_worker_is_shown_with_the_steps_in_which_the_estimate_differs() -> None:
    differing = CulpritComparison(
        num_steps=1200, num_different=3, by_shortcut=(0, 1), by_exact=(2, 1)
    )
    view = View(has_details=True)
    agreeing = replace(differing, num_different=0, by_exact=(0, 1))

    text = report_text(replace(report(), culprits=differing), verdict=VERDICT, width=200, view=view)
    same = report_text(replace(report(), culprits=agreeing), verdict=VERDICT, width=200, view=view)
    none = report_text(report(), verdict=VERDICT, width=200, view=view)

    assert (
        "worst worker dp 2, stage 1, by the paper's estimate dp 0, stage 1;"
        " the estimate differs in 3 of 1,200 steps\n"
    ) in text
    assert "worst worker dp 0, stage 1; the estimate differs in 0 of 1,200 steps" in same
    assert "worst worker" not in none


def test_what_its_hosts_say_is_below_the_evidence_of_a_finding() -> None:
    found = report(slow_rank=5)
    notes = (HostNote(source="stacks", text="47 ranks at train.py:70 main; rank\x1b[2J 3 there"),)
    top = replace(found.findings[0], host_notes=notes)

    lines = report_text(
        replace(found, findings=(top, *found.findings[1:])), verdict=VERDICT, width=80
    ).splitlines()

    (number,) = [k for k, line in enumerate(lines) if line.startswith("  - stacks: 47 ranks at")]
    assert lines[number - 1].startswith("  ")
    assert "\x1b" not in lines[number]
