"""Spans as columns, reports and providers that behave, for tests of what the screen shows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from analysis.source import SpanTable
from tracer.span import KIND_CODES, NONE, Span

if TYPE_CHECKING:
    from collections.abc import Sequence


def span_table(spans: Sequence[Span], *, epoch: int = 0, depths: Sequence[int] = ()) -> SpanTable:
    """Lay spans out as columns, in the order given."""
    names = tuple(sorted({span.name for span in spans}))
    tracks = tuple(sorted({span.track for span in spans}))
    num = len(spans)
    return SpanTable(
        epoch=np.full(num, epoch, dtype=np.int32),
        step=np.array([span.step for span in spans], dtype=np.int32),
        rank=np.array([span.rank for span in spans], dtype=np.int32),
        kind=np.array([KIND_CODES[span.kind] for span in spans], dtype=np.int8),
        name=np.array([names.index(span.name) for span in spans], dtype=np.int32),
        track=np.array([tracks.index(span.track) for span in spans], dtype=np.int32),
        start_ns=np.array([span.start_ns for span in spans], dtype=np.int64),
        duration_ns=np.array([span.duration_ns for span in spans], dtype=np.int64),
        launch_ns=np.full(num, NONE, dtype=np.int64),
        group_id=np.array([span.group_id for span in spans], dtype=np.uint64),
        seq=np.array([span.seq for span in spans], dtype=np.int64),
        src_rank=np.array([span.src_rank for span in spans], dtype=np.int32),
        dst_rank=np.array([span.dst_rank for span in spans], dtype=np.int32),
        microbatch=np.array([span.microbatch for span in spans], dtype=np.int32),
        chunk=np.array([span.chunk for span in spans], dtype=np.int32),
        num_bytes=np.array([span.num_bytes for span in spans], dtype=np.int64),
        interval_id=np.zeros(num, dtype=np.int64),
        flags=np.array([int(span.flags) for span in spans], dtype=np.uint16),
        depth=np.array(depths or [0] * num, dtype=np.int16),
        names=names,
        tracks=tracks,
    )
