"""Which rank stands where: in the layout, on which host, in which rack."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .scenario import RankOrder

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .scenario import Scenario


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Places of all ranks."""

    rank: NDArray[np.int32]
    """Shape (pp, dp, cp, tp): the global rank at each position."""

    stage: NDArray[np.int32]
    """Shape (ranks,), as all that follow: position of each rank on the axis."""

    dp: NDArray[np.int32]
    cp: NDArray[np.int32]
    tp: NDArray[np.int32]
    host: NDArray[np.int32]
    """Number of its host."""

    local_rank: NDArray[np.int32]
    rack: NDArray[np.int32]


def place(scenario: Scenario) -> Placement:
    """Number the positions and fill the hosts in rank order.

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
    """Tell whether partners of one tensor-parallel group stand on several hosts."""
    hosts = placement.host[placement.rank]
    return bool((hosts != hosts[..., :1]).any())
