"""What is known of a run without an analysis: its steps' times, its MFU, what was found before."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankscope.analysis.breakdown.mfu import compute_mfu
from rankscope.analysis.report.progress import SeenSteps
from rankscope.collector.read.findings import read_findings
from rankscope.collector.read.steps import read_step_times

from .finding_tracker import tracked_finding

if TYPE_CHECKING:
    from rankscope.analysis.report.report import Finding
    from rankscope.analysis.trace.tables import SpanSource
    from rankscope.collector.store.store import Store

MAX_STEPS = 2_000
MAX_MFU_ROWS = 250_000
"""Rows of steps, one a rank, that are read for the MFU: the newest 20 steps of 12,288 ranks."""

NS_PER_S = 1e9


def read_seen(store: Store, source: SpanSource, run_id: str) -> SeenSteps:
    """Return what the newest `MAX_STEPS` steps of a run tell of themselves.

    Raises:
        UnknownRunError: The store holds no run of that name.
    """
    rows = read_step_times(store, run_id, most=MAX_STEPS)
    seconds = {row["step"]: (row["last_ns"] - row["first_ns"]) / NS_PER_S for row in rows}
    steps = sorted(seconds)
    mfu = None
    if steps:
        num_ranks = max(row["num_ranks"] for row in rows)
        first = steps[-max(1, MAX_MFU_ROWS // num_ranks) :][0]
        mfu = compute_mfu(source.run_info(run_id), source.steps(run_id, first=first))
    return SeenSteps(
        epochs=tuple(sorted({row["epoch"] for row in rows})),
        actual_s_by_step={step: seconds[step] for step in steps},
        mfu=mfu,
    )


def read_told(store: Store, run_id: str) -> tuple[Finding, ...]:
    """Return the findings of a run that stood when it was last analysed."""
    return tuple(
        tracked_finding(stored).finding
        for stored in read_findings(store, run_id)
        if stored.closed_ns is None
    )
