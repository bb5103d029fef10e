"""Single spans of step 3 of run "r", and the step that they make."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankscope.analysis.drawing.timeline import read_timeline
from rankscope.analysis.trace.tables import GroupInfo
from rankscope.tracer.span import SpanKind
from tests.support.dashboard.builders import FakeProvider, report, span_table, step_span

if TYPE_CHECKING:
    from rankscope.analysis.drawing.timeline import StepTimeline
    from rankscope.tracer.span import Span

PAIR = GroupInfo(group_id=7, kind="tp-comm", name="tp", members=(0, 1))


def compute(rank: int, start_ns: int, end_ns: int, kind: SpanKind = SpanKind.FORWARD) -> Span:
    """Return a span on the track "main"."""
    return step_span(rank, kind, "layer", start_ns, end_ns)


def comm(rank: int, start_ns: int, end_ns: int, *, seq: int = 0) -> Span:
    """Return a span of the communication ``seq`` between ranks 0 and 1."""
    return step_span(
        rank, SpanKind.TP_COMM, "all_reduce", start_ns, end_ns,
        track="comm tp", group_id=PAIR.group_id, seq=seq,
    )  # fmt: skip


def source_of(*spans: Span, depths: tuple[int, ...] = ()) -> FakeProvider:
    """Return a source of spans, in the layout PP 2, DP 2, TP 2."""
    return FakeProvider(
        reports={"r": report(run="r")},
        tables={"r": span_table(spans, depths=depths)},
        groups={"r": (PAIR,)},
    )


def step_of(*spans: Span, depths: tuple[int, ...] = ()) -> StepTimeline:
    """Return the step that consists of these spans."""
    return read_timeline(source_of(*spans, depths=depths), "r", epoch=0, step=3)
