"""What a span says of itself under the pointer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rankscope.analysis.report.text import format_bytes, format_duration
from rankscope.tracer.span import KINDS, NONE, NS_PER_MS, SpanFlag

from ..text import plotly_text

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from rankscope.analysis.drawing.timeline import StepTimeline


def hover_texts(timeline: StepTimeline) -> NDArray[np.object_]:
    """Return the label of every span, shape (spans,), in plotly's own line breaks.

    Quantities that are unknown or mean nothing for the span are left out;
    names come from outside and are made inert.
    """
    names = [plotly_text(name) for name in timeline.spans.names]
    places = {rank: f"PP {at.pp} · DP {at.dp} · TP {at.tp}" for rank, at in timeline.coords.items()}
    texts = np.empty(len(timeline.spans), dtype=object)
    for row in range(len(timeline.spans)):
        texts[row] = "<br>".join(_lines(timeline, row, names, places))
    return texts


def _lines(timeline: StepTimeline, row: int, names: list[str], places: dict[int, str]) -> list[str]:
    spans = timeline.spans
    rank = int(spans.rank[row])
    microbatch = int(spans.microbatch[row])
    kind = KINDS[int(spans.kind[row])].value
    begin_ms = (int(spans.start_ns[row]) - timeline.begin_ns) / NS_PER_MS
    lines = [
        f"<b>{names[int(spans.name[row])]}</b>",
        kind if microbatch == NONE else f"{kind}, micro-batch {microbatch}",
        f"rank {rank}" + (f" ({places[rank]})" if rank in places else ""),
        f"duration {format_duration(int(spans.duration_ns[row]))}, from {begin_ms:,.3f} ms",
    ]
    return lines + _communication(timeline, row) + _flags(int(spans.flags[row]))


def _communication(timeline: StepTimeline, row: int) -> list[str]:
    spans = timeline.spans
    lines = []
    if timeline.wait_ns[row] >= 0:
        wait, last = int(timeline.wait_ns[row]), int(timeline.last_rank[row])
        blamed = f" for rank {last}" if wait > 0 and last != spans.rank[row] else ""
        lines.append(f"wait {format_duration(wait)}{blamed}")
        lines.append(f"transfer {format_duration(int(timeline.transfer_ns[row]))}")
    if spans.src_rank[row] != NONE and spans.dst_rank[row] != NONE:
        lines.append(f"rank {int(spans.src_rank[row])} → rank {int(spans.dst_rank[row])}")
    if spans.num_bytes[row] != NONE:
        lines.append(format_bytes(int(spans.num_bytes[row])))
    return lines


def _flags(flags: int) -> list[str]:
    lines = []
    if flags & SpanFlag.OPEN:
        lines.append("had not ended when last seen")
    if flags & SpanFlag.ERROR:
        lines.append("left by an exception")
    return lines
