"""The layout and coordinates of a rank from its groups: certain, or None."""

from __future__ import annotations

import math
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope.tracer.topology import AxisGroup, Coords, Layout, derive_layout

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""Of a mesh, the slowest first."""

SIZES = st.tuples(*[st.integers(1, 3) for _ in AXES])


def positions(sizes: tuple[int, ...]) -> list[tuple[int, ...]]:
    return list(product(*map(range, sizes)))


def members_along(sizes: tuple[int, ...], rank: int, *along: int) -> tuple[int, ...]:
    """Return the ranks that differ from ``rank`` along these axes only."""
    everyone = positions(sizes)
    own = everyone[rank]
    return tuple(
        other
        for other, position in enumerate(everyone)
        if all(position[at] == own[at] for at in range(len(sizes)) if at not in along)
    )


def mesh_groups(sizes: tuple[int, ...], rank: int) -> list[AxisGroup]:
    return [
        AxisGroup(axis=axis, members=members_along(sizes, rank, at)) for at, axis in enumerate(AXES)
    ]


@given(SIZES, st.data())
def test_the_axes_of_a_mesh_give_every_rank_its_coordinates(
    sizes: tuple[int, ...], data: st.DataObject
) -> None:
    world_size = math.prod(sizes)
    rank = data.draw(st.integers(0, world_size - 1))
    pp, replicate, shard, cp, tp = sizes
    axis_groups = mesh_groups(sizes, rank)
    flattened = [
        AxisGroup(axis="dp", members=members_along(sizes, rank, 1, 2)),
        AxisGroup(axis="dp_shard_cp", members=members_along(sizes, rank, 2, 3)),
        AxisGroup(axis="dp_cp", members=members_along(sizes, rank, 1, 2, 3)),
    ]

    at = positions(sizes)[rank]
    for groups in (
        axis_groups,
        [*axis_groups, flattened[0]],
        [*flattened[:1], axis_groups[0], *axis_groups[3:]],
    ):
        found = derive_layout(groups, rank=rank, world_size=world_size)
        assert found is not None
        assert found.layout == Layout(pp=pp, dp=replicate * shard, cp=cp, tp=tp)
        assert found.coords == Coords(pp=at[0], dp=at[1] * shard + at[2], cp=at[3], tp=at[4])
        assert found.pipeline == frozenset(members_along(sizes, rank, 0) if pp > 1 else ())


@given(SIZES, st.data())
def test_without_the_name_of_an_axis_the_layout_is_unknown(
    sizes: tuple[int, ...], data: st.DataObject
) -> None:
    long = [at for at, size in enumerate(sizes) if size > 1]
    if not long:
        return
    world_size = math.prod(sizes)
    rank = data.draw(st.integers(0, world_size - 1))
    axis_groups = mesh_groups(sizes, rank)
    del axis_groups[data.draw(st.sampled_from(long))]

    assert derive_layout(axis_groups, rank=rank, world_size=world_size) is None


def derived_from(*axis_groups: tuple[str, tuple[int, ...]], world_size: int = 4) -> Layout | None:
    made = [AxisGroup(axis=axis, members=members) for axis, members in axis_groups]
    found = derive_layout(made, rank=0, world_size=world_size)
    return None if found is None else found.layout


@pytest.mark.parametrize(
    "axis_groups",
    [
        [("dp", (0, 1)), ("tp", (0, 1))],  # two axes over the same ranks
        [("dp", (0, 1)), ("dp", (0, 2)), ("tp", (0, 1))],  # one axis, two groups
        [("dp", (1, 3)), ("tp", (0, 1))],  # this rank is not a member
        [("dp", (0, 1)), ("fsdp", (0, 2)), ("tp", (0, 3))],  # two candidates for the data axis
        [("dp", (0, 1, 2, 3, 4))],  # more ranks than the world size
        [("tp", (0, 1, 2))],  # does not divide the world size
        [("tp", (0, 1)), ("ep", (0, 1)), ("dp", (0, 2))],  # experts along the tensor axis
        [("dp", (0, 1, 2, 3)), ("ep", (0, 1, 2))],  # experts that do not divide the data axis
        [("stages", (0, 1, 2, 3))],  # an unknown axis
        [],
    ],
)
def test_groups_that_do_not_fit_give_no_layout(
    axis_groups: list[tuple[str, tuple[int, ...]]],
) -> None:
    assert derived_from(*axis_groups) is None


def test_expert_groups_overlay_the_data_axis() -> None:
    assert derived_from(("dp", (0, 1, 2, 3)), ("ep", (0, 1))) == Layout(dp=4, ep=2)
    assert derived_from(("dp", (0, 2)), ("ep", (0, 2)), ("tp", (0, 1))) == Layout(dp=2, tp=2, ep=2)


def test_groups_of_one_member_are_ignored() -> None:
    assert derived_from(("dp", (0, 1, 2, 3)), ("tp", (0,)), ("pp", (0,)), ("ep", (0,))) == Layout(
        dp=4
    )


def test_the_declared_chunks_per_stage_are_used() -> None:
    axis_groups = [AxisGroup(axis="pp", members=(0, 1))]
    found = derive_layout(axis_groups, rank=1, world_size=2, num_chunks=3)

    assert found is not None
    assert (found.layout, found.coords) == (Layout(pp=2, vpp=3), Coords(pp=1))
