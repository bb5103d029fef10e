"""The ByteDance trace format: its operation types and the rules that come with it.

Source: "Understanding Stragglers in Large Model Training Using What-if
Analysis", arXiv 2505.05713, and the layout of the traces published with it.
TP is collapsed there: one traced rank stands for each (dp, stage), a *worker*.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Whole = NDArray[np.integer[Any]]

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

TYPES = (
    FORWARD_COMPUTE,
    BACKWARD_COMPUTE,
    FORWARD_SEND,
    FORWARD_RECV,
    BACKWARD_SEND,
    BACKWARD_RECV,
    PARAMS_ALL_GATHER,
    GRADS_REDUCE_SCATTER,
    SEPARATE_GRADS,
    LAYERNORM_GRADS,
    EMBEDDING_GRADS,
    GRAD_CLIP,
    GC,
    OPTIMIZER,
)
CODE = {name: code for code, name in enumerate(TYPES)}

COMMUNICATION = frozenset(TYPES) - {FORWARD_COMPUTE, BACKWARD_COMPUTE, GC, OPTIMIZER}
PEER_TO_PEER = frozenset({FORWARD_SEND, FORWARD_RECV, BACKWARD_SEND, BACKWARD_RECV})
DP_ONLY = frozenset({PARAMS_ALL_GATHER, GRADS_REDUCE_SCATTER, SEPARATE_GRADS})

FOLDED = {
    FORWARD_SEND: "forward-pp-comm",
    FORWARD_RECV: "forward-pp-comm",
    BACKWARD_SEND: "backward-pp-comm",
    BACKWARD_RECV: "backward-pp-comm",
}
"""The published results count send and recv of one direction as one type."""

CLOCK_ERROR_TRANSFER_NS = -10_000_000
"""A transfer this negative or more is clock error by the format's rule: 0, and reported."""

NO_OP_SLACK_NS = 50_000


class Columns(Protocol):
    """Operations in any order. `analysis.trace.tables.SpanTable` is one, `TraceColumns` another."""

    @property
    def step(self) -> Whole:
        """Step numbers."""

    @property
    def rank(self) -> Whole:
        """Global ranks."""

    @property
    def name(self) -> Whole:
        """Types, as codes into ``names``."""

    @property
    def start_ns(self) -> NDArray[np.int64]:
        """Starts; steps need no common clock."""

    @property
    def duration_ns(self) -> NDArray[np.int64]:
        """Durations."""

    @property
    def seq(self) -> Whole:
        """Numbers among the operations of one type on one worker in one step."""

    @property
    def chunk(self) -> Whole:
        """Model chunks on the stage."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the types."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceColumns:
    """A trace read for its what-if alone. Fields as in `Columns`."""

    step: Whole
    rank: Whole
    name: Whole
    start_ns: NDArray[np.int64]
    duration_ns: NDArray[np.int64]
    seq: Whole
    chunk: Whole
    names: tuple[str, ...]


def rows_of_columns(columns: Columns, rows: NDArray[np.int64]) -> TraceColumns:
    """Return some of the rows."""
    return TraceColumns(
        step=columns.step[rows],
        rank=columns.rank[rows],
        name=columns.name[rows],
        start_ns=columns.start_ns[rows],
        duration_ns=columns.duration_ns[rows],
        seq=columns.seq[rows],
        chunk=columns.chunk[rows],
        names=columns.names,
    )
