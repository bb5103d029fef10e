"""Faults that recur on one of few ranks, pauses of all, and spans of the job's own."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np
import pytest

from rankscope.tracer.span import SpanKind
from rankscope.tracer.topology import Layout
from tests.cases.reports import analyze_job, analyze_live
from tests.support.analysis.cluster import MS, Compute
from tests.support.analysis.one_group import ALL_REDUCE, findings_of, work

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from rankscope.analysis.report.report import Finding
    from tests.support.analysis.cluster import Action

pytestmark = pytest.mark.slow


def test_one_slow_loader_worker_of_four_is_named(tmp_path: Path) -> None:
    report = analyze_job(tmp_path, "h04_one_worker.py", "4", "4", "500", run="h04-w4-p4")

    top = report.findings[0]
    assert (top.cause, top.ranks, top.steps) == ("data-stall", (1,), (12, 56))
    assert "in every 4th step (steps 12 to 56)" in top.evidence
    # 12 of 60 steps wait 500 ms: 100 ms of a mean step of 202 ms
    assert top.saved_s == pytest.approx(0.1, rel=0.05)


def test_a_rank_that_computes_longer_in_every_fourth_step_is_slow(tmp_path: Path) -> None:
    report = analyze_job(tmp_path, "h_compute4.py", "4", run="h-comp-w4")

    (top,) = report.findings
    assert (top.cause, top.ranks, top.steps) == ("slow-compute", (1,), (12, 56))
    assert "in every 4th step" in top.evidence
    # 12 of 60 steps take 180 ms longer: 36 ms of a mean step of 136 ms
    assert top.saved_s == pytest.approx(0.036, rel=0.05)


@pytest.mark.parametrize(
    ("ranks", "part", "period", "cause"),
    [
        (2, "input", 2, "data-stall"),
        pytest.param(2, "backward", 8, "slow-compute", marks=pytest.mark.nightly),
        pytest.param(2, "launch", 4, "host-stall", marks=pytest.mark.nightly),
        (3, "gap", 5, "host-stall"),
        (3, "forward", 3, "slow-compute"),
        pytest.param(4, "optimizer", 4, "slow-compute", marks=pytest.mark.nightly),
        (8, "launch", 2, "host-stall"),
        (8, "optimizer", 8, "slow-compute"),
    ],
)
def test_each_part_of_a_step_may_recur(
    tmp_path: Path, ranks: int, part: str, period: int, cause: str
) -> None:
    report = analyze_job(tmp_path, "periodic.py", str(ranks), part, str(period), run=part)

    (top,) = report.findings
    assert (top.cause, top.ranks) == (cause, (1,))
    assert re.search(rf"in every {period}(nd|rd|th) step", top.evidence)
    slow = [step for step in range(9, 60) if step % period == 1]
    assert top.steps == (slow[0], slow[-1])
    assert top.saved_s == pytest.approx(0.1 * len(slow) / 60, rel=0.1)


@pytest.mark.parametrize("place", ["before", "inside", "after"])
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_a_span_of_the_job_names_the_work_of_the_host(
    tmp_path: Path, ranks: int, place: str
) -> None:
    report = analyze_job(tmp_path, "own_spans.py", str(ranks), place, run=place)

    (top,) = report.findings
    assert (top.cause, top.ranks) == ("host-stall", (1,))
    assert 'in its own span "retrieval"' in top.evidence
    assert top.saved_s == pytest.approx(0.04, rel=0.05)


@pytest.mark.nightly
def test_a_loader_that_stalls_in_every_fourth_step_of_a_live_job_is_named(tmp_path: Path) -> None:
    report = analyze_live(tmp_path, "live.py", "loader", num_ranks=2)

    top = report.findings[0]
    assert (top.cause, top.ranks) == ("data-stall", (1,))
    assert "in every 4th step" in top.evidence


@pytest.mark.nightly
def test_a_span_inside_the_forward_of_a_live_job_is_no_compute(tmp_path: Path) -> None:
    report = analyze_live(tmp_path, "live.py", "span", num_ranks=2)

    top = report.findings[0]
    assert (top.cause, top.ranks) == ("host-stall", (1,))
    assert 'in its own span "retrieval"' in top.evidence


def epochs_of(num_ranks: int, alone: Iterable[Action], load_ms: int) -> tuple[Finding, ...]:
    """Return the findings of epochs of ten steps, after which all start loaders.

    Args:
        alone: What rank 0 does at the end of an epoch, while the others are in a barrier.
        load_ms: What the loaders take to start.
    """
    alone = tuple(alone)

    def script(rank: int, step: int) -> Iterator[Action]:
        rng = np.random.default_rng((rank, step))
        if step and step % 10 == 0:
            yield from alone if rank == 0 else ()
            yield ALL_REDUCE
            if load_ms:
                start_ms = load_ms * (1 + 0.02 * rng.standard_normal())
                yield from work(SpanKind.DATA, start_ms * MS)
        factor = 1 + 0.01 * rng.standard_normal()
        yield from work(SpanKind.FORWARD, 20 * MS * factor, microbatch=0)
        yield from work(SpanKind.BACKWARD, 40 * MS * factor, microbatch=0)
        yield ALL_REDUCE

    return findings_of(script, num_steps=60, layout=Layout(dp=num_ranks))


LOGS, SAVES = (Compute(800 * MS),), tuple(work(SpanKind.CHECKPOINT, 800 * MS))


@pytest.mark.parametrize(("alone", "cause"), [(LOGS, "host-stall"), (SAVES, "checkpoint")])
@pytest.mark.parametrize(("num_ranks", "load_ms"), [(2, 1000), (4, 1000), (4, 300)])
def test_what_one_rank_does_before_a_pause_of_all_has_its_own_price(
    num_ranks: int, load_ms: int, alone: tuple[Action, ...], cause: str
) -> None:
    found = epochs_of(num_ranks, alone, load_ms)

    saved_ms = {(each.cause, each.ranks): (each.saved_s or 0) * 1e3 for each in found}
    assert saved_ms == {
        (cause, (0,)): pytest.approx(800 * 5 / 60, rel=0.02),
        ("data-stall", tuple(range(num_ranks))): pytest.approx(load_ms * 5 / 60, rel=0.05),
    }


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_one_rank_that_saves_for_all_is_a_checkpoint(num_ranks: int) -> None:
    healthy, save = epochs_of(num_ranks, SAVES, load_ms=0)

    assert (healthy.cause, save.cause, save.ranks) == ("healthy", "checkpoint", (0,))
    assert save.saved_s == pytest.approx(0.8 * 5 / 60, rel=0.01)
    assert f"rank 0 of {num_ranks} saves, the others wait, for 800 ms every 10 steps" in (
        save.evidence
    )


def test_the_rank_whose_disk_is_slow_in_each_save_is_named() -> None:
    def script(rank: int, step: int) -> Iterator[Action]:
        rng = np.random.default_rng((rank, step))
        if step and step % 10 == 0:
            took_ms = (3000 if rank == 5 else 1000) * (1 + 0.02 * rng.standard_normal())
            yield from work(SpanKind.CHECKPOINT, took_ms * MS)
        factor = 1 + 0.01 * rng.standard_normal()
        yield from work(SpanKind.FORWARD, 20 * MS * factor, microbatch=0)
        yield from work(SpanKind.BACKWARD, 40 * MS * factor, microbatch=0)
        yield ALL_REDUCE

    found = findings_of(script, num_steps=60, layout=Layout(dp=8))

    save = next(each for each in found if each.cause == "checkpoint")
    assert save.saved_s == pytest.approx(3.0 * 5 / 60, rel=0.02)
    assert "; rank 5 for 2.9" in save.evidence
    assert "the others for 1.0" in save.evidence
