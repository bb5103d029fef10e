"""Where a rank stands in a job that told no layout, from the groups that it is a member of.

Standard library only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING

from ..topology import GROUP_KINDS, Coords, Layout

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    Members = tuple[int, ...]

MODEL_AXES = ("tp", "pp", "cp")
AXES = frozenset({*GROUP_KINDS, "pp"})
"""What a claim may be made of."""

DATA_AXES = frozenset(axis for axis, kind in GROUP_KINDS.items() if kind == "dp-comm")
REPLICATED, SHARDED = "dp_replicate", "dp_shard"


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A group of this rank's, and the axis that it spans."""

    axis: str
    """As in `tracer.topology.GROUP_KINDS`, or ``pp``."""

    members: Members
    """Global ranks, by position on the axis."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where a rank stands, and by which groups."""

    layout: Layout
    coords: Coords
    groups: frozenset[frozenset[int]]
    """Members of each group that spans an axis of the layout, two at least."""

    pipeline: frozenset[int] = frozenset()
    """Members of the one that spans its pipeline."""


def place(
    claims: Iterable[Claim], *, rank: int, world_size: int, num_chunks: int = 1
) -> Placement | None:
    """Return where a rank stands, where its groups leave no doubt.

    They do not where one axis has two groups, where two axes share more than this rank, or
    where the axes' product is not the number of ranks: something is then left out, or seen
    twice (a flattened axis beside its parts is neither).

    Args:
        claims: Groups that the rank is a member of; those of one member say nothing.
        rank: Global.
        world_size: Ranks of the job.
        num_chunks: Model chunks per pipeline stage.

    Returns:
        None in doubt.
    """
    groups: dict[str, Members] = {}
    for claim in claims:
        if len(claim.members) > 1 and groups.setdefault(claim.axis, claim.members) != claim.members:
            return None
    model = {axis: groups[axis] for axis in MODEL_AXES if axis in groups}
    num_data, is_left = divmod(world_size, math.prod(map(len, model.values())))
    data = None if is_left else _data_groups(groups, num_data)
    if data is None or not _meet_in(rank, [*model.values(), *data]):
        return None
    experts = groups.get("ep", (rank,))
    if num_data % len(experts) or not _is_overlaid(experts, model.values()):
        return None
    position = {axis: members.index(rank) for axis, members in model.items()}
    data_position = 0
    for members in data:
        data_position = data_position * len(members) + members.index(rank)
    sizes = {axis: len(members) for axis, members in model.items()}
    return Placement(
        layout=Layout(dp=num_data, ep=len(experts), vpp=num_chunks, **sizes),
        coords=Coords(dp=data_position, ep=experts.index(rank), **position),
        groups=frozenset(map(frozenset, [*model.values(), *data])),
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


def _meet_in(rank: int, groups: Sequence[Members]) -> bool:
    """Return whether ``rank`` is in all groups and no other is in two."""
    return all(rank in members for members in groups) and all(
        set(one) & set(other) == {rank} for one, other in combinations(groups, 2)
    )


def _is_overlaid(experts: Members, model: Iterable[Members]) -> bool:
    """Return whether the experts' axis goes along none of the model's."""
    return all(len(set(experts) & set(members)) == 1 for members in model)
