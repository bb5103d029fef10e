"""The ByteDance trace format: operation types, rules and columns.

TP is collapsed in it: one traced rank represents each (dp, stage), a *worker*.

Source: "Understanding Stragglers in Large Model Training Using What-if
Analysis", arXiv 2505.05713, and the layout of the traces published with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ...trace.tables import SpanTable

    IntArray = NDArray[np.integer[Any]]


class OpType(StrEnum):
    """Type of an operation, as the trace names it."""

    FORWARD_COMPUTE = "forward-compute"
    BACKWARD_COMPUTE = "backward-compute"
    FORWARD_SEND = "forward-send"
    FORWARD_RECV = "forward-recv"
    BACKWARD_SEND = "backward-send"
    BACKWARD_RECV = "backward-recv"
    PARAMS_ALL_GATHER = "params-all-gather"
    GRADS_REDUCE_SCATTER = "grads-reduce-scatter"
    SEPARATE_GRADS = "separate-grads-all-reduce"
    LAYERNORM_GRADS = "layernorm-grads-all-reduce"
    EMBEDDING_GRADS = "embedding-grads-all-reduce"
    GRAD_CLIP = "optimizer-clip-main-grad"
    GC = "gc"
    OPTIMIZER = "optimizer"


TYPES = tuple(each.value for each in OpType)
CODE = {name: code for code, name in enumerate(TYPES)}

COMPUTE = (OpType.FORWARD_COMPUTE, OpType.BACKWARD_COMPUTE)
COMPUTE_CODES = tuple(CODE[name] for name in COMPUTE)
COMMUNICATION = frozenset(TYPES) - {*COMPUTE, OpType.GC, OpType.OPTIMIZER}
PEER_TO_PEER = frozenset(
    {OpType.FORWARD_SEND, OpType.FORWARD_RECV, OpType.BACKWARD_SEND, OpType.BACKWARD_RECV}
)
DP_ONLY = frozenset({OpType.PARAMS_ALL_GATHER, OpType.GRADS_REDUCE_SCATTER, OpType.SEPARATE_GRADS})

FOLDED: dict[str, str] = {name: f"{name.split('-')[0]}-pp-comm" for name in PEER_TO_PEER}
"""Kinds of results: the published ones count send and recv of one direction as one type."""

CLOCK_ERROR_TRANSFER_NS = -10_000_000
"""By the format's rule, a transfer of this or less is clock error: it counts as 0 and is
reported."""

NO_OP_SLACK_NS = 50_000
"""Tolerance of comparisons between a worker's transfers and computes: which transfers are no-ops
(`pipeline`), and which had ended before an operation began (`evidence`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceColumns:
    """Operations of a trace that is read for its what-if only, in any order.

    Integer columns may have any width.
    """

    step: IntArray
    """Step numbers."""

    rank: IntArray
    """Global ranks."""

    name: IntArray
    """Operation types, as codes into ``names``."""

    start_ns: NDArray[np.int64]
    """Steps need no common clock."""

    duration_ns: NDArray[np.int64]
    seq: IntArray
    """Numbers of the operations of one type on one worker in one step."""

    chunk: IntArray
    """Model chunks of the stage."""

    names: tuple[str, ...]


if TYPE_CHECKING:
    Columns = SpanTable | TraceColumns


def take_rows(columns: Columns, rows: NDArray[np.int64]) -> TraceColumns:
    """Return some rows of a trace."""
    names = ("step", "rank", "name", "start_ns", "duration_ns", "seq", "chunk")
    return TraceColumns(
        **{name: getattr(columns, name)[rows] for name in names}, names=columns.names
    )
