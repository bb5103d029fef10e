"""Small spans for tests: say only what the test is about."""

from __future__ import annotations

from tracer.span import Span, SpanKind, UnixNs


def make_span(
    *,
    rank: int = 0,
    step: int = 0,
    start_ns: int = 0,
    duration_ns: int = 1,
    name: str = "op",
    kind: SpanKind = SpanKind.FORWARD,
) -> Span:
    return Span(
        rank=rank,
        step=step,
        kind=kind,
        name=name,
        start_ns=UnixNs(start_ns),
        duration_ns=duration_ns,
    )
