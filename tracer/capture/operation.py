"""Torch's communication operators: their names and the positions of their arguments."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

NAMESPACE = "c10d"
NAMES = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce_coalesced",
    "allgather_": "all_gather",
    "allgather_coalesced_": "all_gather_coalesced",
    "_allgather_base_": "all_gather_into_tensor",
    "allgather_into_tensor_coalesced_": "all_gather_into_tensor_coalesced",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter_tensor_coalesced",
    "broadcast_": "broadcast",
    "reduce_": "reduce",
    "gather_": "gather",
    "scatter_": "scatter",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all_single",
    "barrier": "barrier",
    "monitored_barrier_": "monitored_barrier",
    "send": "send",
    "recv_": "recv",
    "recv_any_source_": "recv_any_source",
}
"""Public name of each operator. An operator that is not listed keeps its own name."""

ASYNC_NAMES = ("async_op", "asyncOp")
"""Names of the argument in different versions of torch."""


class Direction(Enum):
    """The ranks between which an operation moves data."""

    GROUP = "all members of a group"
    SEND = "to one peer"
    RECV = "from one peer"
    RECV_ANY = "from any peer"


PART_POSITIONS = {"gather": 1, "scatter": 0}
"""Position of the argument that is one member's part, for operations whose whole only the root has.
"""

EMPTY = {"barrier", "monitored_barrier"}
"""Operations that move no data. Their tensor only selects the device."""

DIRECTIONS = {
    "send": Direction.SEND,
    "recv_": Direction.RECV,
    "recv_any_source_": Direction.RECV_ANY,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One operator of the ``c10d`` namespace."""

    op: Any
    """The operator's overload."""

    op_name: str
    """Name in the dispatcher."""

    name: str
    direction: Direction
    group_position: int
    """Position of the process group; tensors come before it, the peer of a p2p after it."""

    async_position: int | None
    """Position of the flag that the caller will wait itself; None if the operator has no such flag.
    """

    returns_work: bool
    is_empty: bool
    """Whether it moves no data."""

    part_position: int | None
    """Position of one member's part of a whole that only the root has; None if each member's
    largest tensor argument is the whole."""

    def is_async(self, args: tuple[Any, ...]) -> bool:
        """Return whether the caller will wait for the work later.

        If the operator has no flag (p2p, collectives of older versions of torch), this is so for
        all that return a work.
        """
        at = self.async_position
        if at is None:
            return self.returns_work
        return bool(args[at]) if at < len(args) else True

    def num_bytes(self, args: tuple[Any, ...], group_size: int) -> int:
        """Return the number of bytes on the larger side of the operation.

        This is the gathered, scattered or reduced whole. It is equal on all members, except in an
        all-to-all with uneven splits.
        """
        if self.is_empty:
            return 0
        if self.part_position is not None:
            return group_size * _bytes(args[self.part_position])
        if self.group_position == 1:  # nearly always, and hot
            return _bytes(args[0])
        return max(map(_bytes, args[: self.group_position]), default=0)


def find_operations() -> list[Operation]:
    """Return all communication operators of this torch, including those not in `NAMES`."""
    prefix = f"{NAMESPACE}::"
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith(prefix)]
    operations = [_read(name.removeprefix(prefix)) for name in sorted(names)]
    return [operation for operation in operations if operation is not None]


def _bytes(argument: Any) -> int:  # noqa: ANN401 - tensors nested in lists
    while type(argument) is list and len(argument) == 1:  # nearly always: one tensor in a list
        argument = argument[0]
    if isinstance(argument, torch.Tensor):
        try:
            return argument.nbytes
        except RuntimeError:  # a sparse tensor
            return argument.numel() * argument.element_size()
    if isinstance(argument, (list, tuple)):
        return sum(map(_bytes, argument))
    return 0


def _read(op_name: str) -> Operation | None:
    bare, _, overload = op_name.partition(".")
    op = getattr(getattr(torch.ops.c10d, bare), overload or "default")
    arguments = op._schema.arguments
    groups = [at for at, item in enumerate(arguments) if "ProcessGroup" in str(item.type)]
    if not groups:
        return None
    flags = [at for at, item in enumerate(arguments) if item.name in ASYNC_NAMES]
    name = NAMES.get(bare, bare.strip("_"))
    return Operation(
        op=op,
        op_name=op_name,
        name=name,
        direction=DIRECTIONS.get(bare, Direction.GROUP),
        group_position=groups[0],
        async_position=flags[0] if flags else None,
        returns_work=any("Work" in str(item.type) for item in op._schema.returns),
        is_empty=name in EMPTY,
        part_position=PART_POSITIONS.get(name),
    )
