"""The parallel layout of a job, and a rank's coordinates in it, also from its process groups.

Standard library only.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    Members = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Sizes of the parallel axes. The product of dp, tp, pp, cp and dsp is the world size."""

    dp: int = 1
    """Data parallel, replicated or sharded (DDP, FSDP, ZeRO)."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    """Expert parallel. It overlays dp, so it is not a factor of the world size."""

    dsp: int = 1
    """A further data or sequence parallel factor of some imported traces; it has no coordinate."""

    vpp: int = 1
    """Model chunks per pipeline stage."""

    def __post_init__(self) -> None:
        for axis, size in asdict(self).items():
            if size < 1:
                raise ValueError(f"Layout.{axis} must be at least 1, got {size}")

    @property
    def world_size(self) -> int:
        """Number of ranks of the job."""
        return self.dp * self.tp * self.pp * self.cp * self.dsp

    def to_dict(self) -> dict[str, int]:
        """Return the sizes by axis name, as in manifests and JSON documents."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Coords:
    """Position of one rank on each axis, each ``0 <= position < size``."""

    dp: int = 0
    tp: int = 0
    pp: int = 0
    cp: int = 0
    ep: int = 0

    def to_dict(self) -> dict[str, int]:
        """Return the positions by axis name."""
        return asdict(self)


GROUP_KINDS: dict[str, str] = {
    **dict.fromkeys(("tp", "etp"), "tp-comm"),
    "cp": "cp-comm",
    "ep": "ep-comm",
    **dict.fromkeys(("dp", "fsdp", "ddp", "dp_shard", "dp_replicate", "hsdp"), "dp-comm"),
    **dict.fromkeys(("dp_cp", "dp_shard_cp", "edp", "efsdp", "dp_mod_ep"), "dp-comm"),
    **dict.fromkeys(("dp_shard_mod_ep", "dp_shard_in_ep"), "dp-comm"),
}
"""Span kind of a collective by the mesh axis of its group; any other axis is ``other``."""

MODEL_AXES = ("tp", "pp", "cp")

AXES = frozenset({*GROUP_KINDS, "pp"})
"""Axes that a group can span."""

DATA_AXES = frozenset(axis for axis, kind in GROUP_KINDS.items() if kind == "dp-comm")
REPLICATED, SHARDED = "dp_replicate", "dp_shard"


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisGroup:
    """A group that contains this rank, and the axis that it spans."""

    axis: str
    """As in `GROUP_KINDS`, or ``pp``."""

    members: Members
    """Global ranks, by position on the axis."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DerivedLayout:
    """A layout, the coordinates of this rank, and the groups from which they were derived."""

    layout: Layout
    coords: Coords
    groups: dict[frozenset[int], str]
    """Axis of each group that spans one or a factor of it, by its members; two at least."""

    pipeline: frozenset[int] = frozenset()
    """Members of the group that spans the pipeline."""


def derive_layout(
    groups_of_rank: Iterable[AxisGroup], *, rank: int, world_size: int, num_chunks: int = 1
) -> DerivedLayout | None:
    """Return layout and coordinates of a rank if its groups determine them.

    They do not if one axis has two groups, if two axes share more than this rank, or if the product
    of the axes is not the number of ranks: then an axis is missing or counted twice. A flattened
    axis beside its parts is neither.

    Args:
        groups_of_rank: Groups that contain the rank; those with one member are ignored.
        num_chunks: Model chunks per pipeline stage.

    Returns:
        None in doubt.
    """
    groups: dict[str, Members] = {}
    for axis_group in groups_of_rank:
        if (
            len(axis_group.members) > 1
            and groups.setdefault(axis_group.axis, axis_group.members) != axis_group.members
        ):
            return None
    model = {axis: groups[axis] for axis in MODEL_AXES if axis in groups}
    num_data, is_left = divmod(world_size, math.prod(map(len, model.values())))
    data = None if is_left else _data_groups(groups, num_data)
    if data is None or not _intersect_only_in(rank, [*model.values(), *data]):
        return None
    experts = groups.get("ep", (rank,))
    shared = [len(set(experts) & set(members)) for members in model.values()]
    if num_data % len(experts) or any(num != 1 for num in shared):
        return None
    position = {axis: members.index(rank) for axis, members in model.items()}
    data_position = 0
    for members in data:
        data_position = data_position * len(members) + members.index(rank)
    sizes = {axis: len(members) for axis, members in model.items()}
    return DerivedLayout(
        layout=Layout(dp=num_data, ep=len(experts), vpp=num_chunks, **sizes),
        coords=Coords(dp=data_position, ep=experts.index(rank), **position),
        groups={frozenset(members): axis for axis, members in model.items()}
        | dict.fromkeys(map(frozenset, data), "dp"),
        pipeline=frozenset(model.get("pp", ())),
    )


def _data_groups(groups: dict[str, Members], num_data: int) -> list[Members] | None:
    """Return the groups that together span the data axis, the slowest first; None in doubt."""
    if num_data == 1:
        return []
    data = [groups[axis] for axis in DATA_AXES & groups.keys()]
    whole = {members for members in data if len(members) == num_data}
    if whole:
        return list(whole) if len(whole) == 1 else None
    if REPLICATED not in groups or SHARDED not in groups:
        return None
    parts = [groups[REPLICATED], groups[SHARDED]]
    return parts if math.prod(map(len, parts)) == num_data else None


def _intersect_only_in(rank: int, groups: Sequence[Members]) -> bool:
    """Return whether ``rank`` is in all groups and no other rank is in two of them."""
    return all(rank in members for members in groups) and all(
        set(one) & set(other) == {rank} for one, other in combinations(groups, 2)
    )
