"""Which rank stands where: rank = ((pp * dp_size) + dp) * tp_size + tp. Standard library only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankscope.tracer.topology import Coords

if TYPE_CHECKING:
    from rankscope.tracer.topology import Layout

MESH_AXES = ("pp", "dp", "tp")
"""Axes of the device mesh, the slowest-changing first."""


def coords_of(rank: int, layout: Layout) -> Coords:
    """Return the position of global rank ``rank`` on each axis of `MESH_AXES`.

    Raises:
        ValueError: The rank is not in ``[0, layout.world_size)``.
    """
    if not 0 <= rank < layout.world_size:
        raise ValueError(f"rank must be in [0, {layout.world_size}), got {rank}")
    rest, tp = divmod(rank, layout.tp)
    pp, dp = divmod(rest, layout.dp)
    return Coords(pp=pp, dp=dp, tp=tp)


def ranks_of_stage(stage: int, layout: Layout) -> tuple[int, ...]:
    """Return the global ranks of one pipeline stage, ascending."""
    return tuple(rank for rank in range(layout.world_size) if coords_of(rank, layout).pp == stage)
