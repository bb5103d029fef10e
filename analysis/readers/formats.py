"""The readers of all trace formats: the only module that chooses between them.

What else differs between formats is a fact of `analysis.trace.tables.TraceFormat`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..trace.rows import make_span_table
from ..trace.tables import format_of
from .bytedance.format import FOLDED
from .bytedance.reader import read_bytedance, split_bytedance_waits
from .tracer.reader import read_traced
from .waits import split_traced_waits

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..replay.model import Reading
    from ..trace.tables import RunInfo, SpanTable, StepTable
    from .waits import Arrivals, WaitSplit


def read_run(
    run: RunInfo,
    take_spans: Callable[[], SpanTable],
    steps: StepTable,
    *,
    num_earlier_steps: int = 0,
) -> Reading:
    """Return spans as operations with their dependencies; the steps are those of the device.

    Args:
        take_spans: Returns the spans; if it keeps none, their memory is free before the end.
    """
    if format_of(run).has_groups:
        return read_traced(run, take_spans(), steps, num_earlier_steps=num_earlier_steps)
    return read_bytedance(run, take_spans())


def split_run_waits(
    run: RunInfo, spans: SpanTable, *, arrivals: Arrivals | None = None
) -> WaitSplit:
    """Split the communication of a run into wait and transfer.

    Args:
        arrivals: See `split_traced_waits`; without groups, ``spans`` must be whole steps instead.
    """
    if format_of(run).has_groups:
        return split_traced_waits(run, spans, arrivals=arrivals)
    return split_bytedance_waits(run, spans)


def drop_read_columns(run: RunInfo, spans: SpanTable) -> SpanTable:
    """Return the spans that the analysis still needs once they are read.

    Without groups the operations hold all of it: as many zeros, which take no memory, save 50 bytes
    per span.
    """
    if format_of(run).has_groups:
        return spans
    zeros = np.broadcast_to(np.int64(0), len(spans))
    columns = "epoch", "step", "rank", "kind", "name", "track", "start_ns", "duration_ns"
    return make_span_table(**dict.fromkeys(columns, zeros), names=("",), tracks=("",))


def replay_kind(name: str) -> str:
    """Return the kind of the replay of an operation type, in a format whose spans name types."""
    return FOLDED.get(name, name)
