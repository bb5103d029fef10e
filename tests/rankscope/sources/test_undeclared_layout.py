"""A job that declares no parallel layout, like a plain training script."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from rankscope.analysis.analyze import analyze_run
from rankscope.analysis.verdict import verdict_sentence
from rankscope.collector.spool.tail import SpoolTail
from rankscope.collector.store.writer import StoreWriter
from rankscope.sources.store_source import StoreSource
from rankscope.terminal.report_text import View, report_text
from rankscope.tracer.span import NONE, SpanKind
from rankscope.tracer.topology import Layout
from tests.support.collector.spool_builder import SpoolBuilder

if TYPE_CHECKING:
    from pathlib import Path

    from rankscope.collector.store.store import Store

NUM_RANKS, NUM_STEPS, SLOW = 4, 12, 2
GROUP = 0xABCD
MS = 1_000_000
STEP_MS, COMPUTE_MS, SLOWER_MS, TRANSFER_MS = 100, 20, 40, 2


def record(spool: Path, rank: int) -> None:
    """Record a rank that computes forward and backward, and then waits for the slow one."""
    unknown = {"layout": None, "coords": None}
    own = SpoolBuilder(
        spool, run_id="plain", rank=rank, world_size=NUM_RANKS, capacity=256, manifest=unknown
    )
    own.group(GROUP, kind="other", name="world", members=list(range(NUM_RANKS)))
    done_ms = COMPUTE_MS + COMPUTE_MS + SLOWER_MS + TRANSFER_MS
    for step in range(NUM_STEPS):
        at_ms = 1000 + step * STEP_MS
        backward_ms = COMPUTE_MS + (SLOWER_MS if rank == SLOW else 0)
        own.span("forward", start_ns=at_ms * MS, duration_ns=COMPUTE_MS * MS, step=step,
                 microbatch=0)  # fmt: skip
        own.span("backward", kind=SpanKind.BACKWARD, start_ns=(at_ms + COMPUTE_MS) * MS,
                 duration_ns=backward_ms * MS, step=step, microbatch=0)  # fmt: skip
        entered_ms = at_ms + COMPUTE_MS + backward_ms
        for name, kind in (("all_reduce", SpanKind.OTHER), ("wait all_reduce", SpanKind.WAIT)):
            own.span(name, kind=kind, start_ns=entered_ms * MS, launch_ns=entered_ms * MS,
                     duration_ns=(at_ms + done_ms - entered_ms) * MS, step=step,
                     track="main" if kind is SpanKind.WAIT else "comm world",
                     comm=(GROUP, step, NONE, rank, 1 << 20, 0))  # fmt: skip
        own.step(step, start_ns=at_ms * MS, duration_ns=STEP_MS * MS)
    own.end(at_ns=(1000 + NUM_STEPS * STEP_MS) * MS)


@pytest.mark.slow
def test_only_the_slow_rank_is_named(empty_store: Store, tmp_path: Path) -> None:
    for rank in range(NUM_RANKS):
        record(tmp_path / "spool", rank)
    SpoolTail(tmp_path / "spool", StoreWriter(empty_store)).poll()

    report = analyze_run(StoreSource(empty_store), "plain")

    first = report.findings[0]
    assert (first.cause, first.ranks) == ("slow-compute", (SLOW,))
    assert "one worker" not in first.evidence
    assert verdict_sentence(report).startswith(f"Rank {SLOW} computes slowly (slow-compute).")
    assert {entry.rank for entry in report.starved} == {0, 1, 3}
    assert (report.layout, report.mfu) == (Layout(), None)
    text = report_text(report, verdict="", width=100, view=View(has_details=True))
    assert "4 ranks (parallel layout unknown)" in text
    assert f"worst worker rank {SLOW};" in " ".join(text.split())
    (warning,) = [text for text in report.quality.warnings if "layout" in text]
    assert "each rank is treated as its own worker" in warning
