"""The communication groups of a layout: names, ids, members."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np

from rankscope.tracer.span import SpanKind, hash_group

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .placement import Placement


class Axis(IntEnum):
    """What a group spans; the order is that of `Groups.ids`."""

    NONE = 0
    TP = 1
    CP = 2
    DP = 3
    """Data-parallel positions and, with them, context-parallel ones: who shares gradients."""

    PP = 4
    WORLD = 5
    EP = 6
    """Neighbours among the data-parallel positions, so many as the layout's ep."""


KIND_OF_AXIS: dict[Axis, SpanKind] = {
    Axis.TP: SpanKind.TP_COMM,
    Axis.CP: SpanKind.CP_COMM,
    Axis.EP: SpanKind.EP_COMM,
    Axis.DP: SpanKind.DP_COMM,
    Axis.PP: SpanKind.OTHER,
    Axis.WORLD: SpanKind.OTHER,
}
"""Span kind of a group's collectives (of p2p: `PP_SEND` and `PP_RECV`)."""

GRID_AXES: dict[Axis, tuple[int, ...]] = {
    Axis.TP: (3,),
    Axis.CP: (2,),
    Axis.DP: (1, 2),
    Axis.PP: (0,),
    Axis.WORLD: (0, 1, 2, 3),
}
"""Axes of the (pp, dp, cp, tp) grid over which a group's members lie; expert-parallel groups are
blocks of one axis (`expert_blocks`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One communication group."""

    group_id: int
    kind: SpanKind
    name: str
    members: tuple[int, ...]
    """Global ranks, ascending."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """All groups of more than one member, and each rank's group on each axis."""

    groups: tuple[Group, ...]
    ids: NDArray[np.uint64]
    """Shape (axes, pp, dp, cp, tp): group id, 0 where the position has no such group."""


def make_groups(placement: Placement, *, ep: int = 1) -> Groups:
    """Return the groups of a layout, as the job's mesh would make them."""
    grid = placement.rank
    ids = np.zeros((len(Axis), *grid.shape), dtype=np.uint64)
    groups: list[Group] = []
    for axis, spanned in GRID_AXES.items():
        fixed = tuple(at for at in range(grid.ndim) if at not in spanned)
        rows = grid.transpose(fixed + spanned).reshape(*(grid.shape[at] for at in fixed), -1)
        if rows.shape[-1] > 1:
            found = _add_groups(groups, axis, rows)
            ids[axis] = np.expand_dims(found, spanned)
    if ep > 1:
        found = _add_groups(groups, Axis.EP, np.moveaxis(expert_blocks(grid, ep), 2, -1))
        ids[Axis.EP] = np.repeat(found, ep, axis=1)
    return Groups(groups=tuple(groups), ids=ids)


def expert_blocks(grid: NDArray[np.int32], ep: int) -> NDArray[np.int32]:
    """Return the (pp, dp, cp, tp) grid with each expert-parallel group on an axis of its own.

    Returns:
        Shape (pp, dp / ep, ep, cp, tp).
    """
    pp, dp, cp, tp = grid.shape
    return grid.reshape(pp, dp // ep, ep, cp, tp)


def _add_groups(groups: list[Group], axis: Axis, rows: NDArray[np.int32]) -> NDArray[np.uint64]:
    """Add a group for each row of members; return their ids, shaped as the rows are."""
    found = np.empty(rows.shape[:-1], dtype=np.uint64)
    for at in np.ndindex(found.shape):
        members = tuple(sorted(rows[at].tolist()))
        name = axis.name.lower() + "".join(f"-{part}" for part in at)
        group_id = hash_group(name, members)
        groups.append(Group(group_id=group_id, kind=KIND_OF_AXIS[axis], name=name, members=members))
        found[at] = group_id
    return found
