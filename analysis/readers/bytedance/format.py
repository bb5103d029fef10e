"""The ByteDance trace format: its operation types and the rules that come with it.

Source: "Understanding Stragglers in Large Model Training Using What-if
Analysis", arXiv 2505.05713, and the layout of the traces published with it.
TP is collapsed there: one traced rank stands for each (dp, stage), a *worker*.
"""

from __future__ import annotations

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
