"""Slow ranks, beside stages with more work."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from rankscope.analysis.analyze import analyze_run
from rankscope.analysis.trace.context import RunContext, SampleTable
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
    gpt_cluster,
    source_of,
)
from tests.support.analysis.one_group import ALL_REDUCE, trained, work

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.analysis.cluster import Action

LAYOUT = Layout(dp=5, pp=4)
LAST_STAGE = (15, 16, 17, 18, 19)


def test_the_fast_rank_of_a_slow_stage_is_not_named() -> None:
    # GIVEN a last stage of five ranks, four of which compute slowly from step 2 on
    def forward_ns(rank: int, step: int, microbatch: int) -> int:
        return 30 * MS if rank > 15 and step >= 2 else 10 * MS

    source = source_of(gpt_cluster(LAYOUT, num_steps=8, forward_ns=forward_ns))

    (finding,) = analyze_run(source, "run").findings

    assert (finding.cause, finding.ranks, finding.steps) == (
        "slow-compute",
        (16, 17, 18, 19),
        (2, 7),
    )
    # THEN the price is that of GPipe with 4 micro-batches: the longest path passes stages 0 to 2
    # once and the last one 4 times. Forward that is 4 x 20 + 3 x 20 = 140 ms, or 3 x 20 + 4 x 60
    # in a slow step; backward takes twice as long. Sends take less than 1 % of it.
    healthy, slow = 3 * 140, 3 * (60 + 240)
    expected = (2 * healthy + 6 * slow) / (8 * healthy)
    assert finding.slowdown is not None
    assert abs(finding.slowdown / expected - 1) < 0.02


def test_a_stage_with_more_work_is_named_whole() -> None:
    # GIVEN a last stage with 1.3 times the work, and a device of it that is 4 % faster
    def forward_ns(rank: int, step: int, microbatch: int) -> int:
        return {15: 125 * MS // 10}.get(rank, 13 * MS) if rank >= 15 else 10 * MS

    source = source_of(gpt_cluster(LAYOUT, num_steps=8, forward_ns=forward_ns))

    (finding,) = analyze_run(source, "run").findings

    assert (finding.cause, finding.ranks) == ("stage-imbalance", LAST_STAGE)


def test_an_intermittently_slow_rank_is_one_finding_from_the_first_step_to_the_last() -> None:
    # GIVEN a rank that takes 1.5 times as long in steps 1, 8 and 15 of 18
    def forward_ns(rank: int, step: int, microbatch: int) -> int:
        return 15 * MS if rank == 7 and step in (1, 8, 15) else 10 * MS

    source = source_of(gpt_cluster(LAYOUT, num_steps=18, forward_ns=forward_ns))

    (finding,) = analyze_run(source, "run").findings

    assert (finding.cause, finding.ranks, finding.steps) == ("slow-compute", (7,), (1, 15))
    assert finding.evidence == (
        "rank 7: 360 ms of own compute per step, 240 ms for the 4 other ranks of its stage"
        " (+50 %; waiting not counted), in 3 of the 15 steps 1 to 15"
    )
    # AND the price is that of GPipe with 4 stages and 4 micro-batches: 7 micro-batches of 60 ms in
    # a row, 4 of which take 90 ms in 3 of 18 steps
    healthy = 7 * 60
    expected = (15 * healthy + 3 * (3 * 60 + 4 * 90)) / (18 * healthy)
    assert finding.slowdown is not None
    assert abs(finding.slowdown / expected - 1) < 0.01


CP_RANKS = (0, 1, 2, 3, 4, 5, 6, 7)
CP, PP_KINDS = KIND_CODES[SpanKind.CP_COMM], (SpanKind.PP_SEND, SpanKind.PP_RECV)


def ring_job(*, slow_rank: int, factor: float) -> Source:
    """Return 4 pairs of context-parallel ranks over 8 steps; one rank is slow from step 3 on.

    Each pair exchanges its keys by sends of kind cp-comm, a ring of two.
    """
    cluster = Cluster(
        Layout(dp=4, cp=2),
        {WORLD: (SpanKind.DP_COMM, CP_RANKS), PIPELINE: (SpanKind.CP_COMM, CP_RANKS)},
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
    # GIVEN rank 4, which takes 1.5 times as long, and its partner 5, which waits for it
    (finding,) = analyze_run(ring_job(slow_rank=4, factor=1.5), "run").findings

    # THEN only rank 4 is slow. A healthy step takes 4 x 10 ms and 5 transfers of 0.5 ms, a slow one
    # 4 x 15 ms and the same transfers: (3 x 42.5 + 5 x 62.5) / 8 / 42.5 = 1.294
    assert (finding.cause, finding.ranks, finding.steps) == ("slow-compute", (4,), (3, 7))
    assert finding.slowdown is not None
    assert abs(finding.slowdown - 1.294) < 0.001


@pytest.mark.parametrize(
    ("waited", "others", "cause"),
    [(0.6, 0.02, "host-stall"), (0.6, 0.55, "slow-compute"), (0.05, 0.0, "slow-compute")],
)
def test_a_rank_that_waits_for_a_cpu_does_not_compute_slowly(
    waited: float, others: float, cause: str
) -> None:
    # GIVEN four ranks of 30 ms of compute, of which one takes 90 ms, all of it on processors: its
    # steps last 90 ms, and it had none for 54 ms of them; or as long as others; or for 4.5 ms
    def script(rank: int, _step: int) -> Iterator[Action]:
        for kind, ms in ((SpanKind.FORWARD, 10), (SpanKind.BACKWARD, 20)):
            yield from work(kind, ms * MS * (3 if rank == 2 else 1), microbatch=0)
        yield ALL_REDUCE

    cluster = trained(script, num_steps=8, layout=Layout(dp=4))
    plain = source_of(cluster)
    (epoch,) = plain.info.epochs
    ranks = tuple(replace(each, host="a", local_rank=each.rank) for each in epoch.ranks)
    readings = [
        (rank, start, waited if rank == 2 else others) for _, rank, start, _ in cluster.steps
    ]
    device, at_ns, value = zip(*sorted(readings), strict=True)
    source = replace(
        plain,
        info=replace(plain.info, epochs=(replace(epoch, ranks=ranks),)),
        around=RunContext(
            samples=SampleTable(
                host=np.zeros(len(device), np.int32),
                device=np.array(device, np.int32),
                at_ns=np.array(at_ns, np.int64),
                name=np.zeros(len(device), np.int32),
                value=np.array(value),
                hosts=("a",),
                names=("run-queue-wait-ratio",),
            )
        ),
    )

    (finding,) = analyze_run(source, "run").findings

    # THEN: cause by the wait; either way the 60 ms of 90 ms are what a fix saves
    assert (finding.cause, finding.ranks) == (cause, (2,))
    assert finding.slowdown == pytest.approx(3.0, rel=0.05)
    text = "it was ready and waited for a CPU for 60 % of the time, other ranks 2 %"
    assert (text in finding.evidence) is (cause == "host-stall")
