"""What frameworks tell of a job, in the tracer's words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict

from tracer.topology import Coords, Layout

if TYPE_CHECKING:
    from collections.abc import Iterable


class Placement(TypedDict):
    """Where a rank stands; either both are known or neither."""

    layout: Layout | None
    coords: Coords | None


def data_parallel(world_size: int, rank: int) -> Placement:
    """Return the placement where all ranks are data parallel (DDP, FSDP, ZeRO)."""
    return {"layout": Layout(dp=world_size), "coords": Coords(dp=rank)}


def placed(rank: int, *, tp: int, cp: int, dp: int, pp: int) -> Placement:
    """Return the placement in a mesh of axes (pp, dp, cp, tp), tp the fastest.

    Args:
        rank: Global.
        tp: Size of the axis, as the others.
        cp: Likewise.
        dp: Replicas and shards together.
        pp: Likewise.
    """
    rest, tp_position = divmod(rank, tp)
    rest, cp_position = divmod(rest, cp)
    pp_position, dp_position = divmod(rest, dp)
    return {
        "layout": Layout(dp=dp, tp=tp, pp=pp, cp=cp),
        "coords": Coords(dp=dp_position, tp=tp_position, pp=pp_position, cp=cp_position),
    }


def named(holder: object, names: Iterable[str]) -> dict[str, object]:
    """Return those attributes of ``holder`` that exist, by name."""
    missing: Any = object()
    found = {name: getattr(holder, name, missing) for name in names}
    return {name: value for name, value in found.items() if value is not missing}
