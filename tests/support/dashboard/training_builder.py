"""Builder of a training step as spans, and of a provider with it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rankscope.analysis.trace.tables import GroupInfo
from rankscope.tracer.span import NONE, SpanKind, hash_group
from tests.support.dashboard.builders import (
    FakeProvider,
    grid_coords,
    report,
    span_table,
    step_span,
)

if TYPE_CHECKING:
    from rankscope.analysis.report.report import RunReport
    from rankscope.tracer.span import Span
    from rankscope.tracer.topology import Coords, Layout


def training_step(
    layout: Layout,
    *,
    slow_rank: int = 5,
    factor: float = 1.8,
    num_microbatches: int = 4,
    num_blocks: int = 2,
    name: str = "block",
) -> tuple[list[Span], tuple[GroupInfo, ...]]:
    """Return a step's spans: forward, backward and TP all-reduces, reduce-scatter, optimizer.

    The ranks of a TP group go on together: its slow member makes the others wait.
    """
    spans: list[Span] = []
    groups: dict[int, GroupInfo] = {}
    coords = grid_coords(layout)
    for dp in range(layout.dp):
        for pp in range(layout.pp):
            members = tuple(r for r, at in coords.items() if (at.dp, at.pp) == (dp, pp))
            tp_id = hash_group("tp", members)
            groups[tp_id] = GroupInfo(group_id=tp_id, kind="tp-comm", name="tp", members=members)
            seq = 0
            now = 20_000_000 * pp
            for microbatch in range(2 * num_microbatches):
                backward = microbatch >= num_microbatches
                kind = SpanKind.BACKWARD if backward else SpanKind.FORWARD
                begin = now
                for _ in range(num_blocks):
                    work = 8_000_000 * (2 if backward else 1)
                    ends = {r: now + int(work * (factor if r == slow_rank else 1)) for r in members}
                    left = max(ends.values()) + 1_200_000
                    for rank in members:
                        comm = step_span(
                            rank, SpanKind.TP_COMM, "all_reduce", ends[rank], left,
                            track="comm tp", group_id=tp_id, seq=seq, num_bytes=4 << 20,
                            microbatch=microbatch % num_microbatches,
                        )  # fmt: skip
                        wait = replace(comm, kind=SpanKind.WAIT, track="main", num_bytes=NONE)
                        spans += [comm, wait]
                    seq += 1
                    now = left
                spans += [
                    step_span(
                        rank, kind, f"{kind.value} {name}", begin, now,
                        microbatch=microbatch % num_microbatches,
                    )
                    for rank in members
                ]  # fmt: skip
                now += 1_500_000
    spans += _data_parallel(spans, coords, layout, groups)
    spans.sort(key=lambda span: (span.rank, span.start_ns, -span.duration_ns))
    return spans, tuple(groups.values())


def _data_parallel(
    spans: list[Span], coords: dict[int, Coords], layout: Layout, groups: dict[int, GroupInfo]
) -> list[Span]:
    added = []
    free = {rank: max(s.end_ns for s in spans if s.rank == rank) for rank in coords}
    for pp in range(layout.pp):
        for tp in range(layout.tp):
            members = tuple(r for r, at in coords.items() if (at.pp, at.tp) == (pp, tp))
            dp_id = hash_group("dp", members)
            groups[dp_id] = GroupInfo(group_id=dp_id, kind="dp-comm", name="dp", members=members)
            left = max(free[rank] for rank in members) + 9_000_000
            for rank in members:
                added += [
                    step_span(
                        rank, SpanKind.DP_COMM, "reduce_scatter", free[rank], left,
                        track="comm dp", group_id=dp_id, seq=0, num_bytes=64 << 20,
                    ),
                    step_span(rank, SpanKind.OPTIMIZER, "adamw", left, left + 6_000_000),
                ]  # fmt: skip
    return added


def training_provider(made: RunReport | None = None, *, name: str = "block") -> FakeProvider:
    """Return a provider of one run with the spans of its step 3."""
    made = made or report()
    provider = FakeProvider(reports={made.run: made})
    spans, groups = training_step(made.layout, name=name)
    provider.tables[made.run] = span_table(
        spans, depths=[int(span.kind is SpanKind.WAIT) for span in spans]
    )
    provider.groups[made.run] = groups
    return provider
