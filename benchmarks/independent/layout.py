"""Positions and groups of the ranks of a job."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rankscope.tracer.topology import Coords, Layout

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class Group:
    """A group of ranks."""

    kind: str
    name: str
    members: tuple[int, ...]

    def renumbered(self, order: Sequence[int]) -> Group:
        """Return the group with renumbered ranks."""
        return Group(self.kind, self.name, tuple(sorted(order[rank] for rank in self.members)))

    @property
    def group_id(self) -> int:
        """Group id as in docs/spool-format.md."""
        text = self.name.encode() + b"\0" + ",".join(map(str, self.members)).encode()
        digest = hashlib.blake2b(text, digest_size=8).digest()
        return int.from_bytes(digest, "little") or 1


@dataclass(frozen=True, kw_only=True)
class Places:
    """Positions of ranks, with tensor parallelism innermost, then cp, dp and pp."""

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    vpp: int = 1
    ranks_per_host: int = 8
    order: tuple[int, ...] | None = None
    """Global rank of each position; None if they are equal."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def layout(self) -> Layout:
        """Sizes of the axes, as in a manifest."""
        return Layout(dp=self.dp, tp=self.tp, pp=self.pp, cp=self.cp, ep=self.ep, vpp=self.vpp)

    def coords_of_place(self, place: int) -> Coords:
        """Return the coordinates of a position."""
        tp, rest = place % self.tp, place // self.tp
        cp, rest = rest % self.cp, rest // self.cp
        dp, pp = rest % self.dp, rest // self.dp
        return Coords(dp=dp, tp=tp, pp=pp, cp=cp, ep=dp % self.ep)

    def rank_at(self, *, dp: int, tp: int, pp: int, cp: int) -> int:
        """Return the global rank at a position."""
        place = ((pp * self.dp + dp) * self.cp + cp) * self.tp + tp
        return place if self.order is None else self.order[place]

    def place_of(self, rank: int) -> int:
        """Return the position of a rank."""
        return rank if self.order is None else self.order.index(rank)

    def coords(self, rank: int) -> Coords:
        """Return the coordinates of a rank."""
        return self.coords_of_place(self.place_of(rank))

    def host(self, rank: int) -> str:
        """Return the host of a rank."""
        return f"node{self.place_of(rank) // self.ranks_per_host:03d}"

    def crosses(self, members: Sequence[int]) -> bool:
        """Return whether ranks are on several hosts."""
        return len({self.host(rank) for rank in members}) > 1

    def group(self, axis: str, rank: int) -> Group:
        """Return a rank's group along an axis, its members in ascending order."""
        at = self.coords(rank)
        here = {"dp": at.dp, "tp": at.tp, "pp": at.pp, "cp": at.cp}
        if axis == "ep":
            first = at.dp // self.ep * self.ep
            members = [self.rank_at(**here | {"dp": first + k}) for k in range(self.ep)]
        elif axis == "dp_cp":
            members = [
                self.rank_at(**here | {"dp": dp, "cp": cp})
                for dp in range(self.dp)
                for cp in range(self.cp)
            ]
        elif axis == "embedding":
            members = [self.rank_at(**here | {"pp": pp}) for pp in (0, self.pp - 1)]
        elif axis == "world":
            members = list(range(self.world_size))
        else:
            sizes = {"dp": self.dp, "tp": self.tp, "pp": self.pp, "cp": self.cp}
            members = [self.rank_at(**here | {axis: k}) for k in range(sizes[axis])]
        kind = {"dp_cp": "dp-comm", "embedding": "other", "world": "other", "pp": "other"}.get(
            axis, f"{axis}-comm"
        )
        return Group(kind, f"mesh_{axis}", tuple(sorted(members)))
