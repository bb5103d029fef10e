"""Scripted jobs whose ranks all reduce in one group, and their findings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankscope.analysis.analyze import analyze_run
from rankscope.tracer.span import NONE, SpanKind
from rankscope.tracer.topology import Layout
from tests.support.analysis.cluster import (
    WORLD,
    Begin,
    Cluster,
    Collective,
    Compute,
    End,
    source_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rankscope.analysis.report.report import Finding
    from tests.support.analysis.cluster import Action

FOUR = Layout(dp=4)
ALL_REDUCE = Collective(WORLD, SpanKind.DP_COMM)


def work(kind: SpanKind, length_ns: float, *, microbatch: int = NONE) -> Iterator[Action]:
    """Yield a span of this kind with so much compute."""
    yield Begin(kind, microbatch)
    yield Compute(round(length_ns))
    yield End()


def trained(
    script: Callable[[int, int], Iterator[Action]], *, num_steps: int, layout: Layout = FOUR
) -> Cluster:
    """Return a cluster that ran ``script(rank, step)`` for each rank and step."""
    ranks = tuple(range(layout.world_size))
    cluster = Cluster(layout, {WORLD: (SpanKind.DP_COMM, ranks)})
    cluster.run(num_steps, script)
    return cluster


def findings_of(
    script: Callable[[int, int], Iterator[Action]], *, num_steps: int, layout: Layout = FOUR
) -> tuple[Finding, ...]:
    """Return the findings of such a job."""
    cluster = trained(script, num_steps=num_steps, layout=layout)
    return analyze_run(source_of(cluster), "run").findings
