"""Ranks whose experts get unequal numbers of tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from rankscope.analysis.analyze import read_operations
from rankscope.tracer.span import SpanKind
from rankscope.tracer.topology import Layout
from tests.support.analysis.cluster import MS, Action, Begin, Cluster, Collective, Compute, End

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankscope.analysis.replay.model import Reading

EXPERTS = 7
MEMBERS = (0, 1, 2, 3)


def read(cluster: Cluster) -> Reading:
    return read_operations(cluster.run_info(), cluster.span_table(), cluster.step_table())


def moe(
    outside_ms: tuple[int, ...], experts_ms: tuple[int, ...], *, is_closed: bool = True
) -> Reading:
    """Read one micro-batch of four ranks: attention, tokens out, experts, tokens back."""

    def script(rank: int, _: int) -> Iterator[Action]:
        yield Begin(SpanKind.FORWARD, 0)
        yield Compute(outside_ms[rank] * MS)
        yield Collective(EXPERTS, SpanKind.EP_COMM)
        yield Compute(experts_ms[rank] * MS)
        if is_closed:
            yield Collective(EXPERTS, SpanKind.EP_COMM)
        yield End()

    cluster = Cluster(Layout(dp=4, ep=4), {EXPERTS: (SpanKind.EP_COMM, MEMBERS)})
    cluster.run(1, script)
    return read(cluster)


def test_rank_is_judged_by_what_it_computes_outside_its_experts() -> None:
    reading = moe((10, 10, 10, 13), (20, 10, 5, 8))

    # All compute is 86 ms, 43 of it outside: each rank's compute outside is doubled.
    assert (reading.items.self_ns / MS).tolist() == [20.0, 20.0, 20.0, 26.0]


def test_experts_keep_their_own_time_in_the_graph() -> None:
    model = moe((10, 10, 10, 13), (20, 10, 5, 8)).model

    compute = [model.kinds[kind] == "forward" for kind in model.kind]
    assert (model.operations.duration_ns[compute] / MS).tolist() == [
        10.0, 20.0, 10.0, 10.0, 10.0, 5.0, 13.0, 8.0,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("outside_ms", "is_closed"), [((10, 10, 10, 13), False), ((1, 1, 1, 1), True)]
)
def test_experts_are_not_excluded_if_borders_do_not_match_or_little_remains(
    outside_ms: tuple[int, ...], *, is_closed: bool
) -> None:
    reading = moe(outside_ms, (20, 10, 5, 8), is_closed=is_closed)

    assert (reading.items.self_ns / MS).tolist() == [
        outside + inside for outside, inside in zip(outside_ms, (20, 10, 5, 8), strict=True)
    ]


def test_wait_that_ends_as_the_next_span_begins_belongs_to_the_span_before() -> None:
    def script(rank: int, _: int) -> Iterator[Action]:
        for microbatch in range(2):
            yield Begin(SpanKind.FORWARD, microbatch)
            yield Compute(10 * MS)
            yield Collective(EXPERTS, SpanKind.EP_COMM)
            yield Compute((10 + 10 * rank) * MS)
            yield Collective(EXPERTS, SpanKind.EP_COMM)
            yield End()

    cluster = Cluster(Layout(dp=2, ep=2), {EXPERTS: (SpanKind.EP_COMM, (0, 1))})
    cluster.run(1, script)

    # 100 ms in all, 40 ms outside: 10 ms are scaled to 25.
    assert (read(cluster).items.self_ns / MS).tolist() == [25.0] * 4
