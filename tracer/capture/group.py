"""Communication groups: their id, kind, members, and the numbers of their operations."""

from __future__ import annotations

import itertools
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from tracer.span import SpanKind, group_id_of
from tracer.topology import GROUP_KINDS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tracer.recorder import Recorder
    from tracer.topology import Layout

MESH_PREFIX = "mesh_"
"""How `torch.distributed.device_mesh` describes the group of an axis: ``mesh_tp``."""

AXES = ("pp", "dp", "tp", "cp", "ep")


class CommGroup:
    """One communication group as this rank sees it."""

    __slots__ = ("group_id", "kind", "members", "next_seq", "pair_seqs", "track_id")

    def __init__(
        self, *, group_id: int, kind: SpanKind, members: Sequence[int], track_id: int
    ) -> None:
        self.group_id = group_id
        self.kind = kind
        self.members = tuple(members)
        self.track_id = track_id
        # Counts hand out numbers in one C call: threads may launch side by side.
        self.next_seq: Callable[[], int] = itertools.count().__next__
        self.pair_seqs: defaultdict[tuple[int, int], Callable[[], int]] = defaultdict(
            lambda: itertools.count().__next__
        )


class GroupBook:
    """All groups that this process has communicated in."""

    def __init__(self, recorder: Recorder, layout: Layout | None) -> None:
        self._recorder = recorder
        self._world_axis = sole_axis(layout)
        self._groups: dict[tuple[str, int, int], CommGroup] = {}

    def find(self, process_group: Any) -> CommGroup:  # noqa: ANN401 - a pybind class
        """Return the group behind torch's object; it is noted in `groups.jsonl` on first sight."""
        # By name, not by object: holding the object would keep its threads alive.
        key = (process_group.group_name, process_group.rank(), process_group.size())
        known = self._groups.get(key)
        if known is not None:
            return known
        return self._groups.setdefault(key, self._meet(process_group))

    def _meet(self, process_group: Any) -> CommGroup:  # noqa: ANN401
        members = sorted(dist.get_process_group_ranks(process_group))
        axis = self._axis(process_group)
        name = f"{axis or 'group'}:{process_group.group_name}"
        kind = SpanKind(GROUP_KINDS.get(axis, SpanKind.OTHER))
        group_id = group_id_of(process_group.group_name, members)
        self._recorder.add_group(group_id, kind=kind, name=name, members=members)
        return CommGroup(
            group_id=group_id,
            kind=kind,
            # Positions in the group are in the group's own order, not in rank order.
            members=dist.get_process_group_ranks(process_group),
            track_id=self._recorder.name_id(f"comm {axis or process_group.group_name}"),
        )

    def _axis(self, process_group: Any) -> str:  # noqa: ANN401
        described = str(process_group.group_desc)
        if described.startswith(MESH_PREFIX):
            return described.removeprefix(MESH_PREFIX)
        if process_group.size() == dist.get_world_size():
            return self._world_axis or "world"
        return ""


def sole_axis(layout: Layout | None) -> str:
    """Return the only axis that is longer than one, "" where none or several are.

    A mesh axis that spans all ranks has no group of its own: torch reuses the
    default one, and the axis's name is lost. Where the job has just one axis,
    the default group can be no other.
    """
    if layout is None:
        return ""
    sizes = layout.to_dict()
    long = [axis for axis in AXES if sizes[axis] > 1]
    return long[0] if len(long) == 1 and sizes[long[0]] == layout.world_size else ""
