"""Placement of the ranks: positions in the layout, hosts, racks, communication groups."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np

from rankscope.tracer.span import SpanKind, hash_group

from .scenario import RankOrder

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .scenario import Scenario


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Positions, hosts and racks of all ranks."""

    rank: NDArray[np.int32]
    """Shape (pp, dp, cp, tp): the global rank at each position."""

    stage: NDArray[np.int32]
    """Shape (ranks,), as the following: position of each rank on the axis."""

    dp: NDArray[np.int32]
    cp: NDArray[np.int32]
    tp: NDArray[np.int32]
    host: NDArray[np.int32]
    """Number of each rank's host."""

    local_rank: NDArray[np.int32]
    rack: NDArray[np.int32]


def place(scenario: Scenario) -> Placement:
    """Return the placement of a scenario; hosts are filled in the order of ranks.

    With `RankOrder.TP_FIRST`, ``rank = ((pp * dp_size + dp) * cp_size + cp) * tp_size + tp``.
    """
    sizes = (scenario.pp, scenario.dp, scenario.cp, scenario.tp)
    ranks = np.arange(scenario.world_size, dtype=np.int32)
    if scenario.rank_order is RankOrder.TP_FIRST:
        grid = ranks.reshape(sizes)
    else:
        pp, dp, cp, tp = sizes
        grid = np.ascontiguousarray(ranks.reshape(pp, cp, tp, dp).transpose(0, 3, 1, 2))
    position = np.empty((4, scenario.world_size), dtype=np.int32)
    position[:, grid.ravel()] = np.indices(sizes).reshape(4, -1)
    host = ranks // scenario.ranks_per_host
    return Placement(
        rank=grid,
        stage=position[0],
        dp=position[1],
        cp=position[2],
        tp=position[3],
        host=host,
        local_rank=ranks % scenario.ranks_per_host,
        rack=host // scenario.hosts_per_rack,
    )


def host_name(host: int) -> str:
    """Return the name of a host by its number."""
    return f"sim-{host:05d}"


def tp_crosses_hosts(placement: Placement) -> bool:
    """Return whether a tensor-parallel group has ranks on several hosts."""
    hosts = placement.host[placement.rank]
    return bool((hosts != hosts[..., :1]).any())


class Axis(IntEnum):
    """Axes of groups, in the order of `Groups.ids`."""

    NONE = 0
    TP = 1
    CP = 2
    DP = 3
    """Data- and context-parallel positions: the ranks that share gradients."""

    PP = 4
    WORLD = 5
    EP = 6
    """``ep`` neighbouring data-parallel positions."""


KIND_OF_AXIS: dict[Axis, SpanKind] = {
    Axis.TP: SpanKind.TP_COMM,
    Axis.CP: SpanKind.CP_COMM,
    Axis.EP: SpanKind.EP_COMM,
    Axis.DP: SpanKind.DP_COMM,
    Axis.PP: SpanKind.OTHER,
    Axis.WORLD: SpanKind.OTHER,
}
"""Span kind of collectives on an axis (p2p has `PP_SEND` and `PP_RECV`)."""


GRID_AXES: dict[Axis, tuple[int, ...]] = {
    Axis.TP: (3,),
    Axis.CP: (2,),
    Axis.DP: (1, 2),
    Axis.PP: (0,),
    Axis.WORLD: (0, 1, 2, 3),
}
"""Axes of the (pp, dp, cp, tp) grid that a group spans; expert-parallel groups are blocks of one
axis (`expert_blocks`)."""


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
    """Shape (axes, pp, dp, cp, tp): group id; 0 if the position has no group on the axis."""


def make_groups(placement: Placement, *, ep: int = 1) -> Groups:
    """Return the groups of a layout."""
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
    """Add a group for each row of members, and return their ids in the shape of the rows."""
    found = np.empty(rows.shape[:-1], dtype=np.uint64)
    for at in np.ndindex(found.shape):
        members = tuple(sorted(rows[at].tolist()))
        name = axis.name.lower() + "".join(f"-{part}" for part in at)
        group_id = hash_group(name, members)
        groups.append(Group(group_id=group_id, kind=KIND_OF_AXIS[axis], name=name, members=members))
        found[at] = group_id
    return found
