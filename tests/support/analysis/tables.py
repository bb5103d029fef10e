"""Runs, and tables of steps, micro-batches and compute from what a test is about."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from rankscope.analysis.replay.model import ComputeItems
from rankscope.analysis.trace.context import MicrobatchTable
from rankscope.analysis.trace.tables import EpochInfo, RunInfo, StepTable
from rankscope.tracer.span import NONE

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import ArrayLike

    from rankscope.analysis.trace.tables import GroupInfo, RankInfo
    from rankscope.tracer.topology import Layout

Table = TypeVar("Table", StepTable, MicrobatchTable, ComputeItems)

DTYPES = {"kind": np.int8, "loss": np.float64, "left_out": np.uint32}
DTYPES |= dict.fromkeys(("start_ns", "end_ns", "self_ns"), np.int64)
COUNTS = (
    "num_tokens",
    "sum_squared_lengths",
    "sum_windowed_lengths",
    "num_elements",
    "peak_memory_bytes",
    "peak_reserved_bytes",
    "num_alloc_retries",
)
DTYPES |= dict.fromkeys(COUNTS, np.int64)
MISSING = {**dict.fromkeys(COUNTS, NONE), "loss": np.nan}


def one_epoch(
    run_id: str,
    layout: Layout,
    ranks: Iterable[RankInfo],
    groups: Iterable[GroupInfo] = (),
    **more: Any,  # noqa: ANN401  # of the other fields
) -> RunInfo:
    """Return a traced run of one epoch."""
    epoch = EpochInfo(epoch=0, ranks=tuple(ranks), groups=tuple(groups))
    plain: dict[str, Any] = {"source_format": "rankscope", "world_size": layout.world_size}
    return RunInfo(run_id=run_id, layout=layout, epochs=(epoch,), **plain | more)


def table_of(table: type[Table], /, **columns: ArrayLike) -> Table:
    """Return a table with these columns; a scalar is repeated in all rows.

    What is not given is unknown if it may be, else 0: epoch 0, rank 0, ...
    """
    num = max(np.size(column) for column in columns.values())
    names = [name for name in table.__dataclass_fields__ if name != "deferred_ratio"]
    filled: dict[str, Any] = {
        name: np.array(np.broadcast_to(columns.get(name, MISSING.get(name, 0)), num)).astype(
            DTYPES.get(name, np.int32)
        )
        for name in names
    }
    return table(**filled)
