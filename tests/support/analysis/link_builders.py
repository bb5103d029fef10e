"""Links with given transfer times."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rankscope.analysis.replay.model import Link, Transfers
from rankscope.analysis.statistics.link_profile import profile_links
from rankscope.analysis.trace.tables import RankInfo
from rankscope.tracer.topology import Coords

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rankscope.analysis.statistics.link_profile import LinkProfile

MS = 1_000_000


def group(*members: int) -> Link:
    return Link(members=members, kind="dp-comm", is_pair=False)


def pair(src: int, dst: int) -> Link:
    return Link(members=(src, dst), kind="pp-send", is_pair=True)


def profile(
    ms_of: Mapping[Link, Sequence[float]],
    *,
    num: int = 2,
    ranks_per_stage: int = 0,
    hosts: Mapping[int, str] | None = None,
    infos: Mapping[int, RankInfo] | None = None,
) -> LinkProfile:
    """Return the profile of links with given transfer times.

    Operation k of the replay is carried by link k. Links of equal kind and size are alike. Ranks
    are numbered stage by stage.

    Args:
        ms_of: By link, the time of one transfer in each step.
        num: Transfers per step.
        ranks_per_stage: 0: there is one stage.
        hosts: Host of each rank; None: unknown.
        infos: Location of each rank; None: by ``ranks_per_stage`` and ``hosts``.
    """
    links = tuple(ms_of)
    sizes = sorted({(link.kind, len(link.members)) for link in links})
    rows = [
        (step, index, sizes.index((link.kind, len(link.members))), round(ms * MS))
        for index, link in enumerate(links)
        for step, ms in enumerate(ms_of[link])
        for _ in range(num)
    ]
    step, link, alike, transfer = zip(*rows, strict=True)
    transfers = Transfers(
        step=np.array(step, np.int32),
        link=np.array(link, np.int32),
        alike=np.array(alike, np.int32),
        transfer_ns=np.array(transfer, np.int64),
        num_bytes=np.full(len(rows), 1 << 20, np.int64),
        name=np.zeros(len(rows), np.int32),
        names=("all_reduce",),
        links=links,
        link_of_operation=np.arange(len(links), dtype=np.int32),
    )
    ranks = {rank for link in links for rank in link.members}
    size = ranks_per_stage or max(ranks) + 1
    infos = infos or {
        rank: RankInfo(
            rank=rank,
            coords=Coords(dp=rank % size, pp=rank // size),
            host=(hosts or {}).get(rank, ""),
        )
        for rank in ranks
    }
    return profile_links(transfers, tuple(range(max(step) + 1)), infos)
