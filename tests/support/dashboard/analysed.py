"""A real report of a small cluster, for pages that show much of it."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

from rankscope.analysis.analyze import analyze_run
from rankscope.tracer.topology import Layout
from tests.support.analysis.cluster import MS, gpt_cluster, source_of

if TYPE_CHECKING:
    from rankscope.analysis.report.report import RunReport

SLOW_RANK = 5


@cache
def analysed_report() -> RunReport:
    """Return the report of run "tiny": 8 steps of 8 ranks (PP 2, DP 2, TP 2), rank 5 slow."""
    cluster = gpt_cluster(
        Layout(pp=2, dp=2, tp=2),
        num_steps=8,
        forward_ns=lambda rank, *_: 18 * MS if rank == SLOW_RANK else 10 * MS,
    )
    return replace(analyze_run(source_of(cluster), "tiny"), run="tiny")
