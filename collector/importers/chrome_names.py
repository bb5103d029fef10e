"""Names of events in Chrome traces of training frameworks, and what each says.

Source: names of MegaScan (github.com/OpenSQZ/MegatronApp, `megatron/training/trace.py`), of
Megatron-LM's schedules, and of ndtimeline (github.com/volcengine/veScale,
`legacy/vescale/ndtimeline/handlers/local_timeline_handler.py`).
"""

from __future__ import annotations

import re
from typing import NamedTuple

from rankscope.tracer.span import SpanKind

COMPUTE = {
    "forward": SpanKind.FORWARD, "forward-warmup": SpanKind.FORWARD,
    "forward-compute": SpanKind.FORWARD, "forward-step": SpanKind.FORWARD,
    "backward": SpanKind.BACKWARD, "backward-cooldown": SpanKind.BACKWARD,
    "backward-compute": SpanKind.BACKWARD, "backward-step": SpanKind.BACKWARD,
    "backward-input": SpanKind.BACKWARD, "backward-weight": SpanKind.BACKWARD,
    "optimizer": SpanKind.OPTIMIZER, "optimizer-step": SpanKind.OPTIMIZER,
    "optimizer-inner-step": SpanKind.OPTIMIZER, "optimizer-clip-main-grad": SpanKind.OPTIMIZER,
    "optimizer-copy-to-main-grad": SpanKind.OPTIMIZER,
    "optimizer-copy-main-to-model-params": SpanKind.OPTIMIZER,
    "batch-generator": SpanKind.DATA, "save-checkpoint": SpanKind.CHECKPOINT,
}  # fmt: skip
"""Kind by name, in lower case and with ``-`` for ``_``."""


class Move(NamedTuple):
    """One end of a transfer between neighbouring stages."""

    flow: str
    """``forward``: activations, to the next stage. ``backward``: gradients, to the previous."""

    is_send: bool


RECV_FORWARD, SEND_FORWARD = Move("forward", is_send=False), Move("forward", is_send=True)
RECV_BACKWARD, SEND_BACKWARD = Move("backward", is_send=False), Move("backward", is_send=True)
TO_NEXT, TO_PREVIOUS = (SEND_FORWARD, RECV_BACKWARD), (SEND_BACKWARD, RECV_FORWARD)

PIPELINE: dict[str, tuple[Move, ...]] = {
    "recv-forward": (RECV_FORWARD,), "forward-recv": (RECV_FORWARD,),
    "recv-warmup": (RECV_FORWARD,), "recv-extra": (RECV_FORWARD,),
    "send-forward": (SEND_FORWARD,), "forward-send": (SEND_FORWARD,),
    "send-warmup": (SEND_FORWARD,),
    "recv-backward": (RECV_BACKWARD,), "backward-recv": (RECV_BACKWARD,),
    "recv-cooldown": (RECV_BACKWARD,),
    "send-backward": (SEND_BACKWARD,), "backward-send": (SEND_BACKWARD,),
    "send-cooldown": (SEND_BACKWARD,), "send-extra": (SEND_BACKWARD,),
    "exchange-next": TO_NEXT, "forward-send-backward-recv": TO_NEXT,
    "exchange-prev": TO_PREVIOUS, "backward-send-forward-recv": TO_PREVIOUS,
    "forward-send-forward-recv": (SEND_FORWARD, RECV_FORWARD),
    "backward-send-backward-recv": (SEND_BACKWARD, RECV_BACKWARD),
    "forward-backward-send-forward-backward-recv": TO_NEXT + TO_PREVIOUS,
}  # fmt: skip
"""Transfers of one call by its name."""

ENDS = "embedding"
"""Axis of the first and the last stage, which share the embedding."""

COLLECTIVES = {
    "reduce": "tp", "gather-along-last-dim": "tp", "gather-along-first-dim": "tp",
    "reduce-scatter-along-last-dim": "tp", "reduce-scatter-along-first-dim": "tp",
    "tp-allreduce": "tp", "tp-allgather": "tp", "tp-reducescatter": "tp",
    "layernorm-grads-all-reduce": "tp",
    "allreduce": "dp", "unshard-all-gather": "dp", "grad-reduce-scatter": "dp",
    "grad-all-reduce": "dp", "grads-reduce-scatter": "dp", "params-all-gather": "dp",
    "separate-grads-all-reduce": "dp", "grads-reduce-scatter-nonoverlapping": "dp",
    "params-all-gather-nonoverlapping": "dp",
    "embedding-grads-all-reduce": ENDS,
}  # fmt: skip
"""Axis of the group by the name of a collective."""

TRANSFER = re.compile(r"(?:^|-)(send|recv|receive)(?:-|$)")
OTHER_COLLECTIVE = re.compile(
    r"nccl|rccl|all-?reduce|all-?gather|reduce-?scatter|all-?to-?all|broadcast"
)
"""Parts of the names of communication that is in no table: it needs ``args.group``."""


def plain_name(name: str) -> str:
    """Return a name as the tables have it: ``event/forward`` (Composer) is ``forward``."""
    return name.rpartition("/")[2].lower().replace("_", "-").strip("- ")


def kind_of(name: str) -> SpanKind | None:
    """Return the kind of compute, input or checkpoint that a name is."""
    return COMPUTE.get(plain_name(name))
