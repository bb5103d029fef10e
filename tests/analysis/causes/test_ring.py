"""Context parallelism by a ring of sends: its pairs are its axis's, not the pipeline's."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from rankscope.analysis.analyze import analyze_run
from rankscope.tracer.span import KIND_CODES, SpanKind
from rankscope.tracer.topology import Coords, Layout
from tests.support.analysis.cluster import (
    MS,
    PIPELINE,
    WORLD,
    Begin,
    Cluster,
    Collective,
    Compute,
    End,
    Recv,
    Send,
    Source,
    source_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.analysis.cluster import Action

RANKS = (0, 1, 2, 3, 4, 5, 6, 7)
CP, PP_KINDS = KIND_CODES[SpanKind.CP_COMM], (SpanKind.PP_SEND, SpanKind.PP_RECV)


def ring_job(*, slow_rank: int, factor: float) -> Source:
    """Train 4 pairs of context parallel ranks for 8 steps; one rank is slow from step 3 on."""
    cluster = Cluster(
        Layout(dp=4, cp=2),
        {WORLD: (SpanKind.DP_COMM, RANKS), PIPELINE: (SpanKind.CP_COMM, RANKS)},
    )

    def script(rank: int, step: int) -> Iterator[Action]:
        peer = rank ^ 1
        first, then = (Send(peer), Recv(peer)) if rank < peer else (Recv(peer), Send(peer))
        length = round(10 * MS * (factor if rank == slow_rank and step >= 3 else 1.0))
        for kind in (SpanKind.FORWARD, SpanKind.BACKWARD):
            yield Begin(kind, 0)
            yield Compute(length)
            yield first
            yield then
            yield Compute(length)
            yield End()
        yield Collective(WORLD, SpanKind.DP_COMM)

    cluster.run(8, script)
    source = source_of(cluster)
    is_pair = np.isin(source.span_table.kind, [KIND_CODES[kind] for kind in PP_KINDS])
    kinds = np.where(is_pair, CP, source.span_table.kind).astype(np.int8)
    (epoch,) = source.info.epochs
    ranks = tuple(
        replace(info, coords=Coords(dp=info.rank // 2, cp=info.rank % 2)) for info in epoch.ranks
    )
    return replace(
        source,
        info=replace(source.info, epochs=(replace(epoch, ranks=ranks),)),
        span_table=replace(source.span_table, kind=kinds),
    )


def test_the_slow_rank_of_a_traced_ring_is_named_without_its_partner() -> None:
    # GIVEN rank 4 at 1.5 x, whose partner 5 waits for it in sends of kind cp-comm
    (finding,) = analyze_run(ring_job(slow_rank=4, factor=1.5), "run").findings

    # THEN it alone is slow. A healthy step: 4 x 10 ms and 5 transfers of 0.5 ms; the slow one's
    # compute takes 4 x 15 ms. 5 of 8 steps are so: (3 x 42.5 + 5 x 62.5) / 8 / 42.5 = 1.294
    assert (finding.cause, finding.ranks, finding.steps) == ("slow-compute", (4,), (3, 7))
    assert finding.slowdown is not None
    assert abs(finding.slowdown - 1.294) < 0.001
